"""Peers on SuperNodes: real SuperLinks and SuperNodes, TLS, node authentication, offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

from flwr_moshpit.flower import load_app
from tests.flower.flower_processes import Deployment, flwr, wait_until
from tests.flower.swarms import (
    LONG_S,
    begin,
    controllers,
    ended,
    peer_pids,
    stop,
    wait_for_all_to_end,
    wait_for_rounds,
)

pytestmark = pytest.mark.slow

QUICK = "min-supernodes=3 log-every-s=5"
PROFILE = """
[device.mine]
fp32_tflops = 5
mfu = 0.1
memory_gb = 4
memory_gb_per_s = 10
power_w = 15
idle_w = 5
link = "gigabit"
sources = "probe"
unverified = []
"""


@pytest.mark.parametrize("algorithm", ["moshpit", "rfast"])
def test_peers_train_and_their_model_comes_back(
    deployment: Deployment, tmp_path: Path, algorithm: str
) -> None:
    profile = tmp_path / "device.toml"
    profile.write_text(PROFILE)
    for number in range(3):
        own = f'device-profile="{profile}"' if number == 0 else ""
        deployment.start_supernode(number, of=3, node_config=own)
    out = tmp_path / "out"
    rounds = 30 if algorithm == "moshpit" else 300
    config = f"{QUICK} rounds={rounds} algorithm='{algorithm}' out='{out}'"
    said = deployment.run(load_app("digits").path, config)
    assert re.search(r"swarm digits-\w+: 3 peers begin", said), said
    assert "client-0: speed = 2.5, by which it finds its place" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["alive"] == 3
    assert summary["accuracy"] > 0.8
    assert summary["bytes"] > 0
    assert sum(array.size for array in np.load(out / "model.npz").values()) == 4810
    names = {json.loads(line)["peer"] for line in (out / "events.jsonl").read_text().splitlines()}
    assert {"client-0", "client-1", "client-2"} <= names
    # Nobody stays behind.
    wait_until(lambda: all(map(ended, peer_pids(deployment).values())), LONG_S, "peers end")


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
    wait_until(lambda: '"offline"' in deployment.supernodes(), LONG_S, "one SuperNode is missed")
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
    wait_for_all_to_end(pids.values())
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
        wait_for_all_to_end(
            pid for name, pid in peer_pids(deployment).items() if name != "client-2"
        )
