"""A deployment for the tests that start real SuperLinks and SuperNodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flower.flower_processes import Deployment, flower_home, processes_of


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
