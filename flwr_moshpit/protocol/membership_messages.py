"""What the membership of two peers says to each other; see `membership.py`.

All of it are datagrams: nothing here is needed to arrive, because everything is said again until
the digests of both sides agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from flwr_moshpit.protocol.machine import Delivery, Message, PeerId, PeerInfo, Record

ALIVE, SUSPECT, DEAD, LEFT = "alive", "suspect", "dead", "left"

RANKS = {ALIVE: 0, SUSPECT: 1, DEAD: 2, LEFT: 3}
"""Of two claims about one stamp of one peer the one with the higher rank wins."""


class Stamp(NamedTuple):
    """How new a claim is, of those about one peer. Only the peer itself makes a new one."""

    incarnation: int
    """Grows when the peer restarts."""
    version: int
    """Grows, within one incarnation, whenever the peer has something to say about itself: that it
    lives though others doubt it, or that its address or its `PeerInfo` has changed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What somebody says about one peer."""

    info: PeerInfo
    address: str
    """Where it can be dialled, "host:port"."""
    version: int
    birth: int
    """Drawn by the peer when it starts: tells two lives of it apart that do not know of each other
    and so have one stamp."""
    status: str
    """One of `RANKS`."""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.info.incarnation, self.version)

    @property
    def order(self) -> tuple[int, int, int]:
        """Of two claims about one peer the higher order wins."""
        return (self.info.incarnation, self.version, RANKS[self.status])

    @property
    def is_up(self) -> bool:
        """A suspected peer counts as living until the suspicion has run out."""
        return self.status in (ALIVE, SUSPECT)


class RecordName(NamedTuple):
    """Names one version of a record; its value is sent to those who ask."""

    key: tuple[str, ...]
    rank: tuple[Any, ...]


class LifeName(NamedTuple):
    """A living peer, without what is known of it."""

    peer: PeerId
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class News:
    """Rides on every ping and ack, and travels alone as `Gossip` while it is fresh."""

    claims: tuple[Claim, ...] = ()
    """The sender's claim about itself comes first, then what it believes of the receiver unless
    that is plain life."""
    names: tuple[RecordName, ...] = ()
    digest: int = 0
    """64 bits over all living peers' stamps and all records' ranks that the sender knows: peers
    with one digest have nothing to tell each other."""


class MembershipMessage(Message):
    """Base of these messages: a driver hands them to the membership, all others to the protocol."""

    __slots__ = ()
    delivery: ClassVar[Delivery] = Delivery.DATAGRAM


@dataclass(frozen=True, slots=True)
class Ping(MembershipMessage):
    """Are you there? Answered by `Ack`."""

    news: News
    behalf: PeerId | None = None
    """Who asked the sender to ask; comes back in the answer."""


@dataclass(frozen=True, slots=True)
class Ack(MembershipMessage):
    news: News
    behalf: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PingFor(MembershipMessage):
    """Ping `target` for me: it does not answer me."""

    target: PeerId
    news: News


@dataclass(frozen=True, slots=True)
class Vouch(MembershipMessage):
    """`target` has answered the ping that you asked for."""

    target: PeerId


@dataclass(frozen=True, slots=True)
class Gossip(MembershipMessage):
    news: News


@dataclass(frozen=True, slots=True)
class Summary(MembershipMessage):
    """Our digests differ: these are mine, by bucket. Answered by a `Listing` of those that differ
    from the receiver's."""

    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Listing(MembershipMessage):
    """All living peers and all records in some buckets, by name."""

    buckets: tuple[int, ...]
    lives: tuple[LifeName, ...]
    names: tuple[RecordName, ...]


@dataclass(frozen=True, slots=True)
class Want(MembershipMessage):
    """Send me what you know of these."""

    peers: tuple[PeerId, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Update(MembershipMessage):
    """What the receiver asked for, or what the sender found it to lack."""

    claims: tuple[Claim, ...] = ()
    records: tuple[Record, ...] = ()
