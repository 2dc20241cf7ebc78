"""What came out of a swarm of processes, in the files that a simulation writes too."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_moshpit import __version__
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.observe.json_lines import plain
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.protocol.machine import Vector
from flwr_moshpit.settings import RunSettings
from flwr_moshpit.vector import Layout

EVENTS, SUMMARY, MODEL = "events.jsonl", "summary.json", "model.npz"


@dataclass(frozen=True, slots=True)
class Measured:
    """The swarm's mean model at one instant."""

    wall_s: float
    """Since the first round began."""
    round: int
    """Completed by the median living peer."""
    alive: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class SwarmResults:
    """The outcome of a run. All times are real seconds on this machine."""

    wall_s: float
    """From the beginning of the first round to the end of the last peer's."""
    start_s: float
    """Before that: starting processes, loading trainers, finding each other."""
    bytes: int
    """Sent by all peers that ended by themselves, in frames, headers included."""
    interrupted: bool
    points: Sequence[Measured]
    params: Mapping[str, np.ndarray[Any, Any]]
    """The averaged arrays of the mean of the living peers' models at the end, by name."""
    coverage: float | None
    """Mean over all peers' rounds."""
    wait_s: float | None
    """Mean over all peers' rounds, from the end of training to the beginning of the exchange."""
    alive: int
    failed: Mapping[str, str]
    """Peers whose training kept failing to the end, and what failed."""
    rounds: int
    settings: Mapping[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Of the mean model at the end."""
        return self._last("accuracy")

    @property
    def loss(self) -> float | None:
        return self._last("loss")

    def _last(self, metric: str) -> float | None:
        return self.points[-1].metrics.get(metric) if self.points else None

    def summary(self) -> dict[str, Any]:
        """The run in numbers and text, as in `summary.json`. There is no digest: real time makes
        every run different."""
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "wall_s": self.wall_s,
            "start_s": self.start_s,
            "bytes": self.bytes,
            "rounds": self.rounds,
            "alive": self.alive,
            "failed": self.failed,
            "coverage": self.coverage,
            "wait_s": self.wait_s,
            "interrupted": self.interrupted,
            **self.settings,
        }

    def table(self) -> str:
        """The end of the run in two lines, and one for each peer that failed."""
        parts = [] if self.accuracy is None else [f"accuracy {self.accuracy:.4f}"]
        ended = "interrupted after" if self.interrupted else "done in"
        parts.append(f"{ended} {duration(self.wall_s)} of real time")
        parts.append(f"{scaled(self.bytes, 'B')} sent")
        second = [f"{self.rounds} rounds", f"{self.alive}/{self.settings['peers']} peers"]
        if self.coverage is not None:
            second.append(f"mean coverage {100 * self.coverage:.1f} %")
        if self.wait_s is not None:
            second.append(f"mean wait {duration(self.wait_s)}")
        second.append(f"{duration(self.start_s)} to start")
        failed = [f"{peer}: {what}" for peer, what in self.failed.items()]
        return "\n".join([", ".join(parts), ", ".join(second), *failed])

    def save(self, folder: Path) -> None:
        """Write summary.json and model.npz; events.jsonl was written while the run went on. Raises
        MoshpitError where that is not possible."""
        summary = json.dumps(plain(self.summary()), indent=2, allow_nan=False)
        with whole(folder / SUMMARY) as path:
            path.write_text(summary + "\n", encoding="utf-8")
        if self.params:
            save_model(folder, self.params)


def save_model(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Write model.npz, whole or not at all. Raises MoshpitError where that is not possible."""
    with whole(folder / MODEL) as path:
        np.savez(path, **arrays)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Write to what is given, which takes the name `path` when that is done, or is removed."""
    scratch = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise MoshpitError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def named_arrays(layout: Layout, vector: Vector) -> dict[str, Any]:
    """The averaged arrays by name; bfloat16, which numpy does not have, as float32. What each
    client keeps for itself is nobody else's."""
    specs = [
        dataclasses.replace(spec, dtype="float32") if spec.dtype == "bfloat16" else spec
        for spec in layout.averaged
    ]
    return Layout(specs, (), layout.dtype.name).unflatten(vector)


def described(settings: RunSettings) -> dict[str, Any]:
    """What was run, for `SwarmResults.settings`."""
    algorithm = settings.algorithm
    names = [field.name for field in dataclasses.fields(algorithm)]
    return {
        "algorithm": type(algorithm).__name__,
        "algorithm_settings": {name: getattr(algorithm, name) for name in names},
        "peers": settings.peers,
        "seed": settings.seed,
        "until_round": settings.rounds,
        "dtype": settings.dtype,
        "transport": "gRPC over mutual TLS, one process per peer and one per trainer",
        "version": __version__,
    }
