"""What `RFastPeer` and its tracking, on a tree or on a graph, share about one peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from flwr_moshpit.config import RFast
from flwr_moshpit.protocol.corrections import Corrections
from flwr_moshpit.protocol.leases import Leases, Standing
from flwr_moshpit.protocol.ledger import InEdge, Ledger, OutEdge
from flwr_moshpit.protocol.machine import (
    Effect,
    PeerId,
    Record,
    Send,
    State,
    Vector,
    View,
    ViewChanged,
)
from flwr_moshpit.protocol.messages import (
    Attach,
    Detached,
    EdgeId,
    Grant,
    Label,
    Model,
    Push,
    Subtree,
)

RELAY = 0.25
"""Least time between two messages on an edge, in steps of whoever uses them: more often than four
times a step costs bytes and saves no time worth having."""


IDLE = 0.05
"""How long, in leases, a peer waits for news before it takes one more gradient without any."""


def copies(gap: float) -> int:
    """How often to send a message again, where on average one in `gap` arrives. Running sums need
    no resending; but where most are lost, news travel faster if on average one arrives in a step.
    """
    return min(9, int(gap) - 1) if gap > 2 else 0


def spacing(gap: float) -> float:
    """Between two messages on an edge, in steps of whoever uses them."""
    return min(RELAY, 1 / gap)


def smoothed(gap: float, newest: int, before: int) -> float:
    """`gap` after the message `newest` came where `before` was the newest."""
    return gap + (newest - before - gap) / 8


class Lines:
    """What the host says of the lines to the neighbours, see `LineBusy`.

    On a slow line a message takes many steps to leave. What is new meanwhile waits in its maker
    rather than in the host, where it would replace what waits: to its receiver that looks like
    loss, which is answered by sending more often. And nothing is sent again that may be under way.
    """

    def __init__(self) -> None:
        self._busy: dict[PeerId, float] = {}
        """Since when."""
        self._took: dict[PeerId, tuple[float, float]] = {}
        """How long what left last took to leave, and when that was."""

    def on_busy(self, peer: PeerId, now: float) -> None:
        self._busy.setdefault(peer, now)

    def on_free(self, peer: PeerId, now: float) -> None:
        since = self._busy.pop(peer, None)
        if since is not None:
            self._took[peer] = (now - since, now)

    def forget(self, peer: PeerId) -> None:
        self._busy.pop(peer, None)
        self._took.pop(peer, None)

    def is_busy(self, peer: PeerId) -> bool:
        return peer in self._busy

    def took_s(self, peer: PeerId) -> float:
        """0 where what is sent leaves at once."""
        return self._took.get(peer, (0.0, 0.0))[0]

    def arrives_by(self, peer: PeerId) -> float:
        """Until when what was sent may still be on its way: in routers and at the receiver no
        longer than it took to leave."""
        if peer in self._busy:
            return inf
        took_s, left_at = self._took.get(peer, (0.0, -inf))
        return left_at + took_s


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change about a machine."""

    me: PeerId
    incarnation: int
    dim: int
    schema: bytes
    lease_s: float


def nowhere() -> Standing:
    """The standing of a peer that has never had a parent: below everybody's."""
    return Standing(Label(-1, PeerId(""), 0))


@dataclass(slots=True)
class Core:
    """One peer's state. `x` and what is sent are read-only arrays of shape (d,)."""

    config: RFast
    identity: Identity
    view: View
    ledger: Ledger
    leases: Leases
    standing: Standing
    emit: Callable[[Effect], None]
    x: Vector
    lines: Lines = field(default_factory=Lines)
    version: int = 0
    """Counts the models that this peer has had to send."""
    trained_version: int = -1
    """`version` when the newest job began."""
    training: bool = False
    period_s: float = 0.0
    """Seconds between two of its steps, smoothed; 0 before there are two."""
    weight: float = 0.0
    """What its gradient counts for; 0 before there is one."""
    seen: int = 0
    """The root's step at whose model that gradient was taken."""
    lag: int = 0
    """How many steps the root, as far as this peer knows, made before it was done."""
    step: int = 0
    """The root's steps, as far as this peer knows."""
    contributors: int = 0
    """Peers in the root's sum, as far as this peer knows."""
    direction: Vector | None = None
    """The mean gradient at the root, for corrected local epochs."""
    corrections: Corrections = field(default_factory=Corrections)

    def send_push(self, parent: PeerId, out: OutEdge, subtree: Subtree) -> None:
        assert out.rho is not None
        self.emit(Send(parent, Push(out.edge, out.counter, out.rho, out.echo_s, subtree)))

    def send_model(
        self,
        peer: PeerId,
        edge: EdgeId | None,
        counter: int,
        v: Vector,
        period_s: float,
        scale: float,
        now: float,
    ) -> None:
        taken = -1
        if self.direction is not None and edge is not None:
            taken = self.corrections.taken(peer, edge)
        standing = self.standing
        message = Model(
            self.identity.incarnation,
            counter,
            v,
            edge,
            now,
            standing.label,
            standing.path,
            self.step,
            period_s,
            self.contributors,
            scale,
            self.direction,
            taken,
        )
        self.emit(Send(peer, message))


class Tracking(Protocol):
    """A tree or a graph: whom a peer talks to, and what it does with what it hears."""

    @property
    def due(self) -> float:
        """When `look_after` must run next, or earlier."""
        ...

    def start(self, now: float) -> None: ...

    def stop(self) -> None: ...

    def step(self, now: float) -> None:
        """The peer has a new gradient: push, descend, mix, send."""
        ...

    def ready_at(self, began_at: float) -> float:
        """When the next job may begin if the last one began then. Later than at once only where
        training is much faster than the network: steps without news cost and bring nothing.
        Infinity: when something has happened."""
        ...

    def snapshot(self) -> State:
        """What a later incarnation should know beside the model."""
        ...

    def restore(self, state: State) -> None: ...

    def look_after(self, now: float) -> None:
        """Send what was held back, ask again."""
        ...

    def on_push(self, child: PeerId, held: InEdge, message: Push, now: float) -> None:
        """The ledger has taken in a new running sum."""
        ...

    def on_dropped(self, now: float) -> None:
        """What some child had pushed is taken out."""
        ...

    def on_model(self, src: PeerId, message: Model, now: float) -> bool:
        """Whether the model was new and is taken in. Its values are known to be usable."""
        ...

    def on_view(self, event: ViewChanged, now: float) -> None: ...

    def on_record(self, record: Record, now: float) -> None: ...

    def on_line_free(self, peer: PeerId, now: float) -> None:
        """What has waited for the line to `peer` may leave."""
        ...

    def on_attach(self, child: PeerId, message: Attach, now: float) -> None: ...

    def on_grant(self, parent: PeerId, message: Grant, now: float) -> None:
        """An edge that was asked for is granted."""
        ...

    def on_news(self, parent: PeerId, out: OutEdge, message: Grant, now: float) -> None:
        """An open edge is renewed."""
        ...

    def on_behind(self, child: PeerId, held: InEdge, now: float) -> None:
        """The newest model for `child` got lost."""
        ...

    def on_refused(self, parent: PeerId, message: Detached, now: float) -> None: ...

    def on_no_answer(self, parent: PeerId, now: float) -> None: ...

    def on_released(self, parent: PeerId, message: Detached | None, now: float) -> None:
        """Our edge to `parent` has ended, by this message or by lapsing."""
        ...
