"""The groups of one peer: those it is in, those it can still serve, those it may yet be named into.

A group's messages overtake each other and outlive its round. Parts may come before the naming, a
member may ask for a result long after the others went on, and a leader that died may have named
this peer without its knowing.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr_moshpit.compression import agreed
from flwr_moshpit.protocol.allreduce import AllReduce
from flwr_moshpit.protocol.group_checks import objection
from flwr_moshpit.protocol.machine import Effect, Message, PeerId, Report, Round, Send
from flwr_moshpit.protocol.messages import (
    Accuse,
    Answer,
    Ask,
    Fetch,
    Gone,
    GroupId,
    GroupKey,
    GroupNamed,
    Member,
    Part,
    Query,
)
from flwr_moshpit.protocol.packing import Packing
from flwr_moshpit.protocol.parts import Parts
from flwr_moshpit.protocol.seat import Seat

EARLY_MAX = 1024
"""Messages kept of one group that is not named yet: its parts may overtake its naming."""

EARLY_GROUPS_MAX = 16

PAST_MAX = 256


class Groups:
    """`compression` is what this peer asks for at most."""

    def __init__(self, me: PeerId, incarnation: int, compression: str) -> None:
        self._me = me
        self._incarnation = incarnation
        self._compression = compression
        self._groups: dict[GroupId, AllReduce] = {}
        self._past: dict[GroupId, bool] = {}
        """Groups that I can serve no more, and those that I declined: whether I was in it."""
        self._early: dict[GroupId, list[tuple[PeerId, Message]]] = {}
        self._spare_parts: list[Parts] = []
        self._packings: dict[tuple[int, ...], Packing] = {}
        """By the cells of a seat, which stay while a plan does."""
        self._absent: dict[PeerId, None] = {}
        """Peers that I saw die. One whose joining I have not heard of yet is not among them."""
        self._left_out: dict[PeerId, int] = {}
        """Lives that a group of mine went on without, taking them for dead."""

    # Messages

    def on_named(
        self, src: PeerId, named: GroupNamed, seats: Sequence[Seat], now: float
    ) -> tuple[Seat | None, list[Effect]]:
        """(the seat that is in a group now, what follows), or None for the seat: it is in none."""
        known = self._groups.get(named.group)
        if known is not None:
            return None, known.handle(src, named, now)
        seat = next((s for s in seats if s.key == named.group.key and s.waits), None)
        if seat is None or named.group in self._past or self._means_another(named, seat):
            return None, self._decline(named)
        reason = self._objection(src, named, seat)
        if reason:
            report = Report("refused", {"peer": src, "reason": reason, "what": "group"})
            return None, [report, *self._decline(named)]
        self._let_go(named)
        seat.retry_at, seat.grouped_at = None, now
        seat.allreduce = AllReduce(
            self._me,
            named,
            seat.vector,
            lambda peer: peer not in self._absent,
            now,
            self._spare_parts.pop() if self._spare_parts else Parts(),
            self._packing(seat, seats, named.compression),
        )
        self._groups[named.group] = seat.allreduce
        effects = seat.allreduce.start(now)
        for early_src, message in self._early.pop(named.group, []):
            effects += seat.allreduce.handle(early_src, message, now)
        return seat, effects

    def on_message(
        self, src: PeerId, group: GroupId, message: Message, seats: Sequence[Seat], now: float
    ) -> list[Effect]:
        known = self._groups.get(group)
        if known is not None:
            return known.handle(src, message, now)
        if any(seat.waits and seat.key == group.key for seat in seats):
            # Its GroupNamed may be under way from the leader while this came from a member.
            # Dropped if there are too many; a part that is missed is asked for.
            early = self._early.get(group, [])
            if len(early) < EARLY_MAX and len(self._early) < EARLY_GROUPS_MAX:
                self._early[group] = [*early, (src, message)]
            return [Send(src, Answer(group, message.ballot))] if type(message) is Query else []
        if isinstance(message, Ask | Fetch | Query | Part | Answer | Accuse):
            return [Send(src, Gone(group, self._past.get(group, False)))]
        return []

    def on_gone(self, src: PeerId, message: Gone, now: float) -> list[Effect]:
        known = self._groups.get(message.group)
        return known.forgotten_by(src, message.finished, now) if known else []

    def _member(self, named: GroupNamed) -> Member | None:
        return next((member for member in named.members if member.peer == self._me), None)

    def _left_me_out(self, named: GroupNamed) -> bool:
        """Before its first version could reach me, a group may have gone on without me."""
        return self._me in named.ranks and self._member(named) is None

    def _means_another(self, named: GroupNamed, seat: Seat) -> bool:
        """Whether it means a life of mine that is over, or comes by a leader that I have left."""
        member = self._member(named)
        if member is None:
            return self._left_me_out(named) and named.group.leader != seat.leader
        return member.incarnation < self._incarnation

    def _objection(self, src: PeerId, named: GroupNamed, seat: Seat) -> str | None:
        reason = objection(named, len(seat.vector))
        if reason:
            return reason
        if agreed([named.compression, self._compression]) != named.compression:
            return "a compression that I did not ask for"
        mine = Member(self._me, seat.weight, seat.num_cells, self._incarnation)
        is_mine = self._left_me_out(named) or self._member(named) == mine
        if not is_mine or src not in (named.group.leader, *named.ranks):
            return "not what I came with"
        return None

    def _decline(self, named: GroupNamed) -> list[Effect]:
        """I have gone elsewhere, and stay there: a later version must not count on me either."""
        self._past[named.group] = False
        heads = [peer for peer in named.ranks if peer != self._me]
        return [Send(heads[0], Accuse(named.group, self._me, "declines"))] if heads else []

    def _packing(self, seat: Seat, seats: Sequence[Seat], compression: str) -> Packing | None:
        if compression == "none":
            return None
        cells = tuple(seat.cells)
        if cells not in self._packings:
            # A new plan gave me other cells: little is lost with what their codec had left out.
            here = [tuple(other.cells) for other in seats]
            self._packings = {key: self._packings[key] for key in here if key in self._packings}
            self._packings[cells] = Packing(len(seat.vector), seat.vector.dtype)
        return self._packings[cells]

    # Peers

    def on_joined(self, peer: PeerId, incarnation: int) -> list[Effect]:
        self._absent.pop(peer, None)
        if self._left_out.pop(peer, None) != incarnation:
            return []
        # It lived, perhaps on the other side of a partition: what it had contributed may be in a
        # result of that side too.
        return [Report("may_duplicate", {"peer": peer})]

    def see_dead(self, peers: Sequence[PeerId]) -> None:
        self._absent.update(dict.fromkeys(peers))

    def on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        return [e for group in self._groups.values() for e in group.on_lost(peer, now)]

    def on_link_lost(self, peer: PeerId, now: float) -> list[Effect]:
        return [e for group in self._groups.values() for e in group.on_link_lost(peer, now)]

    def leave(self, key: GroupKey, leader: PeerId) -> list[Effect]:
        """A leader that I waited for is lost: a group that it has named has to do without me."""
        effects: list[Effect] = []
        for group in [g for g in self._early if g.key == key and g.leader == leader]:
            sources = dict.fromkeys(src for src, _ in self._early.pop(group))
            self._past[group] = False
            effects += [Send(src, Gone(group, False)) for src in sources]
        return effects

    # Ends

    def end(self, seat: Seat) -> None:
        """The round of `seat` is over; its group is still served."""
        if seat.allreduce is None:
            return
        self._spare_parts.append(seat.allreduce.parts)
        if seat.averaged:
            self._left_out.update(seat.allreduce.left_out)

    def forget(self, served_from: int, round: Round) -> None:
        """Groups of rounds before `served_from`, and what came early for rounds before `round`."""
        for group in [group for group in self._groups if group.key.round < served_from]:
            self._drop(group)
        while len(self._past) > PAST_MAX:
            del self._past[next(iter(self._past))]
        for group in [group for group in self._early if group.key.round < round]:
            del self._early[group]

    def _drop(self, group: GroupId) -> None:
        outcome = self._groups.pop(group).outcome
        self._past[group] = outcome is not None and outcome.average is not None

    def _let_go(self, named: GroupNamed) -> None:
        """Results that nobody can miss any more, because all who had a part in them are here."""
        here = dict.fromkeys(member.peer for member in named.members)
        for group, known in list(self._groups.items()):
            earlier = group.key.round < named.group.key.round and known.outcome is not None
            if earlier and all(peer in here for peer in known.named.ranks):
                self._drop(group)
