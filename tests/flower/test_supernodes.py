"""Peers on SuperNodes: real SuperLinks and SuperNodes, TLS, node authentication, offline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

from flwr_moshpit.flower import load_app
from tests.flower.flower_processes import (
    Deployment,
    flower_home,
    processes_of,
    wait_until,
)

pytestmark = pytest.mark.slow

QUICK = "min-supernodes=3 log-every-s=5"
LONG_S = 600.0
"""Far more than anything takes on a busy machine with two cores."""


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    home = tmp_path / "home"
    with flower_home(home) as env:
        deployed = Deployment(env, tmp_path)
        try:
            deployed.start_superlink()
            for number in range(3):
                deployed.register(number)
            yield deployed
        finally:
            deployed.close()
    assert not list(processes_of(home))


def peer_pids(deployment: Deployment) -> dict[str, int]:
    """Of the peers of all swarms, by name."""
    files = Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/*/peer.json")
    return {file.parent.name: int(json.loads(file.read_text())["pid"]) for file in files}


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def rounds_of(deployment: Deployment, peer: str) -> int:
    files = Path(deployment.env["FLWR_HOME"], "moshpit").glob(f"*/{peer}/events.jsonl")
    return sum(file.read_text().count('"name":"round"') for file in files)


@pytest.mark.parametrize("algorithm", ["moshpit", "rfast"])
def test_peers_train_and_their_model_comes_back(
    deployment: Deployment, tmp_path: Path, algorithm: str
) -> None:
    for number in range(3):
        deployment.start_supernode(number, of=3)
    out = tmp_path / "out"
    rounds = 30 if algorithm == "moshpit" else 300
    config = f"{QUICK} rounds={rounds} algorithm='{algorithm}' out='{out}'"
    said = deployment.run(load_app("digits").path, config)
    assert re.search(r"swarm digits-\w+: 3 peers begin", said), said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["alive"] == 3
    assert summary["accuracy"] > 0.8
    assert summary["bytes"] > 0
    assert sum(array.size for array in np.load(out / "model.npz").values()) == 4810
    names = {json.loads(line)["peer"] for line in (out / "events.jsonl").read_text().splitlines()}
    assert {"client-0", "client-1", "client-2"} <= names
    # Nobody stays behind.
    wait_until(lambda: all(map(ended, peer_pids(deployment).values())), LONG_S, "peers end")
