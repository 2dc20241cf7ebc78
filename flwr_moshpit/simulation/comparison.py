"""What came out of a comparison: rows with mean and spread over the seeds, paired ratios, files."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.band_plot import Curves, save_band_png
from flwr_moshpit.observe.json_lines import plain
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.simulation.history import Point
from flwr_moshpit.simulation.intervals import Interval, ratio_interval, spread
from flwr_moshpit.simulation.reach import (
    TARGET_SHARE,
    Run,
    derived_target,
    metric_of,
    reach,
    value_of,
)

RESULTS, CURVES = "compare.json", "compare.png"

_LITTLE = 0.1
"""A target that differs by less than this share from the initial model's metric is remarked on."""
_EARLY = 0.1
"""A method that ends before this share of the median method's time is remarked on."""

_log = logging.getLogger("flwr_moshpit")


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation over the seeds."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times longer a method takes to the target than another, seed by seed."""

    interval: Interval
    """The geometric mean and its 95 % interval."""
    is_bound: bool
    """In some run the slower one never got there: its whole time stands in, and the ratio is at
    least this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm over all seeds. None: not measured, or the target was never reached."""

    algorithm: str
    lr_factor: float
    runs: int
    reached: int
    """Runs that reached the target; time, bytes and joules are over these."""
    time_s: Spread | None
    bytes: Spread | None
    joules: Spread | None
    final: Spread | None
    """Accuracy of the mean model at the end, or loss."""
    consensus_distance: Spread | None
    """At the end."""
    steps: Spread
    """Local steps of the mean peer."""
    end_s: Spread
    """Virtual time at the end."""
    ratio: Ratio | None
    """Its time to the target over the first algorithm's."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`. `save` writes it all, `table` prints it."""

    settings: Mapping[str, Any]
    algorithms: tuple[str, ...]
    ends: str
    """Where each run ended, in words."""
    given_target: float | None
    runs: tuple[Run, ...]
    tries: tuple[Run, ...]
    """The runs that chose the learning rates."""
    interrupted: bool

    @cached_property
    def metric(self) -> str:
        """ "accuracy" where every run has it at its end, else "loss"."""
        return metric_of(self.runs or self.tries)

    @cached_property
    def target(self) -> float | None:
        if self.given_target is not None or not self.runs:
            return self.given_target
        return derived_target(self.runs, self.metric)

    @property
    def target_rule(self) -> str:
        """The target in words."""
        if self.target is None:
            return "no target"
        text = f"target {self.metric} {self.target:.4g}"
        if self.given_target is not None:
            return f"{text}, as given"
        share = f"{100 * TARGET_SHARE:g} %"
        if self.metric == "accuracy":
            return f"{text}: {share} of the median method's final one"
        return f"{text}: after {share} of the fall that the median method's makes"

    def of(self, algorithm: str) -> list[Run]:
        """Its runs, in order of their seeds."""
        return [run for run in self.runs if run.algorithm == algorithm]

    def rows(self) -> list[Row]:
        """One for each algorithm that has a complete run."""
        return [self._row(name) for name in self.algorithms if self.of(name)]

    def ratio(self, slow: str, fast: str) -> Ratio | None:
        """Time to the target of `slow` over that of `fast`, over the seeds that both have run.

        None where `fast` does not reach the target in each of them, or where `slow` was over before
        `fast` got there.
        """
        if self.target is None:
            return None
        slow_by_seed = {run.seed: run for run in self.of(slow)}
        ratios, is_bound = [], False
        for run in self.of(fast):
            other = slow_by_seed.get(run.seed)
            if other is None:
                continue
            mine = reach(run.points, self.metric, self.target)
            theirs = reach(other.points, self.metric, self.target)
            if mine is None or not mine.t > 0:
                return None
            is_bound |= theirs is None
            time_s = other.points[-1].t if theirs is None else theirs.t
            if not time_s > 0 or (theirs is None and time_s < mine.t):
                return None
            ratios.append(time_s / mine.t)
        return Ratio(ratio_interval(ratios), is_bound) if ratios else None

    def table(self) -> str:
        """Rows with mean and standard deviation, and below them what was compared."""
        rows = self.rows()
        if not rows:
            return "no run is complete"
        first = rows[0].algorithm
        head = (
            "algorithm", "lr", "steps", "time to target", "bytes", "joules", "reached",
            f"final {self.metric}", "consensus", "ends at", f"time / {first}'s",
        )  # fmt: skip
        lines = [head, *(_cells(row, self.metric) for row in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = []
        for line in lines:
            name, *cells = line
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("  ".join([name.ljust(widths[0]), *aligned]))
        return "\n".join([*text, "", *self._notes()])

    def _start_near_target(self) -> float | None:
        """The metric of the initial model, where a derived target is hardly better than that."""
        curves = [_curve(run.points, self.metric)[1] for run in self.runs]
        starts = [values[0] for values in curves if values]
        if self.given_target is not None or self.target is None or not starts:
            return None
        start = statistics.fmean(starts)
        is_near = abs(self.target - start) < _LITTLE * max(abs(start), abs(self.target))
        return start if is_near else None

    def _notes(self) -> list[str]:
        seeds = sorted({run.seed for run in self.runs})
        notes = [
            f"{self.target_rule}; {self.ends}",
            f"mean +- standard deviation over {len(seeds)} seeds ({_listed(seeds)}); the last "
            "column is the geometric mean over pairs of one seed with its 95 % interval",
        ]
        start = self._start_near_target()
        if start is not None:
            notes.append(
                f"at the start the {self.metric} was {start:.4g}, close to this target: times to "
                "it say little; let them train longer, or set one (--target)"
            )
        if any(row.ratio is not None and row.ratio.is_bound for row in self.rows()):
            notes.append(">: at least, because a run ended before it reached the target")
        notes += [
            f"{row.algorithm} waits for nobody and took its steps in {duration(row.end_s.mean)}: "
            "little was exchanged by then; end the runs by time (until) to see what it can do"
            for row in self.rows()
            if row.end_s.mean < _EARLY * statistics.median(r.end_s.mean for r in self.rows())
        ]
        if self.tries:
            factors = list(dict.fromkeys(run.lr_factor for run in self.tries))
            notes.append(
                f"every method tried {len(factors)} learning rates on seed {self.tries[0].seed}: "
                f"{_listed(factors)} times the app's"
            )
        if self.interrupted:
            notes.append("interrupted: rows hold the runs that were complete")
        return notes

    def save(self, folder: str | Path) -> None:
        """Write compare.json and, with matplotlib, compare.png."""
        folder = Path(folder)
        self.save_json(folder)
        try:
            save_band_png(folder / CURVES, self.curves(), self.metric, self.target)
        except ConfigError as error:
            _log.warning("%s is not drawn: %s", CURVES, error)

    def save_json(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(self.as_dict()), indent=1, allow_nan=False)
        # Never half a file: it is rewritten after every run, and a run may be killed.
        partial = folder / f"{RESULTS}.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(folder / RESULTS)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as in `compare.json`: settings, rows, every run's curve."""
        return {
            **self.settings,
            "ends": self.ends,
            "metric": self.metric,
            "target": self.target,
            "target_rule": self.target_rule,
            "interrupted": self.interrupted,
            "rows": [asdict(row) for row in self.rows()],
            "runs": [asdict(run) for run in self.runs],
            "tries": [asdict(run) for run in self.tries],
        }

    def curves(self) -> Curves:
        """By algorithm, for each of its runs (virtual seconds, values of the metric)."""
        return {
            name: [_curve(run.points, self.metric) for run in self.of(name)]
            for name in self.algorithms
            if self.of(name)
        }

    def _row(self, name: str) -> Row:
        runs = self.of(name)
        target = self.target
        reaches = [] if target is None else [reach(r.points, self.metric, target) for r in runs]
        hits = [hit for hit in reaches if hit is not None]
        return Row(
            algorithm=name,
            lr_factor=runs[0].lr_factor,
            runs=len(runs),
            reached=len(hits),
            time_s=_spread([hit.t for hit in hits]),
            bytes=_spread([hit.bytes for hit in hits]),
            joules=_spread([hit.joules for hit in hits]),
            final=_spread([value_of(run.points[-1], self.metric) for run in runs]),
            consensus_distance=_spread([run.points[-1].consensus_distance for run in runs]),
            steps=Spread(*_mean_std([run.steps for run in runs])),
            end_s=Spread(*_mean_std([run.points[-1].t for run in runs])),
            ratio=None if name == self.algorithms[0] else self.ratio(name, self.algorithms[0]),
        )


def _curve(points: Sequence[Point], metric: str) -> tuple[list[float], list[float]]:
    known = [(point.t, value_of(point, metric)) for point in points]
    kept = [(t, value) for t, value in known if value is not None and math.isfinite(value)]
    return [t for t, _ in kept], [value for _, value in kept]


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), spread(values)


def _spread(values: Sequence[float | None]) -> Spread | None:
    """None where nothing, or not everything, was measured."""
    known = [value for value in values if value is not None]
    return Spread(*_mean_std(known)) if known and len(known) == len(values) else None


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _cells(row: Row, metric: str) -> tuple[str, ...]:
    return (
        row.algorithm,
        f"x {row.lr_factor:g}",
        f"{row.steps.mean:.0f}",
        _with_unit(row.time_s, "s"),
        _with_unit(row.bytes, "B"),
        _with_unit(row.joules, "J"),
        f"{row.reached}/{row.runs}",
        _plain(row.final, ".4f" if metric == "accuracy" else ".4g"),
        _plain(row.consensus_distance, ".2g"),
        duration(row.end_s.mean),
        _ratio_text(row.ratio),
    )


def _with_unit(value: Spread | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{duration(value.mean)} +- {_percent(value)}"
    return f"{scaled(value.mean, unit)} +- {_percent(value)}"


def _percent(value: Spread) -> str:
    return f"{100 * value.std / value.mean:.0f} %" if value.mean else "0 %"


def _plain(value: Spread | None, form: str) -> str:
    return "-" if value is None else f"{value.mean:{form}} +- {value.std:.2g}"


def _ratio_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    of = ratio.interval
    sign = ">" if ratio.is_bound else ""
    bounds = f" [{of.low:.2f}, {of.high:.2f}]" if of.count > 1 else ""
    return f"{sign}{of.mean:.2f}{bounds}"
