"""What `doctor` finds on a device, and the profile that `probe` writes of it."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flwr_moshpit.cli import main
from flwr_moshpit.commands import doctor as doctor_module
from flwr_moshpit.commands.doctor import Finding, findings
from flwr_moshpit.errors import ConfigError, TransportError


def found(bind: str = "127.0.0.1:0") -> dict[str, Finding]:
    return {finding.what: finding for finding in findings(bind)}


def test_a_device_on_which_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(finding.is_well for finding in found().values() if finding.is_needed)
    assert main(["doctor", "--bind", "127.0.0.1:0"]) == 0
    said = capsys.readouterr().out
    assert "ok  TLS          mutual TLS over loopback" in said
    assert f"ok  Python       {sys.version_info.major}.{sys.version_info.minor}." in said


def test_a_taken_port_and_its_cure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        bind = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["doctor", "--bind", bind]) == 1
    assert f"NO  port         {bind}: " in (said := capsys.readouterr().out)
    assert "choose another with --bind" in said
    assert main(["doctor", "--bind", "nonsense"]) == 2


@pytest.mark.parametrize(
    ("name", "value", "what", "cure"),
    [
        ("version", lambda name: "1.41.9", "flwr", "pip install 'flwr>=1.42"),
        ("version", lambda name: "0.9", "grpcio", "pip install 'grpcio>=1.70"),
        ("_RELEASED_AT", 1e12, "clock", "set the clock"),
        ("_synchronized", lambda: False, "clock", "set the clock"),
    ],
)
def test_what_is_wrong_has_a_cure(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, what: str, cure: str
) -> None:
    monkeypatch.setattr(doctor_module, name, value)
    finding = found()[what]
    assert not finding.is_well
    assert cure in finding.cure


def test_the_profile_is_one_that_a_fleet_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from flwr_moshpit import torch_probe
    from flwr_moshpit.commands.probe import probe
    from flwr_moshpit.simulation.device import load_catalogue

    monkeypatch.setattr(torch_probe, "_MEASURED_S", 0.01)
    monkeypatch.setattr(torch_probe, "_MATMUL", {"cpu": 128, "cuda": 1024})
    monkeypatch.setattr(torch_probe, "_COPY_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})
    rates = torch_probe.measure(0.01)
    assert rates.training_flops_per_s > 1e6
    assert rates.memory_bytes_per_s > 1e6
    monkeypatch.setattr(torch_probe, "measure", lambda: rates)
    out = tmp_path / "box.toml"
    assert main(["probe", "--name", "box", "--out", str(out), "--idle-w", "3"]) == 0
    device = load_catalogue(out).device("box")
    assert device.idle_w == 3
    assert "idle_w" not in device.unverified
    assert "link" in device.unverified
    least = min(rates.training_flops_per_s, rates.fp32_flops_per_s)
    assert device.flops_per_s == pytest.approx(least, rel=0.01)
    assert f"--fleet box --catalogue {out}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a name holds none of the signs"):
        probe(name="a:b", out=tmp_path / "no.toml")
    assert main(["probe", "--link", "string", "--out", str(tmp_path / "no.toml")]) == 2
    assert not (tmp_path / "no.toml").exists()


def test_a_line_is_measured_between_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from flwr_moshpit import torch_probe
    from flwr_moshpit.commands import line_probe
    from flwr_moshpit.commands.line_probe import Waiting, measure_line
    from flwr_moshpit.simulation.device import load_catalogue

    monkeypatch.setattr(line_probe, "WARMS_UP_S", 0.02)
    waiting = Waiting("127.0.0.1:0")
    thread = threading.Thread(target=waiting.serve)
    thread.start()
    try:
        line = measure_line(waiting.address, 0.05)
        monkeypatch.setattr("flwr_moshpit.commands.probe.measure_line", lambda address: line)
        rates = torch_probe.Rates("cpu", "a box", 1e12, None, 1e11, 1e10, None, False)
        monkeypatch.setattr(torch_probe, "measure", lambda: rates)
        out = tmp_path / "box.toml"
        given = ["probe", "--name", "box", "--out", str(out), "--to", waiting.address]
        assert main(given) == 0
        assert f"to {waiting.address}" in capsys.readouterr().out
        assert main([*given, "--link", "lte"]) == 2
    finally:
        waiting.close()
        thread.join()
    assert line.rtt_s > 0
    assert min(line.uplink_bytes_per_s, line.downlink_bytes_per_s) > 1e6
    device = load_catalogue(out).device("box")
    assert "link" not in device.unverified
    assert device.link.uplink_bytes_per_s == pytest.approx(line.uplink_bytes_per_s, rel=0.01)
    assert device.link.latency_s == pytest.approx(line.rtt_s / 2, rel=0.1)
    with pytest.raises(TransportError, match="--wait HOST:PORT"):
        measure_line(waiting.address)
