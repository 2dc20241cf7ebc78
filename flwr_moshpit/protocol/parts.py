"""What a reducer was sent, kept until its group is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import PeerId, Vector


class Parts:
    """Parts by offset and sender.

    They are copied into one block of memory, as large as they are expected to be. What they came in
    can then be used for what comes next, which costs less than to keep it and ask the system for
    more, and a block leaves no gaps when it is given back.
    """

    def __init__(self) -> None:
        self._parts: dict[int, dict[PeerId, Vector]] = {}
        self._block: Vector = np.empty(0)
        self._size = 0
        """Elements of a row of the block."""
        self._rows: dict[PeerId, int] = {}
        self._places: dict[int, tuple[int, int]] = {}

    def expect(
        self, pieces: Mapping[int, int], senders: Sequence[PeerId], dtype: np.dtype[Any]
    ) -> None:
        """`pieces`: the end of each by its offset; a part of each comes from each of `senders`."""
        size = 0
        for offset, end in pieces.items():
            self._places[offset] = size, size + end - offset
            size += end - offset
        self._rows = {peer: row for row, peer in enumerate(senders)}
        if self._block.dtype != dtype or self._block.size < len(senders) * size:
            # Memory that is not written to is not taken.
            self._block = np.empty(len(senders) * size, dtype)
        self._size = size

    def put(self, offset: int, src: PeerId, data: Vector) -> None:
        """One that was not expected, because it is for a later version of the group, is kept as it
        came."""
        row, place = self._rows.get(src), self._places.get(offset)
        if row is not None and place is not None and place[1] - place[0] == len(data):
            kept = self._block[row * self._size :][place[0] : place[1]]
            kept[:] = data
            data = kept
        self._parts.setdefault(offset, {})[src] = data

    def of(self, offset: int) -> Mapping[PeerId, Vector]:
        return self._parts.get(offset, {})

    def clear(self) -> None:
        """Forget them, but keep the block: fresh memory costs more time than what is put there."""
        self._parts, self._rows, self._places = {}, {}, {}
