"""Fewer bytes for a vector: none, float16, or 8 bits in blocks, with error feedback.

What a codec leaves out of a vector x in one round is not lost: `Feedback` adds it to what is sent
in the next (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847). With
e what has been left out so far and q = decode(encode(x + e)),

    e <- x + e - q

so what was sent in all, plus e, is what there was to send in all: the mean over T rounds is wrong
by e / T, and e does not grow. Among peers that replace their x by the mean of their q, the sum of
x + e never changes.

Packed pieces are flat uint8 arrays, little-endian. Codecs are functions of their input alone, so a
piece that is asked for again is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from flwr_moshpit.errors import ConfigError, RemoteProtocolError

Vector: TypeAlias = npt.NDArray[Any]
"""(n,), float32 or float64, finite."""
Packed: TypeAlias = npt.NDArray[np.uint8]

BLOCK = 256
"""Elements that share a scale: 4 bytes for these are 1.6 % on top."""


_LARGEST = 0.999 * float(np.finfo(np.float32).max)
"""Larger values are cut off at this, so that 127 times a rounded scale is still a float32."""


class Codec(Protocol):
    """Vectors to bytes and back."""

    name: ClassVar[str]

    def packed_bytes(self, count: int, dtype: npt.DTypeLike) -> int:
        """Length of what `encode` makes of `count` elements."""
        ...

    def encode(self, values: Vector) -> Packed: ...

    def decode(self, packed: Packed, count: int, dtype: npt.DTypeLike) -> Vector:
        """(count,) of `dtype`, read-only. Raises RemoteProtocolError for what no `encode` makes."""
        ...


class NoCompression:
    """Every bit as it is."""

    name: ClassVar[str] = "none"

    def packed_bytes(self, count: int, dtype: npt.DTypeLike) -> int:
        return count * np.dtype(dtype).itemsize

    def encode(self, values: Vector) -> Packed:
        return _packed(values)

    def decode(self, packed: Packed, count: int, dtype: npt.DTypeLike) -> Vector:
        _check_length(self, packed, count, dtype)
        return _finite(_view(packed, np.dtype(dtype)))


class Float16:
    """Half precision, a relative error of 2^-11. Beyond its range a value is cut off at 65504."""

    name: ClassVar[str] = "float16"

    def packed_bytes(self, count: int, dtype: npt.DTypeLike) -> int:
        return 2 * count

    def encode(self, values: Vector) -> Packed:
        largest = float(np.finfo(np.float16).max)
        return _packed(np.clip(values, -largest, largest).astype(np.float16))

    def decode(self, packed: Packed, count: int, dtype: npt.DTypeLike) -> Vector:
        _check_length(self, packed, count, dtype)
        return _finite(_view(packed, np.dtype(np.float16)).astype(dtype))


class Blockwise8Bit:
    """Blocks of 256 elements: the largest magnitude / 127 as float32, then a signed byte for each
    element, the nearest multiple of that. Wrong by 1/254 of the block's largest at most."""

    name: ClassVar[str] = "int8"

    def packed_bytes(self, count: int, dtype: npt.DTypeLike) -> int:
        return count + 4 * _num_blocks(count)

    def encode(self, values: Vector) -> Packed:
        count, num_blocks = len(values), _num_blocks(len(values))
        blocks = np.zeros((num_blocks, BLOCK), values.dtype)
        blocks.reshape(-1)[:count] = values
        largest = np.minimum(np.abs(blocks).max(axis=1, initial=0.0), _LARGEST)
        scales = (largest / 127).astype(np.float32)
        divisors = np.where(scales > 0, scales, 1).astype(values.dtype)
        codes = np.clip(np.rint(blocks / divisors[:, None]), -127, 127).astype(np.int8)
        codes[scales == 0] = 0
        return _joined(scales, codes.reshape(-1)[:count])

    def decode(self, packed: Packed, count: int, dtype: npt.DTypeLike) -> Vector:
        _check_length(self, packed, count, dtype)
        begin = 4 * _num_blocks(count)
        scales = _finite(_view(packed[:begin], np.dtype(np.float32)))
        codes = packed[begin:].view(np.int8)
        if (scales < 0).any() or (codes == -128).any():
            raise RemoteProtocolError("8-bit data that no peer makes")
        values = codes.astype(dtype)
        with np.errstate(over="ignore"):
            values *= np.repeat(scales.astype(dtype), BLOCK)[:count]
        return _finite(values)


CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (NoCompression(), Float16(), Blockwise8Bit())
}
"""From the most exact to the smallest."""


def codec_of(name: str) -> Codec:
    """Raises ConfigError for a name that is none of `CODECS`."""
    if name not in CODECS:
        raise ConfigError(f"compression must be one of {', '.join(CODECS)}, not {name!r}")
    return CODECS[name]


def agreed(names: Sequence[str]) -> str:
    """What a group uses whose members ask for `names`: the most exact of them. Unknown names count
    as "none", which everybody can decode."""
    order = list(CODECS)
    return min((n if n in CODECS else order[0] for n in names), key=order.index, default=order[0])


class Feedback:
    """What a peer's codec has left out so far. One for each vector that is sent again and again:
    `encode` its pieces during a round, then `commit`, or `rollback` if the round came to nothing.
    """

    def __init__(self, codec: Codec, dim: int, dtype: npt.DTypeLike) -> None:
        self.codec = codec
        self.residual: Vector = np.zeros(dim, dtype)
        """(dim,), what goes along with the next round: e above."""
        self._next: dict[int, Vector] = {}

    def encode(self, begin: int, values: Vector) -> Packed:
        """Pack the piece of the vector that begins at `begin`, and what was left out of it before.

        Within a round the same piece gives the same bytes, however often it is asked for.
        """
        wanted = values + self.residual[begin : begin + len(values)]
        packed = self.codec.encode(wanted)
        wanted -= self.codec.decode(packed, len(values), values.dtype)
        self._next[begin] = wanted
        return packed

    def commit(self) -> None:
        """The round's pieces count. Elements that were in none of them keep what they had."""
        for begin, left_out in self._next.items():
            self.residual[begin : begin + len(left_out)] = left_out
        self._next = {}

    def rollback(self) -> None:
        """What was encoded since the last `commit` does not count."""
        self._next = {}

    def rescale(self, factor: float) -> None:
        """The weight that the vector is sent with is now 1/factor of what it was: what was left out
        keeps its mass."""
        self.residual *= self.residual.dtype.type(factor)


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _packed(values: npt.NDArray[Any]) -> Packed:
    """The bytes of `values`, not copied if they are in order."""
    packed: Packed = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)
    packed.setflags(write=False)
    return packed


def _joined(scales: npt.NDArray[np.float32], codes: npt.NDArray[np.int8]) -> Packed:
    packed: Packed = np.concatenate([_packed(scales), codes.view(np.uint8)])
    packed.setflags(write=False)
    return packed


def _view(packed: Packed, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    raw = np.ascontiguousarray(packed)
    return np.frombuffer(raw.data, dtype.newbyteorder("<")).astype(dtype, copy=False)


def _check_length(codec: Codec, packed: Packed, count: int, dtype: npt.DTypeLike) -> None:
    wanted = codec.packed_bytes(count, dtype)
    if packed.ndim != 1 or packed.dtype != np.uint8 or len(packed) != wanted:
        raise RemoteProtocolError(f"{len(packed)} bytes for {count} elements, not {wanted}")


def _finite(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not np.isfinite(values).all():
        raise RemoteProtocolError("compressed data with NaN or infinities")
    values.setflags(write=False)
    return values
