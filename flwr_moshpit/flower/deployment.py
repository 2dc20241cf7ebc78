"""A swarm on SuperNodes: the ServerApp brings the peers together and looks on.

It signs their certificates and collects what they report. They need it for nothing else: no
parameter passes through Flower before they have finished.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.app import App
from flwr_moshpit.flower.client import FlowerTrainer
from flwr_moshpit.flower.compat import log
from flwr_moshpit.flower.controller import watch_over
from flwr_moshpit.flower.crew import Crew
from flwr_moshpit.flower.grid import GridCarrier
from flwr_moshpit.flower.member import Member
from flwr_moshpit.flower.settings import budget_s, flower_settings, own
from flwr_moshpit.flower.swarm import Swarm
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.swarm_results import (
    EVENTS,
    Measured,
    SwarmResults,
    described,
    named_arrays,
)
from flwr_moshpit.protocol.machine import Vector
from flwr_moshpit.settings import RunSettings

RESULTS_PART = 0.005
"""Of the bytes that the peers have exchanged: so much of it at most passes through Flower when
several peers' results do."""
_SIMULATED = ("fleet", "catalogue", "faults", "workers", "cost-as", "until")


def train_on_supernodes(app: App, grid: Grid, run_config: Mapping[str, Any]) -> SwarmResults:
    """Let the peers of the SuperNodes train, and write what came out.

    Raises ConfigError for a wrong setting, and MoshpitError when no peer is left.
    """
    run_config = {key: "" if key in _SIMULATED else value for key, value in run_config.items()}
    min_members = int(own(run_config, "min-supernodes"))
    settings = flower_settings(run_config, int(run_config.get("peers") or min_members))
    if getattr(settings.algorithm, "needs_server", False):
        raise ConfigError(
            f"algorithm {type(settings.algorithm).__name__} needs a server, and peers have none: "
            "it is for simulation"
        )
    resumed = own(run_config, "resume")
    given = Path(run_config["out"]) if run_config.get("out") else None
    with run_folder(given, resumes=bool(resumed)) as out:
        trainer = app.trainer(run_config)
        trainer.check_serverless()
        trainer.prepare(settings.peers, settings.dtype)
        initial = trainer.initial_params(settings.seed)
        swarm = Swarm.load(resumed) if resumed else Swarm.create(app.name, budget_s(run_config))
        for remark in settings.remarks:
            log().info("%s", remark)
        log().info("swarm %s; its authority is in %s", swarm.id, swarm.path)
        watch_over(swarm)
        with (out / EVENTS).open("a", encoding="utf-8") as events:
            crew = Crew(
                grid,
                swarm,
                min_members=min_members,
                log_every_s=float(own(run_config, "log-every-s")),
                start={"schema": trainer.layout.schema.hex()},
                rounds=settings.rounds,
                write=events.write,
            )
            called_at = time.monotonic()
            crew.run()
            ended_at = time.monotonic()
            params = result_of(crew, initial)
            crew.stop()
        swarm.end()
        started_s, wall_s = crew.began_at - called_at, ended_at - crew.began_at
        results = _results(crew, trainer, grid, settings, params, started_s, wall_s)
        results.save(out)
        for line in results.table().splitlines():
            log().info("%s", line)
        for file in sorted(out.iterdir()):
            log().info("%s", file.resolve())
    return results


def result_of(crew: Crew, initial: Vector) -> Vector:
    """The parameters that the peers have ended with, checked against what each has said before.

    Those of one peer, where several have the same. Where none has, as with R-FAST, the mean of as
    many as may pass through Flower, by their weights: the swarm's model, as everywhere else.
    Raises MoshpitError if nobody can give them.
    """
    finished = [m for m in crew.members.values() if m.state == "finished" and m.end is not None]
    counts = Counter(str(member.end["sha256"]) for member in finished if member.end)
    finished.sort(key=lambda member: -counts[member.end["sha256"]] if member.end else 0)
    equal = max(counts.values(), default=1)
    wanted = 1 if equal > 1 else _affordable(finished, initial.nbytes)
    found: list[tuple[Member, Vector]] = []
    for member in finished:
        params = _fetched(crew, member, initial)
        if params is not None:
            found.append((member, params))
        if len(found) == wanted:
            break
    if not found:
        raise MoshpitError("no peer gives its parameters")
    _log_agreement(finished, [member for member, _ in found], counts, initial.size)
    if len(found) == 1:
        return found[0][1]
    weights = np.array([float((member.end or {}).get("weight", 1.0)) for member, _ in found])
    if not weights.sum() > 0:
        weights = np.ones(len(found))
    mean = np.zeros(initial.shape, np.float64)
    for weight, (_, params) in zip(weights / weights.sum(), found, strict=True):
        mean += weight * params
    return mean.astype(initial.dtype)


def _affordable(finished: Sequence[Member], vector_bytes: int) -> int:
    """How many results may pass through Flower; one does at any rate."""
    sent_bytes = sum(int((member.end or {}).get("sent-bytes", 0)) for member in finished)
    return max(1, int(RESULTS_PART * sent_bytes / vector_bytes))


def _fetched(crew: Crew, member: Member, initial: Vector) -> Vector | None:
    """What `member` has finished with; None if it does not give that."""
    assert member.end is not None
    reply = crew.ask(member, "result", peer=member.peer)
    if reply is None:
        return None
    params: Vector = reply.content.array_records["arrays"]["params"].numpy()
    if hashlib.sha256(np.ascontiguousarray(params).data).hexdigest() != member.end["sha256"]:
        log().error("what %s sends is not what it has finished with", member.name)
        return None
    if params.shape != initial.shape or params.dtype != initial.dtype:
        log().error("%s sends another model: %s", member.name, params.shape)
        return None
    return params


def _log_agreement(
    finished: Sequence[Member], givers: Sequence[Member], counts: Mapping[str, int], size: int
) -> None:
    first = givers[0].end or {}
    log().info(
        "%d parameters from %s; %d of %d peers have the same, bit for bit",
        size,
        givers[0].name if len(givers) == 1 else f"the mean of {len(givers)} peers",
        counts[first["sha256"]],
        len(finished),
    )
    samples = [np.array(m.end["sample"]) for m in finished if m.end is not None]
    here = np.array(first["sample"])
    scale = float(np.linalg.norm(here)) or 1.0
    far = max(float(np.linalg.norm(sample - here)) for sample in samples) / scale
    log().info("the one farthest from %s differs by %.1e of its norm", givers[0].name, far)


def _results(
    crew: Crew,
    trainer: FlowerTrainer,
    grid: Grid,
    settings: RunSettings,
    params: Vector,
    start_s: float,
    wall_s: float,
) -> SwarmResults:
    """`wall_s` reaches until Flower has told that all have finished, up to `log-every-s` later."""
    members = [member for member in crew.members.values() if member.peer]
    reachable = [m for m in members if m.state == "finished" and not m.is_silent]
    trainer.prepare(len(reachable), settings.dtype)
    trainer.carry_by(GridCarrier(grid, [member.node_id for member in reachable]))
    metrics = dict(trainer.evaluate(params).metrics)
    coverages = [coverage for member in members for coverage in member.coverages]
    waits_s = [wait_s for member in members for wait_s in member.waits_s]
    completed = sorted(member.completed for member in members)
    rounds = completed[len(completed) // 2]
    if settings.rounds is not None:
        rounds = min(rounds, settings.rounds)
    return SwarmResults(
        wall_s=wall_s,
        start_s=max(0.0, start_s),
        bytes=sum(int((member.end or {}).get("sent-bytes", 0)) for member in members),
        interrupted=False,
        points=[Measured(wall_s, rounds, len(reachable), metrics)],
        params=named_arrays(trainer.layout, params),
        coverage=float(np.mean(coverages)) if coverages else None,
        wait_s=float(np.mean(waits_s)) if waits_s else None,
        alive=len(reachable),
        failed={m.name: m.end["error"] for m in members if m.end and "error" in m.end},
        rounds=rounds,
        settings={**described(settings), "peers": len(members)},
    )
