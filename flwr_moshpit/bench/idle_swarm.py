"""A swarm of processes, whole peers over gRPC and TLS, that do one thing at a time when told to."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from flwr_moshpit.bench.gauge import Gauge, Measure, Usage
from flwr_moshpit.bench.trainers import DriftTrainer
from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.protocol.machine import PeerId, Report, Start
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.identity import DAY_S, Authority
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.peer import PeerSettings
from flwr_moshpit.runtime.worker import Failed, Finished, Gone, Listening, Proceed, Reported

HANG_S = 120.0
TRIES = 5


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One peer's part in one round; times on the clock `monotonic`, which all processes share."""

    met_at: float
    """When it was ready to average."""
    grouped_at: float
    ended_at: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Averaging:
    """One round of all."""

    match_s: float
    """From when the last was ready until all were in their groups."""
    reduce_s: float
    """From when the first was in its group until the last had its average."""
    coverage: float
    """The least."""

    @classmethod
    def of(cls, peers: list[RoundTimes]) -> Averaging:
        return cls(
            max(peer.grouped_at for peer in peers) - max(peer.met_at for peer in peers),
            max(peer.ended_at for peer in peers) - min(peer.grouped_at for peer in peers),
            min(peer.coverage for peer in peers),
        )


class IdleSwarm:
    """A context manager: `size` peers with models of (dim,), in groups of `group_size` at most.

    Raises MoshpitError when a peer fails, dies, or says nothing for a long time.
    """

    def __init__(self, size: int, dim: int, group_size: int | None = None) -> None:
        self.start_s = 0.0
        """From when the first peer's process was started until it could be talked to."""
        self.alarms = 0
        """How often somebody was suspected, or held for dead."""
        self._size = size
        self._swarm = LocalSwarm(_peers(size, dim, group_size), Gauge)
        self._finished: dict[PeerId, None] = {}
        self._round = 0
        self._rounds: dict[int, dict[PeerId, RoundTimes]] = {}
        self._usages: dict[PeerId, Usage] = {}

    def __enter__(self) -> IdleSwarm:
        with ExitStack() as undo:
            undo.enter_context(self._swarm)
            self._until(lambda: len(self._finished) == self._size, "the start of all")
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._swarm.__exit__(kind, error, traceback)

    def train(self) -> None:
        """One round with local steps. Before the first one nobody has anything to average."""
        self._run(Start(until_round=self._round + 1, sweep=False))

    def average(self) -> list[Averaging]:
        """One sweep, a round for each axis of the grid, for which all are ready at once.

        One that somebody missed, or came to too late, as happens where peers do not get enough of
        the processors to be taken for alive, says nothing and is repeated.
        """
        for _ in range(TRIES):
            rounds = self._run(Start(until_round=self._round, sweep=True))
            if is_whole(rounds, self._size):
                return [Averaging.of(those) for those in rounds]
        raise MoshpitError("peers go on missing rounds: the machine is too busy to measure")

    def usage(self) -> list[Usage]:
        self._usages.clear()
        self._tell(Measure())
        self._until(lambda: len(self._usages) == self._size, "what they take up")
        return list(self._usages.values())

    def _run(self, start: Start) -> list[list[RoundTimes]]:
        """The rounds that were done, and what each peer told of them."""
        self._rounds.clear()
        self._finished.clear()
        self._tell(Proceed(start))
        self._until(lambda: len(self._finished) == self._size, "a round of all")
        self._round = max([self._round, *(number + 1 for number in self._rounds)])
        return [list(self._rounds[number].values()) for number in sorted(self._rounds)]

    def _tell(self, command: Any) -> None:
        for peer in self._swarm.living:
            self._swarm.tell(peer, command)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + HANG_S
        while not condition():
            heard = self._swarm.next(ends_at)
            if heard is None:
                raise MoshpitError(f"{what} did not come in {HANG_S:g} s")
            self._take(*heard)

    def _take(self, peer: PeerId, told: object) -> None:
        match told:
            case Listening() if peer == self._swarm.contact:
                self.start_s = time.monotonic() - self._swarm.began_at
            case Finished():
                self._finished[peer] = None
            case Usage():
                self._usages[peer] = told
            case Reported():
                self._report(peer, told.at, told.report)
            case Failed():
                raise told.error()
            case Gone():
                raise MoshpitError(f"{peer} died")

    def _report(self, peer: PeerId, at: float, report: Report) -> None:
        values = report.values
        if report.name == "peer" and values["status"] not in ("alive", "left"):
            self.alarms += 1
        if report.name == "round":
            grouped_at = at - values["allreduce_s"]
            times = RoundTimes(grouped_at - values["wait_s"], grouped_at, at, values["coverage"])
            self._rounds.setdefault(int(values["round"]), {})[peer] = times


def is_whole(rounds: list[list[RoundTimes]], size: int) -> bool:
    """Whether all of `size` peers were in every round, with all that they had."""
    return bool(rounds) and all(
        len(those) == size and all(each.coverage == 1.0 for each in those) for those in rounds
    )


def _peers(size: int, dim: int, group_size: int | None) -> list[PeerSettings]:
    authority = Authority.create("bench", valid_s=DAY_S)
    make_trainer = functools.partial(DriftTrainer, dim)
    # They begin by finishing at once, and then wait to be told to go on.
    schedule = Schedule(start=Start(until_round=0, sweep=False), gather_peers=size, gather_s=HANG_S)
    return [
        PeerSettings(
            identity=authority.issue(PeerId(f"p{index}")),
            algorithm=Moshpit(group_size=group_size, local_steps=1),
            task=Task(make_trainer, index, size, seed=(0, index)),
            schedule=schedule,
        )
        for index in range(size)
    ]
