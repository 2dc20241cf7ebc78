"""`flwr-moshpit compare`: several algorithms on one app, under the same conditions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flwr_moshpit.config import ALGORITHMS
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import App, load_app
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.progress import Progress
from flwr_moshpit.observe.text import duration, notice, scaled
from flwr_moshpit.settings import (
    LEARNING_RATES,
    RunSettings,
    algorithm_keys,
    gather,
    read_toml,
)
from flwr_moshpit.simulation.compare import compare
from flwr_moshpit.simulation.comparison import CURVES, RESULTS, Comparison
from flwr_moshpit.simulation.contest import Contest, Task, steps_per_round
from flwr_moshpit.simulation.device import load_catalogue
from flwr_moshpit.simulation.fault_grammar import parse_duration
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.reach import Run
from flwr_moshpit.trainer import Trainer

DEFAULT_ALGORITHMS = "moshpit,rfast,ring,dpsgd,adpsgd,osgp,fedavg"
DEFAULT_SEEDS = "3"


def compare_app(
    name: str,
    *,
    flags: Mapping[str, Any],
    algorithms: str = DEFAULT_ALGORITHMS,
    seeds: str = DEFAULT_SEEDS,
    target: float | None = None,
    tries: int = 1,
    config: Path | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> Comparison:
    """Compare `algorithms`, names with commas, on the app called `name`, and write to `out`.

    `seeds` is how many, from the setting `seed` on, or the seeds themselves with commas. Settings
    are those of `gather`; one that only some of the algorithms have is theirs. Raises ConfigError
    for a wrong setting, before anything is written, and TrainerError where the app's code raises.
    """
    app = load_app(name)
    settings = _gathered(app, _names(algorithms), read_toml(config) if config else {}, flags)
    contest = _contest(app, settings, seeds, target, tries)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    workers = next(iter(settings.values())).workers
    with run_folder(out) as folder:
        if not quiet:
            notice(*next(iter(settings.values())).remarks)
        contest = contest.asked_of_the_app()
        console.print(_header(contest))
        if quiet:
            comparison = compare(contest, workers=workers, out=folder)
        else:
            with RunsProgress(contest) as progress:
                comparison = compare(contest, workers=workers, follower=progress, out=folder)
        console.print(comparison.table())
        for file in (RESULTS, CURVES):
            if (folder / file).exists():
                console.print(str(folder / file))
    return comparison


@dataclass(frozen=True)
class AppTrainers:
    """Trainers of an app with its learning rate multiplied."""

    app: App
    config: Mapping[str, bool | int | float | str]

    def __call__(self, factor: float) -> Trainer:
        if factor == 1:
            return self.app.trainer(self.config)
        key = self.rate_key
        return self.app.trainer({**self.config, key: float(self.config[key]) * factor})

    @property
    def rate_key(self) -> str:
        """The learning rate's key in the app's config. Raises ConfigError if there is none."""
        for key in LEARNING_RATES:
            if key in self.config:
                return key
        raise ConfigError(
            f"tune: app {self.app.name!r} has no learning rate to try others of: its config "
            f"needs {' or '.join(LEARNING_RATES)}"
        )


class RunsProgress:
    """Tells of a comparison on stderr: a line for every run that has ended and, on a terminal, how
    far the one under way is."""

    def __init__(self, contest: Contest, console: Console | None = None) -> None:
        self._contest = contest
        self._console = console or Console(stderr=True)
        self._began = time.monotonic()
        self._done = 0
        self._task: Task | None = None
        self._run: Progress | None = None
        self._live: Live | None = None

    def __enter__(self) -> RunsProgress:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=5, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_start(self, task: Task) -> Progress:
        contest = self._contest
        self._task = task
        self._run = Progress(
            num_peers=contest.peers,
            rounds=contest.rounds_of(task.algorithm),
            until_s=contest.until_s,
            # Its own lines, ten a run, would be too many.
            console=Console(quiet=True),
        )
        return self._run

    def on_end(self, task: Task, run: Run) -> None:
        self._done += 1
        self._run = None
        last = run.points[-1]
        measured = (
            f"accuracy {last.accuracy:.4f}" if last.accuracy is not None else f"loss {last.loss:g}"
        )
        self._console.print(
            f"{self._done:3}/{self._contest.num_runs}  {_named(task)}  {measured}, "
            f"{duration(last.t)} of virtual time, {scaled(last.bytes, 'B')}{self._left()}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def __rich__(self) -> Text:
        if self._task is None or self._run is None:
            return Text(f"{self._done}/{self._contest.num_runs} runs done{self._left()}")
        return Text(f"{_named(self._task)}  {self._run.line()}{self._left()}")

    def _left(self) -> str:
        done = self._done + (self._run.fraction if self._run is not None else 0.0)
        if not 0 < done < self._contest.num_runs:
            return ""
        passed_s = time.monotonic() - self._began
        return f"; {duration(passed_s * (self._contest.num_runs - done) / done)} left in all"


def _named(task: Task) -> str:
    what = f"tries lr x {task.lr_factor:g}" if task.is_try else f"seed {task.seed}"
    return f"{task.algorithm}, {what}:"


def _names(algorithms: str) -> list[str]:
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    for name in names:
        if name not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ConfigError(f"algorithms: {name!r} is unknown; there are: {known}")
        if names.count(name) > 1:
            raise ConfigError(f"algorithms: {name} is named twice")
    return names


def _gathered(
    app: App, names: Sequence[str], file: Mapping[str, Any], flags: Mapping[str, Any]
) -> dict[str, RunSettings]:
    """The settings of each algorithm's runs: what others of them have is left out."""
    keys = {name: algorithm_keys(name) for name in names}
    of_any = {key for known in keys.values() for key in known}

    def without_others(source: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {k: v for k, v in source.items() if k not in of_any or k in keys[name]}

    return {
        name: gather(
            app.config,
            without_others(file, name),
            {**without_others(flags, name), "algorithm": name},
        )
        for name in names
    }


def _contest(
    app: App,
    settings: Mapping[str, RunSettings],
    seeds: str,
    target: float | None,
    tries: int,
) -> Contest:
    if not settings:
        raise ConfigError("algorithms: there is none to compare")
    run = next(iter(settings.values()))
    catalogue = load_catalogue(run.catalogue) if run.catalogue else None
    # Said before the app's frameworks, which take seconds to load.
    Fleet.parse(run.fleet, run.peers, catalogue=catalogue)
    trainers = AppTrainers(app, run.app)
    if tries > 1:
        _ = trainers.rate_key  # refuses here what would fail after the first runs
    algorithms = {name: of.algorithm for name, of in settings.items()}
    until_s = None if run.until is None else parse_duration(str(run.until), "until")
    steps = None
    if run.rounds is not None and until_s is None:
        steps = run.rounds * max(steps_per_round(each) for each in algorithms.values())
    return Contest(
        algorithms=algorithms,
        make_trainer=trainers,
        peers=run.peers,
        fleet=run.fleet,
        catalogue=catalogue,
        faults=run.faults,
        seeds=_seeds(seeds, run.seed),
        until_s=until_s,
        steps=steps,
        target=target,
        tries=tries,
        dtype=run.dtype,
        cost_as=run.cost_as,
    )


def _seeds(text: str, first: int) -> tuple[int, ...]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"seeds: {text!r} is neither how many, as 5, nor seeds, as 3,7,9"
        ) from error
    if "," in text:
        return tuple(numbers)
    if numbers[0] < 1:
        raise ConfigError(f"seeds: there must be at least 1, not {numbers[0]}")
    return tuple(range(first, first + numbers[0]))


def _header(contest: Contest) -> str:
    """What is compared, before it begins."""
    seeds = ", ".join(map(str, contest.seeds))
    lines = [
        ", ".join(contest.algorithms),
        f"{contest.peers} peers ({contest.fleet}), seeds {seeds}",
        f"{contest.ends}; {contest.num_runs} runs",
    ]
    if contest.faults:
        lines.append(f"faults: {'; '.join(str(fault) for fault in contest.faults)}")
    if contest.has_round_faults:
        lines.append("a fault at a round meets each method when it has got to that round")
    if contest.tries > 1:
        factors = ", ".join(f"{factor:g}" for factor in contest.lr_factors)
        lines.append(
            f"each method first tries {contest.tries} learning rates, {factors} times the app's, "
            f"on seed {contest.tuning_seed}"
        )
    return "\n".join([*lines, ""])
