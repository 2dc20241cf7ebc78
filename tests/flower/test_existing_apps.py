"""Apps as Flower's users write them, and what it takes to make them serverless: `apps/*.diff`."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("flwr")
pytest.importorskip("sklearn")

import torch
from flwr.app import Context, RecordDict

from flwr_moshpit.flower import App, load_app
from flwr_moshpit.flower.compat import quiet_flower
from flwr_moshpit.flower.simulation import simulate_on_grid
from flwr_moshpit.settings import gather
from flwr_moshpit.simulation.plan import Plan
from tests.flower.grid import LocalGrid

APPS = Path(__file__).parent / "apps"
PEERS = 4


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cnn", "logreg", "private"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ordinary(name: str, folder: Path) -> App:
    shutil.copytree(APPS / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return load_app(folder / name)


def converted(name: str, folder: Path) -> App:
    ordinary(name, folder)
    command = ["git", "apply", str(APPS / f"{name}.diff")]
    subprocess.run(command, cwd=folder, check=True)
    return load_app(folder / name)


def test_its_own_server_trains_it(name: str, tmp_path: Path) -> None:
    app = ordinary(name, tmp_path)
    grid = LocalGrid(app, PEERS)
    server = app.load(str(app.server_ref))
    with quiet_flower():
        server(grid, Context(1, 1, {}, RecordDict(), dict(app.config)))
    assert grid.calls.count("train") == 3 * PEERS


def test_two_lines_in_the_client_and_three_in_the_server(name: str) -> None:
    """And the settings; an app that has no function for its first model gets one."""
    diff = (APPS / f"{name}.diff").read_text()
    added: dict[str, list[str]] = {}
    for line in diff.splitlines():
        if line.startswith("+++"):
            file = line.rpartition("/")[2]
        elif re.match(r"\+\S|\+ +\S", line):
            added.setdefault(file, []).append(line[1:])
    assert added["client_app.py"] == [
        "from flwr_moshpit.flower import serverless",
        "serverless(app)",
    ]
    assert added["server_app.py"] == [
        "from flwr_moshpit.flower import bootstrap_app",
        "app = bootstrap_app()",
    ]
    assert len(added.get("task.py", [])) <= 2


def test_converted_it_trains_among_its_clients(name: str, tmp_path: Path) -> None:
    app = converted(name, tmp_path)
    config = {**app.config, "out": str(tmp_path / "out")}
    with warnings.catch_warnings():
        # None of the three looks at local-steps: they have their own number of epochs.
        warnings.filterwarnings("ignore", message="the app does not look at local-steps")
        with quiet_flower():
            run = simulate_on_grid(app, LocalGrid(app, PEERS, config), config)
            settings = gather(app.config, {}, {"peers": PEERS})
            plan = Plan.of(settings)
            here = plan.simulation(app.trainer(settings.app)).run(rounds=3)
    assert run.digest == here.digest
    first, *_, last = run.points
    assert first.accuracy is not None
    assert last.accuracy is not None
    # Personal heads stay in the clients' contexts, and noise is added: that takes longer.
    assert last.accuracy > first.accuracy + (0.05 if name == "private" else 0.3)
