"""More that goes wrong on devices: nobody can dial them, they lose power, nobody stops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

from flwr_moshpit.flower import load_app
from tests.flower.flower_processes import FLWR_BIN, Deployment, wait_until
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

ENDLESS = "rounds=1000000 log-every-s=5"
NOWHERE = "192.0.2.7:9100"
"""An address that RFC 5737 keeps for documents: nobody is there."""


def all_ended(deployment: Deployment) -> bool:
    return all(map(ended, peer_pids(deployment).values()))


def test_peers_whom_others_cannot_dial_are_relayed(deployment: Deployment, tmp_path: Path) -> None:
    deployment.start_supernode(0, of=3)
    hidden = f'peer-address="{NOWHERE}" peer-bind="127.0.0.1:0"'
    deployment.start_supernode(1, of=3, node_config=hidden)
    deployment.start_supernode(2, of=3, node_config="peer-relayed=true")
    out = tmp_path / "out"
    config = f"min-supernodes=3 log-every-s=5 rounds=30 out='{out}'"
    said = deployment.run(load_app("digits").path, config)
    assert f"others cannot dial client-1 at {NOWHERE}" in said, said
    assert "others cannot dial client-2" not in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["alive"] == 3, said
    assert summary["accuracy"] > 0.8
    assert summary["coverage"] > 0.9
    wait_until(lambda: all_ended(deployment), LONG_S, "peers end")


def test_a_device_that_is_gone_comes_back_and_a_stop_by_hand_ends_all(
    deployment: Deployment,
) -> None:
    for number in range(3):
        deployment.start_supernode(number, of=3)
    begin(deployment, f"{ENDLESS} min-supernodes=3")
    wait_for_rounds(deployment, "client-0", 3)

    # SuperNode and peer die together, as when a device loses power.
    before = peer_pids(deployment)["client-1"]
    deployment.kill("supernode1")
    os.kill(before, signal.SIGKILL)
    wait_for_rounds(deployment, "client-0", 3)
    wait_until(lambda: '"offline"' in deployment.supernodes(), LONG_S, "it is missed")
    deployment.start_supernode(1, of=3)
    wait_until(lambda: peer_pids(deployment).get("client-1", before) != before, LONG_S, "alive")
    wait_for_rounds(deployment, "client-1", 3)

    # Nobody can stop the run any more; its authority's owner can stop the swarm.
    deployment.kill("superlink")
    [authority] = Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/authority")
    address = json.loads((authority / "peers.json").read_text())["client-0"]
    command = [str(FLWR_BIN / "flwr-moshpit"), "stop", address, "--authority", str(authority)]
    subprocess.run(command, env=deployment.env, check=True)
    wait_for_all_to_end(peer_pids(deployment).values())


@pytest.mark.parametrize("nobody", ["no SuperLink", "none is dialable"])
def test_peers_whom_nobody_reaches_end_by_their_budget(deployment: Deployment, nobody: str) -> None:
    for number in range(2):
        deployment.start_supernode(number, of=2)
    run_id = begin(deployment, f"{ENDLESS} min-supernodes=2 budget-h=0.02")
    wait_for_rounds(deployment, "client-0", 1)
    if nobody == "no SuperLink":
        deployment.kill("superlink")
    else:
        # As from a SuperLink that is not in the peers' network.
        [authority] = Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/authority")
        file = authority / "peers.json"
        wait_until(lambda: len(json.loads(file.read_text())) == 2, LONG_S, "both are noted")
        file.write_text(json.dumps({"client-0": "127.0.0.1:1"}))
        stop(deployment, run_id)
    wait_until(lambda: all_ended(deployment), LONG_S, "all peers end")
    files = list(Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/client-*/end.json"))
    assert len(files) == 2
    assert not any(json.loads(file.read_text())["finished"] for file in files)
    if nobody == "none is dialable":
        told = "no peer can be reached: they end by their budget"
        wait_until(lambda: told in controllers(deployment), LONG_S, told)
