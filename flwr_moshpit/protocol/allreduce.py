"""Butterfly all-reduce inside one group, finished by whoever survives.

Every member sends the pieces of its vector to their reducers and gets the averages back; weights,
members and shares are fixed by the `GroupNamed` of a version. When a member is lost, the highest
ranking survivor names the next version without it. It first asks the living whether somebody has
finished an earlier one: then that one stands and is served to those who miss pieces of it.
Otherwise nobody finishes it any more after having answered. So all members that live end with one
result, over one set of contributors. (This is single-decree consensus among the living, with
versions as ballots and crash-stop failures; across a partition each side decides for itself.)

    AVERAGING  parts go out, averages come in       -> DONE when all averages of a version are here
    FROZEN     answered a query: may not finish     -> AVERAGING by a new version or by `Stands`
    NAMING     I rank highest: asking the living    -> AVERAGING by my version, or `Stands`
    DONE       result or None (sat out); serves others until it is forgotten

What is sent and summed in a version is in `reduction.py`.

Ryabinin et al. (arXiv 2103.03239) and hivemind lose a dead reducer's share and mix contributors
between pieces; see section 4 of the paper for the all-reduce itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from flwr_moshpit.protocol.doubts import CERTAIN, REDIAL_S, Doubts
from flwr_moshpit.protocol.group_checks import descends, may_name
from flwr_moshpit.protocol.machine import Effect, Message, PeerId, Report, Send, Vector, refused
from flwr_moshpit.protocol.messages import (
    Accuse,
    Answer,
    Ask,
    Average,
    Fetch,
    Gone,
    GroupNamed,
    Part,
    Query,
    Stands,
    Version,
    Waiting,
)
from flwr_moshpit.protocol.packing import Packing
from flwr_moshpit.protocol.partition import reassigned
from flwr_moshpit.protocol.reduction import Reduction

NOTHING = "nobody has anything to average"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a group ended for one member."""

    average: Vector | None
    """(d,), or None: this member sat out and keeps what it has."""
    weight: float
    """Sum of the contributors' weights."""
    num_cells: int
    contributors: tuple[PeerId, ...]
    reason: str
    """Why it sat out, or ""."""
    lost_track: bool = False
    """Others may have finished with this member's contribution and are gone: it must not bring
    that contribution in again."""


class AllReduce:
    """One member's side of one group. `alive` tells whom the membership sees alive."""

    def __init__(
        self,
        me: PeerId,
        named: GroupNamed,
        vector: Vector,
        alive: Callable[[PeerId], bool],
        now: float,
        packing: Packing | None = None,
    ) -> None:
        """`packing`: of this vector, where the group sends anything but values."""
        self.me = me
        self.group = named.group
        self.named = named
        self.outcome: Outcome | None = None
        self._alive = alive
        self._first = {member.peer: member for member in named.members}
        self._weights = {member.peer: member.weight for member in named.members}
        self._reduction = Reduction(me, named, vector, packing)
        self._promised = named.version
        """The highest ballot that I have answered or named: it never falls."""
        self._stands: Version | None = None
        """A version that somebody finished: I may finish it whatever I have promised."""
        self._ballot: dict[PeerId, bool] | None = None
        self._doubts = Doubts()
        self._shown: dict[PeerId, None] = {}
        self._redial_at: float | None = None
        self._progress_at = now

    @property
    def bytes_sent(self) -> int:
        return self._reduction.bytes_sent

    @property
    def deadline(self) -> float | None:
        if self.outcome:
            return None
        return min(self._stalled_at, self._redial_at or inf)

    @property
    def _stalled_at(self) -> float:
        """Answers wait behind what was sent before: each time that none comes, twice as long."""
        return self._progress_at + self.named.stall_s * 2.0**self._doubts.longest_silence

    @property
    def left_out(self) -> dict[PeerId, int]:
        """Members of the first version that are not in this one, with their incarnations."""
        return {
            peer: member.incarnation
            for peer, member in self._first.items()
            if peer not in self._weights
        }

    @property
    def result_bytes(self) -> int:
        """What it costs to go on serving this."""
        average = self.outcome.average if self.outcome else None
        return 0 if average is None else average.nbytes

    def is_asked_for(self, now: float) -> bool:
        """Whether a member that misses something may still ask for it."""
        return now < self._progress_at + 3 * self.named.stall_s

    def waits_for(self) -> dict[str, object]:
        """For people: whose messages are missing, for what."""
        if self._ballot is not None:
            return {"answers": [peer for peer, answer in self._ballot.items() if not answer]}
        if self._is_frozen:
            return {"new version": self.named.ranks[self._promised.rank]}
        missing = self._reduction
        return {
            "parts": list(missing.missing_parts()),
            "averages": list(missing.missing_averages()),
        }

    def start(self, now: float) -> list[Effect]:
        return self._take_version(self.named, now)

    def handle(self, src: PeerId, message: Message, now: float) -> list[Effect]:
        """A message of this group. Whatever it says, `src` has shown that it lives."""
        outsiders = Accuse | Answer | Fetch | Part | Query | Stands
        if src not in self._weights and not isinstance(message, outsiders):
            return []
        if isinstance(message, Part | Average | Answer | Waiting | Stands | GroupNamed):
            self._doubts.said(src)
        if self.outcome and self.outcome.average is None:
            # I sit this group out, with what I have.
            asks = isinstance(message, Accuse | Answer | Ask | Fetch | Query)
            return [Send(src, Gone(self.group, self.outcome.lost_track))] if asks else []
        if self.outcome and isinstance(message, Accuse | Answer | Ask | Query | GroupNamed):
            return [Send(src, Stands(self.named, self.me))]
        match message:
            case Part():
                return self._on_part(src, message, now)
            case Average():
                return self._on_average(src, message, now)
            case Ask():
                # I have answered for every version before it can be named.
                known = message.version <= self._promised
                if not known:
                    return [Send(src, Waiting(self.group))]
                return self._reduction.on_ask(src, message)
            case Fetch():
                return self._on_fetch(src, message)
            case Accuse():
                if message.peer != self.me and src in self._weights:
                    return self._lose(message.peer, f"accused: {message.reason}", now)
            case Query():
                if may_name(src, message.ballot, self.named.ranks):
                    return self._on_query(src, message)
            case Answer():
                if may_name(None, message.ballot, self.named.ranks):
                    return self._on_answer(src, message, now)
            case GroupNamed():
                if not descends(message, self.named, self._first):
                    return [refused(src, "group", "forged")]
                if message.version > self.named.version and message.version >= self._promised:
                    return self._take_version(message, now)
            case Stands():
                holders = [member.peer for member in message.named.members]
                known = descends(message.named, self.named, self._first)
                if not known or message.holder not in holders:
                    return [refused(src, "stands", "forged")]
                return self._on_stands(message, now)
            case Waiting():
                self._progress_at = now
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Ask again for what has not come; who never answers is lost."""
        if self._redial_at is not None and self._redial_at <= now and not self.outcome:
            self._redial_at = None
            ballot = self._ballot or {}
            return [self._query(peer) for peer, said in ballot.items() if not said]
        if self.outcome or now < self._stalled_at:
            return []
        self._progress_at = now
        asked: dict[PeerId, list[Effect]] = {}
        if self._ballot is not None:
            asked = {peer: [self._query(peer)] for peer, said in self._ballot.items() if not said}
        elif self._is_frozen and not self._is_lost(self._ballots_namer):
            # The namer says nothing: its message or my answer may have been lost.
            answer = Answer(self.group, self._promised)
            asked[self._ballots_namer] = [Send(self._ballots_namer, answer)]
        elif self._is_frozen or any(peer in self._doubts.lost for peer in self._weights):
            if self._namer() == self.me:
                return self._ask_the_living(now)
            asked[self._namer()] = [
                Send(self._namer(), Accuse(self.group, peer, why))
                for peer, why in self._doubts.lost.items()
            ]
        else:
            asked = self._reduction.questions()
        effects: list[Effect] = []
        for peer, questions in asked.items():
            if self._doubts.may_ask(peer):
                effects += questions
            else:
                effects += self._lose(peer, "silent", now)
        return effects

    def on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        """The membership sees `peer` dead."""
        return self._lose(peer, "dead", now)

    def on_link_lost(self, peer: PeerId, now: float) -> list[Effect]:
        """Something to or from `peer` was lost: say it again once, then take `peer` for lost."""
        if self.outcome:
            # What was lost may have been the last piece that `peer` needed.
            return self._show(peer) if peer in self._weights else []
        if peer not in self._weights:
            return []
        if self._ballot is not None:
            if self._ballot.get(peer, True):
                return []
            if not self._doubts.may_redial(peer):
                return self._lose(peer, "cut off", now)
            self._redial_at = now + REDIAL_S
            return []
        if not self._doubts.may_retry(peer) or not self._alive(peer):
            return self._lose(peer, "unreachable", now)
        # Should it be dead, this is lost too, and says so.
        again = self._reduction.send_again(peer)
        return again + self._reduction.questions().get(peer, [])

    def forgotten_by(self, src: PeerId, finished: bool, now: float) -> list[Effect]:
        """`src` is not in the group, or was, and is so long past it that it cannot serve it."""
        if self.outcome or src not in self._weights:
            return []
        if finished:
            # My contribution is in what the others have gone on with.
            self._end(None, "the others are past it", lost_track=True)
            return []
        return self._lose(src, "gone", now)

    def _show(self, peer: PeerId) -> list[Effect]:
        """Say once, to one that may have missed it, how this ended."""
        outcome = self.outcome
        if outcome is None or outcome.average is None or peer in self._shown:
            return []
        self._shown[peer] = None
        return [Send(peer, Stands(self.named, self.me))]

    @property
    def _is_frozen(self) -> bool:
        """Whether I may not finish this version: I have told a namer that I had not."""
        return self._promised > self._version and self._stands != self._version

    @property
    def _ballots_namer(self) -> PeerId:
        """Who asked me last whether I had finished: I wait for its word."""
        return self.named.ranks[self._promised.rank]

    def _is_lost(self, peer: PeerId) -> bool:
        mine = peer == self.me and self._ballot is None
        return mine or peer in self._doubts.lost or not self._alive(peer)

    # Averaging

    def _take_version(self, named: GroupNamed, now: float, stands: bool = False) -> list[Effect]:
        self.named = named
        self._promised = max(self._promised, named.version)
        self._weights = {member.peer: member.weight for member in named.members}
        self._ballot = None
        self._doubts.begin_version()
        self._progress_at = now
        if self.outcome:
            return []
        if self.me not in self._weights:
            self._end(None, "left out")
            return []
        if not self._reduction.begin(named) or len(self._weights) == 1:
            self._end(None, "nobody came" if len(self._weights) == 1 else NOTHING)
            return []
        effects = self._reduction.go()
        for src, message in self._reduction.early_averages():
            effects += self._on_average(src, message, now)
        for peer in [] if stands else list(self._weights):
            if peer in self._doubts.lost or (peer != self.me and not self._alive(peer)):
                effects += self._lose(peer, self._doubts.lost.pop(peer, "dead"), now)
        self._check_done()
        return effects

    def _on_part(self, src: PeerId, part: Part, now: float) -> list[Effect]:
        if self.outcome:
            # A member that was left out, or fell asleep, still sends: tell it how this ended.
            if self.outcome.average is not None and self._weights.get(src) is None:
                return [Send(src, Stands(self.named, self.me))]
            return []
        taken = self._reduction.on_part(src, part)
        if taken is None:
            return []
        reason, effects = taken
        if reason:
            return [refused(src, "part", reason), *self._lose(src, "unusable", now)]
        self._gave(src, now)
        self._check_done()
        return effects

    def _gave(self, src: PeerId, now: float) -> None:
        self._progress_at = now
        self._doubts.gave(src)

    def _on_average(self, src: PeerId, message: Average, now: float) -> list[Effect]:
        reason = None if self.outcome else self._reduction.on_average(src, message)
        if reason:
            return [refused(src, "average", reason), *self._lose(src, "unusable", now)]
        if reason is not None:
            self._gave(src, now)
            self._check_done()
        return []

    def _on_fetch(self, src: PeerId, message: Fetch) -> list[Effect]:
        if self.outcome and message.version != self._version:
            return [Send(src, Stands(self.named, self.me))]
        result = self.outcome.average if self.outcome else None
        return self._reduction.on_fetch(src, message, result)

    @property
    def _version(self) -> Version:
        return self.named.version

    def _check_done(self) -> None:
        if self.outcome or self._is_frozen:
            return
        average = self._reduction.result
        if average is not None:
            self._end(average, "")

    def _end(self, average: Vector | None, reason: str, lost_track: bool = False) -> None:
        members = self.named.members
        contributors = tuple(member.peer for member in members if member.weight > 0)
        self.outcome = Outcome(
            average,
            sum(member.weight for member in members),
            sum(member.num_cells for member in members),
            contributors if average is not None else (),
            reason,
            lost_track,
        )
        self._reduction.end(self.me in self.outcome.contributors, average is not None)
        self._ballot = None

    # Losses and versions

    def _lose(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """Go on without `peer`: name the next version, or tell who should."""
        outsider = peer not in self._weights and peer != self._ballots_namer
        if self.outcome or outsider or peer == self.me:
            return []
        known = peer in self._doubts.lost
        self._doubts.lose(peer, reason)
        if self._ballot is not None:
            if not self._can_answer(peer):
                self._ballot.pop(peer, None)
            return self._conclude(now)
        if known:
            return []
        namer = self._namer()
        if namer == self.me:
            return self._ask_the_living(now)
        # Of deaths the namer knows itself, but it may have finished: then it says what stands. A
        # namer that is new hears the old cases too.
        return [
            Send(namer, Accuse(self.group, lost, why))
            for lost, why in self._doubts.lost.items()
            if lost == peer or reason in CERTAIN
        ]

    def _namer(self) -> PeerId:
        for peer in self.named.ranks:
            if peer in self._weights and peer not in self._doubts.lost:
                return peer
        return self.me

    def _can_answer(self, peer: PeerId) -> bool:
        """A member that was accused may live, and may have finished: it is asked as well."""
        return self._alive(peer) and self._doubts.lost.get(peer) not in CERTAIN

    def _ask_the_living(self, now: float) -> list[Effect]:
        rank = self.named.ranks.index(self.me)
        ballot = Version(max(self._version.counter, self._promised.counter) + 1, rank)
        self._promised, self._stands = ballot, None
        self._progress_at = now
        self._ballot = {
            peer: False for peer in self._weights if peer != self.me and self._can_answer(peer)
        }
        effects: list[Effect] = [self._query(peer) for peer in self._ballot]
        return effects + self._conclude(now)

    def _query(self, peer: PeerId) -> Send:
        return Send(peer, Query(self.group, self._promised))

    def _on_query(self, src: PeerId, message: Query) -> list[Effect]:
        if message.ballot > self._promised:
            self._promised, self._stands = message.ballot, None
            self._ballot = None
        return [Send(src, Answer(self.group, self._promised))]

    def _on_answer(self, src: PeerId, message: Answer, now: float) -> list[Effect]:
        if self._ballot is None:
            # The answer was repeated because my naming of that ballot got lost.
            if self.named.ranks[message.ballot.rank] != self.me:
                return []
            if message.ballot > self._version and src in self._weights:
                # It waits for me by a ballot that I gave up, or never had: I name a later one.
                self._promised = max(self._promised, message.ballot)
                return self._ask_the_living(now)
            return [Send(src, self.named)] if message.ballot == self._version else []
        if message.ballot > self._promised:
            self._promised, self._stands = message.ballot, None
            self._ballot = None
        elif message.ballot == self._promised and src in self._ballot:
            self._ballot[src] = True
            return self._conclude(now)
        return []

    def _conclude(self, now: float) -> list[Effect]:
        """All the living have answered that they finished nothing: name the version."""
        if self._ballot is None or not all(self._ballot.values()):
            return []
        told = list(self._ballot)
        members = tuple(m for m in self.named.members if m.peer not in self._doubts.lost)
        named = replace(
            self.named,
            version=self._promised,
            members=members,
            shares=reassigned(self.named.shares, members),
        )
        lost = {p: why for p, why in self._doubts.lost.items() if p in self._weights}
        effects: list[Effect] = [
            Report(
                "group_version",
                {
                    "group": str(self.group.key),
                    "lost": lost,
                    "members": len(members),
                    "version": named.version.counter,
                },
            )
        ]
        effects += [Send(peer, named) for peer in told]
        return effects + self._take_version(named, now)

    def _on_stands(self, message: Stands, now: float) -> list[Effect]:
        """Somebody finished `message.named`: take it up even if I promised not to finish it."""
        if self.outcome or message.named.version < self._version:
            return []
        if self._doubts.lost.get(message.holder) == "unusable":
            return []
        effects: list[Effect] = []
        if self._ballot is not None:
            # Those whom I asked have promised me to finish nothing.
            effects += [Send(peer, message) for peer in self._ballot if peer != message.holder]
        self._ballot = None
        self._stands = message.named.version
        if message.named.version > self._version:
            effects += self._take_version(message.named, now, stands=True)
        if self.outcome:
            return effects
        self._reduction.holder = message.holder
        self._progress_at = now
        effects += self._reduction.questions().get(message.holder, [])
        self._check_done()
        return effects
