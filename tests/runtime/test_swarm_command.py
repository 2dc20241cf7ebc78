"""`flwr-moshpit swarm`: real processes, what they write, how they end, and that none stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.cli import main

HANG_S = 240.0
MARK = "FLWR_MOSHPIT_TEST_RUN"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--peers", "1"], "peers must be at least 2, not 1"),
        (["digits", "--algorithm", "fedavg"], "algorithm FedAvg needs a server"),
        (["digits", "--algorithm", "moshpot"], "algorithm 'moshpot' is unknown"),
        (["nowhere"], "app 'nowhere' does not exist"),
        (["digits", "--fleet", "cloud-t4"], "unrecognized arguments: --fleet cloud-t4"),
        (["digits", "--config", "faults.toml"], "setting 'faults' is for `simulate`"),
        (["digits", "--out", "faults.toml"], "is a file, not a folder"),
    ],
)
def test_wrong_settings(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faults.toml").write_text('faults = "crash 20% per hour"\n')
    assert main(["swarm", *arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["faults.toml"]


class Run:
    """The command in a process of its own, whose descendants can be told from all others."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from flwr_moshpit.cli import main; sys.exit(main())",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), MARK: self.mark},
        )

    def until(self, text: str) -> str:
        """The next line on stderr that holds `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}")

    def wait(self, code: int) -> str:
        """Until its end with exit code `code`; what it wrote to stdout."""
        out, errors = self.process.communicate(timeout=HANG_S)
        assert self.process.returncode == code, errors
        return out

    def descendants(self) -> list[int]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environ = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if wanted in environ.split(b"\0"):
                    found.append(int(entry.name))
        return found


@pytest.fixture
def start(tmp_path: Path) -> Generator[Any, None, None]:
    runs: list[Run] = []

    def start(*arguments: str) -> Run:
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        for stream in (run.process.stdout, run.process.stderr):
            assert stream is not None
            stream.close()


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "events.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["moshpit", "rfast"])
def test_trains_to_its_end(start: Any, tmp_path: Path, algorithm: str) -> None:
    rounds = 6 if algorithm == "moshpit" else 60
    run = start(
        "swarm", "digits", "--peers", "3", "--rounds", str(rounds), "--algorithm", algorithm,
        "--out", "out",
    )  # fmt: skip
    out = run.wait(0)
    assert run.descendants() == []
    assert "accuracy 0." in out
    assert "3/3 peers" in out

    summary, events = read(tmp_path / "out")
    assert summary["accuracy"] > 0.4
    assert "digest" not in summary
    assert summary["wall_s"] > 0
    assert summary["bytes"] > 0
    assert (summary["rounds"], summary["alive"], summary["interrupted"]) == (rounds, 3, False)
    for peer in ("p0", "p1", "p2"):
        done = [e for e in events if e["peer"] == peer and e["name"] == "round"]
        assert len(done) >= rounds
        assert any(e["contributors"] == 3 for e in done)
    with np.load(tmp_path / "out" / "model.npz") as model:
        assert sum(model[name].size for name in model.files) == 4810


@pytest.mark.slow
def test_ctrl_c(start: Any, tmp_path: Path) -> None:
    run = start("swarm", "digits", "--peers", "3", "--rounds", "500", "--out", "out")
    run.until("round 50/500")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    out = run.wait(130)
    assert "interrupted after" in out
    assert run.descendants() == []
    summary, events = read(tmp_path / "out")
    assert summary["interrupted"]
    assert 50 <= summary["rounds"] < 500
    assert summary["bytes"] > 0
    assert events[-1]["name"] == "swarm"
    assert (tmp_path / "out" / "model.npz").exists()


@pytest.mark.slow
def test_nobody_stays_when_it_is_killed(start: Any) -> None:
    run = start("swarm", "digits", "--peers", "3", "--rounds", "500", "--out", "out")
    run.until("round 50/500")
    descendants = run.descendants()
    # The command, three peers, their trainers and the helpers of `multiprocessing`.
    assert len(descendants) >= 7
    run.process.kill()
    # They hold its stderr open: its end is theirs.
    assert run.process.stderr is not None
    run.process.stderr.read()
    assert run.descendants() == []
