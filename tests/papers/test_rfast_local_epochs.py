"""Local epochs: exact in the corrected form, biased as a plain pseudo-gradient.

The plain form tracks (x - y_K) / (K lr), y_K being K local steps from x: it converges as well, but
to the point where these are balanced, FedAvg's, which is not the optimum when peers differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import CorrectedSteps, GradientResult
from tests.papers.rfast_problem import NUM_PEERS, least_squares, network
from tests.protocol.harness import Host, Net

K = 5
PROBLEM = least_squares()
OPTIMUM = PROBLEM.optimum(list(range(NUM_PEERS)))


class PlainNet(Net):
    """Trainers that do not know of the correction."""

    def result(self, host: Host, job: Any) -> Any:
        assert isinstance(job, CorrectedSteps)
        y = job.params
        for _ in range(job.num_steps):
            y = y - job.learning_rate * self.problem.gradient(host.number, y)
        return GradientResult((job.params - y) / (job.num_steps * job.learning_rate), 1)


def net_of(kind: type[Net]) -> Net:
    settings = {"local_steps": K, "learning_rate": 0.3 * PROBLEM.learning_rate()}
    net = network(PROBLEM, "binary", seed=2, config=settings, slow={6: 10.0})
    return kind(PROBLEM, NUM_PEERS, net.config, seed=2, loss=0.3, slow={6: 10.0}, books=False)


def test_corrected_epochs_reach_the_optimum_and_plain_ones_do_not() -> None:
    corrected = net_of(Net)
    assert corrected.run_until(lambda: corrected.error(OPTIMUM) < 1e-6, 3000, every=20) < np.inf
    plain = net_of(PlainNet)
    plain.run(1500)
    first = plain.hosts[plain.ids()[0]].machine.params
    plain.run(1600)
    second = plain.hosts[plain.ids()[0]].machine.params
    assert np.linalg.norm(second - first) < 1e-6, "it has converged"
    assert plain.error(OPTIMUM) > 1e-2, "but not to the optimum"
