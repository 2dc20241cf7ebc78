"""Peers on SuperNodes: real SuperLinks and SuperNodes, TLS, node authentication, offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
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
    flwr,
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


def begin(deployment: Deployment, config: str, app: Path | None = None) -> str:
    """Start a run and do not wait for it; its id."""
    arguments = ("run", str(app or load_app("digits").path), "here", "-c", config)
    said = flwr(deployment.env, *arguments, cwd=deployment.folder, timeout_s=LONG_S)
    found = re.search(r"Successfully started run (\d+)", said)
    assert found, said
    return found[1]


def stop(deployment: Deployment, run_id: str) -> None:
    said = flwr(deployment.env, "stop", run_id, "here", cwd=deployment.folder, timeout_s=LONG_S)
    assert "successfully stopped" in said, said


def wait_for_rounds(deployment: Deployment, peer: str, more: int) -> None:
    before = rounds_of(deployment, peer)
    wait_until(lambda: rounds_of(deployment, peer) >= before + more, LONG_S, f"rounds of {peer}")


def controllers(deployment: Deployment) -> str:
    """What the processes that watch over runs have said."""
    files = Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/authority/controller.log")
    return "".join(file.read_text() for file in files)


def test_peers_outlive_supernodes_and_the_superlink_until_the_run_is_stopped(
    deployment: Deployment,
) -> None:
    for number in range(2):
        deployment.start_supernode(number, of=3)
    endless = "rounds=1000000 log-every-s=20"
    begin(deployment, endless)
    wait_for_rounds(deployment, "client-0", 3)

    # A late SuperNode joins the swarm that runs.
    deployment.start_supernode(2, of=3)
    wait_for_rounds(deployment, "client-2", 3)

    # A SuperNode is killed: its peer goes on.
    deployment.kill("supernode0")
    wait_for_rounds(deployment, "client-0", 3)

    # So do all when the SuperLink is killed.
    deployment.kill("superlink")
    wait_until(
        lambda: "the SuperLink is gone" in controllers(deployment), LONG_S, "the controller ends"
    )
    for client in range(3):
        wait_for_rounds(deployment, f"client-{client}", 3)
    pids = peer_pids(deployment)
    assert len(pids) == 3
    assert not any(map(ended, pids.values()))

    # A new run finds them again, and `flwr stop` ends them.
    deployment.start_superlink()
    # Before, Flower would turn the SuperNode away, which then does not ask again.
    wait_until(lambda: "offline" in deployment.supernodes(), LONG_S, "one SuperNode is missed")
    deployment.start_supernode(0, of=3)
    [swarm] = [path.name for path in Path(deployment.env["FLWR_HOME"], "moshpit").iterdir()]
    run_id = begin(deployment, f"{endless} resume='{swarm}'")
    log = ("log", run_id, "here", "--show")

    def resumed() -> bool:
        said = flwr(deployment.env, *log, cwd=deployment.folder, timeout_s=LONG_S)
        return "3 of 3 peers heard" in said

    wait_until(resumed, LONG_S, "the new run hears all peers")
    assert peer_pids(deployment) == pids
    stop(deployment, run_id)
    wait_until(lambda: all(map(ended, pids.values())), LONG_S, "all peers end")
    assert "the run was stopped" in controllers(deployment)


def raising_app(folder: Path) -> Path:
    """`digits`, whose second call of client 1 raises."""
    shutil.copytree(load_app("digits").path, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "digits" / "client_app.py"
    text = file.read_text()
    old = '    config, run_config = msg.content["config"], context.run_config\n'
    assert old in text
    new = '    if context.node_config["partition-id"] == 1 and config["server-round"] == 2:\n'
    file.write_text(text.replace(old, old + new + '        raise RuntimeError("a torn cable")\n'))
    return folder


def test_a_taken_port_a_killed_peer_and_an_app_that_raises(
    deployment: Deployment, tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        deployment.start_supernode(0, of=3)
        deployment.start_supernode(1, of=3)
        deployment.start_supernode(2, of=3, node_config=f'peer-address="{taken}"')
        app = raising_app(tmp_path / "app")
        run_id = begin(deployment, "rounds=1000000 log-every-s=10", app)
        wait_for_rounds(deployment, "client-0", 3)
        before = peer_pids(deployment)["client-1"]
        os.kill(before, signal.SIGKILL)
        wait_for_rounds(deployment, "client-0", 3)
        wait_until(
            lambda: peer_pids(deployment).get("client-1", before) != before, LONG_S, "a new life"
        )
        wait_for_rounds(deployment, "client-1", 3)

        log = ("log", run_id, "here", "--show")
        wanted = (
            rf"cannot join: peer-address: cannot listen on {taken}",
            "client-1 has died: it is started again from its last checkpoint",
            "client-1: training failed: client 1, step .*: RuntimeError: a torn cable",
        )

        def said_all() -> bool:
            said = flwr(deployment.env, *log, cwd=deployment.folder, timeout_s=LONG_S)
            return all(re.search(text, said) for text in wanted)

        wait_until(said_all, LONG_S, f"the log says {wanted}")
        stop(deployment, run_id)
        pids = [pid for name, pid in peer_pids(deployment).items() if name != "client-2"]
        wait_until(lambda: all(map(ended, pids)), LONG_S, "all peers end")
