"""The pytest plugin: a `swarm` fixture and `--moshpit-seed`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flwr_moshpit.testing.swarm import Swarm

_SEEDS = pytest.StashKey[list[int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flwr-moshpit")
    group.addoption(
        "--moshpit-seed",
        type=int,
        default=None,
        help="seed of every swarm in this run, instead of what the tests say",
    )


@pytest.fixture
def swarm(request: pytest.FixtureRequest) -> Generator[Callable[..., Swarm], None, None]:
    """Makes swarms: swarm(app_or_trainer, peers=9, algorithm=Moshpit(group_size=3), seed=4).

    The first argument is a Flower ClientApp or any `Trainer`. Other settings are those of
    `flwr_moshpit.testing.Swarm`. A failing test prints the seeds it used.
    """
    # Not at the top: pytest loads this plugin in every project, used or not.
    from flwr_moshpit.testing.swarm import Swarm

    made: list[Swarm] = []
    seeds = request.node.stash.setdefault(_SEEDS, [])
    fixed = request.config.getoption("--moshpit-seed")

    def make(trainer: Any, **settings: Any) -> Swarm:
        if fixed is not None:
            settings["seed"] = fixed
        seeds.append(settings.get("seed", 0))
        made.append(Swarm(_as_trainer(trainer), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _as_trainer(trainer: Any) -> Any:
    if hasattr(trainer, "initial_params"):
        return trainer
    from flwr_moshpit.flower import FlowerTrainer

    return FlowerTrainer(trainer)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    seeds = item.stash.get(_SEEDS, [])
    if report.failed and seeds:
        text = f"swarm seeds: {', '.join(map(str, seeds))}; repeat with --moshpit-seed {seeds[-1]}"
        report.sections.append(("flwr-moshpit", text))
