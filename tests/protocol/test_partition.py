"""Shares by bandwidth: the closed form against the linear program that it solves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.protocol.partition import piece_elems, shares

ALL = [True] * 64


def slowest_s(fractions, bandwidths):
    """Seconds until the slowest member is done, for a vector of one unit."""
    size = len(bandwidths)
    return max((1 + (size - 2) * w) / b for w, b in zip(fractions, bandwidths, strict=True))


@pytest.mark.parametrize(
    ("bandwidths", "fractions"),
    [
        ([100, 100, 100, 10], [1 / 3, 1 / 3, 1 / 3, 0]),
        ([10, 20, 30, 40, 50, 60, 70, 80], [0, 0.036, 0.071, 0.107, 0.143, 0.179, 0.214, 0.25]),
        ([1000, 100, 100, 100], [0.5, 1 / 6, 1 / 6, 1 / 6]),
        ([7, 7], [0.5, 0.5]),
        ([None, None, None, None], [0.25] * 4),
    ],
)
def test_known_shares(bandwidths, fractions):
    # Where the optimum is not unique (the slowest sender rules), any of its solutions will do.
    found = np.array(shares(100_000, bandwidths, ALL[: len(bandwidths)], 0)) / 100_000
    known = [b or 1.0 for b in bandwidths]
    assert slowest_s(found, known) <= slowest_s(fractions, known) * (1 + 1e-3)
    assert found.max() <= max(0.5, 2 / len(bandwidths)) + 1e-4


@given(
    bandwidths=st.lists(st.floats(1, 1000), min_size=3, max_size=12),
    dim=st.integers(1, 10_000),
)
@settings(deadline=None)
def test_no_other_share_is_faster(bandwidths, dim):
    scipy_optimize = pytest.importorskip("scipy.optimize")
    size = len(bandwidths)
    counts = shares(dim, bandwidths, ALL[:size], 0)
    assert sum(counts) == dim
    assert min(counts) >= 0
    cap = min(0.5, 2 / size)
    b = np.array(bandwidths)
    # Variables (w_1 .. w_M, T): minimise T subject to (1 + (M-2) w_i) / b_i <= T, w <= cap.
    constraint = np.hstack([np.diag((size - 2) / b), -np.ones((size, 1))])
    best = scipy_optimize.linprog(
        [0] * size + [1],
        A_ub=constraint,
        b_ub=-1 / b,
        A_eq=[[1] * size + [0]],
        b_eq=[1],
        bounds=[(0, cap)] * size + [(0, None)],
    )
    fractions = np.array(shares(10**9, bandwidths, ALL[:size], 0)) / 1e9
    assert slowest_s(fractions, bandwidths) <= best.fun * (1 + 1e-6)
    assert fractions.max() <= cap + 1e-8


def test_small_vectors_are_not_split():
    for turn in range(10):
        counts = shares(1000, [None] * 10, ALL[:10], 4096, turn)
        assert counts[turn] == 1000
    assert sorted(shares(10_000, [None] * 10, ALL[:10], 4096, 0))[-2:] == [5000, 5000]


def test_who_cannot_be_reached_reduces_nothing():
    assert shares(9, [100, 1, 1], [False, True, True], 0) == [0, 5, 4]
    assert shares(9, [1, 1, 1], [False] * 3, 0) == [9, 0, 0]


@pytest.mark.parametrize(
    ("share_bytes", "uplinks", "piece_bytes"),
    [
        (300_000, [None, None], 1 << 20),
        (300_000, [1e9, None], 1 << 20),
        (300_000, [625e3, 1e9], 1 << 16),
        (300_000, [2.5e6, None], 125_000),
        (10_000_000, [625e3, 625e3], 1 << 20),
        (4_000_000, [625e3, 625e3], 500_000),
    ],
)
def test_pieces_are_small_where_a_line_is_slow(share_bytes, uplinks, piece_bytes):
    assert piece_elems(share_bytes // 4, uplinks, 4, 1 << 18) == piece_bytes // 4
