"""Edges between two peers that may both believe the other dead: nothing is ever counted twice.

An edge of A belongs to its child end, the peer that pushes on it. Its parent end keeps `rho_buf`,
what came, and the two ends must agree on who counts that mass. With views that differ, messages
that linger and peers that pause, agreement comes from a lease on the parent's own clock:

    parent end   (none) --Attach, admitted--> HELD --Detach, lapsed, child dead--> (none)
    child end    (none) --ask--> ASKING --Grant--> OPEN --close--> CLOSING --released--> (none)

- A parent holds an edge until `lease_s` after a moment of its own clock that the child has echoed.
  Clocks travel with every model and `Grant`, echoes with every push and `Renew`. When the hold
  ends, or the child is dead, or asks for it, the parent drops all that it ever took in.
- A child heard that clock later than the parent read it. So `lease_s` after it has last heard a
  new clock of the parent, and 10 % for clocks that run unevenly, the hold is over for certain,
  even if the parent knows nothing of it. Then, or as soon as `Detached` comes, the child puts back
  what it had pushed (released), and only then may that mass go anywhere else.
- An `EdgeId` is used once. Only an `Attach` makes an edge, each parent remembers for every child
  the highest edge that is over, and a push on an edge that is over is answered with `Detached`.
- The side that comes to miss the other's messages asks for an answer in the lease's last third,
  or earlier where that has proved too late. These messages are tiny and reliable: an edge survives
  the loss of most pushes and models.

Between a drop and a release the mass is at neither end: on its way back, as if it were in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from flwr_moshpit.protocol.ledger import InEdge, Ledger, OutEdge
from flwr_moshpit.protocol.machine import Effect, PeerId, Report, Send
from flwr_moshpit.protocol.messages import (
    Attach,
    Detach,
    Detached,
    EdgeId,
    Grant,
    Label,
    Renew,
)

_CLOCK_MARGIN = 1.1


@dataclass(slots=True)
class Standing:
    """Where a peer is, as it tells its children."""

    label: Label
    path: tuple[PeerId, ...] = ()
    """From its parent up to the root."""


@dataclass(slots=True)
class Ask:
    """An `Attach` that is not answered yet."""

    edge: EdgeId
    until: float


@dataclass(slots=True)
class Lapsed:
    """What ran out: see `Leases.look_after`."""

    children: list[PeerId]
    parents: list[PeerId]
    asks: list[PeerId]


class Leases:
    """Both ends of all edges of one peer. Mass moves by the ledger only, when an edge ends."""

    def __init__(
        self,
        incarnation: int,
        schema: bytes,
        lease_s: float,
        ledger: Ledger,
        standing: Standing,
        emit: Callable[[Effect], None],
    ) -> None:
        self.ledger = ledger
        self.asks: dict[PeerId, Ask] = {}
        self.due: float = inf
        """When `look_after` must run next, or earlier."""
        self._incarnation = incarnation
        self._epoch = -1
        self._dim = ledger.dim
        self._schema = schema
        self._lease_s = lease_s
        self._ask_s = lease_s / 3
        """An answer is asked for when no more than this is left of a lease. Grows when a child
        comes back whose lease has lapsed: the network needs more time."""
        self._lapsed: dict[PeerId, None] = {}
        self._standing = standing
        self._emit = emit
        self._over: dict[PeerId, EdgeId] = {}

    # The child's end.

    def ask(self, parent: PeerId, step: int, insist: bool, now: float) -> None:
        self._epoch += 1
        edge = EdgeId(self._incarnation, self._epoch)
        self.asks[parent] = Ask(edge, now + self._lease_s / 2)
        self.due = min(self.due, now + self._lease_s / 2)
        self._emit(
            Send(parent, Attach(edge, self._standing.label, step, self._dim, self._schema, insist))
        )

    def give_up(self, parent: PeerId) -> None:
        """Do not wait for an answer any longer; should it still come, the edge is over."""
        ask = self.asks.pop(parent)
        self._emit(Send(parent, Detach(ask.edge)))

    def open(self, parent: PeerId, grant: Grant, now: float) -> OutEdge:
        """Start to push on the edge that was asked for."""
        del self.asks[parent]
        out = OutEdge(grant.edge, grant.incarnation, heard_at=now, echo_s=grant.clock_s)
        self.ledger.outs[parent] = out
        self.due = min(self.due, now + self._lease_s - self._ask_s)
        self._answer(parent, out, wants_answer=False)
        return out

    def hear(self, out: OutEdge, clock_s: float, now: float) -> None:
        """The parent's clock, on whatever message it came."""
        if clock_s > out.echo_s and not out.closing:
            out.echo_s, out.heard_at = clock_s, now

    def on_grant(self, parent: PeerId, grant: Grant, now: float) -> OutEdge | None:
        """The lease of an open edge goes on; None if this is about no such edge."""
        out = self.ledger.outs.get(parent)
        if out is None or out.edge != grant.edge or out.closing:
            return None
        self.hear(out, grant.clock_s, now)
        if grant.answer:
            self._answer(parent, out, wants_answer=False)
        return out

    def close(self, parent: PeerId) -> None:
        """Stop pushing; what was pushed comes back once the parent counts it no more."""
        out = self.ledger.outs[parent]
        if not out.closing:
            out.closing = True
            self.due = min(self.due, out.heard_at + self._lease_s * _CLOCK_MARGIN)
            self._emit(Send(parent, Detach(out.edge)))

    def on_detached(self, parent: PeerId, message: Detached) -> bool:
        """Whether an edge of ours came to its end by this."""
        out = self.ledger.outs.get(parent)
        if out is None or out.edge != message.edge:
            return False
        self.ledger.release_out(parent)
        return True

    # The parent's end.

    def admit(self, child: PeerId, edge: EdgeId, now: float) -> InEdge | None:
        """Hold an edge for `child`, and tell it so; None if that edge is over already."""
        known = self.ledger.ins.get(child)
        if known is not None and edge > known.edge:
            # The child has been released from its older edge, or else it could not ask.
            self._end(child)
        if self.is_over(child, edge):
            self._emit(Send(child, Detached(edge, "over")))
            return None
        if self._lapsed.pop(child, self) is None:
            self._ask_s = min(1.5 * self._ask_s, 2 * self._lease_s / 3)
        if known is None or edge > known.edge:
            known = InEdge(edge, hold_until=now + self._lease_s)
            self.ledger.add_in(child, known)
            self.due = min(self.due, known.hold_until - self._ask_s)
        self.grant(child, known, now, wants_answer=False)
        return known

    def refuse(
        self, child: PeerId, edge: EdgeId, reason: str, instead: tuple[PeerId, ...] = ()
    ) -> None:
        self._mark_over(child, edge)
        self._emit(Send(child, Detached(edge, reason, instead)))

    def is_over(self, child: PeerId, edge: EdgeId) -> bool:
        over = self._over.get(child)
        return over is not None and edge <= over

    def confirm(self, held: InEdge, echo_s: float, now: float) -> None:
        """The child has echoed our clock; from the future it cannot have it."""
        held.hold_until = max(held.hold_until, min(echo_s, now) + self._lease_s)

    def on_renew(self, child: PeerId, message: Renew, now: float) -> InEdge | None:
        held = self.held(child, message.edge)
        if held is not None:
            self.confirm(held, message.echo_s, now)
            if message.answer:
                self.grant(child, held, now, wants_answer=False)
        return held

    def held(self, child: PeerId, edge: EdgeId) -> InEdge | None:
        """The edge that a message is about. If it is not held, its child is told."""
        held = self.ledger.ins.get(child)
        if held is not None and held.edge == edge:
            return held
        if held is None or edge > held.edge:
            self._mark_over(child, edge)
        self._emit(Send(child, Detached(edge, "over")))
        return None

    def on_detach(self, child: PeerId, message: Detach) -> bool:
        """Whether an edge that we held came to its end by this."""
        held = self.ledger.ins.get(child)
        ended = held is not None and held.edge <= message.edge
        if ended:
            self._end(child)
        self._mark_over(child, message.edge)
        self._emit(Send(child, Detached(message.edge, "as asked")))
        return ended

    def drop(self, child: PeerId, reason: str, instead: tuple[PeerId, ...] = ()) -> None:
        """Take out all that `child` pushed, and tell it."""
        held = self._end(child)
        self._emit(Send(child, Detached(held.edge, reason, instead)))

    def grant(self, child: PeerId, held: InEdge, now: float, wants_answer: bool) -> None:
        place = self._standing
        self._emit(
            Send(
                child,
                Grant(
                    held.edge,
                    self._incarnation,
                    now,
                    place.label,
                    place.path,
                    held.counter,
                    wants_answer,
                ),
            )
        )

    # Both.

    def look_after(self, now: float) -> Lapsed:
        """End what has run out, ask after what may, and say which edges and asks ended."""
        lapsed = Lapsed([], [], [])
        self.due = inf
        for child, held in list(self.ledger.ins.items()):
            self._look_after_child(child, held, now, lapsed)
        for parent, out in list(self.ledger.outs.items()):
            self._look_after_parent(parent, out, now, lapsed)
        for parent, ask in list(self.asks.items()):
            if ask.until <= now:
                self.give_up(parent)
                lapsed.asks.append(parent)
            else:
                self.due = min(self.due, ask.until)
        return lapsed

    def _look_after_child(self, child: PeerId, held: InEdge, now: float, lapsed: Lapsed) -> None:
        if held.hold_until <= now:
            self.drop(child, "lapsed")
            self._lapsed[child] = None
            lapsed.children.append(child)
            self._emit(Report("lapsed", {"peer": child, "end": "parent"}))
            return
        ask_at = max(held.hold_until - self._ask_s, held.nudged_at + self._ask_s / 2)
        if ask_at <= now:
            held.nudged_at = now
            ask_at = now + self._ask_s / 2
            self.grant(child, held, now, wants_answer=True)
        self.due = min(self.due, ask_at, held.hold_until)

    def _look_after_parent(self, parent: PeerId, out: OutEdge, now: float, lapsed: Lapsed) -> None:
        end = out.heard_at + self._lease_s * _CLOCK_MARGIN
        if end <= now:
            self.ledger.release_out(parent)
            lapsed.parents.append(parent)
            self._emit(Report("lapsed", {"peer": parent, "end": "child"}))
            return
        self.due = min(self.due, end)
        if out.closing:
            return
        ask_at = max(end - self._ask_s, out.nudged_at + self._ask_s / 2)
        if ask_at <= now:
            out.nudged_at = now
            ask_at = now + self._ask_s / 2
            self._answer(parent, out, wants_answer=True)
        self.due = min(self.due, ask_at)

    def _answer(self, parent: PeerId, out: OutEdge, wants_answer: bool) -> None:
        message = Renew(out.edge, out.echo_s, out.model_counter, wants_answer)
        self._emit(Send(parent, message))

    def _end(self, child: PeerId) -> InEdge:
        held = self.ledger.drop_in(child)
        self._mark_over(child, held.edge)
        return held

    def _mark_over(self, child: PeerId, edge: EdgeId) -> None:
        if not self.is_over(child, edge):
            self._over[child] = edge
