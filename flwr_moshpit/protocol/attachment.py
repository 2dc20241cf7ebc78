"""A peer's place in the tree: whom it hangs on, who is root, and how the tree mends itself.

Everybody decides alone, under a view that may differ from the others'. There are no phases:

    ATTACHED   one edge, to the parent. When the edge ends (see `leases.py`) the peer is an orphan.
    ORPHAN     asks, one after the other: its parent in the tree planned over its own view, the
               roots it has heard of, some peers fitter than itself, and some others if there is a
               root. The first to grant is its parent. If it comes to the end of the list it claims
               to be root. Its subtree stays with it.
    ROOT       descends. If it hears of a better root it asks there, and is attached when granted.

**No cycle, ever.** Each peer has a label (term, root, beat). The root's beat grows with its steps;
a child takes its parent's label, and claims of a new root take a higher term. So a label never
falls, and no peer's is above its parent's. An edge is opened only towards a label strictly above
one's own. Suppose an edge i -> j closed a cycle: j hangs below i, so j's label is at most i's; but
it was above. Labels that come late are too low, which only makes the rule stricter. Root paths are
used too, to refuse at once a peer that asks somebody below itself, but nothing depends on them:
a path can be out of date, and two moves under stale paths can meet in a cycle.

**One root in the end.** Claims are gossiped and ordered by (live peers, examples, term, id). A root
that hears of a better one among the living asks there. A better root whose label is not above the
other's raises its term. Claims are published when made or changed, by roots only.

Attachments need no gossip: a lease ends an old edge before a new one begins, so that no parent has
to hear of its children from others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from flwr_moshpit.protocol.machine import (
    PeerId,
    Publish,
    Record,
    Report,
    View,
    ViewChanged,
    refused,
)
from flwr_moshpit.protocol.messages import Attach, Detached, Grant, Label, RootClaim
from flwr_moshpit.protocol.topology import Topology
from flwr_moshpit.protocol.tracking import Core

_OTHERS_ASKED = 6
_WAITING_MAX = 64


@dataclass(slots=True)
class _Search:
    """Whom an orphan asks, one after the other."""

    queue: list[PeerId]
    others: list[PeerId]
    """Less fit than the orphan itself: only if there is a root, to which they may know a way. If
    there is none they wait for one as well, and the fittest of those who wait should become it."""
    full: list[PeerId] = field(default_factory=list)
    insist: bool = False
    among_others: bool = False
    """Whether `others` are being asked now."""
    asked: dict[PeerId, None] = field(default_factory=dict)

    def next(self, is_there_a_root: bool) -> PeerId | None:
        while True:
            if not self.queue and self.full and not self.insist:
                # Rather a crowded parent than none.
                self.insist, self.queue, self.asked = True, self.full, {}
            self.among_others = not self.queue
            queue = self.queue or (self.others if is_there_a_root else [])
            if not queue:
                return None
            peer = queue.pop(0)
            if peer not in self.asked:
                self.asked[peer] = None
                return peer


class TreeSeat:
    """See the module. `plan` builds the tree that a view suggests; `census` counts our subtree
    and the examples in it."""

    def __init__(
        self, core: Core, plan: Callable[[View], Topology], census: Callable[[], tuple[int, float]]
    ) -> None:
        self.is_root = False
        self.parent: PeerId | None = None
        """Whom we push to and take the model from."""
        self.due: float = inf
        """When `look_after` must run next, or earlier."""
        self._core = core
        self._identity = core.identity
        self._standing = core.standing
        self._leases = core.leases
        self._emit = core.emit
        self._plan = plan
        self._census = census
        self._active = False
        self._search = _Search([], [])
        self._waiting: dict[PeerId, tuple[Attach, float]] = {}
        self._claims: dict[PeerId, tuple[int, RootClaim]] = {}
        self._claim: RootClaim | None = None
        self._claimed_at = -inf
        self._serial = 0
        self._beat_at = -inf
        self._settle_at = -inf

    # Looking for a parent.

    def start(self, now: float) -> None:
        self._active = True
        self.seek(now)

    def stop(self) -> None:
        """Send the children to our parent, and leave ours."""
        self._active = False
        instead = () if self.parent is None else (self.parent,)
        for child in list(self._leases.ledger.ins):
            self._leases.drop(child, "leaving", instead)
        for peer in list(self._leases.asks):
            self._leases.give_up(peer)
        for parent in list(self._leases.ledger.outs):
            self._leases.close(parent)
        self._retire()

    def seek(self, now: float, first: tuple[PeerId, ...] = ()) -> None:
        """Begin to ask, unless an edge still stands or is coming to its end.

        first: ask these before the others; only with them does a root ask at all.
        """
        if not self._active or self._leases.ledger.outs or self._leases.asks:
            return
        if self.is_root and not first:
            return
        topology, me = self._plan(self._core.view), self._identity.me
        planned, place = topology.parent(me), topology.peers.index(me)
        rivals = sorted(self._rivals(), key=self._order, reverse=True)
        wanted = [
            *first,
            *(() if planned is None else (planned,)),
            *rivals,
            *topology.peers[: min(place, _OTHERS_ASKED)],
        ]
        others = topology.peers[place + 1 : place + 1 + _OTHERS_ASKED]
        self._search = _Search(list(dict.fromkeys(wanted)), list(others))
        self._ask_next(now)

    def on_view(self, event: ViewChanged, now: float) -> None:
        for peer in event.lost:
            if peer in self._leases.asks:
                self.on_no_answer(peer, now)
            self._waiting.pop(peer, None)
        if event.joined:
            # After a partition views heal faster than records: old claims are all we have yet.
            self._settle_at = now + self._identity.lease_s / 3
        self._reconsider(now)
        self.seek(now)

    def on_no_answer(self, peer: PeerId, now: float) -> None:
        """Asked in vain: `peer` is dead, or the link to it."""
        if peer in self._leases.asks:
            self._leases.give_up(peer)
        self._ask_next(now)

    def on_refused(self, peer: PeerId, message: Detached, now: float) -> None:
        del self._leases.asks[peer]
        if message.reason == "full":
            self._search.full.append(peer)
            self._search.queue = [*message.instead, *self._search.queue]
        self._ask_next(now)

    def on_grant(self, peer: PeerId, grant: Grant, now: float) -> bool:
        """Whether the edge that we asked for is open now."""
        if not grant.label > self._standing.label:
            self.on_no_answer(peer, now)
            return False
        self._leases.open(peer, grant, now)
        self.parent = peer
        if self.is_root:
            self.is_root = False
            self._retire()
        self.follow(grant.label, (peer, *grant.path), now)
        values = {"parent": peer, "root": grant.label.root, "depth": len(self._standing.path)}
        self._emit(Report("attached", values))
        return True

    def on_released(self, peer: PeerId, message: Detached | None, now: float) -> None:
        """The edge to our parent has ended, by this message or by lapsing; its mass is back."""
        if peer == self.parent:
            self.parent = None
        if message is not None and message.reason == "leaving":
            self._claims.pop(peer, None)
        self.seek(now, () if message is None else message.instead)

    def follow(self, label: Label, path: tuple[PeerId, ...], now: float) -> None:
        """News of the root from the parent."""
        if label > self._standing.label:
            self._standing.label, self._standing.path = label, path
            if self._waiting:
                self._serve_waiting(now)

    def _ask_next(self, now: float) -> None:
        if not self._active or self._leases.asks:
            return
        search, view = self._search, self._core.view
        while True:
            peer = search.next(bool(self._rivals()))
            if peer is None:
                break
            info = view.peers.get(peer)
            if info is not None and info.dialable and peer != self._identity.me:
                self._leases.ask(peer, self._core.step, search.insist, now)
                return
        if self.is_root:
            self.due = min(self.due, now + self._identity.lease_s / 2)
        else:
            self._become_root(now)

    # Being a parent.

    def on_attach(self, child: PeerId, message: Attach, now: float) -> bool:
        """Whether an edge is held for `child` now."""
        leases, identity = self._leases, self._identity
        if leases.is_over(child, message.edge):
            leases.refuse(child, message.edge, "over")
            return False
        if (message.dim, message.schema) != (identity.dim, identity.schema):
            self._emit(refused(child, "Attach", "schema"))
            leases.refuse(child, message.edge, "schema")
            return False
        if child in self._standing.path or not self._active:
            leases.refuse(child, message.edge, "below" if self._active else "leaving")
            return False
        if self.is_root and 2 * self._core.step < message.step:
            # We have just come back, with a model that the others have left far behind.
            leases.refuse(child, message.edge, "new here")
            self.seek(now, (child,))
            return False
        if self.is_root and not self._standing.label > message.label:
            # A root may raise its label whenever it likes: the newcomer need not wait.
            self._raise_term(message.label.term, now)
        if not self._standing.label > message.label:
            if len(self._waiting) < _WAITING_MAX:
                self._waiting[child] = (message, now + identity.lease_s / 2)
            return False
        children = leases.ledger.ins
        if len(children) >= self._room() and child not in children and not message.insist:
            leases.refuse(child, message.edge, "full", self._smallest_children())
            return False
        return leases.admit(child, message.edge, now) is not None

    def _room(self) -> int:
        """Most children: twice what was planned, so that orphans find a place at once."""
        topology = self._plan(self._core.view)
        widest = len(topology.sources.get(topology.root, ()))
        return 2 * max(widest, 2)

    def _smallest_children(self) -> tuple[PeerId, ...]:
        def size(child: PeerId) -> tuple[int, PeerId]:
            subtree = self._leases.ledger.ins[child].subtree
            return (1 if subtree is None else subtree.peers), child

        return tuple(sorted(self._leases.ledger.ins, key=size)[:3])

    def _serve_waiting(self, now: float) -> None:
        waiting, self._waiting = self._waiting, {}
        for child, (message, until) in waiting.items():
            if now < until:
                self.on_attach(child, message, now)

    # Being root.

    def on_claim(self, peer: PeerId, record: Record, now: float) -> None:
        if peer == self._identity.me:
            return
        incarnation = record.rank[0]
        known = self._claims.get(peer)
        if known is not None and incarnation < known[0]:
            return
        if isinstance(record.value, RootClaim):
            self._claims[peer] = (incarnation, record.value)
        else:
            self._claims.pop(peer, None)
        self._reconsider(now)

    def _reconsider(self, now: float) -> None:
        """Other roots are there than before."""
        self._settle_roots(now)
        if self._search.among_others and not self._rivals():
            for peer in list(self._leases.asks):
                self.on_no_answer(peer, now)

    def beat(self, now: float) -> None:
        """The root has something new: everybody's label will follow."""
        label = self._standing.label
        self._standing.label = Label(label.term, label.root, label.beat + 1)
        self._beat_at = now
        if self._waiting:
            self._serve_waiting(now)

    def look_after(self, now: float) -> None:
        self.due = inf
        if not self.is_root or not self._active:
            return
        third = self._identity.lease_s / 3
        if now - self._beat_at >= third:
            # An idle root must beat too: orphans can attach only to labels above their own.
            self.beat(now)
        if now - self._claimed_at >= self._identity.lease_s:
            live, examples = self._census()
            if self._claim is not None and live != self._claim.live:
                self._publish(RootClaim(self._standing.label.term, live, examples), now)
        self._settle_roots(now)
        if self.is_root:
            self.due = min(self.due, now + third)

    def _become_root(self, now: float) -> None:
        self.is_root = True
        self._raise_term(self._standing.label.term, now)
        self.due = min(self.due, now + self._identity.lease_s / 3)

    def _raise_term(self, above: int, now: float) -> None:
        terms = [claim.term for _, claim in self._claims.values()]
        term = max([above, self._standing.label.term, *terms]) + 1
        self._standing.label = Label(term, self._identity.me, 0)
        self._standing.path = ()
        live, examples = self._census()
        self._publish(RootClaim(term, live, examples), now)
        self._emit(Report("root", {"term": term, "live": live}))
        self._serve_waiting(now)

    def _publish(self, claim: RootClaim | None, now: float) -> None:
        self._claim = claim
        self._claimed_at = now
        self._serial += 1
        key, rank = ("root", self._identity.me), (self._identity.incarnation, self._serial)
        self._emit(Publish(Record(key, rank, claim)))

    def _retire(self) -> None:
        if self._claim is not None:
            self._publish(None, self._claimed_at)

    def _rivals(self) -> list[PeerId]:
        """The other roots among the living."""
        peers = self._core.view.peers
        return [
            peer
            for peer, (incarnation, _) in self._claims.items()
            if peer in peers and peers[peer].incarnation == incarnation
        ]

    def _order(self, peer: PeerId) -> tuple[int, float, int, PeerId]:
        claim = self._claim if peer == self._identity.me else self._claims[peer][1]
        assert claim is not None
        return claim.live, claim.examples, claim.term, peer

    def _settle_roots(self, now: float) -> None:
        """If there is a better root, ask it; else see to it that the others can attach here."""
        if not self.is_root or not self._active:
            return
        rivals = self._rivals()
        if not rivals or now < self._settle_at:
            return
        best = max(rivals, key=self._order)
        if self._order(best) > self._order(self._identity.me):
            self.seek(now, (best,))
        elif max(self._claims[peer][1].term for peer in rivals) >= self._standing.label.term:
            self._raise_term(self._standing.label.term, now)
