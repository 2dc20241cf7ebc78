"""Local only: every peer trains alone, and no model ever travels.

What averaging has to beat. A peer that restarts goes on from its checkpoint if it has one, and from
the initial model otherwise.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.config import Local
from flwr_moshpit.protocol.baselines.common import RoundTimes, Worker
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    PeerInfo,
    Start,
    State,
    Stop,
    Vector,
    View,
    ViewChanged,
)


class LocalPeer:
    """idle -> training -> training ... -> finished."""

    def __init__(
        self,
        config: Local,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        *,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
    ) -> None:
        self._worker = Worker(
            me,
            params,
            view,
            local_steps=config.local_steps,
            weight_max=np.inf,
            schema=schema,
            state=state,
        )
        self._begun_s = 0.0

    @property
    def deadline(self) -> float | None:
        return None

    @property
    def params(self) -> Vector:
        return self._worker.params

    @property
    def weight(self) -> float:
        return self._worker.weight

    def handle(self, event: Event, now: float) -> list[Effect]:
        worker = self._worker
        match event:
            case Start():
                worker.start(event)
                return [] if worker.training else self._begin(now)
            case ComputeDone() | ComputeFailed():
                return self._on_trained(event, now)
            case ViewChanged(view):
                worker.view = view
                return []
            case Stop():
                return worker.stop()
            case _:
                return []

    def snapshot(self) -> State:
        return self._worker.snapshot()

    def _begin(self, now: float) -> list[Effect]:
        worker = self._worker
        if worker.done:
            return worker.finish()
        self._begun_s = now
        return worker.train()

    def _on_trained(self, event: ComputeDone | ComputeFailed, now: float) -> list[Effect]:
        worker = self._worker
        result, effects = worker.trained(event)
        if result is None:
            return effects
        worker.weight = float(result.num_examples)
        # Nothing was averaged, so nothing of the vector is covered.
        report = RoundTimes(self._begun_s, now, now).report(
            now, worker, contributors=1, weight=worker.weight, coverage=0.0
        )
        worker.advance(result.params)
        return [*effects, report, *self._begin(now)]
