"""`flwr-moshpit simulate`: an app's clients on virtual devices, and what is written of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_moshpit.flower.app import load_app
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.text import notice
from flwr_moshpit.settings import gather, read_toml
from flwr_moshpit.simulation.explain import Row
from flwr_moshpit.simulation.history import CURVES, EVENTS, MODEL, SUMMARY, History
from flwr_moshpit.simulation.plan import Plan


def simulate(
    name: str,
    *,
    flags: Mapping[str, Any],
    config: Path | None = None,
    out: Path | None = None,
    explain: bool = False,
    quiet: bool = False,
) -> History:
    """Run the app called `name` with the settings of `gather`, and write everything to `out`.

    Raises ConfigError for a wrong setting, before anything is written, and TrainerError where the
    app's code raises. Interrupted, the history says so and holds what was done until then.
    """
    app = load_app(name)
    settings = gather(app.config, read_toml(config) if config is not None else {}, flags)
    # The app's frameworks take seconds to load: what is wrong in the settings is said before.
    plan = Plan.of(settings)
    with run_folder(out) as folder:
        if explain or not quiet:
            notice(*settings.remarks)
        if not quiet:
            notice(f"loading {app.name} ...")
        simulation = plan.simulation(app.trainer(settings.app))
        console = Console(highlight=False, markup=False, soft_wrap=True)
        if explain:
            console.print(_explained(simulation.explain()))
        rounds, until_s = settings.rounds, plan.until_s
        history = simulation.run(until_s, rounds, folder, progress=not quiet)
        console.print(history.table())
        for file in (EVENTS, SUMMARY, MODEL, CURVES):
            if (folder / file).exists():
                console.print(str(folder / file))
    return history


def _explained(rows: Sequence[Row]) -> str:
    """`rows` in columns, a line each."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {why}" for name, value, why in rows]
    return "\n".join([*lines, ""])
