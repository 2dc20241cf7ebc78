"""`flwr-moshpit demo`: those who die are the right ones, and what it says is what happened."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flwr_moshpit.cli import main
from flwr_moshpit.commands import deaths, demo
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.watched import Averaged


def averaged(brought: list[float], weight: float, got: list[float]) -> Averaged:
    vectors = np.array(brought, np.float32), np.array(got, np.float32)
    contributors = (PeerId("a"), PeerId("b"))
    return Averaged(1.0, 3, contributors, 1.0, False, vectors[0], weight, vectors[1])


def test_the_difference_is_from_the_weighted_mean() -> None:
    of = {
        PeerId("a"): averaged([0, 8], 1.0, [3, 2]),
        PeerId("b"): averaged([4, 0], 3.0, [3, 2.5]),
    }
    assert deaths._difference(of[PeerId("a")], of) == 0
    assert deaths._difference(of[PeerId("b")], of) == 0.5
    del of[PeerId("a")]
    assert np.isnan(deaths._difference(of[PeerId("b")], of))


def flaw_of(change: dict[str, float], accuracies: list[float]) -> str | None:
    play = demo._Demo.__new__(demo._Demo)
    death = deaths.Death("leader", PeerId("p3"), 12, 0.3, 1.0, 0, 1e-8, 7)
    play.deaths, play._accuracies = [replace(death, **change)], accuracies  # type: ignore[arg-type]
    return play.flaw()


def test_what_it_should_show_is_checked() -> None:
    assert flaw_of({}, [0.5, 0.7]) is None
    assert flaw_of({}, []) is None
    assert "not averaged" in str(flaw_of({"coverage": 0.9}, []))
    assert "differs by 1.0e-03" in str(flaw_of({"difference": 1e-3}, []))
    assert "differs by nan" in str(flaw_of({"difference": float("nan")}, []))
    assert "fell from 0.700 to 0.600" in str(flaw_of({}, [0.7, 0.6]))


def test_a_record_needs_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--record", str(tmp_path / "none" / "demo.svg")]) == 2
    assert "folder that is not there" in capsys.readouterr().err


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "demo.svg"
    arguments = ["--seconds", "1", "--out", str(tmp_path / "out"), "--record", str(svg)]
    assert main(["demo", *arguments]) == 0
    assert "SIGKILL" in svg.read_text()
    said = capsys.readouterr().out
    victims = re.findall(r"SIGKILL of (p\d): (a reducer|the leader|the contact)", said)
    assert [how for _, how in victims] == ["a reducer", "the leader", "the contact"]
    assert victims[-1][0] == "p0"
    assert len(dict(victims)) == 3
    lines = re.findall(r"(\d) survivors.*: delay [\d.]+ s, coverage (\d+) %, .* mean (\S+)", said)
    assert [int(count) for count, *_ in lines] == [7, 6, 5]
    assert all(int(coverage) == 100 for _, coverage, _ in lines)
    assert all(float(difference) < 1e-5 for *_, difference in lines)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["alive"] == 5
    assert summary["accuracy"] > 0.6
    assert (tmp_path / "out" / "model.npz").exists()
