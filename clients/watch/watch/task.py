"""The data, the model and the training; nothing here knows of Flower.

Ten people did seven physiotherapy exercises with each arm while a watch measured acceleration and
rotation, 50 times a second (Burns et al., "Shoulder physiotherapy exercise recognition: machine
learning the inertial signals from a smartwatch", Physiological Measurement 39, 2018). The data are
in the package `seglearn`, which is read as a file and never imported.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TEST_PEOPLE = (9, 10)
"""Never seen in training, by any client."""

WINDOW, STRIDE = 100, 50
"""Samples in a window, and from one window to the next: two seconds and one."""

NUM_CLASSES = 7
BATCH_SIZE = 16


def make_model() -> nn.Module:
    """A small 1-D CNN: (batch, 6, 100) -> (batch, 7), 12,903 parameters."""
    return nn.Sequential(
        nn.Conv1d(6, 32, kernel_size=9, stride=4),
        nn.ReLU(),
        nn.Conv1d(32, 48, kernel_size=7, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(48, NUM_CLASSES),
    )


def load_partition(partition: int, num_partitions: int) -> tuple[Tensor, Tensor]:
    """One client's windows (n, 6, 100) and classes (n,).

    By nature there are 16 clients: eight people, two arms. Fewer clients get several arms each,
    more get a piece in time of one: the same stretch of each of its seven exercises. The pieces of
    an arm differ in size by at most one window.
    """
    x, y, _, _ = _data()
    index = _partitions(num_partitions)[partition]
    return x[index], y[index]


def load_test() -> tuple[Tensor, Tensor]:
    """All windows and classes of the people never seen in training."""
    _, _, x, y = _data()
    return x, y


def batches(x: Tensor, y: Tensor, num_steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`num_steps` full batches in random order, from torch's global generator.

    All data are used once before any are used again; a batch may reach over that border.
    """
    passes = -(-num_steps * size // len(y))
    order = torch.cat([torch.randperm(len(y)) for _ in range(passes)])
    for index in order[: num_steps * size].split(size):
        yield x[index], y[index]


def make_loader(partition: int, num_partitions: int) -> Loader:
    """A client's batches, for `flwr_moshpit.TorchTrainer`."""
    return Loader(*load_partition(partition, num_partitions))


def make_test_loader() -> list[tuple[Tensor, Tensor]]:
    return [load_test()]


class Loader:
    """Batches of one pass in a new random order, whenever it is iterated."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        num_steps = max(1, len(self._y) // BATCH_SIZE)
        return batches(self._x, self._y, num_steps, BATCH_SIZE)


def train(model: nn.Module, x: Tensor, y: Tensor, num_steps: int, lr: float, size: int) -> float:
    """Take `num_steps` steps of SGD; the mean loss on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    total = torch.zeros(())
    for inputs, classes in batches(x, y, num_steps, size):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(total) / num_steps


@torch.no_grad()
def test(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    scores = model(x)
    loss = nn.functional.cross_entropy(scores, y)
    return float(loss), float((scores.argmax(1) == y).float().mean())


@cache
def _data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Windows and classes: of training, in the order of `_arms`, and of test. Once per process."""
    recordings = _recordings()
    seen = [np.concatenate(r["X"]) for r in recordings if r["person"] not in TEST_PEOPLE]
    samples = np.concatenate(seen)
    mean, spread = samples.mean(0), samples.std(0)

    def windows(of_test: bool) -> tuple[Tensor, Tensor]:
        x, y = [], []
        for recording in recordings:
            if (recording["person"] in TEST_PEOPLE) is of_test:
                for series, label in zip(recording["X"], recording["y"], strict=True):
                    cut = _cut((series - mean) / spread)
                    x.append(cut)
                    y.append(np.full(len(cut), label))
        return (
            torch.from_numpy(np.concatenate(x).astype(np.float32)),
            torch.from_numpy(np.concatenate(y).astype(np.int64)),
        )

    return (*windows(False), *windows(True))


def _cut(series: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(t, 6) -> (n, 6, 100)."""
    view = np.lib.stride_tricks.sliding_window_view(series, WINDOW, axis=0)
    return view[::STRIDE]


@cache
def _partitions(num_partitions: int) -> list[Tensor]:
    """Indices into the training windows, for each partition."""
    arms = _arms()
    if num_partitions <= len(arms):
        bounds = [len(arms) * part // num_partitions for part in range(num_partitions + 1)]
        return [torch.cat(arms[a:b]) for a, b in itertools.pairwise(bounds)]
    pieces: list[Tensor] = []
    for number, arm in enumerate(arms):
        count = num_partitions // len(arms) + (number < num_partitions % len(arms))
        if count > len(arm):
            raise ValueError(
                f"the data do not suffice for {num_partitions} clients: an arm has {len(arm)} "
                f"windows, and {count} clients would share it"
            )
        pieces.extend(arm.tensor_split(count))
    return pieces


def _arms() -> list[Tensor]:
    """Indices of each training person's and arm's windows, by their place in time.

    The place is relative to the length of the recording, so that a stretch holds all exercises.
    """
    arms, begin = [], 0
    for recording in _recordings():
        if recording["person"] in TEST_PEOPLE:
            continue
        lengths = [len(_cut(series)) for series in recording["X"]]
        place = np.concatenate([(np.arange(n) + 0.5) / n for n in lengths])
        arms.append(torch.from_numpy(begin + np.argsort(place, kind="stable")))
        begin += len(place)
    return arms


@cache
def _recordings() -> list[dict[str, Any]]:
    """One for each person and arm, in that order: its series (t, 6) and their classes."""
    # The file is a pickle, as the package ships it: it is trusted like the package's code.
    data = np.load(_package_file("seglearn", "watch_dataset.npy"), allow_pickle=True).item()
    people, sides = data["subject"].astype(int), data["side"].astype(int)
    found = []
    for person in sorted(set(people.tolist())):
        for side in (0, 1):
            own = np.flatnonzero((people == person) & (sides == side))
            found.append(
                {
                    "person": person,
                    "side": side,
                    "X": [data["X"][index] for index in own],
                    "y": [int(data["y"][index]) for index in own],
                }
            )
    return found


def _package_file(package: str, name: str) -> str:
    """The path of a file in an installed package, without importing the package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name:
            return str(file.locate())
    raise ModuleNotFoundError(
        f"the data are in the package {package!r}, which is not installed: "
        "pip install 'flwr-moshpit[examples]'",
        name=package,
    )
