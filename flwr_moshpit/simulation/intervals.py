"""Means of a few seeds with the interval that they allow to state, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles for 1 to 30 degrees of freedom; beyond, the normal's is within 4 %.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T95_BEYOND = 1.960


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of `count` values, and between what bounds the true one lies with 95 % confidence."""

    mean: float
    low: float
    high: float
    count: int


def mean_interval(values: Sequence[float]) -> Interval:
    """The arithmetic mean; one value alone has an unbounded interval. Needs at least one."""
    mean = statistics.fmean(values)
    half = _half_width(values)
    return Interval(mean, mean - half, mean + half, len(values))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of positive ratios, so that a/b and b/a say the same. At least one."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), _half_width(logs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(ratios))


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _half_width(values: Sequence[float]) -> float:
    freedom = len(values) - 1
    if freedom < 1:
        return math.inf
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _T95_BEYOND
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
