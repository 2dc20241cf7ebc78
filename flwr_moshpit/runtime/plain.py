"""Values in files: JSON, and arrays as .npy. What traces and checkpoints are made of.

Nothing here is ever pickled, and reading makes nothing but numbers, texts, bytes, arrays, lists,
tuples, dicts and the dataclasses of the modules below.

A block is one line of JSON, `{"value": ..., "arrays": number}`, and so many arrays after it.
In the value an object with one of these keys stands for what JSON does not have:

    {"tuple": [...]}   {"dict": [[key, value], ...]}   {"bytes": "base64"}   {"array": index}
    {"scalar": index} a numpy scalar    {"kind": "messages.Part", "fields": {...}} a dataclass
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flwr_moshpit import config
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.protocol import machine, membership_messages, messages
from flwr_moshpit.protocol.baselines import messages as rivals

Array = npt.NDArray[Any]


class TornError(MoshpitError, ValueError):
    """A file ends too early, or holds what it cannot hold."""


def _kinds(prefix: str, module: ModuleType) -> dict[str, type]:
    """The dataclasses and named tuples that `module` defines."""
    return {
        f"{prefix}.{name}": kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and kind.__module__ == module.__name__
        and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))
    }


_KINDS = (
    _kinds("machine", machine)
    | _kinds("messages", messages)
    | _kinds("rivals", rivals)
    | _kinds("membership", membership_messages)
    | _kinds("config", config)
)
_NAMES = {kind: name for name, kind in _KINDS.items()}


def write_block(file: BinaryIO, value: Any) -> None:
    """Append `value`. Raises TypeError for what cannot be written."""
    arrays: list[Array] = []
    packed = _pack(value, arrays)
    line = {"value": packed, "arrays": len(arrays)}
    file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    for array in arrays:
        np.lib.format.write_array(file, array, allow_pickle=False)


def read_block(file: BinaryIO) -> Any:
    """The next value; arrays are read-only. Raises EOFError at the end and TornError within."""
    raw = file.readline()
    if not raw:
        raise EOFError
    if not raw.endswith(b"\n"):
        raise TornError("the last line is torn")
    try:
        line = json.loads(raw)
        arrays = [_read_array(file) for _ in range(line["arrays"])]
        return _unpack(line["value"], arrays)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, MemoryError) as error:
        raise TornError(f"not a block of values: {error}") from error


def digest(value: Any) -> str:
    """SHA-256 of `value`, arrays bit for bit, in hex. Raises TypeError as `write_block` does."""
    arrays: list[Array] = []
    packed = _pack(value, arrays)
    hashed = hashlib.sha256(json.dumps(packed, separators=(",", ":")).encode())
    for array in arrays:
        hashed.update(f"{array.dtype.str}{array.shape}".encode())
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _pack(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, np.generic):
        # Before numbers: a numpy float is a float, but calculates in another precision.
        arrays.append(np.asarray(value))
        return {"scalar": len(arrays) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects cannot be written")
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) in _NAMES:
        fields = {name: _pack(getattr(value, name), arrays) for name in _fields_of(type(value))}
        return {"kind": _NAMES[type(value)], "fields": fields}
    if isinstance(value, tuple):
        return {"tuple": [_pack(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_pack(item, arrays) for item in value]
    if isinstance(value, Mapping):
        pairs = [[_pack(key, arrays), _pack(item, arrays)] for key, item in value.items()]
        return {"dict": pairs}
    raise TypeError(f"a {type(value).__name__} cannot be written")


def _fields_of(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields)


def _unpack(packed: Any, arrays: list[Array]) -> Any:
    if isinstance(packed, list):
        return [_unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "kind" in packed:
        fields = {name: _unpack(item, arrays) for name, item in packed["fields"].items()}
        return _KINDS[packed["kind"]](**fields)
    ((tag, content),) = packed.items()
    match tag:
        case "tuple":
            return tuple([_unpack(item, arrays) for item in content])
        case "dict":
            return {_unpack(key, arrays): _unpack(item, arrays) for key, item in content}
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "array":
            return arrays[content]
        case "scalar":
            return arrays[content][()]
    raise ValueError(f"unknown tag {tag!r}")


def _read_array(file: BinaryIO) -> Array:
    array: Array = np.lib.format.read_array(file, allow_pickle=False)
    array.setflags(write=False)
    return array
