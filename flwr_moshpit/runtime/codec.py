"""Dataclasses to protobuf and back, by the names and types of their fields.

A `Codec` is compiled from a class and the protobuf descriptor that stands for it. Their fields
must have the same names and fitting types, or compiling raises `TypeError`: a message that was
changed on one side only is found by its first test. Decoding checks everything that a hostile peer
can make wrong, and raises `RemoteProtocolError` only.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NewType, Union

import numpy as np

from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.protocol.machine import PeerId, Vector

Buffer = memoryview
Encode = Callable[[Any, Any, list[Vector]], None]
"""(value, the protobuf message to fill, arrays met on the way)."""
Decode = Callable[[Any, "Arrays"], Any]
Put = Callable[[Any], Any]
Check = Callable[[Any], Any]

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype(np.uint8),
}
"""By number in peer.proto."""
_DTYPE_NUMBERS = {"f": 1, "d": 2, "B": 3}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a field may hold at most; lengths of strings in characters, of arrays in elements."""

    id_length: int
    text_length: int
    bytes_length: int
    count: int
    """Entries of a list."""


class Arrays:
    """Hands out the arrays of one message, in order, as read-only views of its data."""

    def __init__(self, data: Buffer, size_max: int) -> None:
        self._data = data
        self._size_max = size_max
        self.used_bytes = 0
        self.num_taken = 0

    def take(self, source: Any) -> Vector:
        """The next array, of the dtype and size that the protobuf `Array` says."""
        dtype = DTYPES.get(source.dtype)
        size = source.size
        # Packed elements and their scales take no more than a float64 each.
        most = self._size_max * (8 if source.dtype == 3 else 1)
        if dtype is None or size > most:
            raise RemoteProtocolError(f"an array of {size} elements of type {source.dtype}")
        begin, end = self.used_bytes, self.used_bytes + size * dtype.itemsize
        if end > len(self._data):
            raise RemoteProtocolError("arrays and their data differ in length")
        self.used_bytes = end
        self.num_taken += 1
        array = np.frombuffer(self._data[begin:end], dtype) if size else np.empty(0, dtype)
        array.setflags(write=False)
        return array


class Codec:
    """One class and the protobuf message that stands for it."""

    def __init__(self, cls: type, fields: Mapping[str, tuple[Encode, Decode]]) -> None:
        self.cls = cls
        self._fields = tuple((name, *pair) for name, pair in fields.items())

    def encode(self, value: Any, target: Any, arrays: list[Vector]) -> None:
        for name, encode, _ in self._fields:
            encode(getattr(value, name), target, arrays)

    def decode(self, source: Any, arrays: Arrays) -> Any:
        return self.cls(*[decode(source, arrays) for _, _, decode in self._fields])


class Compiler:
    """Makes codecs. `variants`: for a field of type Any, the classes it may hold, by the name of
    the field in the oneof that stands for it."""

    def __init__(self, bounds: Bounds, variants: Mapping[str, Mapping[str, type]]) -> None:
        self._bounds = bounds
        self._variants = variants
        self._codecs: dict[type, Codec] = {}

    def codec(self, cls: type, descriptor: Any) -> Codec:
        """Raises `TypeError` when the class and the descriptor do not fit."""
        if cls not in self._codecs:
            self._codecs[cls] = self._compile(cls, descriptor)
        return self._codecs[cls]

    def _compile(self, cls: type, descriptor: Any) -> Codec:
        hints = typing.get_type_hints(cls)
        if dataclasses.is_dataclass(cls):
            names = [field.name for field in dataclasses.fields(cls)]
        else:
            names = list(getattr(cls, "_fields", ()))
        there = {field.name: field for field in descriptor.fields}
        for oneof in descriptor.oneofs:
            if oneof.name in names:
                for field in oneof.fields:
                    del there[field.name]
                there[oneof.name] = oneof
        if sorted(names) != sorted(there):
            raise TypeError(f"{cls.__name__} has {names}, peer.proto has {sorted(there)}")
        return Codec(cls, {name: self._field(hints[name], there[name]) for name in names})

    def _field(self, hint: Any, field: Any) -> tuple[Encode, Decode]:
        """How a value of type `hint` gets into and out of `field`."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return self._oneof(field)
        if origin in (Union, types.UnionType):
            (inner,) = [arg for arg in args if arg is not type(None)]
            return _optional(field, self._field(inner, field))
        if origin is tuple:
            return self._repeated(args[0], field)
        if origin is np.ndarray:
            return _array(field)
        if field.message_type is not None:
            return self._message(hint, field)
        put, check = self._scalar(hint, field)
        name = field.name

        def encode(value: Any, target: Any, arrays: list[Vector]) -> None:
            setattr(target, name, put(value))

        def decode(source: Any, arrays: Arrays) -> Any:
            return check(getattr(source, name))

        return encode, decode

    def _message(self, hint: Any, field: Any) -> tuple[Encode, Decode]:
        codec, name = self.codec(hint, field.message_type), field.name
        # Message after message is about one group: the last value is not gone through again.
        sent: tuple[Any, Any] = (None, None)
        came: tuple[Any, Any] = (None, None)

        def encode(value: Any, target: Any, arrays: list[Vector]) -> None:
            nonlocal sent
            inner = getattr(target, name)
            if value is sent[0]:
                inner.CopyFrom(sent[1])
                return
            inner.SetInParent()
            num_arrays = len(arrays)
            codec.encode(value, inner, arrays)
            if len(arrays) == num_arrays:
                sent = value, copy.deepcopy(inner)

        def decode(source: Any, arrays: Arrays) -> Any:
            nonlocal came
            if not source.HasField(name):
                raise RemoteProtocolError(f"no {name}")
            inner = getattr(source, name)
            if came[0] is not None and inner == came[0]:
                return came[1]
            num_taken = arrays.num_taken
            value = codec.decode(inner, arrays)
            if arrays.num_taken == num_taken:
                came = copy.deepcopy(inner), value
            return value

        return encode, decode

    def _repeated(self, hint: Any, field: Any) -> tuple[Encode, Decode]:
        name, count_max = field.name, self._bounds.count
        encode: Encode
        one: Decode
        if field.message_type is None:
            put, check = self._scalar(hint, field)

            def encode_all(value: Any, target: Any, arrays: list[Vector]) -> None:
                getattr(target, name).extend([put(each) for each in value])

            def decode_one(each: Any, arrays: Arrays) -> Any:
                return check(each)

            encode, one = encode_all, decode_one
        else:
            encode_one, one = self._entry(hint, field.message_type)

            def encode_each(value: Any, target: Any, arrays: list[Vector]) -> None:
                entries = getattr(target, name)
                for each in value:
                    encode_one(each, entries.add(), arrays)

            encode = encode_each

        def decode(source: Any, arrays: Arrays) -> Any:
            entries = getattr(source, name)
            if len(entries) > count_max:
                raise RemoteProtocolError(f"{len(entries)} {name}")
            return tuple([one(each, arrays) for each in entries])

        return encode, decode

    def _entry(self, hint: Any, descriptor: Any) -> tuple[Encode, Decode]:
        """An entry of a list that is a message of its own."""
        if hint is not Any and typing.get_origin(hint) is not tuple:
            codec = self.codec(hint, descriptor)
            return codec.encode, codec.decode
        # A number or a word, or a tuple of words: the message wraps this one thing.
        (only,) = descriptor.oneofs or descriptor.fields
        encode, decode_any = self._field(hint, only)

        def decode(source: Any, arrays: Arrays) -> Any:
            value = decode_any(source, arrays)
            if value is None:
                raise RemoteProtocolError(f"an empty {descriptor.name}")
            return value

        return encode, decode

    def _oneof(self, oneof: Any) -> tuple[Encode, Decode]:
        """A value of one of several types; None where no field of the oneof is set."""
        variants = self._variants[oneof.full_name]
        fields = {
            name: (cls, oneof.containing_type.fields_by_name[name])
            for name, cls in variants.items()
        }
        codecs = {name: self._field(cls, field) for name, (cls, field) in fields.items()}
        oneof_name = oneof.name

        def encode(value: Any, target: Any, arrays: list[Vector]) -> None:
            for name, cls in variants.items():
                if isinstance(value, cls):
                    codecs[name][0](value, target, arrays)
                    return
            if value is not None:
                raise TypeError(f"{type(value).__name__} cannot be sent as {oneof.full_name}")

        def decode(source: Any, arrays: Arrays) -> Any:
            name = source.WhichOneof(oneof_name)
            return None if name is None else codecs[name][1](source, arrays)

        return encode, decode

    def _scalar(self, hint: Any, field: Any) -> tuple[Put, Check]:
        """How one number or text gets onto the wire, and how it is checked when it comes off.

        What leaves is checked alike: a peer's own mistakes must not look like its peers' malice.
        """
        bounds, name, kind = self._bounds, field.name, _kind(hint)
        if field.enum_type is not None:
            words = {value.number: value.name.lower() for value in field.enum_type.values}
            numbers = {word: number for number, word in words.items()}
            return numbers.__getitem__, lambda number: _known(number, words, name)
        if kind is not _KINDS.get(field.cpp_type) and (kind, field.cpp_type) != (bytes, 9):
            raise TypeError(f"{field.full_name} cannot hold {hint}")
        if kind is float:
            least = 0.0 if name in NON_NEGATIVE else -math.inf
            return _checked(float, lambda number: _finite(number, least, name))
        if hint is PeerId:
            return _checked(str, lambda text: _text(text, bounds.id_length, name))
        if kind is str:
            length = bounds.text_length
            if name in FOR_PEOPLE:
                return lambda text: _printable(text[:length]), lambda text: _text(
                    text, length, name
                )
            return _checked(str, lambda text: _text(text, length, name))
        if kind is bytes:
            return _checked(bytes, lambda content: _sized(content, bounds.bytes_length, name))
        return kind, lambda value: value


FOR_PEOPLE = ("reason",)
"""Texts that are cut off rather than refused when they are too long."""
NON_NEGATIVE = ("weight", "weights", "examples", "num_examples", "speed")

_KINDS: dict[int, type] = {1: int, 2: int, 3: int, 4: int, 5: float, 6: float, 7: bool, 9: str}
"""By the number that a field descriptor gives its type in C++."""


def _kind(hint: Any) -> type:
    """int, float, bool, str or bytes, also below a NewType."""
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    if hint not in (int, float, bool, str, bytes):
        raise TypeError(f"{hint} cannot be sent")
    kind: type = hint
    return kind


def _checked(kind: type, check: Check) -> tuple[Put, Check]:
    return lambda value: check(kind(value)), check


def _optional(field: Any, inner: tuple[Encode, Decode]) -> tuple[Encode, Decode]:
    name = field.name
    encode_inner, decode_inner = inner

    def encode(value: Any, target: Any, arrays: list[Vector]) -> None:
        if value is not None:
            encode_inner(value, target, arrays)

    def decode(source: Any, arrays: Arrays) -> Any:
        return decode_inner(source, arrays) if source.HasField(name) else None

    return encode, decode


def _array(field: Any) -> tuple[Encode, Decode]:
    name = field.name

    def encode(value: Any, target: Any, arrays: list[Vector]) -> None:
        inner = getattr(target, name)
        if value.ndim != 1 or value.dtype.char not in _DTYPE_NUMBERS:
            raise TypeError(f"{name} is an array of shape {value.shape} and type {value.dtype}")
        inner.dtype = _DTYPE_NUMBERS[value.dtype.char]
        inner.size = value.size
        arrays.append(value)

    def decode(source: Any, arrays: Arrays) -> Any:
        if not source.HasField(name):
            raise RemoteProtocolError(f"no {name}")
        return arrays.take(getattr(source, name))

    return encode, decode


def _known(number: int, words: Mapping[int, str], name: str) -> str:
    if number not in words:
        raise RemoteProtocolError(f"{name} is {number}")
    return words[number]


def _finite(number: float, least: float, name: str) -> float:
    if not math.isfinite(number) or number < least:
        raise RemoteProtocolError(f"{name} is {number}")
    return number


def _text(text: str, length: int, name: str) -> str:
    if len(text) > length or not text.isprintable():
        raise RemoteProtocolError(f"{name} is {len(text)} characters, or cannot be printed")
    return text


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join([c if c.isprintable() else " " for c in text])


def _sized(content: bytes, length: int, name: str) -> bytes:
    if len(content) > length:
        raise RemoteProtocolError(f"{name} is {len(content)} bytes")
    return content
