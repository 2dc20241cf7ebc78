"""Who is ready for this round's all-reduce, who is waited for, and who leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr_moshpit.protocol.baselines.common import Worker
from flwr_moshpit.protocol.baselines.messages import Ready
from flwr_moshpit.protocol.machine import PeerId

GroupOf = Callable[[Sequence[PeerId], PeerId, int], Sequence[PeerId]]
"""(living peers in order, peer, round) -> that peer's group, the coordinator first."""


class RollCall:
    """One peer's group in the round of the moment, as far as it knows."""

    def __init__(self, worker: Worker, group_of: GroupOf) -> None:
        self._worker = worker
        self._group_of = group_of
        # The newest of each peer: one that is ahead is ready for a round to come.
        self._ready: dict[PeerId, Ready] = {}
        # Not waited for in this round; True if it should get the round's result.
        self._absent: dict[PeerId, bool] = {}

    def begin(self) -> None:
        """A new round: all of the group are waited for again."""
        self._absent = {}
        self._ready = {p: r for p, r in self._ready.items() if r.round >= self._worker.round}

    def mine(self) -> Ready:
        worker = self._worker
        return Ready(worker.round, worker.weight, worker.params.size, worker.schema)

    def flaw(self, ready: Ready) -> str:
        worker = self._worker
        if ready.schema != worker.schema:
            return "schema differs"
        if ready.dim != worker.params.size:
            return f"dimension {ready.dim} instead of {worker.params.size}"
        return worker.weight_flaw(ready.weight)

    def weights_flaw(self, weights: Sequence[float]) -> str:
        return next(filter(None, map(self._worker.weight_flaw, weights)), "")

    def arrived(self, peer: PeerId, ready: Ready) -> None:
        self._ready[peer] = ready

    def leave_out(self, peer: PeerId, *, owed: bool) -> None:
        """Go on without `peer` in this round. If it is `owed` the result it gets it at the end."""
        self._absent[peer] = owed
        if self._is_ready(peer):
            del self._ready[peer]

    def forget(self, peer: PeerId) -> None:
        """It died: what it said was said by another incarnation."""
        self._ready.pop(peer, None)
        self._absent.pop(peer, None)

    def owed(self) -> list[PeerId]:
        return [p for p, owed in self._absent.items() if owed and p in self._worker.view]

    def group(self) -> list[PeerId]:
        """The coordinator first, without those who are absent."""
        worker = self._worker
        group = self._group_of(list(worker.view), worker.peer, worker.round)
        return [peer for peer in group if peer not in self._absent]

    @property
    def coordinator(self) -> PeerId:
        return self.group()[0]

    def missing(self) -> list[PeerId]:
        me = self._worker.peer
        return [p for p in self.group() if p != me and not self._is_ready(p)]

    def members(self) -> dict[PeerId, float]:
        """Who is there, in the order of the ring, with their weights.

        Whoever came by another view than this peer's is welcome too.
        """
        worker = self._worker
        group = [p for p in self.group() if p == worker.peer or self._is_ready(p)]
        extra = [p for p in sorted(self._ready) if self._is_ready(p) and p not in group]
        present = group + [p for p in extra if p in worker.view and p not in self._absent]
        return {p: worker.weight if p == worker.peer else self._ready[p].weight for p in present}

    def _is_ready(self, peer: PeerId) -> bool:
        ready = self._ready.get(peer)
        return ready is not None and ready.round == self._worker.round
