"""What one peer believes of the others, how that changes, and what of it is news.

    unknown -> ALIVE -> SUSPECT -> DEAD        by claims of others or of my own probes
                 ^---------+---------'         by a newer claim of the peer itself
                 `-> LEFT                      it said so

The rules are SWIM's (section 4.2), but for one: a claim that somebody is dead, about one who has
not even been suspected here, is not believed. It is returned, to be put to the one concerned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flwr_moshpit.protocol.machine import (
    Learned,
    PeerId,
    PeerInfo,
    Record,
    Report,
    ViewChanged,
    refused,
)
from flwr_moshpit.protocol.membership_messages import (
    ALIVE,
    DEAD,
    SUSPECT,
    Claim,
    News,
    RecordName,
)
from flwr_moshpit.protocol.roster import Roster, Rumours, outranks

PEERS_MAX = 8192
RECORDS_MAX = 65536
RECORDS_BYTES_MAX = 1 << 24
"""Of all records, written out: everybody keeps them as long as the swarm lives."""
NEWS_MAX = 24
"""Topics in one message."""


class Beliefs:
    """The roster, what is fresh in it, who is under suspicion, and what the view shows of it."""

    def __init__(self, mine: Claim, suspicion_s: float) -> None:
        self.me = mine.info.peer
        self.roster = Roster(mine)
        self.view = self.roster.view
        self.buried: dict[PeerId, float] = {}
        """When each peer that is down was found so, in that order."""
        self._suspicion_s = suspicion_s
        self._suspicions: dict[PeerId, float] = {}
        """When each runs out, in that order: all last equally long."""
        self._rumours = Rumours()
        self._moved: dict[PeerId, str] = {}
        self._before: dict[PeerId, PeerInfo | None] = {}
        """The peers of whom something has changed since `effects`, as the view has them."""
        self._out: list[Report | Learned] = []
        self._records_bytes = 0

    def begin_with(self, known: Iterable[Claim]) -> None:
        """Claims that the view shows from the beginning."""
        for claim in known:
            if claim.info.peer != self.me:
                self.roster.put(claim)
                self._moved[claim.info.peer] = claim.address
        self.view = self.roster.view

    @property
    def mine(self) -> Claim:
        return self.roster.claims[self.me]

    def status(self, peer: PeerId) -> str | None:
        claim = self.roster.claims.get(peer)
        return None if claim is None else claim.status

    @property
    def has_news(self) -> bool:
        return bool(self._rumours)

    @property
    def deadline(self) -> float | None:
        return next(iter(self._suspicions.values()), None)

    def moved(self) -> dict[PeerId, str]:
        """New addresses since the last call."""
        moved, self._moved = self._moved, {}
        return moved

    def effects(self) -> list[Report | Learned | ViewChanged]:
        """What happened since the last call; one `ViewChanged` tells of all changes."""
        out: list[Report | Learned | ViewChanged] = [*self._out]
        self._out = []
        changed = self._view_change() if self._before else None
        return out if changed is None else [*out, changed]

    # Claims

    def take(self, claim: Claim, now: float) -> Claim | None:
        """Somebody says this. Returned, it says that a peer is dead whom nobody has suspected."""
        peer = claim.info.peer
        known = self.roster.claims.get(peer)
        if peer == self.me:
            self._on_claim_about_me(claim)
        elif known is None:
            if claim.is_up and len(self.roster.claims) < PEERS_MAX:
                self.accept(claim, now)
        elif claim.order > known.order:
            if claim.status != DEAD or known.status != ALIVE:
                self.accept(claim, now)
                return None
            if claim.stamp > known.stamp:
                self.accept(replace(claim, status=ALIVE), now)
            return claim
        return None

    def accept(self, claim: Claim, now: float) -> None:
        """This is what I know of another peer from now."""
        peer = claim.info.peer
        old = self.roster.claims.get(peer)
        self._note(peer)
        self.roster.put(claim)
        self._suspicions.pop(peer, None)
        if claim.is_up:
            self.buried.pop(peer, None)
            if old is None or old.address != claim.address:
                self._moved[peer] = claim.address
            if claim.status == SUSPECT:
                self._suspicions[peer] = now + self._suspicion_s
        else:
            self.buried.setdefault(peer, now)
        if old is None or old.status != claim.status:
            values = {"peer": peer, "status": claim.status, "stamp": tuple(claim.stamp)}
            self._out.append(Report("peer", values))
        self.spread(peer)

    def suspect(self, peer: PeerId, now: float) -> None:
        self.accept(replace(self.roster.claims[peer], status=SUSPECT), now)

    def run_out(self, now: float) -> None:
        """Suspects who have not refuted in time are dead."""
        while self._suspicions:
            peer, ends_at = next(iter(self._suspicions.items()))
            if ends_at > now:
                break
            self.accept(replace(self.roster.claims[peer], status=DEAD), now)

    def prolong(self, by_s: float) -> None:
        """All suspicions last so much longer: I could not hear what was said against them."""
        for peer in self._suspicions:
            self._suspicions[peer] += by_s

    def forget(self, buried_before: float) -> None:
        """Those that have been down since then."""
        while self.buried:
            peer, at = next(iter(self.buried.items()))
            if at > buried_before:
                break
            del self.buried[peer]
            self._rumours.drop(peer)
            self.roster.forget(peer)

    def say(self, mine: Claim) -> None:
        """Something new about myself, in a newer version than `mine`."""
        self._note(self.me)
        self.roster.put(replace(mine, version=mine.version + 1))
        self.spread(self.me)

    def _on_claim_about_me(self, claim: Claim) -> None:
        mine = self.mine
        if claim.birth == mine.birth:
            if claim.order <= mine.order:
                return
            renewed = replace(mine, version=claim.version)
        else:
            # Another life of mine that these peers have known: this one is a later one.
            if claim.order < mine.order:
                return
            info = replace(mine.info, incarnation=claim.info.incarnation + 1)
            renewed = replace(mine, info=info, version=-1)
        self._out.append(Report("refuted", {"claim": claim.status, "stamp": tuple(claim.stamp)}))
        self.say(renewed)

    # Records

    def take_record(self, src: PeerId, record: Record) -> None:
        records = self.roster.records
        here = records.get(record.key)
        if here is not None and not outranks(record.rank, here.rank):
            return
        num_bytes = self._records_bytes + len(repr(record)) - (len(repr(here)) if here else 0)
        if (here is None and len(records) >= RECORDS_MAX) or num_bytes > RECORDS_BYTES_MAX:
            self._out.append(refused(src, "Update", "too many records"))
            return
        self._records_bytes = num_bytes
        self.roster.put_record(record)
        self.spread(record.key)
        self._out.append(Learned(record))

    # News

    def news(self, dst: PeerId | None, about_it: Claim | None = None, copies: int = 1) -> News:
        """What goes along with a message to `dst`, or to `copies` peers."""
        claims = {self.me: self.mine}
        belief = self.roster.claims.get(dst) if dst is not None else None
        if belief is not None and belief.status != ALIVE:
            claims[belief.info.peer] = belief
        if about_it is not None:
            claims.setdefault(about_it.info.peer, about_it)
        names: list[RecordName] = []
        if self._rumours:
            for topic in self._rumours.pick(NEWS_MAX, copies):
                if isinstance(topic, str):
                    peer = PeerId(topic)
                    claims.setdefault(peer, self.roster.claims[peer])
                else:
                    record = self.roster.records[topic]
                    names.append(RecordName(record.key, record.rank))
        return News(tuple(claims.values()), tuple(names), self.roster.digest)

    def correction(self, claim: Claim) -> Claim | None:
        """What the maker of `claim`, which is about itself, should know about itself."""
        known = self.roster.claims.get(claim.info.peer)
        if known is None:
            return None
        is_twin = known.stamp == claim.stamp and known.birth != claim.birth
        return known if is_twin or known.order > claim.order else None

    def spread(self, topic: PeerId | tuple[str, ...]) -> None:
        """`topic`, a peer or the key of a record, is news."""
        self._rumours.add(topic, len(self.roster.living))

    def _note(self, peer: PeerId) -> None:
        if peer not in self._before:
            self._before[peer] = self.view.peers.get(peer)

    def _view_change(self) -> ViewChanged | None:
        before, self._before = self._before, {}
        joined: list[PeerId] = []
        lost: list[PeerId] = []
        changed = False
        for peer, old in sorted(before.items()):
            claim = self.roster.claims.get(peer)
            new = claim.info if claim is not None and claim.is_up else None
            changed = changed or old != new
            if peer == self.me:
                continue
            restarted = bool(old and new and old.incarnation != new.incarnation)
            if new is not None and (old is None or restarted):
                joined.append(peer)
            if old is not None and (new is None or restarted):
                lost.append(peer)
        if not changed:
            return None
        self.view = self.roster.view
        return ViewChanged(self.view, tuple(joined), tuple(lost))
