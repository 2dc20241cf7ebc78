"""By what local epochs are corrected: h - g, the mean gradient less this peer's own.

Let c = 1 - a be the share by which the mean of K gradients met on the way follows the correction
instead of the model: for a loss of curvature L, a = (1 - (1 - lr L)^K) / (lr L K). So what a peer
tracks next is a grad(x) + c (g - h). h is as old as the way to the root and back: the newest of the
peer's own gradients that is in it was taken k jobs before the newest that there is. As g

- the newest makes the mean of peers in step with each other follow z^(k+1) = c (z^k - 1), which
  at k = 2 diverges by itself from c = 0.71 and swings below that, however small the root's step;
- the one that is in h lets the corrections of all who use one h add up to zero, as they must, but
  what is a peer's own follows z^(k+1) = c: a slow peer forgets what it took long ago only in k + 1
  of its jobs, and all wait for it.

Half of each: z^(k+1) = (c / 2) (z^k - 1) for the mean and (c / 2) (z^k + 1) for what is one's own.
On the unit circle the right sides are below 1, so (Rouche) both converge for all c < 1, however old
h is; of no larger share of the newest is that true.

A parent tells with h which push of the child's is in it; the child remembers what was in that push,
its own gradient and its children's pushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from flwr_moshpit.protocol.ledger import InEdge
from flwr_moshpit.protocol.machine import PeerId, Vector
from flwr_moshpit.protocol.messages import EdgeId

_GRADIENTS_REMEMBERED = 8
_PUSHES_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Sum:
    """What is in one push, or in one mean gradient of the root's."""

    counter: int = -1
    """Of the push."""
    number: int = 0
    """Of the gradient."""
    gradient: Vector | None = None
    """(d,), the peer's own, not weighted."""
    taken: Mapping[PeerId, tuple[EdgeId, int]] | None = None
    """By child, its edge and the counter of its newest push."""


class Corrections:
    """Pairs this peer's gradients with the mean gradient of the moment, `Core.direction`."""

    def __init__(self) -> None:
        self._number = 0
        self._newest: Vector | None = None
        self._pushes: deque[_Sum] = deque(maxlen=_PUSHES_REMEMBERED)
        self._paired = _Sum()

    @property
    def gradient(self) -> Vector | None:
        """(d,), g, not weighted; None if this peer has none in the mean gradient."""
        paired, newest = self._paired.gradient, self._newest
        if paired is None or newest is None or paired is newest:
            return paired
        own: Vector = (paired + newest) * paired.dtype.type(0.5)
        return own

    def took(self, gradient: Vector | None) -> None:
        """The peer's newest gradient; None for one that must not correct anything."""
        self._number += 1
        self._newest = gradient

    def pushed(self, counter: int, ins: Mapping[PeerId, InEdge]) -> None:
        """That gradient and what the children had pushed went to the parent."""
        pushes = self._pushes
        pushes.append(self._sum(counter, ins))
        while self._number - pushes[0].number >= _GRADIENTS_REMEMBERED:
            pushes.popleft()

    def forget_pushes(self) -> None:
        """There is another parent, or another edge to it, on which counters begin anew."""
        self._pushes.clear()

    def descended(self, ins: Mapping[PeerId, InEdge]) -> None:
        """The root has made a mean of its newest gradient and what its children had pushed."""
        self._paired = self._sum(-1, ins)

    def heard(self, taken: int) -> None:
        """A mean gradient came, in which the newest push of this peer's is number `taken`."""
        pushes = self._pushes
        while pushes and pushes[0].counter < taken:
            pushes.popleft()
        # If it is forgotten already, the oldest one that is not is nearest.
        self._paired = pushes[0] if pushes and taken >= 0 else _Sum()

    def taken(self, child: PeerId, edge: EdgeId) -> int:
        """The counter of the newest push of `child` in the mean gradient, -1 for none."""
        found = (self._paired.taken or {}).get(child)
        return -1 if found is None or found[0] != edge else found[1]

    def _sum(self, counter: int, ins: Mapping[PeerId, InEdge]) -> _Sum:
        taken = {child: (held.edge, held.counter) for child, held in ins.items()}
        return _Sum(counter, self._number, self._newest, taken)
