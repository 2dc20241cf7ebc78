"""One SuperNode and its peer as the ServerApp knows them, and what is said of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_moshpit.flower.compat import log
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.failures import in_short


@dataclass(slots=True)
class Member:
    """One SuperNode and its peer."""

    node_id: int
    state: str = "new"
    """new, joined, running, finished, lost, refused."""
    peer: PeerId | None = None
    address: str = ""
    public_pem: str = ""
    dialable: bool | None = None
    """Whether others can dial its peer; None until that was tried."""
    client: int | None = None
    num_clients: int | None = None
    lives: int = 0
    offset: int = 0
    completed: int = 0
    is_silent: bool = False
    """Whether its SuperNode has not answered the last time."""
    end: Mapping[str, Any] | None = None
    asked: str = ""
    """What is under way."""
    next_at: float = 0.0
    coverages: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.peer or f"SuperNode {self.node_id}"

    def note(self, report: Mapping[str, Any]) -> None:
        """Remember what its peer has reported, and log what is worth it."""
        match report["name"]:
            case "round":
                self.completed = int(report["round"]) + 1
                self.coverages.append(float(report.get("coverage", 1.0)))
                if "wait_s" in report:
                    self.waits_s.append(float(report["wait_s"]))
            case "training_failed":
                log().error("%s: training failed: %s", self.name, in_short(report["error"]))
            case "derived":
                log().info("%s: %s", self.name, report["what"])
            case "peer" if report["status"] == "dead":
                log().info("%s has lost sight of %s", self.name, report["peer"])


def progress(members: Iterable[Member], min_members: int, until_round: int | None) -> str:
    """How far they are, in a line."""
    members = list(members)
    running = [m for m in members if m.state in ("running", "finished")]
    if not running:
        joined = sum(member.state == "joined" for member in members)
        return f"{joined} of {min_members} SuperNodes have joined"
    rounds = sorted(member.completed for member in running)
    until = "" if until_round is None else f"/{until_round}"
    coverages = [member.coverages[-1] for member in running if member.coverages]
    coverage = f", coverage {100 * sum(coverages) / len(coverages):.0f} %" if coverages else ""
    heard = sum(not member.is_silent for member in running)
    # The closing sweep's rounds train nothing and are not counted.
    completed = rounds[len(rounds) // 2]
    if until_round is not None:
        completed = min(completed, until_round)
    return f"round {completed}{until}, {heard} of {len(members)} peers heard{coverage}"
