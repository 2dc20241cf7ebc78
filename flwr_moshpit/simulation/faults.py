"""What goes wrong in a simulation, and when: crashes, restarts, slow-downs, partitions, churn.

`fault_grammar.py` reads these from text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId


@dataclass(frozen=True, slots=True)
class Who:
    """Certain peers by index, or a share of all of them that the seed draws."""

    indices: tuple[int, ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class AtTime:
    s: float


@dataclass(frozen=True, slots=True)
class AtRound:
    """When the peer has completed `round` rounds; a partition, when the first peer has."""

    round: int


@dataclass(frozen=True, slots=True)
class AtRate:
    """Every peer for itself, after exponentially distributed times: `per_s` events a second."""

    per_s: float


@dataclass(frozen=True, slots=True)
class AfterTime:
    s: float


@dataclass(frozen=True, slots=True)
class AfterRounds:
    """When the swarm's furthest peer has completed `rounds` more rounds."""

    rounds: int


@dataclass(frozen=True, slots=True)
class Crash:
    """A peer stops without a word and loses what it had; `back` starts it anew."""

    who: Who
    """Everybody where `when` is a rate."""
    when: AtTime | AtRound | AtRate
    back: AfterTime | AfterRounds | None = None


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A peer's training takes `factor` times as long."""

    who: Who
    factor: float
    when: AtTime | AtRound = AtTime(0.0)
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """`who` can reach each other and the rest can, but neither reaches the other side."""

    who: Who
    when: AtTime | AtRound
    for_s: float | None = None


Fault: TypeAlias = Crash | SlowDown | Partition


class Engine(Protocol):
    """What faults need of the simulation's engine."""

    @property
    def now(self) -> float: ...
    def is_alive(self, peer: PeerId) -> bool: ...
    def crash(self, peer: PeerId) -> None: ...
    def restart(self, peer: PeerId) -> None: ...
    def slow_down(self, peer: PeerId, factor: float) -> None: ...
    def partition(self, sides: Sequence[Sequence[PeerId]]) -> None: ...
    def schedule(self, at_s: float, call: Callable[[], None]) -> None: ...


class FaultSchedule:
    """Applies faults to an engine.

    `start` schedules those at a time or a rate; the owner tells `on_round` of every round that a
    peer completes, for those at a round. All draws come from `rng`: who is in a share when the
    schedule is made, each peer's exponential times from a stream of its own, so that one peer's
    history does not move another's.
    """

    def __init__(
        self, faults: Sequence[Fault], peers: Sequence[PeerId], rng: np.random.Generator
    ) -> None:
        """Raises ConfigError for an index that no peer has."""
        self._faults: list[tuple[Fault, list[PeerId], np.random.Generator]] = [
            (fault, _choose(fault, peers, stream), stream)
            for fault, stream in zip(faults, rng.spawn(len(faults)), strict=True)
        ]
        self._peers = list(peers)
        self._completed = 0
        self._at_round: dict[PeerId | None, list[tuple[int, Callable[[], None]]]] = {}
        self._factors: dict[PeerId, list[float]] = {peer: [] for peer in peers}
        self._partitions: list[dict[PeerId, None]] = []

    def start(self, engine: Engine) -> None:
        """Schedule everything. Once, before the engine runs."""
        for fault, chosen, stream in self._faults:
            if isinstance(fault, Partition):
                cut = dict.fromkeys(chosen)
                self._at(engine, fault.when, None, partial(self._cut, engine, fault, cut))
            elif isinstance(fault, SlowDown):
                for peer in chosen:
                    self._at(engine, fault.when, peer, partial(self._slow, engine, fault, peer))
            elif isinstance(fault.when, AtRate):
                for peer, own in zip(chosen, stream.spawn(len(chosen)), strict=True):
                    self._crash_at_rate(engine, fault, peer, own)
            else:
                for peer in chosen:
                    self._at(engine, fault.when, peer, partial(self._crash, engine, fault, peer))

    def on_round(self, engine: Engine, peer: PeerId, completed: int) -> None:
        """`peer` has completed `completed` rounds."""
        self._completed = max(self._completed, completed)
        self._reach(engine, peer, completed)
        self._reach(engine, None, self._completed)

    def _reach(self, engine: Engine, who: PeerId | None, completed: int) -> None:
        waiting = self._at_round.get(who)
        if not waiting:
            return
        for at, call in waiting:
            if completed >= at:
                # Not at once: the engine is in the middle of a peer's effects.
                engine.schedule(engine.now, call)
        self._at_round[who] = [(at, call) for at, call in waiting if completed < at]

    def _at(
        self,
        engine: Engine,
        when: AtTime | AtRound,
        peer: PeerId | None,
        call: Callable[[], None],
    ) -> None:
        if isinstance(when, AtTime):
            engine.schedule(when.s, call)
        else:
            self._at_round.setdefault(peer, []).append((when.round, call))

    def _crash(self, engine: Engine, fault: Crash, peer: PeerId) -> None:
        if engine.is_alive(peer):
            engine.crash(peer)
            self._bring_back(engine, fault, peer, lambda: None)

    def _crash_at_rate(
        self, engine: Engine, fault: Crash, peer: PeerId, stream: np.random.Generator
    ) -> None:
        """Crash `peer` after an exponential time, and again after each return."""
        assert isinstance(fault.when, AtRate)
        again = partial(self._crash_at_rate, engine, fault, peer, stream)

        def crash() -> None:
            if not engine.is_alive(peer):
                # Another fault has it down: this one finds it later.
                again()
                return
            engine.crash(peer)
            self._bring_back(engine, fault, peer, again)

        wait_s = float(stream.exponential(1.0 / fault.when.per_s))
        engine.schedule(engine.now + wait_s, crash)

    def _bring_back(
        self, engine: Engine, fault: Crash, peer: PeerId, then: Callable[[], None]
    ) -> None:
        def restart() -> None:
            if not engine.is_alive(peer):
                engine.restart(peer)
            then()

        if isinstance(fault.back, AfterTime):
            engine.schedule(engine.now + fault.back.s, restart)
        elif isinstance(fault.back, AfterRounds):
            at = self._completed + fault.back.rounds
            self._at_round.setdefault(None, []).append((at, restart))

    def _slow(self, engine: Engine, fault: SlowDown, peer: PeerId) -> None:
        factors = self._factors[peer]

        def end() -> None:
            factors.remove(fault.factor)
            engine.slow_down(peer, float(np.prod(factors)))

        factors.append(fault.factor)
        engine.slow_down(peer, float(np.prod(factors)))
        if fault.for_s is not None:
            engine.schedule(engine.now + fault.for_s, end)

    def _cut(self, engine: Engine, fault: Partition, cut: dict[PeerId, None]) -> None:
        def end() -> None:
            self._partitions.remove(cut)
            self._divide(engine)

        self._partitions.append(cut)
        self._divide(engine)
        if fault.for_s is not None:
            engine.schedule(engine.now + fault.for_s, end)

    def _divide(self, engine: Engine) -> None:
        """Peers reach each other when no partition of the moment runs between them."""
        sides: dict[tuple[bool, ...], list[PeerId]] = {}
        for peer in self._peers:
            side = tuple(peer in cut for cut in self._partitions)
            # Whoever is in no cut, a server too, is the side that the engine makes of the rest.
            if any(side):
                sides.setdefault(side, []).append(peer)
        engine.partition(list(sides.values()))


def _choose(fault: Fault, peers: Sequence[PeerId], stream: np.random.Generator) -> list[PeerId]:
    who = fault.who
    for index in who.indices:
        if index >= len(peers):
            raise ConfigError(f"faults: peer={index} does not exist, the last is {len(peers) - 1}")
    if who.indices:
        return [peers[index] for index in who.indices]
    # At least one, so that a fault that is asked for happens in small swarms too.
    count = max(1, round(who.share * len(peers)))
    return [peers[index] for index in sorted(stream.permutation(len(peers))[:count])]
