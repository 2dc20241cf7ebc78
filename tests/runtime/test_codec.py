"""A codec is made from two descriptions of one message, and says where they do not fit."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.protocol import messages
from flwr_moshpit.protocol.machine import PeerId, Round, Vector
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.codec import Arrays, Bounds, Compiler
from flwr_moshpit.runtime.wire import VARIANTS

BOUNDS = Bounds(id_length=8, text_length=16, bytes_length=4, count=3)


def compiler() -> Compiler:
    return Compiler(BOUNDS, VARIANTS)


@dataclass
class Member:
    peer: PeerId
    weight: float
    num_cells: int
    incarnation: int


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ([("peer", PeerId), ("weight", float)], "peer.proto has"),
        ([("peer", PeerId), ("weight", float), ("cells", int), ("incarnation", int)], "has"),
        ([("peer", int), ("weight", float), ("num_cells", int), ("incarnation", int)], "peer"),
        ([("peer", PeerId), ("weight", int), ("num_cells", int), ("incarnation", int)], "weight"),
        ([("peer", PeerId), ("weight", set), ("num_cells", int), ("incarnation", int)], "set"),
    ],
)
def test_descriptions_that_do_not_fit_are_named(
    fields: list[tuple[str, Any]], problem: str
) -> None:
    with pytest.raises(TypeError, match=problem):
        compiler().codec(make_dataclass("Other", fields), pb.Member.DESCRIPTOR)


def test_a_value_goes_there_and_back() -> None:
    codec = compiler().codec(Member, pb.Member.DESCRIPTOR)
    target = pb.Member()
    codec.encode(Member(PeerId("a"), 2.5, 3, 0), target, [])
    assert target == pb.Member(peer="a", weight=2.5, num_cells=3)
    assert codec.decode(target, Arrays(memoryview(b""), 0)) == Member(PeerId("a"), 2.5, 3, 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"peer": "123456789"},
        {"peer": "a\tb"},
        {"weight": float("nan")},
        {"weight": -1.0},
    ],
)
def test_bounds_hold_both_ways(bad: dict[str, Any]) -> None:
    codec = compiler().codec(Member, pb.Member.DESCRIPTOR)
    with pytest.raises(RemoteProtocolError):
        codec.decode(pb.Member(**bad), Arrays(memoryview(b""), 0))
    value = Member(**{"peer": PeerId("a"), "weight": 1.0, "num_cells": 1, "incarnation": 0, **bad})
    with pytest.raises(RemoteProtocolError):
        codec.encode(value, pb.Member(), [])


def test_arrays_are_taken_in_order_and_never_beyond_the_data() -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    arrays = Arrays(memoryview(data), 4)
    assert arrays.take(pb.Array(dtype=pb.FLOAT32, size=4)).tolist() == [0, 1, 2, 3]
    assert arrays.take(pb.Array(dtype=pb.FLOAT32, size=0)).tolist() == []
    with pytest.raises(RemoteProtocolError, match="length"):
        arrays.take(pb.Array(dtype=pb.FLOAT64, size=2))
    with pytest.raises(RemoteProtocolError, match="5 elements"):
        arrays.take(pb.Array(dtype=pb.FLOAT32, size=5))
    assert arrays.take(pb.Array(dtype=pb.FLOAT64, size=1)).size == 1
    assert arrays.used_bytes == len(data)


def test_what_was_sent_before_is_remembered_as_it_was() -> None:
    """A value without arrays is not gone through again; one with arrays is."""
    key = messages.GroupKey(messages.PlanId(1, PeerId("a")), Round(3), 0, 0)
    groups = [messages.GroupId(key, PeerId("a"), number) for number in range(3)]
    descriptor = pb.Part.DESCRIPTOR
    remembers = compiler().codec(messages.Part, descriptor)
    for number in (0, 0, 1, 1, 0, 2):
        part = messages.Part(groups[number], number, np.full(4, number, np.float32))
        targets = [pb.Part(), pb.Part()]
        arrays: list[Vector] = []
        remembers.encode(part, targets[0], arrays)
        compiler().codec(messages.Part, descriptor).encode(part, targets[1], [])
        assert targets[0] == targets[1]
        decoded = remembers.decode(targets[0], Arrays(arrays[0].data.cast("B"), 4))
        assert (decoded.group, decoded.offset) == (part.group, part.offset)
        assert decoded.data.tolist() == part.data.tolist()
