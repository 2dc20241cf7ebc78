"""How a bare butterfly cuts a vector: equal shares, one for each process, in chunks."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_BYTES = 1 << 20
CHUNK_ELEMS = CHUNK_BYTES // 4


@dataclass(frozen=True, slots=True)
class Split:
    """The place of one of `size` processes."""

    index: int
    size: int

    def chunks(self, owner: int, dim: int) -> list[tuple[int, int]]:
        """(begin, end) of the chunks of the share that process `owner` averages."""
        begin, end = dim * owner // self.size, dim * (owner + 1) // self.size
        return [(at, min(at + CHUNK_ELEMS, end)) for at in range(begin, end, CHUNK_ELEMS)]
