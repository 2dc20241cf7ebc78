"""Batches: a client's place in its loader, and their way to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

Batches: TypeAlias = Iterable[tuple[Any, Any]]
"""Batches (x, y); x is what the model takes, y what the loss takes, and len(y) the examples."""


class Place:
    """A place in batches that are gone through again and again."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._iterator: Iterator[tuple[Any, Any]] = iter(())
        self._num_taken = 0
        """In this pass."""
        self._sizes = _batch_sizes(batches)

    def next(self) -> tuple[Any, Any] | None:
        """The next batch; None if there is none even at the beginning."""
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator, self._num_taken = iter(self._batches), 0
            batch = next(self._iterator, None)
        self._num_taken += 1
        return batch

    def examples_ahead(self, num_batches: int) -> int | None:
        """Examples in the next `num_batches`, or None if only iterating tells."""
        sizes = self._sizes
        if not sizes:
            return None
        begin = self._num_taken % len(sizes)
        passes, rest = divmod(begin + num_batches, len(sizes))
        return passes * sum(sizes) + sum(sizes[:rest]) - sum(sizes[:begin])


def _batch_sizes(batches: Batches) -> list[int] | None:
    """Of one pass, or None if only iterating tells."""
    if isinstance(batches, (list, tuple)):
        return [len(y) for _, y in batches]
    if not isinstance(batches, DataLoader) or batches.batch_size is None:
        return None
    if isinstance(batches.dataset, IterableDataset):
        return None
    num_examples, size = len(batches.sampler), batches.batch_size  # type: ignore[arg-type]
    sizes = [size] * (num_examples // size)
    if num_examples % size and not batches.drop_last:
        sizes.append(num_examples % size)
    return sizes


def moved(data: Any, device: torch.device, double: bool) -> Any:
    """The tensors of a batch on `device`, those of floats in float64 if `double`."""
    if isinstance(data, Tensor):
        return data.to(device, torch.float64 if double and data.is_floating_point() else data.dtype)
    if isinstance(data, Mapping):
        return {name: moved(value, device, double) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return tuple(moved(value, device, double) for value in data)
    return data


def are_classes(scores: Any, y: Any) -> bool:
    """Whether `scores` has one score per class, along axis 1, for the classes `y`."""
    return (
        isinstance(scores, Tensor)
        and isinstance(y, Tensor)
        and not y.is_floating_point()
        and scores.dim() == y.dim() + 1
    )
