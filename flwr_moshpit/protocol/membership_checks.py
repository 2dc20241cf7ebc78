"""What a peer can say to the membership of another: everything else is dropped and counted."""

from __future__ import annotations

import math
from typing import Any

from flwr_moshpit.protocol.machine import PeerInfo, Record
from flwr_moshpit.protocol.membership_messages import (
    RANKS,
    Ack,
    Claim,
    Gossip,
    LifeName,
    Listing,
    MembershipMessage,
    News,
    Ping,
    PingFor,
    RecordName,
    Summary,
    Update,
    Vouch,
    Want,
)
from flwr_moshpit.protocol.roster import NUM_BUCKETS

TEXT_MAX = 256
NUMBER_MAX = 1 << 53
ITEMS_MAX = 8192
"""In one message: a listing of 1,000 peers and a few records for each has this many."""
KEY_MAX = 8
RANK_MAX = 16
DIGEST_MAX = 1 << 64


def flaw(message: MembershipMessage) -> str | None:
    """Why `message` cannot be, or None if it can."""
    match message:
        case Ping() | Ack():
            behalf = message.behalf
            return _flaw_of_news(message.news) or (
                None if behalf is None or _is_name(behalf) else "behalf"
            )
        case PingFor():
            return _flaw_of_news(message.news) or (None if _is_name(message.target) else "target")
        case Gossip():
            return _flaw_of_news(message.news)
        case Vouch():
            return None if _is_name(message.target) else "target"
        case Summary():
            digests = message.digests
            good = isinstance(digests, tuple) and len(digests) == NUM_BUCKETS
            return None if good and all(map(_is_digest, digests)) else "digests"
        case Listing():
            return _flaw_of_listing(message)
        case Want():
            good = _all(message.peers, _is_name) and _all(message.keys, is_key)
            return None if good else "names"
        case Update():
            if not _all(message.claims, _is_claim):
                return "claim"
            return None if _all(message.records, is_record) else "record"
    return "unknown message"


def is_key(key: Any) -> bool:
    return isinstance(key, tuple) and 0 < len(key) <= KEY_MAX and all(map(_is_name, key))


def is_record(record: Any) -> bool:
    """The value is for the protocol to judge."""
    return isinstance(record, Record) and is_key(record.key) and _is_rank(record.rank)


def _flaw_of_news(news: Any) -> str | None:
    if not isinstance(news, News) or not _is_digest(news.digest):
        return "news"
    if not _all(news.claims, _is_claim):
        return "claim"
    return None if _all(news.names, _is_record_name) else "record"


def _flaw_of_listing(message: Listing) -> str | None:
    buckets = message.buckets
    if not isinstance(buckets, tuple) or len(buckets) > NUM_BUCKETS:
        return "buckets"
    if not all(type(bucket) is int and 0 <= bucket < NUM_BUCKETS for bucket in buckets):
        return "buckets"
    good = _all(message.lives, _is_life) and _all(message.names, _is_record_name)
    return None if good else "names"


def _all(items: Any, is_good: Any) -> bool:
    return isinstance(items, tuple) and len(items) <= ITEMS_MAX and all(map(is_good, items))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= TEXT_MAX


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < NUMBER_MAX


def _is_digest(value: Any) -> bool:
    return type(value) is int and 0 <= value < DIGEST_MAX


def _is_life(life: Any) -> bool:
    return (
        isinstance(life, LifeName)
        and _is_name(life.peer)
        and _is_number(life.incarnation)
        and _is_number(life.version)
    )


def _is_rank(rank: Any, depth: int = 2) -> bool:
    """Tuples of numbers and texts, nested once at most."""
    if not isinstance(rank, tuple) or len(rank) > RANK_MAX or depth == 0:
        return False
    for item in rank:
        if isinstance(item, str):
            if len(item) > TEXT_MAX:
                return False
        elif isinstance(item, float):
            if math.isnan(item):
                return False
        elif not isinstance(item, bool | int) and not _is_rank(item, depth - 1):
            return False
    return True


def _is_record_name(name: Any) -> bool:
    return isinstance(name, RecordName) and is_key(name.key) and _is_rank(name.rank)


def _is_claim(claim: Any) -> bool:
    if not isinstance(claim, Claim) or not isinstance(claim.info, PeerInfo):
        return False
    info = claim.info
    return (
        _is_name(info.peer)
        and _is_number(info.incarnation)
        and _is_rate(info.speed)
        and (info.uplink_bytes_per_s is None or _is_rate(info.uplink_bytes_per_s))
        and (info.downlink_bytes_per_s is None or _is_rate(info.downlink_bytes_per_s))
        and isinstance(info.dialable, bool)
        and isinstance(claim.address, str)
        and len(claim.address) <= TEXT_MAX
        and _is_number(claim.version)
        and _is_digest(claim.birth)
        and isinstance(claim.status, str)
        and claim.status in RANKS
    )


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf
