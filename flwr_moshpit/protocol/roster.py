"""What one peer knows of the swarm, and how two peers find where their knowledge differs.

Living peers and records fall into buckets by the hash of their name. A bucket's digest is the
exclusive or of 64-bit hashes of what is in it, so it is kept up to date at constant cost, and two
peers that know the same have the same digests whatever the order in which they learned it. Dead
peers are in no digest: that one side holds a peer for dead shows by its absence.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from zlib import crc32

from flwr_moshpit.protocol.machine import PeerId, Record, View
from flwr_moshpit.protocol.membership_messages import (
    Claim,
    LifeName,
    Listing,
    RecordName,
    Stamp,
)

NUM_BUCKETS = 32

LISTED_MAX = 512
"""Names in one listing, roughly: it ends with the bucket that passes this."""


def outranks(rank: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether `rank` is the higher one; never for ranks that cannot be compared."""
    try:
        return bool(rank > other)
    except TypeError:
        return False


@dataclass(slots=True)
class Difference:
    """What came out of a listing: what to ask its sender for, and what to send it."""

    wanted_peers: list[PeerId] = field(default_factory=list)
    wanted_records: list[RecordName] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


class Roster:
    """The best claim about each peer, and the best record for each key."""

    def __init__(self, mine: Claim) -> None:
        self.claims: dict[PeerId, Claim] = {}
        self.living: list[PeerId] = []
        """Sorted, this peer included."""
        self.records: dict[tuple[str, ...], Record] = {}
        self._digests = [0] * NUM_BUCKETS
        self.put(mine)

    def put(self, claim: Claim) -> None:
        """`claim` replaces what was known of its peer."""
        peer = claim.info.peer
        old = self.claims.get(peer)
        self.claims[peer] = claim
        was_up = old is not None and old.is_up
        if was_up and claim.is_up and old is not None and old.stamp == claim.stamp:
            return
        if old is not None and was_up:
            self._toggle(peer, (peer, *old.stamp))
            if not claim.is_up:
                del self.living[bisect_left(self.living, peer)]
        if claim.is_up:
            self._toggle(peer, (peer, *claim.stamp))
            if not was_up:
                insort(self.living, peer)

    def forget(self, peer: PeerId) -> None:
        """Nothing is kept of a peer that is down."""
        assert not self.claims[peer].is_up
        del self.claims[peer]

    def put_record(self, record: Record) -> None:
        """`record` replaces what was there under its key."""
        old = self.records.get(record.key)
        if old is not None:
            self._toggle("\0".join(old.key), (old.key, _plain(old.rank)))
        self.records[record.key] = record
        self._toggle("\0".join(record.key), (record.key, _plain(record.rank)))

    def lacks(self, name: RecordName) -> bool:
        """Whether `name` is newer than the record that is here, if any."""
        here = self.records.get(name.key)
        return here is None or outranks(name.rank, here.rank)

    @property
    def view(self) -> View:
        return View({peer: self.claims[peer].info for peer in self.living})

    @property
    def digests(self) -> tuple[int, ...]:
        return tuple(self._digests)

    @property
    def digest(self) -> int:
        digest = 0
        for bucket in self._digests:
            digest ^= bucket
        return digest

    def listing(self, theirs: Sequence[int], first: int) -> Listing | None:
        """The names in the buckets whose digests differ from `theirs`, beginning with bucket
        `first`, so that those past the limit have their turn another time; None if none differ."""
        differing = [
            bucket
            for bucket in (*range(first, NUM_BUCKETS), *range(first))
            if self._digests[bucket] != theirs[bucket]
        ]
        if not differing:
            return None
        lives: dict[int, list[LifeName]] = {bucket: [] for bucket in differing}
        names: dict[int, list[RecordName]] = {bucket: [] for bucket in differing}
        for peer in self.living:
            bucket = _bucket(peer)
            if bucket in lives:
                lives[bucket].append(LifeName(peer, *self.claims[peer].stamp))
        for record in self.records.values():
            bucket = _bucket("\0".join(record.key))
            if bucket in names:
                names[bucket].append(RecordName(record.key, record.rank))
        taken: list[int] = []
        count = 0
        for bucket in differing:
            if count <= LISTED_MAX:
                taken.append(bucket)
                count += len(lives[bucket]) + len(names[bucket])
        return Listing(
            tuple(taken),
            tuple(life for bucket in taken for life in lives[bucket]),
            tuple(name for bucket in taken for name in names[bucket]),
        )

    def compare(self, listing: Listing) -> Difference:
        """What the sender of `listing` knows better, and what it does not know."""
        found = Difference()
        buckets = dict.fromkeys(listing.buckets)
        theirs = {life.peer: Stamp(life.incarnation, life.version) for life in listing.lives}
        for peer, stamp in theirs.items():
            mine = self.claims.get(peer)
            if mine is None or stamp > mine.stamp:
                found.wanted_peers.append(peer)
            elif not mine.is_up or mine.stamp > stamp:
                found.claims.append(mine)
        for peer in self.living:
            if peer not in theirs and _bucket(peer) in buckets:
                found.claims.append(self.claims[peer])
        ranks = {name.key: name.rank for name in listing.names}
        found.wanted_records += [name for name in listing.names if self.lacks(name)]
        for key, record in self.records.items():
            if key in ranks:
                if outranks(record.rank, ranks[key]):
                    found.records.append(record)
            elif _bucket("\0".join(key)) in buckets:
                found.records.append(record)
        return found

    def _toggle(self, name: str, entry: tuple[Any, ...]) -> None:
        hashed = blake2b(repr(entry).encode(), digest_size=8).digest()
        self._digests[_bucket(name)] ^= int.from_bytes(hashed, "little")


class Rumours:
    """What is fresh: told to so many peers that the chance of one hearing nothing is small.

    A rumour that everybody tells c times misses a fraction e^-c of the peers; the digests bring it
    to those.
    """

    def __init__(self) -> None:
        self._left: dict[Any, int] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, topic: PeerId | tuple[str, ...], num_peers: int) -> None:
        """`topic`, a peer or the key of a record, is to be told to 3 + 1.3 ln n others."""
        self._left.pop(topic, None)
        self._left[topic] = 3 + math.ceil(1.3 * math.log(num_peers + 1))

    def drop(self, topic: PeerId | tuple[str, ...]) -> None:
        self._left.pop(topic, None)

    def pick(self, count: int, copies: int = 1) -> list[Any]:
        """Up to `count` topics, those told least often first; each now counts as told to `copies`
        more."""
        left = self._left
        topics = list(left)
        if len(topics) > count:
            topics = sorted(topics, key=lambda topic: -left[topic])[:count]
        for topic in topics:
            left[topic] -= copies
            if left[topic] <= 0:
                del left[topic]
        return topics


def _bucket(name: str) -> int:
    return crc32(name.encode(errors="backslashreplace")) % NUM_BUCKETS


def _plain(rank: Any) -> Any:
    """Without the names of its tuples, which do not survive the wire."""
    if isinstance(rank, tuple):
        return tuple(_plain(item) for item in rank)
    return rank
