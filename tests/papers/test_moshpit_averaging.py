"""The averaging experiment: its references against theory, the package's row against its claim."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from simulations import moshpit_averaging as experiment


def after(method: object, size: int, p: float, count: int, seed: int = 0) -> list[np.ndarray]:
    """The values after each of `count` iterations from N(0, 1)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size)
    return [v.copy() for v in islice(method(x, p, rng), count)]  # type: ignore[operator]


@pytest.mark.parametrize("method", ["gossip", "random_groups", "all_reduce"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_references_keep_the_mean(method: str, p: float) -> None:
    first, *_, last = after(getattr(experiment, method), 100, p, 20)
    assert last.mean() == pytest.approx(first.mean(), abs=1e-12)


def test_random_groups_shrink_the_spread_as_theory_says() -> None:
    # (r - 1) / (N - 1) for r groups of N peers, in expectation.
    factors = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(1024)
        before = x.var()
        factors.append(next(experiment.random_groups(x, 0.0, rng)).var() / before)
    assert np.mean(factors) == pytest.approx(31 / 1023, rel=0.05)


def test_push_sum_is_exact_after_a_cycle_of_a_power_of_two() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(64)
    *_, last = islice(experiment.push_sum(x, 0.0, rng), 6)
    np.testing.assert_allclose(last, x.mean(), atol=1e-14)


def test_an_all_reduce_needs_everybody() -> None:
    tries = [
        experiment.iterations(experiment.all_reduce, 512, 0.001, seed)[0] for seed in range(300)
    ]
    # Geometric with (1 - p)^N: 1.67 tries, give or take five standard deviations of the mean.
    assert np.mean(tries) == pytest.approx(0.999**-512, abs=0.3)


def test_moshpit_is_exact_after_two_iterations() -> None:
    assert experiment.iterations(experiment.moshpit, 512, 0.0, seed=1) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("size", [512, 768, 900, 1024])
def test_moshpit_under_failures(size: int) -> None:
    needed = [experiment.iterations(experiment.moshpit, size, 0.01, seed)[0] for seed in range(3)]
    assert np.mean(needed) <= 6.5
