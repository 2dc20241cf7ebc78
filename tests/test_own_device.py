"""What a real peer derives from the profile of its own device, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId, PeerInfo
from flwr_moshpit.protocol.topology import fitness
from flwr_moshpit.simulation.advice import BATCH_MAX, batch_for
from flwr_moshpit.simulation.device import DeviceProfile, own_device
from flwr_moshpit.simulation.own_device import own_settings
from flwr_moshpit.trainer import Cost

STEP = Cost(flops_per_example=1e6, examples_per_step=10, memory_bytes=10**7)
"""20 of them take 1 s on the device below."""
PROFILE = """
[link.line]
downlink_mbit_per_s = 80
uplink_mbit_per_s = {uplink}
rtt_ms = 10
sources = "probe"
[device.mine]
fp32_tflops = 0.002
mfu = 0.1
memory_gb = {memory}
memory_gb_per_s = 10
power_w = 15
idle_w = 5
link = "line"
sources = "probe"
unverified = [{unverified}]
"""


def device(
    folder: Path, uplink: float = 8.0, memory: float = 4.0, unverified: str = ""
) -> DeviceProfile:
    """`uplink` in Mbit/s, `memory` in GB."""
    file = folder / "mine.toml"
    file.write_text(PROFILE.format(uplink=uplink, memory=memory, unverified=unverified))
    return own_device(file)


@pytest.mark.parametrize(
    ("vector_bytes", "compression"), [(9e5, "none"), (3.9e6, "float16"), (4.1e6, "int8")]
)
def test_precision_follows_from_the_line(
    tmp_path: Path, vector_bytes: float, compression: str
) -> None:
    mine = device(tmp_path)
    found = own_settings(Moshpit(), {"compression": ""}, mine, STEP, vector_bytes)
    assert found.algorithm == Moshpit(compression=compression)
    assert any(line.startswith(f"compression = {compression}: ") for line in found.remarks)
    assert (found.uplink_bytes_per_s, found.downlink_bytes_per_s) == (1e6, 1e7)


@pytest.mark.parametrize(
    ("algorithm", "config", "unverified"),
    [
        (Moshpit(), {"compression": "none"}, ""),
        (Moshpit(), {}, '"link"'),
        (Moshpit(local_s=60.0), {}, ""),
        (RFast(), {}, ""),
    ],
)
def test_what_is_set_or_not_measured_is_left_alone(
    tmp_path: Path, algorithm: Any, config: dict[str, Any], unverified: str
) -> None:
    mine = device(tmp_path, unverified=unverified)
    found = own_settings(algorithm, config, mine, STEP, 4.1e6)
    assert found.algorithm == algorithm
    assert (found.uplink_bytes_per_s is None) == bool(unverified)
    assert not any("batch-size" in line for line in found.remarks)


def test_the_place_in_a_tree_follows_from_rate_and_line(tmp_path: Path) -> None:
    infos = []
    for name, uplink in (("thin", 0.8), ("wide", 80.0)):
        found = own_settings(RFast(), {}, device(tmp_path, uplink), STEP, 1e6)
        up, down = found.uplink_bytes_per_s, found.downlink_bytes_per_s
        infos.append(PeerInfo(PeerId(name), 0, found.speed, up, down))
    assert [info.peer for info in sorted(infos, key=fitness)] == ["wide", "thin"]
    assert found.speed == pytest.approx(0.001)


def test_the_batch_is_what_half_of_the_memory_holds(tmp_path: Path) -> None:
    # The model's state takes 3 MB of the 10, so an example takes 0.7 MB.
    assert batch_for(device(tmp_path, memory=0.03), STEP, 1e6) == 16
    assert batch_for(device(tmp_path, memory=4.0), STEP, 1e6) == BATCH_MAX


@pytest.mark.parametrize("devices", [0, 2])
def test_a_profile_holds_one_device(tmp_path: Path, devices: int) -> None:
    file = tmp_path / "all.toml"
    file.write_text("".join(f"[device.d{k}]\nfp32_tflops = 1\n" for k in range(devices)))
    with pytest.raises(ConfigError, match=rf"must hold one device, not {devices}"):
        own_device(file)


APP = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

def make_model():
    nn = torch.nn
    return nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 2))

@app.train()
def train(msg, context):
    model, size = make_model(), int(context.run_config["batch-size"])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    for _ in range(int(msg.content["config"]["local-steps"])):
        model(torch.ones(size, 100)).sum().backward()
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": size * msg.content["config"]["local-steps"]})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
"""
CONFIG = """
[project]
name = "batchy"
version = "1.0.0"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
clientapp = "client_app:app"
[tool.flwr.app.config]
initial-model = "client_app:make_model"
batch-size = BATCH
"""


@pytest.mark.parametrize(("declared", "size"), [('""', BATCH_MAX), ("0", BATCH_MAX), ("4", 4)])
def test_an_app_that_leaves_its_batch_open_gets_one(
    tmp_path: Path, declared: str, size: int
) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("torch")
    from flwr_moshpit.flower.app import load_app
    from flwr_moshpit.flower.app_trainer import make_app_trainer

    (tmp_path / "client_app.py").write_text(APP)
    (tmp_path / "pyproject.toml").write_text(CONFIG.replace("BATCH", declared))
    app = load_app(tmp_path)
    mine = device(tmp_path)
    trainer = make_app_trainer(app, app.config, device=mine)()
    trainer.prepare(1)
    cost = trainer.cost()
    assert cost.examples_per_step == size
    found = own_settings(Moshpit(), app.config, mine, cost, 4.0 * trainer.layout.dim)
    told = [line for line in found.remarks if line.startswith(f"batch-size = {size}: ")]
    assert bool(told) == (declared != "4")


@pytest.mark.slow
def test_a_peer_says_what_follows_from_its_profile(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    device(tmp_path, uplink=0.008)
    run = "import sys; from flwr_moshpit.cli import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    env.pop("OMP_NUM_THREADS", None)

    def command(*arguments: str) -> str:
        words = [sys.executable, "-c", run, *arguments]
        done = subprocess.run(
            words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=300
        )
        return done.stderr

    command("ca", "made", "--swarm", "s", "--invite", "a")
    peer = ["peer", "--invitation", "made/invitations/a.invitation", "--app", "digits"]
    peer += ["--client", "0", "--peers", "2", "--bind", "127.0.0.1:0", "--rounds", "1"]
    peer += ["--gather", "1", "--profile", "mine.toml"]
    said = command(*peer)
    assert "compression = int8: 19.2 kB take 19 s to send" in said, said
    assert "OMP_NUM_THREADS = " in said
