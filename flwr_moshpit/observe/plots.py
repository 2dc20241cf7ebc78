"""Curves over virtual time as a PNG. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_moshpit.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Label of the vertical axis, and whether it is logarithmic.
_AXES = {
    "accuracy": ("Accuracy", False),
    "loss": ("Loss", False),
    "consensus_distance": ("Consensus distance", True),
    "alive": ("Living peers", False),
}
_BLUE, _GREY = "#1f5fa8", "#5a5a5a"


def figure(
    times_s: Sequence[float], curves: Mapping[str, Sequence[float | None]], title: str = ""
) -> Figure:
    """One panel per curve, over a shared axis of virtual time.

    `curves` maps a quantity (`accuracy`, `loss`, `consensus_distance`, `alive`, or a name of one's
    own) to its values, one per time; None, NaN and, on a logarithmic axis, 0 are left out.
    Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'flwr-moshpit[plot]'") from error

    # Figure without pyplot: no global state, no window, and Agg is its canvas.
    made = Figure(figsize=(7.5, 0.6 + 2.5 * len(curves)), dpi=150, layout="constrained")
    panels: list[Any] = list(made.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0])
    factor, unit = time_unit(max(times_s, default=0.0))
    for panel, (name, values) in zip(panels, curves.items(), strict=True):
        label, logarithmic = _AXES.get(name, (name.replace("_", " ").capitalize(), False))
        points = [
            (time_s / factor, value)
            for time_s, value in zip(times_s, values, strict=True)
            if value is not None and math.isfinite(value) and (value > 0 or not logarithmic)
        ]
        _draw(panel, points, label, logarithmic)
    made.align_ylabels(panels)
    panels[-1].set_xlabel(f"Virtual time ({unit})", color=_GREY)
    if title:
        made.suptitle(title, fontsize=11, x=0.01, ha="left", color="#222222")
    return made


def save_png(
    path: Path,
    times_s: Sequence[float],
    curves: Mapping[str, Sequence[float | None]],
    title: str = "",
) -> None:
    """Write `figure` to `path`. Raises ConfigError where matplotlib is missing."""
    # Without the version in the file, one run's picture is the same bytes everywhere it can be.
    figure(times_s, curves, title).savefig(path, format="png", metadata={"Software": None})


def _draw(panel: Any, points: list[tuple[float, float]], label: str, logarithmic: bool) -> None:
    panel.set_ylabel(label, color=_GREY)
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b8b8b8")
    panel.tick_params(colors=_GREY, labelsize=9)
    if not points:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color=_GREY)
        panel.set_yticks([])
        return
    if logarithmic:
        _logarithmic(panel, [value for _, value in points])
    times, values = zip(*points, strict=True)
    panel.plot(times, values, color=_BLUE, linewidth=1.8, marker="o", markersize=3)
    panel.set_xlim(left=0)
    last = f"{values[-1]:.2g}" if logarithmic else f"{values[-1]:.3f}"
    panel.annotate(
        last,
        (times[-1], values[-1]),
        textcoords="offset points",
        xytext=(6, 0),
        va="center",
        fontsize=9,
        color=_BLUE,
        annotation_clip=False,
    )


def _logarithmic(panel: Any, values: list[float]) -> None:
    """Few ticks, and plain numbers on a short axis: matplotlib's own crowd a decade or two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_yscale("log")
    panel.yaxis.set_minor_locator(NullLocator())
    if max(values) < 100 * min(values):
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        panel.yaxis.set_major_locator(LogLocator(numticks=7))


def time_unit(longest_s: float) -> tuple[float, str]:
    for factor, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if longest_s >= 2 * factor:
            return factor, unit
    return 1.0, "s"
