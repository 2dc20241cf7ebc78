"""What came out of a simulation: every report, the curve of the swarm's mean, the final model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.json_lines import JsonLines, plain
from flwr_moshpit.observe.plots import figure, save_png
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.protocol.machine import PeerId, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVENTS, SUMMARY, MODEL, CURVES = "events.jsonl", "summary.json", "model.npz", "accuracy.png"

_log = logging.getLogger("flwr_moshpit")


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One peer's round, as its machine reported it. A protocol leaves out what it does not know."""

    t: float
    """Virtual seconds at its end."""
    peer: PeerId
    round: int
    coverage: float = 1.0
    """Fraction of the vector that was averaged."""
    contributors: int = 1
    """Peers whose vectors are in the average, this one included."""
    weight: float = 0.0
    """Sum of the contributors' weights."""
    examples: int = 0
    """That this peer trained on."""
    bytes_sent: int = 0
    """Of parameters, by this peer."""
    local_s: float = 0.0
    """Training."""
    wait_s: float = 0.0
    """From the end of its training to the beginning of the exchange."""
    allreduce_s: float = 0.0
    """The exchange."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The whole report."""

    @classmethod
    def of(cls, t: float, peer: PeerId, values: Mapping[str, Any]) -> RoundRecord:
        known = {key: values[key] for key in cls.__slots__ if key in values}
        return cls(**{**known, "t": t, "peer": peer, "values": values})


@dataclass(frozen=True, slots=True)
class Point:
    """The swarm at one instant. None: the task does not measure it."""

    t: float
    """Virtual seconds."""
    round: int
    """Completed by the median living peer."""
    alive: int
    accuracy: float | None
    """Of the swarm's mean model, sum(weight * params) / sum(weight) over the living peers."""
    loss: float | None
    consensus_distance: float | None
    """Root mean square over the living peers of ||params - mean||."""
    consensus_relative: float | None
    """The same, divided by ||mean||."""
    bytes: int
    """Sent by all peers so far, headers included."""
    joules: float
    """Used by all peers so far."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All that the trainer's `evaluate` gave."""


@dataclass(frozen=True)
class History:
    """The outcome of a run. `save` writes it all; `table`, `plot` and `summary` look at it."""

    digest: str
    """SHA-256 over what happened: equal digests, equal runs."""
    virtual_s: float
    bytes: int
    joules: float
    interrupted: bool
    points: Sequence[Point]
    params: Mapping[str, np.ndarray[Any, Any]]
    """The averaged arrays of the swarm's mean model at the end, by name."""
    events: Sequence[tuple[float, PeerId | None, Report]]
    """Every report, in order: (virtual seconds, peer or None for the swarm, report)."""
    settings: Mapping[str, Any]
    """What was run: algorithm, peers, fleet, seed, faults, version."""

    @cached_property
    def rounds(self) -> list[RoundRecord]:
        """Every peer's every round, in order of their ends."""
        return [
            RoundRecord.of(t, peer, report.values)
            for t, peer, report in self.events
            if report.name == "round" and peer is not None
        ]

    @property
    def accuracy(self) -> float | None:
        """Of the mean model at the end."""
        return self.points[-1].accuracy if self.points else None

    @property
    def loss(self) -> float | None:
        """Of the mean model at the end."""
        return self.points[-1].loss if self.points else None

    def summary(self) -> dict[str, Any]:
        """The run in numbers and text, as in `summary.json`."""
        last = self.points[-1] if self.points else None
        return {
            "digest": self.digest,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "consensus_distance": last.consensus_distance if last else None,
            "consensus_relative": last.consensus_relative if last else None,
            "virtual_s": self.virtual_s,
            "bytes": self.bytes,
            "joules": self.joules,
            "rounds": last.round if last else 0,
            "alive": last.alive if last else 0,
            "coverage": float(np.mean([r.coverage for r in self.rounds])) if self.rounds else None,
            "interrupted": self.interrupted,
            **self.settings,
        }

    def table(self, rows: int = 10) -> str:
        """The curve in at most `rows` lines of text, and the totals below it."""
        head = ("time", "round", "alive", "accuracy", "loss", "consensus", "sent", "energy")
        lines = [head, *(_cells(point) for point in _thinned(self.points, rows))]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        ended = "interrupted after" if self.interrupted else "done in"
        accuracy = "" if self.accuracy is None else f"accuracy {self.accuracy:.4f}, "
        text += [
            "",
            f"{accuracy}{ended} {duration(self.virtual_s)} of virtual time, "
            f"{scaled(self.bytes, 'B')} sent, {scaled(self.joules, 'J')}",
            f"digest {self.digest}",
        ]
        return "\n".join(text)

    def plot(self, metric: str = "accuracy") -> Figure:
        """A curve over virtual time: "accuracy", "loss", "consensus_distance", "alive", or any
        metric that the trainer's `evaluate` gave. Raises ConfigError where matplotlib is missing.
        """
        return figure([point.t for point in self.points], {metric: self._curve(metric)})

    def save(self, folder: str | Path) -> None:
        """Write events.jsonl, summary.json, model.npz and, with matplotlib, accuracy.png."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with JsonLines(folder / EVENTS) as write:
            for event in self.events:
                write(*event)
        self.save_results(folder)

    def save_results(self, folder: Path) -> None:
        """`save` without events.jsonl, for who has streamed it while the run went on."""
        folder.mkdir(parents=True, exist_ok=True)
        summary = json.dumps(plain(self.summary()), indent=2, allow_nan=False)
        (folder / SUMMARY).write_text(summary + "\n", encoding="utf-8")
        np.savez(folder / MODEL, **self.params)  # type: ignore[arg-type]
        measured = "accuracy" if self.accuracy is not None else "loss"
        curves = {name: self._curve(name) for name in (measured, "consensus_distance")}
        try:
            save_png(folder / CURVES, [point.t for point in self.points], curves)
        except ConfigError as error:
            _log.warning("%s is not drawn: %s", CURVES, error)

    def _curve(self, metric: str) -> list[float | None]:
        rows = [{**point.metrics, **asdict(point)} for point in self.points]
        if rows and not any(metric in row for row in rows):
            known = ", ".join(sorted({key for row in rows for key in row} - {"metrics"}))
            raise ConfigError(f"metric {metric!r} was not measured; there are: {known}")
        return [row.get(metric) for row in rows]


def _cells(point: Point) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        duration(point.t),
        str(point.round),
        str(point.alive),
        number(point.accuracy, ".4f"),
        number(point.loss, ".4g"),
        number(point.consensus_distance, ".1e"),
        scaled(point.bytes, "B"),
        scaled(point.joules, "J"),
    )


def _thinned(points: Sequence[Point], count: int) -> list[Point]:
    """At most `count` of `points`, evenly, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    return [points[round(k * (len(points) - 1) / (count - 1))] for k in range(count)]
