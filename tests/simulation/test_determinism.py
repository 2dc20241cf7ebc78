"""One seed, one digest: in other processes, under other hash seeds, with any number of workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from flwr_moshpit import Fleet, Moshpit, Network
from flwr_moshpit.simulation.run import Simulation
from tests.trainers import QuadraticTrainer

if __name__ == "__main__":
    seed, workers = int(sys.argv[1]), int(sys.argv[2])
    history = Simulation(
        Moshpit(group_size=4, local_steps=3),
        QuadraticTrainer(dim=16, num_examples=[3, 11, 7], noise=0.1, flops_per_example=1e9),
        fleet=Fleet.mix({"jetson-nano": 0.5, "cloud-t4": 0.5}, 11, seed=seed),
        network=Network.from_profiles(),
        faults=["crash 30% per min, back after 5 s", "slow 10x peer=3"],
        seed=seed,
        workers=workers,
    ).run(rounds=12)
    print(history.digest, len(history.rounds))
"""


def digest(tmp_path: Path, seed: int, workers: int, hash_seed: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), str(seed), str(workers)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def test_another_process_and_hash_seed_make_no_difference(tmp_path: Path) -> None:
    first = digest(tmp_path, 1, 0, "1")
    assert first == digest(tmp_path, 1, 0, "2")
    assert first != digest(tmp_path, 2, 0, "1")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_make_no_difference(tmp_path: Path, workers: int) -> None:
    assert digest(tmp_path, 1, 0, "1") == digest(tmp_path, 1, workers, "3")
