"""Random groups: every round the peers are shuffled into groups, each of which averages.

The baseline of Moshpit SGD's averaging experiment (arXiv 2103.03239, section 4.1 and Theorem 3.2):
the spread of the models shrinks by (r-1)/(N-1) a round on average, for r groups of N peers. The
groups follow from the view and the number of the round, so nobody has to look for one; inside, a
ring all-reduce weighted by examples: see `collective.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_moshpit.config import RandomGroups
from flwr_moshpit.protocol.baselines.collective import CollectivePeer
from flwr_moshpit.protocol.baselines.common import Worker
from flwr_moshpit.protocol.baselines.graphs import random_group
from flwr_moshpit.protocol.machine import Effect, Event, PeerId, PeerInfo, State, Vector, View


class RandomGroupsPeer:
    """One peer of random groups."""

    def __init__(
        self,
        config: RandomGroups,
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

        def group_of(peers: Sequence[PeerId], peer: PeerId, round_: int) -> Sequence[PeerId]:
            return random_group(peers, peer, round_, config.group_size_for(len(peers)))

        self._rounds = CollectivePeer(worker, group_of, rng, incarnation)

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
