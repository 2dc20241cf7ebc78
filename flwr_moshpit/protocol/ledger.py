"""What one peer tracks: its own gradient, and running sums on the edges of A that touch it.

R-FAST (arXiv 2307.11617), with `rho` the sum of everything ever pushed on an edge, kept by the
sender, and `rho_buf` what the receiver has taken in of it:

    z  =  g  +  sum over in-edges of rho_buf  -  sum over out-edges of rho

for every peer by itself, because the columns of A sum to 1. Summed over the peers this is the
invariant: sum z + sum (rho - rho_buf) = sum g. Lost, late and repeated pushes change nothing: the
next one carries all. A peer that has died is taken out by dropping its edges at both ends.

Departs from the paper, which adds differences to a stored z: float32 would drift. On acyclic
graphs the sums stay bounded and `SumLedger` computes z by the formula each time. On cyclic graphs
they grow with the distance travelled; `CompensatedLedger` stores z in float64 and takes out of it
what rho, rounded to the wire's precision, has really gained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from flwr_moshpit.protocol.machine import PeerId, Vector
from flwr_moshpit.protocol.messages import EdgeId, Subtree


@dataclass(slots=True, eq=False)
class InEdge:
    """What one child has pushed, and how long it may be kept. See `leases.py`."""

    edge: EdgeId
    hold_until: float
    nudged_at: float = -inf
    counter: int = -1
    """Of the newest push."""
    buf: Vector | None = None
    subtree: Subtree | None = None
    gap: float = 1.0
    """By how much the counter grows from push to push, smoothed: 1 / (1 - loss)."""
    model_counter: int = -1
    """Models sent to this child, less one."""
    version: int = -1
    """Of the newest of them."""
    copies: int = 0
    """How often it will still be sent again."""
    next_model_at: float = -inf
    """Models to this child are not sent more often than it can use them."""


@dataclass(slots=True, eq=False)
class OutEdge:
    """What was pushed to one parent. See `leases.py`."""

    edge: EdgeId
    incarnation: int
    """The parent's."""
    heard_at: float
    """When the newest of the parent's clock, `echo_s`, came."""
    echo_s: float
    nudged_at: float = -inf
    closing: bool = False
    """Nothing is pushed any more; `rho` still counts as sent until the parent has dropped it."""
    counter: int = -1
    rho: Vector | None = None
    dirty: bool = False
    """Something has come from below that was not pushed yet."""
    copies: int = 0
    next_push_at: float = -inf
    model_counter: int = -1
    """Of the newest model that came on this edge."""
    gap: float = 1.0
    """As in `InEdge`, of the models."""
    model_at: float = -inf
    model_period_s: float = 0.0
    """Between two models that came, smoothed; 0 before there are two."""


def usable(vector: object, dim: int, dtype: np.dtype[np.generic]) -> bool:
    """Whether it is a vector of this kind that can be added to others without harm.

    Values are bounded so far below the dtype's largest that no sum over peers overflows. NaN fails
    all comparisons. The sum of squares, which settles nearly all cases, is the cheapest test.
    """
    if not isinstance(vector, np.ndarray) or vector.shape != (dim,) or vector.dtype != dtype:
        return False
    if not dim or float(np.vdot(vector, vector)) < 1e30:
        return True
    bound = _BOUND[vector.dtype.char]
    return bool(vector.min() >= -bound) and bool(vector.max() <= bound)


_BOUND = {kind: float(np.finfo(kind).max) / 2.0**40 for kind in "fd"}


def _frozen(vector: Vector) -> Vector:
    vector.setflags(write=False)
    return vector


class SumLedger:
    """z by the formula, for acyclic A. Arrays that it gives away are read-only."""

    def __init__(self, dim: int, dtype: np.dtype[np.generic]) -> None:
        self.dim = dim
        self.dtype = dtype
        self.gradient: Vector | None = None
        """(d,), this peer's newest, weighted. None counts as zero."""
        self.ins: dict[PeerId, InEdge] = {}
        """By child, in order of ids: sums do not depend on who came first."""
        self.outs: dict[PeerId, OutEdge] = {}

    @property
    def z(self) -> Vector:
        """(d,), what is at this peer: tracked, and not pushed on."""
        z = self._total()
        for out in self.outs.values():
            if out.rho is not None:
                z = z - out.rho
        return _frozen(z)

    def set_gradient(self, gradient: Vector) -> None:
        self.gradient = gradient

    def add_in(self, child: PeerId, edge: InEdge) -> None:
        self.ins[child] = edge
        self.ins = dict(sorted(self.ins.items()))

    def absorb(self, edge: InEdge, rho: Vector) -> None:
        """rho_buf <- rho: what is new of it comes to z."""
        edge.buf = rho

    def drop_in(self, child: PeerId) -> InEdge:
        """Take out of z all that `child` ever pushed on its edge."""
        return self.ins.pop(child)

    def release_out(self, parent: PeerId) -> OutEdge:
        """Put back into z all that was pushed to `parent`, which does not count it any more."""
        return self.outs.pop(parent)

    def push(self, shares: Mapping[PeerId, float]) -> None:
        """Push the fraction `shares[j]` of z on each of these out-edges: rho_j += a_j z."""
        if len(shares) == len(self.outs) == 1 and 1.0 in shares.values():
            # All there is goes to one parent: nothing is left, not even a rounding error.
            (out,) = self.outs.values()
            out.rho = self._total()
            out.counter += 1
            return
        z = self.z
        for parent, share in shares.items():
            out = self.outs[parent]
            moved = z * self.dtype.type(share)
            out.rho = _frozen(moved if out.rho is None else out.rho + moved)
            out.counter += 1

    def _total(self) -> Vector:
        """g and all that came in."""
        terms = [edge.buf for edge in self.ins.values() if edge.buf is not None]
        if self.gradient is not None:
            terms.append(self.gradient)
        if len(terms) < 2:
            return terms[0] if terms else _frozen(np.zeros(self.dim, self.dtype))
        total = terms[0] + terms[1]
        for term in terms[2:]:
            total += term
        return _frozen(total)


class CompensatedLedger:
    """z stored, for cyclic A. The same interface as `SumLedger`."""

    def __init__(self, dim: int, dtype: np.dtype[np.generic]) -> None:
        self.dim = dim
        self.dtype = dtype
        self.gradient: Vector | None = None
        self.ins: dict[PeerId, InEdge] = {}
        self.outs: dict[PeerId, OutEdge] = {}
        self._z: npt.NDArray[np.float64] = np.zeros(dim)

    @property
    def z(self) -> Vector:
        """(d,), float64."""
        return _frozen(self._z.view())

    def set_gradient(self, gradient: Vector) -> None:
        self._exchange(self.gradient, gradient)
        self.gradient = gradient

    def add_in(self, child: PeerId, edge: InEdge) -> None:
        self.ins[child] = edge

    def absorb(self, edge: InEdge, rho: Vector) -> None:
        self._exchange(edge.buf, rho)
        edge.buf = rho

    def drop_in(self, child: PeerId) -> InEdge:
        edge = self.ins.pop(child)
        self._exchange(edge.buf, None)
        return edge

    def release_out(self, parent: PeerId) -> OutEdge:
        out = self.outs.pop(parent)
        self._exchange(None, out.rho)
        return out

    def push(self, shares: Mapping[PeerId, float]) -> None:
        z = self._z.copy()
        for parent, share in shares.items():
            out = self.outs[parent]
            moved = z * share
            rho = (moved if out.rho is None else moved + out.rho).astype(self.dtype)
            if not usable(rho, self.dim, self.dtype):
                continue
            self._exchange(rho, out.rho)
            out.rho = _frozen(rho)
            out.counter += 1

    def _exchange(self, old: Vector | None, new: Vector | None) -> None:
        """z += new - old, the difference taken in float64."""
        if new is not None and old is not None:
            self._z += np.subtract(new, old, dtype=np.float64)
        elif new is not None:
            self._z += new
        elif old is not None:
            self._z -= old


Ledger = SumLedger | CompensatedLedger
