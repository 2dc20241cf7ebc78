"""One all-reduce around a ring: reduce-scatter, then all-gather.

N members cut the vector into N chunks. In step s member i sends one chunk to member i+1 and takes
one from member i-1: N-1 steps in which it adds its own to what comes and passes it on, so that in
the end it holds one chunk of the sum; then N-1 steps in which the sums go round. Each member sends
2 (N-1)/N of the vector. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", JPDC 2009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from flwr_moshpit.protocol.baselines.common import usable
from flwr_moshpit.protocol.baselines.messages import Chunk, Ring
from flwr_moshpit.protocol.machine import PeerId, Vector

NO_RING = (0, "")


class RingAttempt:
    """A ring that was named, as one of its members sees it."""

    def __init__(self, ring: Ring, me: PeerId, vector: Vector) -> None:
        place = ring.members.index(me)
        self.ring = ring
        self.key = (ring.attempt, str(ring.coordinator))
        """The higher one of two rings of a round counts."""
        self.before = ring.members[place - 1]
        self.after = ring.members[(place + 1) % len(ring.members)]
        self.reduce = RingReduce(place, ring.weights, vector)
        self.is_void = False

    def chunk(self, step: int) -> Chunk:
        """What goes to `after` in `step`."""
        ring = self.ring
        return Chunk(ring.round, ring.attempt, ring.coordinator, step, self.reduce.outgoing(step))


def ring_flaw(ring: Ring, src: PeerId, me: PeerId) -> str:
    """Why a ring named by `src` cannot be used; empty if it can."""
    members = ring.members
    if src != ring.coordinator or me not in members:
        return "a ring that is not its own, or not this peer's"
    if len(ring.weights) != len(members) or len(dict.fromkeys(members)) < len(members):
        return "a ring with a member twice, or without a weight"
    return ""


class RingReduce:
    """Member `place` of a ring: gives and takes chunks until `result` is there.

    The result is sum(w x) / sum(w), bit for bit the same at all members: chunk c is summed in the
    order of the ring, from member c on.
    """

    def __init__(self, place: int, weights: Sequence[float], vector: Vector) -> None:
        self._place = place
        self._size = len(weights)
        total = math.fsum(weights)
        share = weights[place] / total if total > 0 else 1 / self._size
        self._sum = vector * vector.dtype.type(share) if self._size > 1 else vector.copy()
        bounds = [vector.size * k // self._size for k in range(self._size + 1)]
        self._chunks = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.step = 0
        """The step whose chunk is taken next."""

    @property
    def num_steps(self) -> int:
        return 2 * (self._size - 1)

    @property
    def result(self) -> Vector | None:
        """(d,), read-only, when all steps are done."""
        if self.step < self.num_steps:
            return None
        self._sum.setflags(write=False)
        return self._sum

    def outgoing(self, step: int) -> Vector:
        """What goes to the next member in `step`, which is 0 or the one after the last taken."""
        first = self._place - step if step < self._size - 1 else self._place + self._size - step
        chunk = self._sum[self._chunks[first % self._size]].copy()
        chunk.setflags(write=False)
        return chunk

    def flaw(self, step: int, data: Vector) -> str:
        """Why a chunk from the member before cannot be used; empty if it can."""
        expected = self._sum[self._incoming(step)] if step == self.step else None
        if expected is None:
            return f"step {step} instead of {self.step}"
        if data.shape != expected.shape or data.dtype != expected.dtype:
            return (
                f"chunk of {data.dtype} {data.shape} instead of {expected.dtype} {expected.shape}"
            )
        return "" if usable(data) else "not finite, or too large to be summed"

    def take(self, data: Vector) -> int | None:
        """The next chunk from the member before. Returns the step to send now, if any."""
        chunk = self._incoming(self.step)
        if self.step < self._size - 1:
            self._sum[chunk] += data
        else:
            self._sum[chunk] = data
        self.step += 1
        return self.step if self.step < self.num_steps else None

    def _incoming(self, step: int) -> slice:
        """The elements that come in `step`: those that the member before sends."""
        before = self._place - 1
        first = before - step if step < self._size - 1 else before + self._size - step
        return self._chunks[first % self._size]
