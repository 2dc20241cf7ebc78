"""Random messages of every type, and what makes two of them the same."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any, Union

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flwr_moshpit.protocol import membership_messages, messages
from flwr_moshpit.protocol.baselines import messages as rivals
from flwr_moshpit.protocol.machine import Message, PeerId, Record, Round

DIM = 64


def message_types() -> list[type[Message]]:
    """Every message that any protocol can send."""
    return [
        cls
        for module in (messages, membership_messages, rivals)
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, Message)
        and dataclasses.is_dataclass(cls)
        and cls.__module__ == module.__name__
    ]


printable = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)
vectors = npst.arrays(st.sampled_from([np.dtype("f4"), np.dtype("f8")]), st.integers(0, DIM)).map(
    lambda array: (array.setflags(write=False), array)[1]
)
ranks = st.lists(st.integers(-1, 2**40) | printable, max_size=4).map(tuple)


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type that occurs in messages."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Record:
        values = st.one_of(
            st.none(), printable, strategy(messages.Plan), strategy(messages.RootClaim)
        )
        keys = st.lists(printable, min_size=1, max_size=3).map(tuple)
        return st.builds(Record, keys, ranks, values)
    if hint is Any:
        return st.integers(-1, 2**40) | printable
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=4).map(tuple)
    if origin is np.ndarray:
        return vectors
    if origin in (Union, types.UnionType):
        return st.none() | strategy(next(arg for arg in args if arg is not types.NoneType))
    if hint is PeerId or hint is str:
        return printable
    if isinstance(hint, typing.NewType):
        return strategy(hint.__supertype__)
    if hint is int:
        return st.integers(0, 2**62)
    if hint is float:
        return st.floats(0, allow_nan=False, allow_infinity=False)
    if hint is bool:
        return st.booleans()
    if hint is bytes:
        return st.binary(max_size=64)
    return composite(hint)


def composite(cls: type) -> st.SearchStrategy[Any]:
    fields = {name: strategy(hint) for name, hint in _fields(cls).items()}
    if cls is membership_messages.Claim:
        fields["status"] = st.sampled_from(sorted(membership_messages.RANKS))
    return st.builds(cls, **fields)


def _fields(cls: type) -> dict[str, Any]:
    """The fields of a dataclass or a named tuple, with their types."""
    hints = typing.get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {name: hints[name] for name in getattr(cls, "_fields", ())}


GROUP = messages.GroupId(
    messages.GroupKey(messages.PlanId(3, PeerId("a")), Round(5), 0, 2), PeerId("a"), 7
)


def example(cls: type, **fields: Any) -> Any:
    """One of `cls` with these fields; the others are as empty as they can be."""
    return cls(**{name: fields.get(name, _empty(hint)) for name, hint in _fields(cls).items()})


def _empty(hint: Any) -> Any:
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin = typing.get_origin(hint)
    if hint is messages.GroupId:
        return GROUP
    if origin is tuple:
        return ()
    if origin is np.ndarray:
        return np.zeros(0, np.float32)
    if origin in (Union, types.UnionType):
        return None
    return example(hint) if _fields(hint) else hint()


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, arrays bit for bit."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
