"""Named arrays <-> one flat vector (d,): the only form in which protocols know a model.

A `Layout` is made once from any model's arrays: a torch `state_dict`, a Flower `ArrayRecord`, a
dict of arrays, or a list of them (named "0", "1", ...). Everything goes by name; the vector holds
the averaged arrays in the order of their sorted names, so the order in which a framework lists them
does not matter. Neither torch nor flwr is imported here unless the arrays already are theirs.

    averaged    float16, bfloat16, float32, float64: in the vector
    kept        integers and booleans, and names that match `exclude`: outside it, with the client
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from flwr_moshpit.errors import ConfigError, SchemaError
from flwr_moshpit.protocol.machine import Vector

NamedArrays: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""Arrays by name, or in order: ndarrays, torch tensors or Flower `Array`s."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_KEPT_PREFIXES = ("bool", "int", "uint")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As numpy and torch call it: "float32", "bfloat16", "int64", ..."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout:
    """How named arrays lie in a flat vector of length `dim` and type `dtype`.

    Two peers can average when their layouts have the same `schema`: 16 bytes of SHA-256 over names,
    shapes and dtypes of the averaged arrays and the vector's dtype. Kept arrays are not in it.
    """

    def __init__(
        self,
        averaged: Iterable[ArraySpec],
        kept: Iterable[str] = (),
        dtype: str = "float32",
        names: Iterable[str] = (),
    ) -> None:
        """`names`: all of them, in the order in which the model's own framework lists them."""
        self.averaged: tuple[ArraySpec, ...] = tuple(sorted(averaged, key=lambda spec: spec.name))
        """The arrays in the vector, in its order."""
        self.kept_names: tuple[str, ...] = tuple(sorted(kept))
        """The arrays that each client keeps for itself."""
        self.names: tuple[str, ...] = tuple(names) or (
            *(spec.name for spec in self.averaged),
            *self.kept_names,
        )
        """All arrays, as `unflatten` lists them: who reads a list of them goes by their order."""
        self.dtype: np.dtype[Any] = np.dtype(_checked_dtype(dtype))
        """Of the vector: float32 or float64."""
        self.slices: dict[str, slice] = {}
        """Where each averaged array lies in the vector."""
        begin = 0
        for spec in self.averaged:
            self.slices[spec.name] = slice(begin, begin + spec.size)
            begin += spec.size
        self.dim: int = begin
        """d, the length of the vector."""
        described = [self.dtype.name, [[s.name, s.shape, s.dtype] for s in self.averaged]]
        self.schema: bytes = hashlib.sha256(json.dumps(described).encode()).digest()[:16]

    @classmethod
    def of(
        cls, arrays: NamedArrays, *, exclude: Iterable[str] = (), dtype: str | None = None
    ) -> Layout:
        """The layout of a model's arrays.

        `exclude` holds patterns as in `fnmatch` of names that are not averaged. `dtype` of the
        vector: "float32", "float64", or None for float64 if an averaged array is float64 and
        float32 otherwise.

        Raises ConfigError for a pattern that matches no name, for an array that can neither be
        averaged nor kept as it is (complex numbers, objects), and when nothing is left to average.
        """
        specs = [_spec(name, array) for name, array in _by_name(arrays).items()]
        excluded = _excluded([spec.name for spec in specs], exclude)
        averaged = []
        for spec in specs:
            if spec.name in excluded or spec.dtype.startswith(_KEPT_PREFIXES):
                continue
            if spec.dtype not in _FLOATS:
                raise ConfigError(
                    f"array {spec.name!r} has dtype {spec.dtype}, which cannot be averaged: "
                    f"keep it out with exclude=[{spec.name!r}]"
                )
            averaged.append(spec)
        if not averaged:
            names = ", ".join(spec.name for spec in specs) or "none"
            raise ConfigError(f"no array is left to average; the model's arrays are: {names}")
        if dtype is None:
            double = any(spec.dtype == "float64" for spec in averaged)
            dtype = "float64" if double else "float32"
        inside = {spec.name for spec in averaged}
        listed = [spec.name for spec in specs]
        return cls(averaged, [name for name in listed if name not in inside], dtype, listed)

    def __repr__(self) -> str:
        return (
            f"Layout(dim={self.dim}, dtype={self.dtype.name}, averaged={len(self.averaged)}, "
            f"kept={len(self.kept_names)}, schema={self.schema.hex()})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.schema == other.schema and self.kept_names == other.kept_names

    def __hash__(self) -> int:
        return hash(self.schema)

    def with_dtype(self, dtype: str | None) -> Layout:
        """The same arrays in a vector of type `dtype`; itself for None."""
        if dtype is None:
            return self
        return Layout(self.averaged, self.kept_names, dtype, self.names)

    def flatten(self, arrays: NamedArrays) -> Vector:
        """The averaged arrays as one read-only vector (d,): one copy of the data.

        Values pass bit for bit where an array has the vector's dtype. Another float type than the
        layout's is cast. Raises SchemaError naming the first array that is missing, unknown, not of
        floats, or of another shape.
        """
        named = _by_name(arrays)
        self._check_names(named)
        vector: Vector = np.empty(self.dim, self.dtype)
        for spec in self.averaged:
            array = named[spec.name]
            found = _spec(spec.name, array)
            if found.shape != spec.shape:
                raise SchemaError(_differs(spec.name, "shape", spec.shape, found.shape))
            if found.dtype not in _FLOATS:
                raise SchemaError(_differs(spec.name, "dtype", spec.dtype, found.dtype))
            _copy(array, vector[self.slices[spec.name]].reshape(spec.shape))
        vector.flags.writeable = False
        return vector

    def kept(self, arrays: NamedArrays) -> dict[str, Any]:
        """Copies of the arrays that stay outside the vector, by name, with their own dtypes."""
        named = _by_name(arrays)
        self._check_names(named)
        return {name: _clone(named[name]) for name in self.kept_names}

    def unflatten(self, vector: Vector, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The model's arrays by name, in the model's order, each with its own dtype and shape.

        Views of `vector` (read-only if it is) where the dtype is the vector's, copies otherwise;
        bfloat16 comes back as a torch tensor, because numpy has no such type. `kept` supplies the
        arrays outside the vector. Raises SchemaError if one is missing or `vector` is not (d,).
        """
        if vector.shape != (self.dim,):
            raise SchemaError(f"the vector has shape {vector.shape}, the model needs ({self.dim},)")
        named: dict[str, Any] = {}
        dtype = vector.dtype.name
        for spec in self.averaged:
            view = vector[self.slices[spec.name]].reshape(spec.shape)
            named[spec.name] = view if spec.dtype == dtype else _as_dtype(view, spec.dtype)
        for name in self.kept_names:
            if kept is None or name not in kept:
                raise SchemaError(f"array {name!r} is not averaged and was not given")
            named[name] = kept[name]
        return {name: named[name] for name in self.names}

    def check(self, other: Layout) -> None:
        """Raises SchemaError naming the first array in which `other` differs from this layout."""
        here = {spec.name: spec for spec in self.averaged}
        there = {spec.name: spec for spec in other.averaged}
        for name in sorted({**here, **there}):
            if name not in there:
                raise SchemaError(f"array {name!r} is missing in the other model")
            if name not in here:
                raise SchemaError(f"array {name!r} of the other model is unknown here")
            if here[name].shape != there[name].shape:
                raise SchemaError(_differs(name, "shape", here[name].shape, there[name].shape))
            if here[name].dtype != there[name].dtype:
                raise SchemaError(_differs(name, "dtype", here[name].dtype, there[name].dtype))
        if self.dtype != other.dtype:
            raise SchemaError(
                f"the vectors differ in dtype: {self.dtype.name} here, {other.dtype.name} there"
            )

    def _check_names(self, named: Mapping[str, Any]) -> None:
        expected = {**self.slices, **dict.fromkeys(self.kept_names)}
        if named.keys() == expected.keys():
            return
        for name in sorted({**expected, **named}):
            if name not in named:
                raise SchemaError(f"array {name!r} is missing")
            if name not in expected:
                raise SchemaError(f"array {name!r} is unknown; there are: {', '.join(expected)}")


def _checked_dtype(dtype: str) -> str:
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype must be float32 or float64, not {dtype!r}")
    return dtype


def _excluded(names: Sequence[str], exclude: Iterable[str]) -> dict[str, None]:
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    excluded: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise ConfigError(f"exclude pattern {pattern!r} matches none of: {', '.join(names)}")
        excluded.update(dict.fromkeys(matches))
    return excluded


def _by_name(arrays: NamedArrays) -> Mapping[str, Any]:
    if isinstance(arrays, Mapping):
        return arrays
    return {str(index): array for index, array in enumerate(arrays)}


def _differs(name: str, what: str, here: object, there: object) -> str:
    return f"array {name!r} differs in {what}: {here} here, {there} there"


def _is_torch(array: Any) -> bool:
    return hasattr(array, "detach") and hasattr(array, "cpu")


def _is_flower(array: Any) -> bool:
    return hasattr(array, "stype") and isinstance(getattr(array, "data", None), bytes)


def _spec(name: str, array: Any) -> ArraySpec:
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    dtype = getattr(array.dtype, "name", None) or str(array.dtype).removeprefix("torch.")
    return ArraySpec(name, tuple(int(length) for length in array.shape), dtype)


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    """An ndarray of what is not a torch tensor, without a copy where that can be."""
    if not _is_flower(array):
        return np.asarray(array)
    # Flower's own `Array.numpy()` copies the data out of the NPY bytes; reading the header and
    # looking at the rest saves that copy.
    begin = _npy_begin(array.data)
    if begin is None:
        return np.load(io.BytesIO(array.data), allow_pickle=False)  # type: ignore[no-any-return]
    shape, fortran_order, dtype = _npy_header(array.data[:begin])
    flat = np.frombuffer(array.data, dtype, math.prod(shape), begin)
    return flat.reshape(shape, order="F" if fortran_order else "C")


def _npy_begin(data: bytes) -> int | None:
    """Where the values begin in an NPY file of version 1.0; None in any other."""
    return 10 + int.from_bytes(data[8:10], "little") if data[:8] == b"\x93NUMPY\x01\x00" else None


@lru_cache(maxsize=4096)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return np.lib.format.read_array_header_1_0(io.BytesIO(header[8:]))


def _copy(array: Any, out: np.ndarray[Any, Any]) -> None:
    if _is_torch(array):
        import torch

        torch.from_numpy(out).copy_(array.detach())
        return
    # A float64 beyond float32's range becomes infinite, as it would in torch, without a warning.
    with np.errstate(over="ignore"):
        out[...] = _as_numpy(array)


def _clone(array: Any) -> Any:
    if not _is_torch(array):
        return np.array(_as_numpy(array))
    copied = array.detach().cpu().clone()
    try:
        return copied.numpy()
    except TypeError:  # bfloat16 and the like, which numpy does not know
        return copied


def _as_dtype(view: np.ndarray[Any, Any], dtype: str) -> Any:
    if dtype == "bfloat16":
        import torch

        tensor = torch.empty(view.shape, dtype=torch.bfloat16)
        return tensor.copy_(torch.tensor(view))
    with np.errstate(over="ignore"):
        return view.astype(dtype)
