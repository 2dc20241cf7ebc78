"""What a member of a group sends, made smaller, with what that leaves out sent in later rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_moshpit.compression import Feedback, Packed, codec_of
from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.protocol.machine import Vector


class Packing:
    """Of one vector of (dim,), from round to round: see `compression.py`.

    The sum of w (x + e) over the members, and the means' own e at their reducers, do not change:
    what the codec leaves out of parts and of means is only late.
    """

    def __init__(self, dim: int, dtype: np.dtype[Any]) -> None:
        codec = codec_of("none")
        self._parts = Feedback(codec, dim, dtype)
        self._means = Feedback(codec, dim, dtype)
        self._part_weight = self._mean_weight = 0.0

    def begin(self, codec: str, weight: float, total: float) -> None:
        """A round in which this vector weighs `weight` of `total`. Raises ConfigError for a codec
        that is not known."""
        self._parts.codec = self._means.codec = codec_of(codec)
        self._part_weight = _rescaled(self._parts, self._part_weight, weight)
        self._mean_weight = _rescaled(self._means, self._mean_weight, total)

    def part(self, offset: int, values: Vector) -> Packed:
        """The same for the same piece, until the round ends."""
        return self._parts.encode(offset, values)

    def mean(self, offset: int, values: Vector) -> Packed:
        """The mean of a piece, for everybody; `values` becomes what they make of it."""
        packed = self._means.encode(offset, values)
        values[:] = self._means.codec.decode(packed, len(values), values.dtype)
        return packed

    def begin_version(self) -> None:
        """Means that were made so far do not count."""
        self._means.rollback()

    def end(self, contributed: bool, averaged: bool) -> None:
        """Whether this vector is in the round's result, and whether there is one."""
        for feedback, counts in ((self._parts, contributed), (self._means, averaged)):
            if counts:
                feedback.commit()
            else:
                feedback.rollback()


def _rescaled(feedback: Feedback, old: float, new: float) -> float:
    """The weight by which what is left out is measured now: one of 0 sends nothing."""
    if new <= 0:
        return old
    if old > 0 and old != new:
        feedback.rescale(old / new)
    return new


def unpacked(data: Vector, codec: str, size: int, dtype: np.dtype[Any]) -> Vector | None:
    """(size,) of `dtype`, or None for bytes that are not that. Values, as opposed to bytes, are as
    they should be: that is how a mean is sent again."""
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or codec == "none":
        return data
    try:
        return codec_of(codec).decode(data, size, dtype)
    except RemoteProtocolError:
        return None
