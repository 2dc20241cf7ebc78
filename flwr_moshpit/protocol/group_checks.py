"""What a peer can say of a group, and what can be averaged: everything else is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flwr_moshpit.compression import CODECS
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.protocol.messages import GroupNamed, Member, Version

COUNTER_MAX = 1 << 20
"""No group has more versions than this."""


def objection(named: GroupNamed, dim: int) -> str | None:
    """Why a group cannot be as it was named, or None."""
    peers = [member.peer for member in named.members]
    if not peers or len({*peers}) < len(peers) or not {*peers} <= {*named.ranks}:
        return "impossible members"
    if not (
        0 <= named.version.rank < len(named.ranks) and 0 <= named.version.counter < COUNTER_MAX
    ):
        return "impossible version"
    weights = [member.weight for member in named.members]
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not math.isfinite(sum(weights)):
        return "bad weight"
    if any(member.num_cells < 1 for member in named.members):
        return "impossible members"
    ends = [0, *(share.end for share in named.shares)]
    begins = [*(share.begin for share in named.shares), dim]
    if named.shares and (ends != begins or any(s.end <= s.begin for s in named.shares)):
        return "the shares do not cover the vector"
    if named.dim != dim or any(share.reducer not in peers for share in named.shares):
        return "impossible shares"
    if named.shares and sum(weights) <= 0:
        return "bad weight"
    if named.part_elems < 1:
        return "impossible pieces"
    if named.compression not in CODECS:
        return "unknown compression"
    return None if 0.01 <= named.stall_s <= 1e6 else "impossible time"


def may_name(src: PeerId | None, ballot: Version, ranks: Sequence[PeerId]) -> bool:
    """Whether `ballot` can be, and is `src`'s own: nobody asks in another's name."""
    possible = 0 <= ballot.rank < len(ranks) and 0 <= ballot.counter < COUNTER_MAX
    return possible and src in (None, ranks[ballot.rank])


def descends(named: GroupNamed, known: GroupNamed, first: Mapping[PeerId, Member]) -> bool:
    """Whether `named` can be a version of the group `known`, which began with the members `first`:
    fewer members, everything else alike."""
    same = replace(named, version=known.version, members=known.members, shares=known.shares)
    return (
        same == known
        and objection(named, known.dim) is None
        and all(first.get(member.peer) == member for member in named.members)
    )


def unusable(data: object, size: int, dtype: np.dtype[Any], weight: float) -> str | None:
    """Why a piece of a vector cannot be used, or None. One pass over the data when it is fine.

    Parameters are bounded by the square root of what their type can hold, over the weight: beyond
    that weighted sums overflow, and no model means such values.
    """
    if not isinstance(data, np.ndarray) or data.shape != (size,) or data.dtype != dtype:
        return "wrong length or type"
    with np.errstate(over="ignore", invalid="ignore"):
        norm2 = float(np.dot(data, data)) * max(weight, 1.0)
    if math.isfinite(norm2) and norm2 < float(np.finfo(dtype).max):
        return None
    if np.isnan(data).any():
        return "NaN"
    return "Inf" if np.isinf(data).any() else "overflow"
