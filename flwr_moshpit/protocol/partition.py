"""Shares of the vector: how much of it each group member reduces, by bandwidth.

A member with share w of a vector of s bytes sends s (1 - w) as a sender and s (M - 1) w as a
reducer, so it is done after s (1 + (M - 2) w) / b seconds at b bytes per second. In a time of T it
can take w(T) = (T b - 1) / (M - 2). The least T for which the shares add up to 1 is what hivemind
finds as a linear program; here the sum, which grows with T, is simply bisected, with the cap below
taken into account.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr_moshpit.protocol.messages import Member, Share

PIECE_S = 0.05
"""On a slow line a piece leaves in no less than this."""
PIECE_BYTES_MIN = 1 << 16
PIECES_MAX = 8
"""More pieces of a share than this save no time, and each costs a message."""


def shares(
    dim: int,
    bandwidths: Sequence[float | None],
    can_reduce: Sequence[bool],
    share_min: int,
    turn: int = 0,
) -> list[int]:
    """Elements that each member reduces; they sum to `dim`.

    bandwidths: (M,) uplinks in any one unit, None where unknown: the mean of the known ones.
    can_reduce: (M,) whether others can reach the member; where none can, the first reduces all.
    share_min: a member that would get fewer elements gets none, unless nobody would get more.
    turn: which member is preferred among equals when there is not enough for all.

    No member gets more than min(1/2, 2/M), so that no single peer holds the group up when it dies;
    `share_min` wins over that.
    """
    fractions = _fractions(bandwidths, can_reduce)
    size = len(fractions)
    order = sorted(
        (index for index in range(size) if fractions[index] > 0),
        key=lambda index: (-fractions[index], (index - turn) % size),
    )
    kept = order
    while len(kept) > 1 and fractions[kept[-1]] * dim < share_min * sum(fractions[i] for i in kept):
        kept = kept[:-1]
    total = sum(fractions[index] for index in kept)
    exact = {index: dim * fractions[index] / total for index in kept}
    counts = [int(exact[index]) if index in exact else 0 for index in range(size)]
    by_remainder = sorted(kept, key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: dim - sum(counts)]:
        counts[index] += 1
    return counts


def piece_elems(share: int, uplinks: Sequence[float | None], itemsize: int, elems_max: int) -> int:
    """Elements of a piece of a share, where the largest has `share` elements.

    uplinks: (M,) in bytes per second, None where unknown.
    elems_max: the answer where nothing is known of any line.

    The averages of the first pieces travel while the last ones come in, so that a line carries
    something all the time: on slow ones that saves more than the messages cost.
    """
    known = [rate for rate in uplinks if rate]
    if not known:
        return elems_max
    leaves = max(PIECE_BYTES_MIN, int(PIECE_S * min(known))) // itemsize
    return min(elems_max, max(leaves, -(-share // PIECES_MAX)))


def reassigned(shares: Sequence[Share], members: Sequence[Member]) -> tuple[Share, ...]:
    """What is left of `shares` among `members`: those of others go to the members that reduce
    least, whole. Empty where no member has anything to average."""
    load = {member.peer: 0 for member in members}
    for share in shares:
        if share.reducer in load:
            load[share.reducer] += share.end - share.begin
    reducers = [peer for peer in load if load[peer] > 0] or list(load)
    taken_over = []
    for share in shares:
        reducer = share.reducer
        if reducer not in load:
            reducer = min(reducers, key=lambda peer: load[peer])
            load[reducer] += share.end - share.begin
        taken_over.append(Share(share.begin, share.end, reducer))
    return tuple(taken_over) if any(member.weight > 0 for member in members) else ()


def _fractions(bandwidths: Sequence[float | None], can_reduce: Sequence[bool]) -> list[float]:
    """(M,) shares that sum to 1, before the smallest are dropped."""
    size = len(bandwidths)
    active = [index for index in range(size) if can_reduce[index]] or [0]
    known = [float(rate) for rate in bandwidths if rate is not None and rate > 0]
    mean = sum(known) / len(known) if known else 1.0
    rates = {index: float(bandwidths[index] or mean) for index in active}
    cap = max(min(1 / 2, 2 / size), 1 / len(active))

    def taken(time: float) -> dict[int, float]:
        return {i: min(max(time * b - 1, 0.0) / (size - 2), cap) for i, b in rates.items()}

    wanted = dict.fromkeys(active, 1.0)
    if size > 2 and len({*rates.values()}) > 1:
        # Everybody has to send its own vector in any case, which may leave time to spare.
        low, high = 1 / min(rates.values()), (size - 1) / min(rates.values())
        if sum(taken(low).values()) < 1:
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (low, middle) if sum(taken(middle).values()) >= 1 else (middle, high)
            low = high
        wanted = taken(low)
    total = sum(wanted.values())
    return [wanted.get(index, 0.0) / total for index in range(size)]
