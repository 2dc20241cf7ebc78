"""`flwr-moshpit simulate`: an app's clients on virtual devices, and what is written of the run."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_moshpit.commands.settings import RunSettings, gather, read_toml
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.observe.progress import Progress
from flwr_moshpit.simulation.device import load_catalogue
from flwr_moshpit.simulation.explain import Row
from flwr_moshpit.simulation.fault_grammar import parse_duration
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.history import CURVES, EVENTS, MODEL, SUMMARY, History
from flwr_moshpit.simulation.run import Simulation


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
    fleet = _fleet(settings)
    until_s = _until_s(settings)
    out = next_run(Path("runs")) if out is None else out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out {str(out)!r} is a file, not a folder")

    progress = Progress(num_peers=settings.peers, rounds=settings.rounds, until_s=until_s)
    simulation = Simulation(
        settings.algorithm,
        app.trainer(settings.app),
        fleet=fleet,
        faults=settings.faults,
        seed=settings.seed,
        workers=settings.workers,
        dtype=settings.dtype,
        cost_as=settings.cost_as,
        observe=None if quiet else progress,
    )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if explain:
        console.print(_explained(simulation.explain()))
    with nullcontext() if quiet else progress:
        history = simulation.run(until=until_s, rounds=settings.rounds, out=out)
    console.print(history.table())
    for file in (EVENTS, SUMMARY, MODEL, CURVES):
        if (out / file).exists():
            console.print(str(out / file))
    return history


def _explained(rows: Sequence[Row]) -> str:
    """`rows` in columns, a line each."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {why}" for name, value, why in rows]
    return "\n".join([*lines, ""])


def _fleet(settings: RunSettings) -> Fleet:
    catalogue = load_catalogue(settings.catalogue) if settings.catalogue else None
    return Fleet.parse(settings.fleet, settings.peers, seed=settings.seed, catalogue=catalogue)


def _until_s(settings: RunSettings) -> float | None:
    if settings.until is None:
        return None
    return parse_duration(str(settings.until), "until")


def next_run(folder: Path) -> Path:
    """The first unused `folder/YYYY-MM-DD-N`."""
    today = datetime.date.today().isoformat()
    paths = (folder / f"{today}-{number}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
