"""The pytest plugin, as a project that uses it sees it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.testing import Swarm
from tests.trainers import QuadraticTrainer

ROOT = Path(__file__).resolve().parents[1]

PROJECT = """
import pytest
from flwr_moshpit import Moshpit, RFast
from tests.trainers import QuadraticTrainer

trainer = QuadraticTrainer()

def test_training_survives_a_dead_leader(swarm):
    net = swarm(QuadraticTrainer(), peers=9, algorithm=Moshpit(group_size=3), seed=4)
    killed = net.kill(net.leader(round=2), during="allreduce")
    history = net.run(rounds=6)
    assert killed.fired_at is not None
    assert all(record.coverage == 1.0 for record in history.rounds)
    net.average()
    assert net.consensus_distance() < 1e-6

def test_tracked_mass_is_conserved(swarm):
    net = swarm(trainer, peers=7, algorithm=RFast(), dtype="float64", seed=1)
    for _ in range(500):
        net.step(); net.drop(probability=0.3)
        assert net.tracked_mass() == pytest.approx(net.gradient_sum(), abs=1e-9)

def test_that_fails(swarm):
    net = swarm(QuadraticTrainer(), peers=3, algorithm=Moshpit(), seed=17)
    assert net.seed == 23
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_project.py").write_text(PROJECT, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


def test_a_project_uses_the_fixture_and_a_failure_names_its_seed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "--moshpit-seed 17" in done.stdout


def test_the_seed_can_be_given(tmp_path: Path) -> None:
    done = run(tmp_path, "--moshpit-seed", "23", "-k", "fails")
    assert "1 passed" in done.stdout, done.stdout


def test_peers_are_named_by_index_or_id() -> None:
    net = Swarm(QuadraticTrainer(), peers=3, algorithm=Moshpit())
    assert net.peer(1) == net.peer("peer-1") == "peer-1"
    with pytest.raises(ConfigError, match="no peer"):
        net.peer("nobody")
    with pytest.raises(ConfigError, match="not a stage"):
        net.kill(1, during="lunch")


def test_drops_delays_duplicates_and_orders_are_counted() -> None:
    net = Swarm(QuadraticTrainer(), peers=4, algorithm=Moshpit(), seed=1)
    rules = [
        net.drop(0.1, limit=2),
        net.delay(0.2, 0.5),
        net.duplicate(0.5, kind="Part"),
        net.reorder(0.1, kind="Average"),
    ]
    net.run(rounds=4, sweep=True)
    assert all(rule.hits for rule in rules)
    assert net.consensus_distance() < 1e-9


def rfast_swarm(**settings: Any) -> Swarm:
    settings = {"peers": 7, "algorithm": RFast(topology="binary"), "seed": 3} | settings
    return Swarm(QuadraticTrainer(), **settings)


def conserved(net: Swarm, steps: int) -> None:
    for _ in range(steps):
        net.step()
        np.testing.assert_allclose(net.tracked_mass(), net.gradient_sum(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("topology", ["binary", "exponential"])
def test_tracked_mass_is_conserved_through_every_fault_of_the_fixture(topology: str) -> None:
    net = rfast_swarm(algorithm=RFast(topology=topology, weigh_examples=True))
    lost = net.drop(probability=0.3)
    net.duplicate(0.2)
    net.reorder(2.0, 0.3)
    conserved(net, 600)
    assert np.abs(net.gradient_sum()).max() > 1, "there is something to conserve"
    net.kill(0)
    net.kill(4)
    conserved(net, 400)
    net.restart(0)
    net.partition([1, 2], [0, 3, 5, 6])
    conserved(net, 600)
    net.heal()
    conserved(net, 400)
    assert lost.hits > 100


def test_mass_is_under_way_between_a_push_and_its_arrival() -> None:
    """Else the books would be the machines' own formula, which holds whatever they do."""
    net = rfast_swarm()
    net.drop(kind="Push")
    conserved(net, 300)
    machines = [net.machine(peer) for peer in net.alive]
    held = sum(machine.tracked for machine in machines)
    assert np.abs(held - net.gradient_sum()).max() > 0.1
    assert not any(edge.buf is not None for m in machines for edge in m.ledger.ins.values())


def test_books_see_a_ledger_that_takes_in_what_nobody_pushed() -> None:
    net = rfast_swarm()
    conserved(net, 300)
    held = next(iter(net.machine(0).ledger.ins.values()))
    held.buf = held.buf + 1.0
    with pytest.raises(AssertionError):
        conserved(net, 1)


def test_all_the_mass_is_at_the_root_in_the_end() -> None:
    net = rfast_swarm()
    net.run(rounds=20)
    net.advance(60)
    (root,) = [peer for peer in net.alive if net.machine(peer).is_root]
    np.testing.assert_allclose(net.machine(root).tracked, net.gradient_sum(), rtol=0, atol=1e-9)


def test_only_rfast_tracks_gradients() -> None:
    net = Swarm(QuadraticTrainer(), peers=3, algorithm=Moshpit())
    net.step()
    with pytest.raises(ConfigError, match="Moshpit tracks no gradients"):
        net.tracked_mass()


def test_the_same_loss_said_twice_counts_once() -> None:
    net = Swarm(QuadraticTrainer(), peers=3, algorithm=Moshpit())
    lost = net.drop(0.3)
    assert net.drop(0.3) is lost
    assert net.drop(0.3, kind="Part") is not lost
    assert net.drop(0.3, limit=1) is not net.drop(0.3, limit=1)
    lost.stop()
    assert net.drop(0.3) is not lost
