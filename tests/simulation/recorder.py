"""A machine that writes down what it is told and does what a test tells it, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from flwr_moshpit.protocol.machine import (
    Delivery,
    Effect,
    Event,
    Message,
    PeerId,
    PeerInfo,
    Received,
    Send,
    State,
    TimerFired,
    Vector,
    View,
)
from flwr_moshpit.simulation.engine import Engine
from flwr_moshpit.simulation.network import HEADER_BYTES, Link, Network


@dataclass(frozen=True, slots=True)
class Letter(Message):
    """On a stream."""

    number: int
    size: int = HEADER_BYTES
    """All its bytes, the header's included."""

    @property
    def array_bytes(self) -> int:
        return self.size - HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Postcard(Letter):
    delivery: ClassVar[Delivery] = Delivery.DATAGRAM


@dataclass(frozen=True, slots=True)
class Bulletin(Letter):
    delivery: ClassVar[Delivery] = Delivery.NEWEST
    topic: str = ""

    @property
    def newest_key(self) -> object:
        return self.topic


@dataclass(frozen=True)
class Box:
    """A device."""

    link: Link = field(default_factory=lambda: Link(1e6, 1e6))
    flops_per_s: float = 1.0
    power_w: float = 10.0
    idle_w: float = 1.0


React = Callable[["Recorder", Event, float], Sequence[Effect]]


class Recorder:
    """Carries out `todo` when its timer fires, and whatever `react` says."""

    weight = 1.0

    def __init__(
        self, info: PeerInfo, view: View, rng: np.random.Generator, incarnation: int, react: React
    ) -> None:
        self.info = info
        self.view = view
        self.rng = rng
        self.incarnation = incarnation
        self.react = react
        self.deadline: float | None = None
        self.params: Vector = np.zeros(1, np.float32)
        self.todo: list[Effect] = []
        self.log: list[tuple[float, Event]] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.log.append((now, event))
        effects: list[Effect] = []
        if isinstance(event, TimerFired):
            effects, self.todo = self.todo, []
        return [*effects, *self.react(self, event, now)]

    def snapshot(self) -> State:
        return {}

    def times(self, kind: type[Any]) -> list[float]:
        return [now for now, event in self.log if isinstance(event, kind)]

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for _, event in self.log if isinstance(event, kind)]

    def numbers(self, src: PeerId | None = None) -> list[int]:
        """Of the letters received, from `src` or from everybody, in order."""
        return [
            event.message.number
            for event in self.events(Received)
            if src is None or event.src == src
        ]


def nothing(machine: Recorder, event: Event, now: float) -> Sequence[Effect]:
    return []


class Swarm:
    """An engine full of recorders."""

    def __init__(
        self,
        num_peers: int,
        react: React = nothing,
        *,
        network: Network | None = None,
        boxes: Sequence[Box] = (),
        params: Vector | None = None,
        seed: int = 1,
        **settings: Any,
    ) -> None:
        self.react = react
        self.params = np.zeros(1, np.float32) if params is None else params
        self.lives: dict[PeerId, list[Recorder]] = {}
        """Every machine that a peer has had."""
        self.engine = Engine(seed=seed, network=network or Network.uniform(), **settings)
        self.peers = [PeerId(f"p{k:02}") for k in range(num_peers)]
        for k, peer in enumerate(self.peers):
            self.engine.add(peer, self.make, PeerInfo(peer), boxes[k] if boxes else Box())

    def make(
        self, info: PeerInfo, view: View, rng: np.random.Generator, incarnation: int
    ) -> Recorder:
        machine = Recorder(info, view, rng, incarnation, self.react)
        machine.params = self.params
        self.lives.setdefault(info.peer, []).append(machine)
        return machine

    def __getitem__(self, k: int) -> Recorder:
        """The present machine of peer number `k`, or its last one."""
        return self.lives[self.peers[k]][-1]

    def do(self, k: int, *effects: Effect) -> None:
        """Let peer number `k` return `effects` at this instant."""
        self[k].todo.extend(effects)
        self.engine.tell(self.peers[k], TimerFired())

    def send(self, src: int, dst: int, *messages: Message) -> None:
        self.do(src, *(Send(self.peers[dst], message) for message in messages))

    def at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        self.engine.schedule(at_s, lambda: call(*args))

    def run(self, until_s: float | None = None) -> None:
        self.engine.run(until_s)


def started(num_peers: int, react: React = nothing, **settings: Any) -> Swarm:
    """A swarm whose machines have had their `Start`."""
    swarm = Swarm(num_peers, react, **settings)
    swarm.run(0.0)
    return swarm
