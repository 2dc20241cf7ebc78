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
from flwr_moshpit.protocol.machine import (
    Effect,
    Message,
    PeerId,
    Report,
    Round,
    Send,
    View,
    expired,
    refused,
)
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
    PlanId,
    Query,
    Stands,
)
from flwr_moshpit.protocol.packing import Packing
from flwr_moshpit.protocol.seat import Seat

EARLY_MAX = 1024
EARLY_VECTORS_MAX = 4
EARLY_BYTES_MIN = 1 << 20
"""Messages, and vectors' worth of bytes or at least so many, kept of groups that are not named yet:
parts may overtake the naming. What is dropped is asked for again."""

MEMBER_BYTES = 512
"""What one member takes, at least, in a message that names a group's."""

SERVED_MAX = 8
SERVED_BYTES_MAX = 1 << 24
"""Groups of past rounds, and bytes of their results, that are kept for members that still wait for
an answer. Rounds with a large model are longer than anybody waits before asking."""

PAST_MAX = 256


class Groups:
    """`me` in its life `incarnation`."""

    def __init__(self, me: PeerId, incarnation: int) -> None:
        self._me = me
        self._incarnation = incarnation
        self._groups: dict[GroupId, AllReduce] = {}
        self._past: dict[GroupId, bool] = {}
        """Groups that I can serve no more, and those that I declined: whether I was in it."""
        self._early: list[tuple[GroupId, PeerId, Message]] = []
        self._early_bytes = 0
        self._packings: dict[tuple[int, ...], Packing] = {}
        """By the axis and the cells of a seat, under one plan."""
        self._packings_plan: PlanId | None = None
        self._absent: dict[PeerId, None] = {}
        """Peers that I saw die. One whose joining I have not heard of yet is not among them."""
        self._left_out: dict[PeerId, int] = {}
        """Lives that a group of mine went on without, taking them for dead."""

    # Messages

    def on_named(
        self, src: PeerId, named: GroupNamed, seats: Sequence[Seat], round: Round, now: float
    ) -> tuple[Seat | None, list[Effect]]:
        """(the seat that is in a group now, what follows), or None for the seat: it is in none.
        `round`: the one that I am in."""
        known = self._groups.get(named.group)
        if known is not None:
            return None, known.handle(src, named, now)
        seat = next((s for s in seats if s.key == named.group.key and s.waits), None)
        late = [expired(src, named)] if named.group.key.round < round else []
        if named.group in self._past:
            return None, [*late, Send(src, Gone(named.group, self._past[named.group]))]
        if named.group.leader == self._me != src:
            # To decline it would make it past, and I could never name it myself.
            return None, [refused(src, "group", "no group of mine")]
        if seat is None or self._means_another(named, seat):
            return None, [*late, *self._decline(named)]
        reason = self._objection(src, named, seat)
        if reason:
            report = refused(src, "group", reason)
            return None, [report, *self._decline(named)]
        self._let_go(named)
        seat.retry_at, seat.grouped_at = None, now
        seat.allreduce = AllReduce(
            self._me,
            named,
            seat.vector,
            lambda peer: peer not in self._absent,
            now,
            self._packing(seat, named.compression),
        )
        self._groups[named.group] = seat.allreduce
        effects: list[Effect] = []
        early = self._take_early(named.group)
        # What I have promised to a namer holds before anything can be finished.
        for early_src, message in early:
            if type(message) is Query:
                effects += seat.allreduce.handle(early_src, message, now)
        effects += seat.allreduce.start(now)
        for early_src, message in early:
            if type(message) is not Query:
                effects += seat.allreduce.handle(early_src, message, now)
        return seat, effects

    def on_message(
        self,
        src: PeerId,
        group: GroupId,
        message: Message,
        seats: Sequence[Seat],
        round: Round,
        now: float,
    ) -> list[Effect]:
        """`round`: the one that I am in. What is of an earlier one's group, and that is gone, is
        refused."""
        known = self._groups.get(group)
        if known is not None:
            return known.handle(src, message, now)
        seat = next((seat for seat in seats if seat.waits and seat.key == group.key), None)
        if seat is not None:
            # Its GroupNamed may be under way from the leader while this came from a member.
            most = max(EARLY_VECTORS_MAX * seat.vector.nbytes, EARLY_BYTES_MIN)
            room = most - self._early_bytes
            if len(self._early) >= EARLY_MAX or _kept_bytes(message) > room:
                what = type(message).__name__.lower()
                return [refused(src, what, "too much before its group is named")]
            self._early.append((group, src, message))
            self._early_bytes += _kept_bytes(message)
            return [Send(src, Answer(group, message.ballot))] if type(message) is Query else []
        effects: list[Effect] = []
        if group.key.round < round:
            effects.append(expired(src, message))
        if isinstance(message, Ask | Fetch | Query | Part | Answer | Accuse):
            effects.append(Send(src, Gone(group, self._past.get(group, False))))
        return effects

    def on_gone(self, src: PeerId, message: Gone, round: Round, now: float) -> list[Effect]:
        known = self._groups.get(message.group)
        if known is not None:
            return known.forgotten_by(src, message.finished, now)
        return [expired(src, message)] if message.group.key.round < round else []

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
        if agreed([named.compression, seat.compression]) != named.compression:
            return "a compression that I did not ask for"
        mine = Member(self._me, seat.weight, seat.num_cells, self._incarnation)
        is_mine = self._left_me_out(named) or self._member(named) == mine
        if not is_mine or src not in (named.group.leader, *named.ranks):
            return "not what I came with"
        return None

    def _decline(self, named: GroupNamed) -> list[Effect]:
        """I have gone elsewhere, and stay there: a later version must not count on me either."""
        self._note_past(named.group, was_in=False)
        heads = [peer for peer in named.ranks if peer != self._me]
        return [Send(heads[0], Accuse(named.group, self._me, "declines"))] if heads else []

    def _packing(self, seat: Seat, compression: str) -> Packing | None:
        if compression == "none":
            return None
        if seat.key.plan != self._packings_plan:
            # A new plan gives other cells: little is lost with what their codec had left out.
            self._packings, self._packings_plan = {}, seat.key.plan
        cells = (seat.key.axis, *seat.cells)
        if cells not in self._packings:
            self._packings[cells] = Packing(len(seat.vector), seat.vector.dtype)
        return self._packings[cells]

    def _take_early(self, group: GroupId) -> list[tuple[PeerId, Message]]:
        taken = [(src, message) for each, src, message in self._early if each == group]
        self._keep_early([each for each in self._early if each[0] != group])
        return taken

    def _keep_early(self, early: list[tuple[GroupId, PeerId, Message]]) -> None:
        self._early = early
        self._early_bytes = sum(_kept_bytes(message) for _, _, message in early)

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
        named = dict.fromkeys(group for group, _, _ in self._early)
        for group in [g for g in named if g.key == key and g.leader == leader]:
            sources = dict.fromkeys(src for src, _ in self._take_early(group))
            self._note_past(group, was_in=False)
            effects += [Send(src, Gone(group, False)) for src in sources]
        return effects

    # Ends

    def end(self, seat: Seat, view: View) -> list[Effect]:
        """The round of `seat` is over; its group is still served."""
        if seat.allreduce is None or not seat.averaged or seat.outcome is None:
            return []
        for peer in seat.outcome.contributors:
            self._left_out.pop(peer, None)
        effects: list[Effect] = []
        for peer, incarnation in seat.allreduce.left_out.items():
            if peer in view and view.peers[peer].incarnation == incarnation:
                # It lives, and its contribution may be in a result of its own.
                effects.append(Report("may_duplicate", {"peer": peer}))
            else:
                self._left_out[peer] = incarnation
        return effects

    def forget(self, served_from: int, round: Round, now: float) -> None:
        """Groups of rounds before `served_from`, and what came early for rounds before `round`.

        Rounds may be shorter than the time after which a member asks: a few groups stay as long.
        """
        old = [group for group in self._groups if group.key.round < served_from]
        kept_bytes = 0
        for count, group in enumerate(reversed(old)):
            known = self._groups[group]
            kept_bytes += known.result_bytes
            too_many = count >= SERVED_MAX or kept_bytes > SERVED_BYTES_MAX
            if too_many or not known.is_asked_for(now):
                self._drop(group)
        self._keep_early([each for each in self._early if each[0].key.round >= round])

    def _drop(self, group: GroupId) -> None:
        outcome = self._groups.pop(group).outcome
        self._note_past(group, outcome is not None and outcome.average is not None)

    def _note_past(self, group: GroupId, was_in: bool) -> None:
        """Within bounds at once: who has finished ends no more rounds, and may still be named into
        any number of groups."""
        self._past[group] = was_in
        while len(self._past) > PAST_MAX:
            del self._past[next(iter(self._past))]

    def _let_go(self, named: GroupNamed) -> None:
        """Results that nobody can miss any more, because all who had a part in them are here."""
        here = dict.fromkeys(member.peer for member in named.members)
        for group, known in list(self._groups.items()):
            earlier = group.key.round < named.group.key.round and known.outcome is not None
            if earlier and all(peer in here for peer in known.named.ranks):
                self._drop(group)


def _kept_bytes(message: Message) -> int:
    named = len(message.named.members) if isinstance(message, Stands) else 0
    return message.array_bytes + MEMBER_BYTES * named
