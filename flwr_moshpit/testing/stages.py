"""Faults at a stage of a round: they watch the messages and strike when the stage is reached."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.protocol.messages import GroupNamed
from flwr_moshpit.simulation.engine import Engine
from flwr_moshpit.simulation.network import Verdict

STAGES: dict[str | None, tuple[str, ...]] = {
    None: (),
    "training": (),
    "matchmaking": ("Arrive",),
    "allreduce": ("Part", "Average"),
    "naming": ("Query",),
}


@dataclass(frozen=True)
class LeaderOf:
    """Whoever leads the first group of `round` that has more than one member."""

    round: int


class Trigger:
    """Crashes `target` at the first message of its stage that it sends or is sent, or, in training,
    when its first job has begun."""

    def __init__(
        self, engine: Engine, target: PeerId | LeaderOf, during: str | None, round: int | None
    ) -> None:
        if during not in STAGES:
            known = ", ".join(stage for stage in STAGES if stage)
            raise ConfigError(f"during={during!r} is not a stage; there are: {known}")
        self.fired_at: float | None = None
        self.victim: PeerId | None = None if isinstance(target, LeaderOf) else target
        self._engine = engine
        self._leader_of = target.round if isinstance(target, LeaderOf) else None
        self._during = during
        self._kinds = STAGES[during]
        if during == "training":
            if isinstance(target, LeaderOf):
                raise ConfigError("a leader is not known yet during='training': name a peer")
            engine.on_job.append(self._on_job)
        self._round = self._leader_of if isinstance(target, LeaderOf) else round

    def __call__(self, now: float, src: PeerId, dst: PeerId, message: Message) -> Verdict | None:
        if self.fired_at is not None or self._during == "training":
            return None
        kind = type(message).__name__
        if self._round is not None and _round_of(message) != self._round:
            return None
        if self._leader_of is not None and self.victim is None:
            if isinstance(message, GroupNamed) and len(message.ranks) > 1:
                self.victim = message.group.leader
            elif kind == "Arrive" and kind in self._kinds:
                self.victim = dst
        if self.victim in (src, dst) and (kind in self._kinds or not self._kinds):
            self.fire(self.victim)
        return None

    def _on_job(self, peer: PeerId) -> None:
        round = getattr(self._engine.machines[peer], "round", None)
        of_round = self._round is None or round == self._round
        if self.fired_at is None and peer == self.victim and of_round:
            self.fired_at = self._engine.now
            # Its machine is at work: what it has just asked for comes first.
            self._engine.schedule(self._engine.now, lambda: self._engine.crash(peer))

    def fire(self, victim: PeerId | None) -> None:
        assert victim is not None
        self.victim = victim
        self.fired_at = self._engine.now
        self._engine.crash(victim)


def _round_of(message: Message) -> int | None:
    if isinstance(message, GroupNamed):
        return message.group.key.round
    group = getattr(message, "group", None)
    key = getattr(message, "key", None) or getattr(group, "key", None)
    return getattr(key, "round", None)
