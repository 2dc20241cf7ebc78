"""R-FAST converges to the exact optimum through loss, delays and stragglers (arXiv 2307.11617).

Seven peers, one class a peer, deterministic gradients, 30 % of the messages lost, delays drawn from
Exp(0.3) in mean step times, one peer ten times slower.
"""

from __future__ import annotations

import pytest

from simulations import rfast_exactness as experiment
from tests.papers.rfast_problem import (
    NUM_PEERS,
    NaivePeer,
    least_squares,
    network,
    one_class_a_peer,
)
from tests.protocol.harness import LeastSquares, Logistic

PEERS = list(range(NUM_PEERS))
PROBLEMS = {"one class a peer": one_class_a_peer(), "least squares": least_squares()}
LEAF = {6: 10.0}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_a_tree_is_exact_to_1e9_within_1600_steps(problem: Logistic | LeastSquares) -> None:
    net = network(problem, "binary", slow=LEAF, seed=1)
    optimum = problem.optimum(PEERS)
    assert net.run_until(lambda: net.error(optimum) < 1e-9, 1600, every=20) <= 1600


def test_the_experiment_finds_the_same_on_the_engine() -> None:
    outcome = experiment.run("binary", 0.3, 10, seed=0)
    assert outcome.within is not None
    assert outcome.within <= 1600
    assert outcome.books < 1e-9


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_without_running_sums_lost_mass_is_lost_for_ever(loss: float) -> None:
    problem = one_class_a_peer()
    net = network(problem, "binary", slow=LEAF, seed=1, loss=loss, make=NaivePeer)
    net.run(1600)
    error = net.error(problem.optimum(PEERS))
    if loss == 0:
        assert error < 1e-6, "the method itself is sound"
    else:
        assert error > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("topology", ["complete", "ring", "exponential"])
@pytest.mark.parametrize("slow", [0, 6])
def test_graphs_are_exact_to_1e6_within_12000_steps(
    problem: Logistic | LeastSquares, topology: str, slow: int
) -> None:
    net = network(problem, topology, slow={slow: 10.0}, seed=1)
    optimum = problem.optimum(PEERS)
    assert net.run_until(lambda: net.error(optimum) < 1e-6, 12000, every=100) <= 12000


def test_a_complete_graph_gets_there_too() -> None:
    problem = least_squares()
    net = network(problem, "complete", slow=LEAF, seed=1)
    optimum = problem.optimum(PEERS)
    assert net.run_until(lambda: net.error(optimum) < 3e-2, 600, every=20) <= 600
