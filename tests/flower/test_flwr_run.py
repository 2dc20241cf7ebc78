"""`flwr run` itself, on Flower's simulation engine with Ray."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if find_spec("ray") is None:
    pytest.skip("Ray is in the extra `simulation`", allow_module_level=True)
pytest.importorskip("torch")

from flwr_moshpit.commands.simulate import simulate
from flwr_moshpit.flower import load_app
from tests.flower.flower_processes import flower_home, flwr, processes_of, wait_until

pytestmark = pytest.mark.slow


def test_bundled_app_on_ray_is_the_run_of_simulate(tmp_path: Path) -> None:
    home, app = tmp_path / "home", load_app("digits")
    federation = ("--federation-config", "num-supernodes=5")
    with flower_home(home) as env:
        # Flower gives its local SuperLink 15 s to start, which a busy machine exceeds.
        wait_until(
            lambda: "Failed to start" not in flwr(env, "list", cwd=tmp_path, timeout_s=120),
            300.0,
            "the local SuperLink runs",
        )
        for algorithm in ("moshpit", "rfast"):
            out = tmp_path / algorithm
            config = f"rounds=2 algorithm='{algorithm}' out='{out}'"
            arguments = ("run", str(app.path), "--stream", *federation, "-c", config)
            log = flwr(env, *arguments, cwd=tmp_path, timeout_s=300)
            digest = re.search(r"digest ([0-9a-f]{64})", log)
            assert digest, log
            here = simulate(
                "digits",
                flags={"peers": 5, "rounds": 2, "algorithm": algorithm},
                out=tmp_path / f"{algorithm}-here",
                quiet=True,
            )
            assert digest[1] == here.digest
            summary = json.loads((out / "summary.json").read_text())
            assert summary == json.loads(
                (tmp_path / f"{algorithm}-here" / "summary.json").read_text()
            )
        wrong = ("run", str(app.path), "--stream", "-c", "group-size=1")
        assert "group-size must be at least 2" in flwr(env, *wrong, cwd=tmp_path, timeout_s=300)
    assert not list(processes_of(home))
