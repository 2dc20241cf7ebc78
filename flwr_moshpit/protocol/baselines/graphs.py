"""Who talks to whom: functions of the living peers in order, so that equal views agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from flwr_moshpit.protocol.machine import PeerId


def neighbours(topology: str, peers: Sequence[PeerId], me: PeerId) -> list[PeerId]:
    """`me`'s neighbours in the undirected graph over `peers`, in their order.

    topology: "ring", "exponential" (2^k places away, to either side) or "complete".
    """
    size = len(peers)
    place = peers.index(me)
    if topology == "complete":
        return [peer for peer in peers if peer != me]
    hops = [1]
    while topology == "exponential" and 2 * hops[-1] <= size // 2:
        hops.append(2 * hops[-1])
    places = {(place + sign * hop) % size for hop in hops for sign in (-1, 1)} - {place}
    return [peers[k] for k in sorted(places)]


def num_hops(size: int) -> int:
    """Rounds after which the one-peer exponential graph repeats: ceil(log2(size))."""
    return (size - 1).bit_length()


def pushes_to(peers: Sequence[PeerId], me: PeerId, round_: int) -> PeerId | None:
    """The peer 2^(round mod ceil(log2 N)) places further; None if there is only `me`."""
    return _hop(peers, me, round_, 1)


def pushed_by(peers: Sequence[PeerId], me: PeerId, round_: int) -> PeerId | None:
    """The peer whose `pushes_to` is `me`."""
    return _hop(peers, me, round_, -1)


def _hop(peers: Sequence[PeerId], me: PeerId, round_: int, sign: int) -> PeerId | None:
    size = len(peers)
    if size < 2:
        return None
    hop: int = 1 << (round_ % num_hops(size))
    return peers[(peers.index(me) + sign * hop) % size]


def random_group(
    peers: Sequence[PeerId], me: PeerId, round_: int, group_size: int
) -> tuple[PeerId, ...]:
    """`me`'s group when `peers` are shuffled, by a hash of the round, and dealt out evenly.

    There are ceil(N / group_size) groups, whose sizes differ by at most one.
    """
    return _random_groups(tuple(peers), round_, group_size)[me]


# Every peer of a simulated swarm asks for the same few shuffles.
@lru_cache(maxsize=16)
def _random_groups(
    peers: tuple[PeerId, ...], round_: int, group_size: int
) -> dict[PeerId, tuple[PeerId, ...]]:
    def draw(peer: PeerId) -> bytes:
        return blake2b(f"{round_}/{peer}".encode(), digest_size=16).digest()

    shuffled = sorted(peers, key=draw)
    num_groups = -(-len(shuffled) // group_size)
    groups = [tuple(shuffled[k::num_groups]) for k in range(num_groups)]
    return {peer: group for group in groups for peer in group}
