"""What a reducer keeps of what it was sent."""

from __future__ import annotations

import numpy as np

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.protocol.parts import Parts

A, B = PeerId("a"), PeerId("b")
F32 = np.dtype(np.float32)


def test_parts_are_kept_apart_and_by_themselves() -> None:
    parts = Parts()
    parts.expect({10: 13, 13: 15}, [A, B], F32)
    came = {
        (offset, peer): np.array([offset, *range(size - 1)], F32) + (peer == B)
        for offset, size in ((10, 3), (13, 2))
        for peer in (A, B)
    }
    for (offset, peer), data in came.items():
        parts.put(offset, peer, data.copy())
    for (offset, peer), data in came.items():
        kept = parts.of(offset)[peer]
        assert np.array_equal(kept, data)
        assert not np.shares_memory(kept, data)
    assert dict(parts.of(99)) == {}


def test_what_was_not_expected_is_kept_as_it_came() -> None:
    parts = Parts()
    parts.expect({0: 2}, [A], F32)
    data = np.ones(4, F32)
    parts.put(2, A, data)
    parts.put(0, B, data[:2])
    assert parts.of(2)[A] is data
    assert np.shares_memory(parts.of(0)[B], data)


def test_the_next_group_uses_the_same_memory() -> None:
    parts = Parts()
    parts.expect({0: 4}, [A, B], F32)
    parts.put(0, B, np.ones(4, F32))
    first = parts.of(0)[B]
    parts.clear()
    assert dict(parts.of(0)) == {}
    parts.expect({8: 12}, [B, A], F32)
    parts.put(8, A, np.full(4, 2, F32))
    assert np.shares_memory(parts.of(8)[A], first)
    parts.clear()
    parts.expect({0: 4}, [A, B], np.dtype(np.float64))
    parts.put(0, A, np.full(4, 0.1))
    assert parts.of(0)[A].dtype == np.float64
