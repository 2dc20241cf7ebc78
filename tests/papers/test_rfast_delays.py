"""With one rule for the step size: where a slow peer sits, and how much is lost, matters little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.papers.rfast_problem import NUM_PEERS, least_squares, network
from tests.protocol.harness import LeastSquares

PROBLEM = least_squares()
OPTIMUM = PROBLEM.optimum(list(range(NUM_PEERS)))


def time_to_1e6(seeds: int = 3, problem: LeastSquares = PROBLEM, **changes: Any) -> float:
    """Mean over the seeds, in mean step times."""
    times = []
    for seed in range(seeds):
        net = network(problem, "binary", seed=seed, **changes)
        times.append(net.run_until(lambda net=net: net.error(OPTIMUM) < 1e-6, 8000, every=5))
    return float(np.mean(times))


def test_a_slow_inner_peer_costs_little_more_than_a_slow_leaf() -> None:
    """The slow one has the same data: it changes places with a fast one."""
    order = [0, 6, 2, 3, 4, 5, 1]
    swapped = LeastSquares(PROBLEM.a[order], PROBLEM.b[order])
    leaf = time_to_1e6(slow={6: 10.0}, seeds=5)
    inner = time_to_1e6(slow={1: 10.0}, seeds=5, problem=swapped)
    assert leaf < 1600
    assert inner <= 1.3 * leaf


def test_a_peer_a_hundred_times_slower_does_not_set_the_others_swinging() -> None:
    """Its loss is steeper than all the others' together in some direction: between two gradients of
    it the others must not run to the minimum that its old one makes."""
    a = PROBLEM.a.copy()
    a[6] *= 1.7
    problem = LeastSquares(a, np.einsum("krd,d->kr", a, np.ones(10)) + PROBLEM.b)
    others = problem.hessian(range(6))
    overshoot = np.linalg.eigvals(np.linalg.solve(others, problem.hessian([6]))).real.max()
    assert overshoot > 1.2, "times further away, at each of its gradients, if they did"
    net = network(problem, "binary", slow={6: 100.0}, seed=1)
    optimum = problem.optimum(range(NUM_PEERS))
    assert net.run_until(lambda: net.error(optimum) < 1e-2, 6_000, every=50) <= 6_000


@pytest.fixture(scope="module")
def whole() -> float:
    return time_to_1e6(loss=0.0)


@pytest.mark.parametrize(("loss", "factor", "lease_s"), [(0.5, 2.5, 20.0), (0.9, 8.0, 400.0)])
def test_loss_slows_down_by_a_bounded_factor(
    whole: float, loss: float, factor: float, lease_s: float
) -> None:
    """The lease is longer than the retransmissions of what must not be lost take."""
    lossy = time_to_1e6(loss=loss, config={"lease_s": lease_s}, seeds=2)
    assert lossy <= factor * whole
