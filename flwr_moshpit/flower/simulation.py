"""A swarm in Flower's simulation engine: time is virtual here, training is done by its actors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from rich.console import Console

from flwr_moshpit.flower.app import App
from flwr_moshpit.flower.client import FlowerTrainer
from flwr_moshpit.flower.compat import log
from flwr_moshpit.flower.grid import GridBackend, GridCarrier, virtual_nodes
from flwr_moshpit.flower.settings import flower_settings
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.progress import Progress
from flwr_moshpit.observe.text import duration
from flwr_moshpit.settings import RunSettings
from flwr_moshpit.simulation.history import CURVES, EVENTS, MODEL, SUMMARY, History
from flwr_moshpit.simulation.plan import Plan

FLOWERS_DEFAULT_NODES = 2


def simulate_on_grid(app: App, grid: Grid, run_config: Mapping[str, Any]) -> History:
    """Run the virtual-time engine over the SuperNodes of `grid`, and write what came out.

    The digest is that of `flwr-moshpit simulate` with the same settings. Raises ConfigError for a
    wrong setting and TrainerError where the app's code raises.
    """
    # Flower's actors take seconds to start: what is wrong in the settings is said before.
    flower_settings(run_config, int(run_config.get("peers") or 1))
    trainer = app.trainer(run_config)
    trainer.check_serverless()
    with run_folder(Path(run_config["out"]) if run_config.get("out") else None) as out:
        return _simulate_into(out, trainer, grid, run_config)


def _simulate_into(
    out: Path, trainer: FlowerTrainer, grid: Grid, run_config: Mapping[str, Any]
) -> History:
    nodes = virtual_nodes(grid)
    settings = flower_settings(run_config, len(nodes))
    plan = Plan.of(settings)
    carrier = GridCarrier(grid, nodes)
    trainer.carry_by(carrier)
    backend = GridBackend(trainer, carrier)
    progress = Progress(
        num_peers=settings.peers,
        rounds=settings.rounds,
        until_s=plan.until_s,
        console=Console(stderr=True, highlight=False, width=120),
    )
    simulation = plan.simulation(trainer, backend=backend, observe=progress)
    for remark in settings.remarks:
        log().info("%s", remark)
    _announce(settings)
    began_at = time.monotonic()
    with progress:
        history = simulation.run(until=plan.until_s, rounds=settings.rounds, out=out)
    took_s = time.monotonic() - began_at
    log().info(
        "%d calls of the ClientApp in %s, %.2f ms for each",
        backend.num_jobs,
        duration(took_s),
        1e3 * took_s / max(1, backend.num_jobs),
    )
    for line in history.table().splitlines():
        log().info("%s", line)
    for file in (EVENTS, SUMMARY, MODEL, CURVES):
        if (out / file).exists():
            log().info("%s", (out / file).resolve())
    return history


def _announce(settings: RunSettings) -> None:
    algorithm = settings.algorithm
    log().info(
        "%s among %d virtual clients: %s", type(algorithm).__name__, settings.peers, algorithm
    )
    if settings.peers == FLOWERS_DEFAULT_NODES:
        log().info(
            "2 virtual clients are Flower's default; for 100 of them: "
            'flwr run . --federation-config "num-supernodes=100"'
        )
    if settings.rounds is not None:
        log().info("about %d calls of the ClientApp to come", settings.peers * settings.rounds)
