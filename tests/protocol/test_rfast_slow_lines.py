"""R-FAST where the line, not the training, is the bound: it goes in step with what the line
carries, whatever `lease_s` says."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.bench.trainers import DriftTrainer
from flwr_moshpit.config import RFast
from flwr_moshpit.protocol.machine import (
    Compute,
    GradientResult,
    LineBusy,
    LineFree,
    LinkLost,
    Message,
    PeerId,
    Start,
    TimerFired,
    Vector,
)
from flwr_moshpit.protocol.messages import Grant, Label, Model, Push
from flwr_moshpit.simulation.network import Network, Verdict
from flwr_moshpit.testing import Swarm
from tests.protocol.test_rfast import Hand, attached_child, finish_job, model

PEERS, DIM = 5, 1_000
MODEL_S = 4.0
"""How long the root's four models take to leave."""
BYTES_PER_S = 4 * 8 * DIM / MODEL_S
UNTIL_S = 300.0


class Parabolas(DriftTrainer):
    """f_i(x) = |x - i|^2 / 2 for client i."""

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        return GradientResult(params - client, self.examples(client, 1))


class Outcome(NamedTuple):
    steps: int
    """The root's."""
    error: float
    """Of the worst peer, relative."""
    sent: int
    arrived: int
    lapsed: int


def run(lease_s: float, topology: str = "star", latency_s: float = 0.01) -> Outcome:
    net = Swarm(
        Parabolas(DIM),
        peers=PEERS,
        algorithm=RFast(topology=topology, learning_rate=0.5, lease_s=lease_s),
        network=Network.uniform(latency_s=latency_s, uplink_bytes_per_s=BYTES_PER_S),
        dtype="float64",
    )
    sent = 0

    def count(now: float, src: PeerId, dst: PeerId, message: Message) -> Verdict | None:
        nonlocal sent
        sent += isinstance(message, Push | Model)
        return None

    net.engine.interceptors.append(count)
    lapsed = 0

    def observe(now: float, peer: PeerId | None, report: Any) -> None:
        nonlocal lapsed
        lapsed += report.name == "lapsed"

    net.engine.observe.append(observe)
    net.begin()
    net.advance(UNTIL_S)
    optimum = (PEERS - 1) / 2
    error = max(float(np.abs(net.vector(peer) / optimum - 1).max()) for peer in net.alive)
    machines = [machine._machine for machine in net.engine.machines.values()]
    arrived = sum(
        held.counter + 1 for machine in machines for held in machine.ledger.ins.values()
    ) + sum(out.model_counter + 1 for machine in machines for out in machine.ledger.outs.values())
    steps = max(machine._core.step for machine in machines)
    return Outcome(steps, error, sent, arrived, lapsed)


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return run(3.0)


def test_the_root_steps_as_often_as_its_models_leave(usual: Outcome) -> None:
    # Before each model it takes a gradient, so that the model is of what has come by then.
    assert 0.9 * UNTIL_S / MODEL_S <= usual.steps <= UNTIL_S / MODEL_S
    assert usual.error < 1e-6


@settings(max_examples=6, deadline=None)
@given(st.floats(0.3, 60.0))
def test_pace_and_result_do_not_depend_on_the_lease(usual: Outcome, lease_s: float) -> None:
    """A message takes longer than most of these leases, and no edge is lost by it."""
    outcome = run(lease_s)
    assert outcome.lapsed == 0
    assert outcome.steps == pytest.approx(usual.steps, rel=0.05)
    assert outcome.error < 1e-6


@pytest.mark.parametrize("topology", ["star", "binary"])
@pytest.mark.parametrize("latency_s", [0.01, 0.3])
def test_nothing_is_replaced_and_nothing_sent_again(topology: str, latency_s: float) -> None:
    outcome = run(3.0, topology, latency_s)
    # What is under way at the end has not arrived.
    assert outcome.arrived <= outcome.sent <= outcome.arrived + 4 * (PEERS - 1)


def test_what_is_new_waits_for_the_line_and_then_goes_once() -> None:
    hand = attached_child()
    hand.hear(0, model(hand), later=1.0)
    hand.do(LineBusy(hand.ids[0]))
    hand.do(LineBusy(hand.ids[3]))
    edge = hand.machine.ledger.ins[hand.ids[3]].edge
    for counter in range(10):
        hand.push(3, edge, counter, float(counter))
        assert hand.sent(Push) == []
        hand.hear(0, model(hand, 1 + counter), later=1.0)
        assert hand.sent(Model) == []
    hand.do(LineFree(hand.ids[0]))
    ((parent, push),) = hand.sent(Push)
    assert parent == hand.ids[0]
    np.testing.assert_array_equal(push.rho, np.full(4, 9.0))
    assert push.counter == hand.machine.ledger.outs[parent].counter
    hand.do(LineFree(hand.ids[3]))
    ((child, passed_on),) = hand.sent(Model)
    assert child == hand.ids[3]
    np.testing.assert_array_equal(passed_on.v, np.full(4, 11.0))


def test_a_link_that_is_lost_is_free() -> None:
    hand = attached_child()
    hand.do(LineBusy(hand.ids[0]))
    hand.push(3, hand.machine.ledger.ins[hand.ids[3]].edge, 0, 1.0)
    assert hand.sent(Push) == []
    hand.do(LinkLost(hand.ids[0]))
    assert len(hand.sent(Push)) == 1


def test_what_may_still_be_on_its_way_is_not_sent_again() -> None:
    """It took 6 s to leave, so it may take 6 s more to arrive."""
    hand = attached_child(lease_s=60.0)
    out = hand.machine.ledger.outs[hand.ids[0]]
    hand.push(3, hand.machine.ledger.ins[hand.ids[3]].edge, 0, 1.0)
    assert len(hand.sent(Push)) == 1
    hand.do(LineBusy(hand.ids[0]))

    def hear_that_it_lacks(later: float) -> int:
        label = Label(0, hand.ids[0], 1)
        hand.hear(0, Grant(out.edge, 0, hand.now, label, (), -1, False), later=later)
        return len(hand.sent(Push))

    assert hear_that_it_lacks(later=3.0) == 0
    hand.do(LineFree(hand.ids[0]), later=3.0)
    assert hear_that_it_lacks(later=5.0) == 0
    assert hear_that_it_lacks(later=2.0) == 1


def test_a_leaf_trains_once_at_a_model_while_its_line_is_busy() -> None:
    hand = attached_child(lease_s=60.0)
    (job,) = [e for e in hand.hear(0, model(hand), later=0.1) if isinstance(e, Compute)]
    assert finish_job(hand, job, took_s=0.01) == []
    hand.do(LineBusy(hand.ids[0]))
    assert [e for e in hand.do(LineFree(hand.ids[0]), later=8.0) if isinstance(e, Compute)] == []
    assert hand.machine._jobs.due == pytest.approx(0.1 + 2 * 8.0), "twice what a message takes"


def test_a_root_does_not_step_while_most_of_its_lines_are_busy() -> None:
    hand = Hand(0)
    (job,) = [e for e in hand.do(Start()) if isinstance(e, Compute)]
    for child in (1, 2, 3):
        hand.attach(child)
    hand.do(LineBusy(hand.ids[1]))
    hand.do(LineBusy(hand.ids[2]))
    assert finish_job(hand, job, took_s=1.0) == []
    assert not [e for e in hand.do(TimerFired(), later=1.0) if isinstance(e, Compute)]
    assert [e for e in hand.do(LineFree(hand.ids[1])) if isinstance(e, Compute)]
