"""When a run reaches a target, which target is fair, and which of several tries was the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.simulation.history import Point

TARGET_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Run:
    """One algorithm under one seed."""

    algorithm: str
    seed: int
    lr_factor: float
    points: tuple[Point, ...]
    steps: float
    """Local steps that the mean peer took."""
    digest: str


@dataclass(frozen=True, slots=True)
class Reach:
    """When a run first was at the target, linearly between two evaluations."""

    t: float
    """Virtual seconds."""
    bytes: float
    joules: float


def reach(points: Sequence[Point], metric: str, target: float) -> Reach | None:
    """When a run first is at `target` accuracy or above, at `target` loss or below."""
    before: tuple[Point, float] | None = None
    for point in points:
        value = value_of(point, metric)
        if value is None or not math.isfinite(value):
            continue
        if value >= target if metric == "accuracy" else value <= target:
            if before is None:
                return Reach(point.t, point.bytes, point.joules)
            last, low = before
            share = (target - low) / (value - low)
            return Reach(
                last.t + share * (point.t - last.t),
                last.bytes + share * (point.bytes - last.bytes),
                last.joules + share * (point.joules - last.joules),
            )
        before = (point, value)
    return None


def derived_target(runs: Sequence[Run], metric: str) -> float:
    """What half of the methods reach: neither one that fails nor one that excels moves it.

    95 % of the median over the methods of the mean final accuracy; or the loss after 95 % of the
    fall from the first loss to that median.
    """
    finals: dict[str, list[float]] = {}
    for run in runs:
        value = value_of(run.points[-1], metric)
        finals.setdefault(run.algorithm, []).append(math.nan if value is None else value)
    means = [statistics.fmean(values) for values in finals.values()]
    # With an even number of methods the better half counts the worst of its own.
    finite = sorted(mean for mean in means if math.isfinite(mean))
    if not finite:
        raise ConfigError(f"no run has a final {metric}: set a target of your own, or train longer")
    if metric == "accuracy":
        return TARGET_SHARE * statistics.median_low(finite)
    first = statistics.fmean(value_of(run.points[0], metric) or 0.0 for run in runs)
    return first - TARGET_SHARE * (first - statistics.median_high(finite))


def best_try(tries: Sequence[Run], algorithm: str, target: float | None) -> Run:
    """The first to reach the target in virtual time; if none does, the one that ended best.

    Without a target, it is derived from each method's try that ended best.
    """
    metric = metric_of(tries)
    sign = 1.0 if metric == "accuracy" else -1.0

    def final(run: Run) -> float:
        value = value_of(run.points[-1], metric)
        return -math.inf if value is None or not math.isfinite(value) else sign * value

    if target is None:
        names = dict.fromkeys(run.algorithm for run in tries)
        best = [max((r for r in tries if r.algorithm == name), key=final) for name in names]
        target = derived_target(best, metric)

    def rank(run: Run) -> tuple[float, float]:
        hit = reach(run.points, metric, target)
        return (-math.inf if hit is None else -hit.t, final(run))

    return max((run for run in tries if run.algorithm == algorithm), key=rank)


def metric_of(runs: Sequence[Run]) -> str:
    """ "accuracy" where every run has it at its end, else "loss"."""
    return "accuracy" if all(run.points[-1].accuracy is not None for run in runs) else "loss"


def value_of(point: Point, metric: str) -> float | None:
    return point.accuracy if metric == "accuracy" else point.loss
