"""The data, the model and the training; nothing here knows of Flower.

1,797 handwritten digits of 8 x 8 pixels, from the UCI repository, as the package `scikit-learn`
carries them. The package is read as a file and never imported.
"""

from __future__ import annotations

import gzip
import importlib.metadata
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

NUM_CLASSES = 10
NUM_TEST = 360
BATCH_SIZE = 16


def make_model() -> nn.Module:
    """A multi-layer perceptron: (batch, 64) -> (batch, 10), 4,810 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))


def load_partition(
    partition: int, num_partitions: int, kind: str = "iid", alpha: float = 0.5, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """One client's images (n, 64) and classes (n,).

    `kind` "iid": equal shares of a shuffled whole. "dirichlet": each class is divided among the
    clients in proportions drawn from Dirichlet(alpha) (Hsu et al., arXiv:1909.06335). Either way
    every image belongs to one client, and every client has one at least.
    """
    x, y, _, _ = _data()
    index = _partitions(num_partitions, kind, alpha, seed)[partition]
    return x[index], y[index]


def load_test() -> tuple[Tensor, Tensor]:
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


def make_loader(
    partition: int, num_partitions: int, kind: str = "iid", alpha: float = 0.5, seed: int = 1
) -> Loader:
    """A client's batches, for `flwr_moshpit.TorchTrainer`."""
    return Loader(*load_partition(partition, num_partitions, kind, alpha, seed))


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
    """Images and classes: of training, and of test. Once per process."""
    with gzip.open(_package_file("scikit-learn", "digits.csv.gz"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    x = torch.from_numpy(table[:, :-1] / 16)
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    return x[NUM_TEST:], y[NUM_TEST:], x[:NUM_TEST], y[:NUM_TEST]


@cache
def _partitions(num_partitions: int, kind: str, alpha: float, seed: int) -> list[Tensor]:
    """Indices into the training images, for each partition."""
    _, y, _, _ = _data()
    if num_partitions > len(y):
        raise ValueError(f"{len(y)} images do not suffice for {num_partitions} clients")
    rng = np.random.default_rng(seed)
    if kind == "iid":
        shares = np.array_split(rng.permutation(len(y)), num_partitions)
    elif kind == "dirichlet":
        shares = _dirichlet(y.numpy(), num_partitions, alpha, rng)
    else:
        raise ValueError(f'partition must be "iid" or "dirichlet", not {kind!r}')
    return [torch.from_numpy(np.sort(share)) for share in shares]


def _dirichlet(
    classes: np.ndarray, num_partitions: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, not {alpha}")
    shares: list[list[int]] = [[] for _ in range(num_partitions)]
    for label in range(NUM_CLASSES):
        own = rng.permutation(np.flatnonzero(classes == label))
        proportions = rng.dirichlet(np.full(num_partitions, alpha))
        cuts = np.round(np.cumsum(proportions)[:-1] * len(own)).astype(int)
        for share, piece in zip(shares, np.split(own, cuts), strict=True):
            share.extend(piece.tolist())
    for share in shares:
        if not share:
            share.append(max(shares, key=len).pop())
    return [np.array(share) for share in shares]


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
