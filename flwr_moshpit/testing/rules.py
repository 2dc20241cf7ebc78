"""What a test does to messages on their way: loses, delays, repeats, reorders or changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.simulation.network import Delay, Drop, Duplicate, Replace, Verdict
from flwr_moshpit.simulation.transport import Interceptor

Peer: TypeAlias = PeerId | str | int
"""A peer by id or by index."""


@dataclass
class Rule:
    """Something that is done to some messages. `hits` counts them; `stop()` ends it."""

    action: Callable[[Message], Verdict | None]
    kind: type[Message] | str | None
    src: PeerId | None
    dst: PeerId | None
    probability: float
    limit: int | None
    rng: np.random.Generator
    hits: int = 0
    active: bool = True

    def stop(self) -> None:
        self.active = False

    def is_like(self, other: Rule) -> bool:
        """Whether they do the same to the same messages, as often."""
        fields = ("action", "kind", "src", "dst", "probability", "limit")
        return all(getattr(self, name) == getattr(other, name) for name in fields)

    def __call__(self, now: float, src: PeerId, dst: PeerId, message: Message) -> Verdict | None:
        if not self.active or src == dst or (self.limit is not None and self.hits >= self.limit):
            return None
        if self.src not in (None, src) or self.dst not in (None, dst):
            return None
        name = self.kind if isinstance(self.kind, str) or self.kind is None else self.kind.__name__
        if name is not None and name != type(message).__name__:
            return None
        if self.probability < 1 and self.rng.random() >= self.probability:
            return None
        self.hits += 1
        return self.action(message)


def _lose(message: Message) -> Verdict:
    return Drop()


class RuledNetwork:
    """Rules on what peers say to each other. `kind` is a message class or its name; None stands
    for any. What is drawn is drawn from the swarm's own seed."""

    def __init__(self, peers: list[PeerId], interceptors: list[Interceptor], seed: int) -> None:
        self.peers = peers
        self._interceptors = interceptors
        self._rng = np.random.default_rng([seed, 0x5EED])

    def peer(self, peer: Peer) -> PeerId:
        """The id of a peer named by index or id."""
        if isinstance(peer, int):
            return self.peers[peer]
        if peer not in self.peers:
            raise ConfigError(f"there is no peer {peer!r}; there are {self.peers[0]} and on")
        return PeerId(peer)

    def drop(self, probability: float = 1.0, **which: Any) -> Rule:
        """Lose messages without telling anybody. which: kind, src, dst, limit.

        Said twice it counts once: a second rule like one that is active and has no limit is that
        rule.
        """
        new = self._new(_lose, probability, **which)
        for rule in self._interceptors:
            if isinstance(rule, Rule) and rule.active and rule.limit is None and rule.is_like(new):
                return rule
        return self._add(new)

    def delay(self, seconds: float, probability: float = 1.0, **which: Any) -> Rule:
        """Deliver messages later; on a stream, those behind wait too."""
        return self._add(self._new(lambda message: Delay(seconds), probability, **which))

    def duplicate(self, probability: float = 1.0, **which: Any) -> Rule:
        """Deliver messages twice."""
        return self._add(self._new(lambda message: Duplicate(), probability, **which))

    def reorder(self, seconds: float = 1.0, probability: float = 0.5, **which: Any) -> Rule:
        """Deliver some messages up to `seconds` later, so that others overtake them."""

        def hold_up(message: Message) -> Verdict:
            return Delay(float(self._rng.uniform(0, seconds)))

        return self._add(self._new(hold_up, probability, **which))

    def tamper(
        self, change: Callable[[Any], Message], probability: float = 1.0, **which: Any
    ) -> Rule:
        """Let `change(message)` travel instead."""
        return self._add(self._new(lambda message: Replace(change(message)), probability, **which))

    def _new(
        self,
        action: Callable[[Message], Verdict | None],
        probability: float,
        kind: type[Message] | str | None = None,
        src: Peer | None = None,
        dst: Peer | None = None,
        limit: int | None = None,
    ) -> Rule:
        from_, to = (None if peer is None else self.peer(peer) for peer in (src, dst))
        return Rule(action, kind, from_, to, probability, limit, self._rng)

    def _add(self, rule: Rule) -> Rule:
        self._interceptors.append(rule)
        return rule
