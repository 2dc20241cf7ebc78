"""Ring all-reduce SGD: everybody takes local steps, then everybody averages with everybody.

With one local step this is synchronous data-parallel SGD as in Horovod (Sergeev and Del Balso,
arXiv 1802.05799), the rival of both papers: from equal models, averaging models after a step of SGD
is averaging gradients. With more it is local SGD. The mean is weighted by examples. One slow peer
slows all, one lost peer makes all begin the all-reduce again: see `collective.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_moshpit.config import Ring
from flwr_moshpit.protocol.baselines.collective import CollectivePeer
from flwr_moshpit.protocol.baselines.common import Worker
from flwr_moshpit.protocol.machine import Effect, Event, PeerId, PeerInfo, State, Vector, View


class RingPeer:
    """One peer of ring all-reduce SGD."""

    def __init__(
        self,
        config: Ring,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        *,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
    ) -> None:
        worker = Worker(
            me,
            params,
            view,
            local_steps=config.local_steps,
            weight_max=config.weight_max,
            schema=schema,
            state=state,
        )
        self._rounds = CollectivePeer(worker, _everybody, rng, incarnation)

    @property
    def deadline(self) -> float | None:
        return self._rounds.deadline

    @property
    def params(self) -> Vector:
        return self._rounds.params

    @property
    def weight(self) -> float:
        return self._rounds.weight

    def handle(self, event: Event, now: float) -> list[Effect]:
        return self._rounds.handle(event, now)

    def snapshot(self) -> State:
        return self._rounds.snapshot()


def _everybody(peers: Sequence[PeerId], _me: PeerId, _round: int) -> Sequence[PeerId]:
    return peers
