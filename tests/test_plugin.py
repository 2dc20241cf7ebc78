"""The pytest plugin, as a project that uses it sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flwr_moshpit.config import Moshpit
from tests.trainers import QuadraticTrainer

ROOT = Path(__file__).resolve().parents[1]

PROJECT = """
import pytest
from flwr_moshpit import Moshpit
from tests.trainers import QuadraticTrainer

def test_training_survives_a_dead_leader(swarm):
    net = swarm(QuadraticTrainer(), peers=9, algorithm=Moshpit(group_size=3), seed=4)
    killed = net.kill(net.leader(round=2), during="allreduce")
    history = net.run(rounds=6)
    assert killed.fired_at is not None
    assert all(record.coverage == 1.0 for record in history.rounds)
    net.average()
    assert net.consensus_distance() < 1e-6

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
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "--moshpit-seed 17" in done.stdout


def test_the_seed_can_be_given(tmp_path: Path) -> None:
    done = run(tmp_path, "--moshpit-seed", "23", "-k", "fails")
    assert "1 passed" in done.stdout, done.stdout


def test_peers_are_named_by_index_or_id() -> None:
    from flwr_moshpit.errors import ConfigError
    from flwr_moshpit.testing import Swarm

    net = Swarm(QuadraticTrainer(), peers=3, algorithm=Moshpit())
    assert net.peer(1) == net.peer("peer-1") == "peer-1"
    with pytest.raises(ConfigError, match="no peer"):
        net.peer("nobody")
    with pytest.raises(ConfigError, match="not a stage"):
        net.kill(1, during="lunch")


def test_drops_delays_duplicates_and_orders_are_counted() -> None:
    from flwr_moshpit.testing import Swarm

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
