"""float32 does not drift: neither in the ledger form on a tree, nor compensated on a ring."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.rfast_problem import NUM_PEERS, least_squares, network

PROBLEM = least_squares()
OPTIMUM = PROBLEM.optimum(list(range(NUM_PEERS)))


def ledger_error(net: object) -> float:
    """How far z is from the formula, at the worst peer."""
    worst = 0.0
    for host in net.living():  # type: ignore[attr-defined]
        ledger = host.machine.ledger
        z = ledger.gradient.astype(float)
        z += sum(held.buf.astype(float) for held in ledger.ins.values() if held.buf is not None)
        z -= sum(out.rho.astype(float) for out in ledger.outs.values() if out.rho is not None)
        worst = max(worst, float(np.abs(host.machine.tracked - z).max()))
    return worst


def run(topology: str, steps: int) -> tuple[float, float, float]:
    """(ledger error at a tenth, at the end, relative distance from the optimum)."""
    net = network(PROBLEM, topology, dtype="float32", seed=1)

    def run_to(number: int) -> None:
        limit = 2 * number / NUM_PEERS
        assert net.run_until(lambda: net.counts["steps"] >= number, limit, every=10) <= limit

    run_to(steps // 10)
    early = ledger_error(net)
    run_to(steps)
    return early, ledger_error(net), net.error(OPTIMUM)


@pytest.mark.parametrize(("topology", "steps"), [("binary", 8000)])
def test_float32_stays_at_the_optimum(topology: str, steps: int) -> None:
    early, late, error = run(topology, steps)
    assert error < 1e-4
    assert late <= 2 * early + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["binary", "ring"])
def test_float32_stays_at_the_optimum_for_200_000_steps(topology: str) -> None:
    early, late, error = run(topology, 200_000)
    assert error < 1e-4
    assert late <= 2 * early + 1e-5
