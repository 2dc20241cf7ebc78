"""What a peer holds: one vector and one weight for each of its cells.

Cells are virtual peers. Most peers have one; a stand-in has several, which average in different
groups and must be kept apart until the sweep has made them equal. Nothing here changes the sum of
w x, or of w, over the cells, except where the method says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import Vector

HOMELESS = -1
"""Number of the one cell of a peer that no plan gives a cell to: it keeps what it has."""


class Cells:
    """params: (d,), not copied; it becomes read-only."""

    def __init__(self, params: Vector) -> None:
        params.setflags(write=False)
        self._numbers = [HOMELESS]
        self._vectors: list[Vector] = [params]
        self._weights = [0.0]
        self._mean: Vector | None = params

    @property
    def numbers(self) -> list[int]:
        return [] if self._numbers == [HOMELESS] else self._numbers

    @property
    def weight(self) -> float:
        return self._weights[0] if len(self._weights) == 1 else sum(self._weights)

    @property
    def mean(self) -> Vector:
        """(d,), the weighted mean of the cells: what the peer trains from and shows."""
        if self._mean is None:
            self._mean, _ = self._pooled(range(len(self._numbers)))
        return self._mean

    def joined(self, cells: Sequence[int]) -> tuple[Vector, float]:
        """The weighted mean of some cells, and the sum of their weights."""
        return self._pooled([self._numbers.index(cell) for cell in cells])

    def assign(self, numbers: Sequence[int]) -> None:
        """A plan gives this peer other cells: each gets an equal part of all that it has."""
        wanted = list(numbers) or [HOMELESS]
        if wanted == self._numbers:
            return
        mean, weight = self.mean, self.weight
        self._numbers = wanted
        self._vectors = [mean] * len(wanted)
        self._weights = [weight / len(wanted)] * len(wanted)
        self._mean = mean

    def weigh(self, weight: float) -> None:
        """Weigh `weight` from now on, each cell an equal part of it; the vectors stay."""
        each = weight / len(self._weights)
        if any(mine != each for mine in self._weights):
            self._weights = [each] * len(self._weights)
            self._mean = self._vectors[0] if len(self._vectors) == 1 else None

    def add_training(self, base: Vector, trained: Vector) -> None:
        """Move all cells by trained - base; a vector that was `base` becomes `trained` itself."""
        trained.setflags(write=False)
        if all(vector is base for vector in self._vectors):
            self._vectors = [trained] * len(self._vectors)
            self._mean = trained
            return
        change = np.subtract(trained, base)
        self._vectors = [_frozen(vector + change) for vector in self._vectors]
        self._mean = self._vectors[0] if len(self._vectors) == 1 else None

    def pool(self, cells: Sequence[int]) -> None:
        """These cells average among themselves."""
        vector, weight = self.joined(cells)
        for cell in cells:
            index = self._numbers.index(cell)
            self._vectors[index] = vector
            self._weights[index] = weight / len(cells)

    def replace(self, cells: Sequence[int], vector: Vector, weight: float | None = None) -> None:
        """These cells now hold `vector`, each with `weight`, or with what it weighed."""
        for cell in cells:
            index = self._numbers.index(cell)
            self._vectors[index] = vector
            if weight is not None:
                self._weights[index] = weight
        self._mean = vector if len(self._numbers) == 1 else None

    def begin_with(self, vector: Vector) -> None:
        """All cells hold `vector`, (d,), with weight 0: what a newcomer was given."""
        self._vectors = [vector] * len(self._numbers)
        self._weights = [0.0] * len(self._numbers)
        self._mean = vector

    def drop(self, cells: Sequence[int]) -> None:
        """These cells weigh nothing any more, and hold what the others do."""
        for cell in cells:
            self._weights[self._numbers.index(cell)] = 0.0
        self._mean = None
        if self.weight > 0:
            self.replace(cells, self.mean)

    def snapshot(self) -> dict[str, Any]:
        return {
            "numbers": list(self._numbers),
            "vectors": list(self._vectors),
            "weights": list(self._weights),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._numbers = list(state["numbers"])
        self._vectors = [_frozen(np.array(vector)) for vector in state["vectors"]]
        self._weights = [float(weight) for weight in state["weights"]]
        self._mean = None

    def _pooled(self, indices: Sequence[int]) -> tuple[Vector, float]:
        first = self._vectors[indices[0]]
        weight = sum(self._weights[index] for index in indices)
        if all(self._vectors[index] is first for index in indices):
            return first, weight
        shares = [
            self._weights[index] / weight if weight > 0 else 1 / len(indices) for index in indices
        ]
        mean = np.zeros_like(first)
        for index, share in zip(indices, shares, strict=True):
            mean += self._vectors[index] * mean.dtype.type(share)
        return _frozen(mean), weight


def _frozen(vector: Vector) -> Vector:
    vector.setflags(write=False)
    return vector
