"""One hash over everything that happened: two runs are the same run if it is the same.

It covers what was delivered to whom and when, and the parameters after every round. It does not
depend on the process, on PYTHONHASHSEED or on the number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Event,
    Learned,
    LineBusy,
    LineFree,
    LinkLost,
    Message,
    Start,
    Stop,
    TimerFired,
    Vector,
    ViewChanged,
)

_PENDING_BYTES = 1 << 16
_ARRAY_BYTES = 1024
"""Larger arrays in messages count by their length only: hashing them all would cost more than the
simulation, and what they do shows in the parameters."""
_KNOWN_MAX = 1 << 16

_pack = Struct("<dBii").pack
_KINDS: dict[type[Any], int] = {
    kind: number
    for number, kind in enumerate(
        (
            Start,
            TimerFired,
            ComputeDone,
            ComputeFailed,
            ViewChanged,
            Learned,
            LinkLost,
            Stop,
            LineBusy,
            LineFree,
        ),
        1,
    )
}


class Digest:
    """SHA-256 over delivered events and rounds' parameters, in the order of delivery."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pending = bytearray()
        self._fields: dict[type[Message], Callable[[Message], tuple[Any, ...]]] = {}
        self._names: dict[type[Message], bytes] = {}
        self._known: dict[Any, bytes] = {}

    def hexdigest(self) -> str:
        """Of everything so far."""
        self._flush()
        return self._hash.hexdigest()

    def received(self, now: float, dst: int, src: int, message: Message) -> None:
        """`message` from peer number `src` was handed to peer number `dst`."""
        kind = type(message)
        fields = self._fields.get(kind)
        if fields is None:
            fields = self._learn(kind)
        pending = self._pending
        pending += _pack(now, 0, dst, src)
        pending += self._names[kind]
        known = self._known
        plain: list[object] = []
        for value in fields(message):
            if type(value) in _PLAIN:
                # Nearly all are, and to ask for their very type is quicker than what follows.
                plain.append(value)
            elif isinstance(value, tuple):
                if hasattr(value, "_fields"):
                    # Ids are nested tuples that come again and again: each is written out once.
                    pending += known.get(value) or self._write_out(value)
                else:
                    plain.append(len(value))
            elif isinstance(value, _PLAIN):
                plain.append(value)
            elif isinstance(value, np.ndarray):
                plain.append(value.nbytes)
                if value.nbytes <= _ARRAY_BYTES:
                    pending += value.tobytes()
        pending += repr(plain).encode()
        if len(pending) > _PENDING_BYTES:
            self._flush()

    def event(self, now: float, dst: int, event: Event) -> None:
        """Any other event was handed to peer number `dst`."""
        kind = type(event)
        self._pending += _pack(now, _KINDS[kind], dst, -1)
        if kind is not TimerFired:
            self._pending += _identity(event).encode()
        if len(self._pending) > _PENDING_BYTES:
            self._flush()

    def parameters(self, vector: Vector) -> None:
        """A round ended with `vector`, (d,)."""
        self._flush()
        self._hash.update(np.ascontiguousarray(vector).data)

    def _flush(self) -> None:
        self._hash.update(self._pending)
        self._pending = bytearray()

    def _learn(self, kind: type[Message]) -> Callable[[Message], tuple[Any, ...]]:
        names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        read: Callable[[Any], Any]
        if not names:
            read = _nothing
        elif len(names) == 1:
            only = attrgetter(names[0])

            def read(message: Any) -> Any:
                return (only(message),)
        else:
            read = attrgetter(*names)
        self._names[kind] = kind.__name__.encode()
        self._fields[kind] = read
        return read

    def _write_out(self, value: tuple[Any, ...]) -> bytes:
        written = repr(value).encode()
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[value] = written
        return written


_PLAIN = (int, float, str, bytes, type(None))


def _nothing(_: Any) -> tuple[Any, ...]:
    return ()


def _identity(event: Event) -> str:
    """What tells this event from others of its kind, without its arrays."""
    if isinstance(event, ComputeDone):
        return f"{event.job_id} {event.result.num_examples}"
    if isinstance(event, ComputeFailed):
        return f"{event.job_id} {event.error}"
    if isinstance(event, ViewChanged):
        return f"{len(event.view)} {event.joined} {event.lost}"
    if isinstance(event, Learned):
        return f"{event.record.key} {event.record.rank}"
    if isinstance(event, LinkLost | LineBusy | LineFree):
        return event.peer
    return repr(event)
