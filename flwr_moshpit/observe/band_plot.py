"""One line per method over virtual time, with a band over its runs. Needs the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.plots import time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Virtual seconds and values."""

Curves: TypeAlias = Mapping[str, Sequence[Curve]]
"""By method, one for each run."""

# Okabe and Ito's, which the colour-blind can tell apart; their yellow is too light for a line.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f",
)  # fmt: skip
_GREY = "#5a5a5a"
_GRID_POINTS = 400
_LABEL_GAP = 0.052
"""Least distance between two labels, as a fraction of the axis."""
_LOGARITHMIC_FROM = 15.0
"""Ratio of the slowest method's end to the fastest's from which time is drawn as logarithms."""


def band_figure(curves: Curves, metric: str, target: float | None = None) -> Figure:
    """The mean over a method's runs as a line that its name ends, their range as a band.

    Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'flwr-moshpit[plot]'") from error

    made = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    panel: Any = made.subplots()
    _style(panel, metric, max((len(runs) for runs in curves.values()), default=0))
    bands = {name: _band(runs) for name, runs in curves.items() if any(t for t, _ in runs)}
    ends = [float(times[-1]) for times, *_ in bands.values()]
    factor, unit = time_unit(max(ends, default=0.0))
    is_log = bool(ends) and max(ends) > _LOGARITHMIC_FROM * min(end for end in ends if end > 0)
    panel.set_xlabel(f"Virtual time ({unit}{', logarithmic' if is_log else ''})", color=_GREY)
    if is_log:
        panel.set_xscale("log")
    for index, (times, mean, low, high) in enumerate(bands.values()):
        colour = _COLOURS[index % len(_COLOURS)]
        style = "-" if index < len(_COLOURS) else "--"
        panel.plot(times / factor, mean, color=colour, linewidth=1.8, linestyle=style, zorder=3)
        panel.fill_between(times / factor, low, high, color=colour, alpha=0.15, linewidth=0)
    if target is not None:
        panel.axhline(target, color=_GREY, linewidth=1, linestyle=":", zorder=2)
        panel.annotate(
            f"target {target:.3g}",
            (0.005, target),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8,
            color=_GREY,
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    first = min((t for runs in curves.values() for ts, _ in runs for t in ts if t > 0), default=0)
    panel.set_xlim(first / factor if is_log else 0, max(ends, default=1.0) / factor)
    _label(panel, {name: (t[-1] / factor, mean[-1]) for name, (t, mean, *_) in bands.items()})
    return made


def save_band_png(path: Path, curves: Curves, metric: str, target: float | None = None) -> None:
    """Write `band_figure` to `path`. Raises ConfigError where matplotlib is missing."""
    # Without the version in the file, one comparison's picture is the same bytes everywhere.
    band_figure(curves, metric, target).savefig(path, format="png", metadata={"Software": None})


def spread_labels(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in [0, 1], at least `gap` apart where there is room, as near to `wanted` as that
    allows and in its order."""
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    gap = min(gap, 1.0 / max(1, len(wanted) - 1))
    placed = [0.0] * len(wanted)
    floor = 0.0
    for index in order:
        placed[index] = max(wanted[index], floor)
        floor = placed[index] + gap
    ceiling = 1.0
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


Band: TypeAlias = tuple[Any, Any, Any, Any]
"""Times, mean, lowest and highest, each (n,)."""


def _band(runs: Sequence[Curve]) -> Band:
    """All runs on one axis of time, up to where the shortest ends."""
    runs = [run for run in runs if len(run[0])]
    end = min(times[-1] for times, _ in runs)
    # The runs' own times too: evaluations early in a run are denser than an even grid.
    own = np.concatenate([np.asarray(times, float) for times, _ in runs])
    grid = np.unique(np.concatenate([np.linspace(0.0, end, _GRID_POINTS), own[own <= end]]))
    start = max(times[0] for times, _ in runs)
    grid = grid[grid >= start]
    values = np.stack([np.interp(grid, times, curve) for times, curve in runs])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _style(panel: Any, metric: str, num_runs: int) -> None:
    if num_runs > 1:
        title = f"Mean and range over {num_runs} seeds"
        panel.set_title(title, fontsize=9, color=_GREY, loc="left")
    panel.set_ylabel(metric.replace("_", " ").capitalize(), color=_GREY)
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b8b8b8")
    panel.tick_params(colors=_GREY, labelsize=9)


def _label(panel: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """Each line's name and last value to the right of the axis, with a thin line to its end."""
    panel.autoscale_view()
    low, high = panel.get_ylim()
    right = panel.get_xlim()[1]
    heights = [(value - low) / (high - low) for _, value in ends.values()]
    places = spread_labels(heights, _LABEL_GAP)
    for index, ((name, (time, value)), place) in enumerate(zip(ends.items(), places, strict=True)):
        colour = _COLOURS[index % len(_COLOURS)]
        number = f"{value:.3f}" if math.isfinite(value) else "?"
        panel.annotate(
            f"{name} {number}",
            (time, value),
            xytext=(1.025, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "alpha": 0.6,
                "linestyle": "-" if time >= 0.999 * right else ":",
                "relpos": (0.0, 0.5),
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )
