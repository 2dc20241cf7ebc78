"""What the death of one peer does to the others, from what all have told of their rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.watched import Averaged

CALM_ROUNDS = 10
"""So many rounds say how long one takes when nobody dies."""


@dataclass(frozen=True, slots=True)
class Death:
    """What one death did to the others."""

    stage: str
    victim: PeerId
    round: int
    """The first round that the survivors finished without it."""
    delay_s: float
    """How much longer the slowest round since the death took than the median round before."""
    coverage: float
    """The least of any survivor that came to its group in time: the fraction of its vector that was
    averaged in that round."""
    late: int
    """Survivors that came too late for their group, as happens where processors are short. The
    death did not do that."""
    difference: float
    """Largest, over the survivors and the vector, between what they got and the exact weighted mean
    of what the contributors had brought."""
    survivors: int

    def told(self) -> str:
        """One line."""
        late = f" ({self.late} came too late for it)" if self.late else ""
        return (
            f"round {self.round}, {self.survivors} survivors{late}: delay {self.delay_s:.2f} s, "
            f"coverage {100 * self.coverage:.0f} %, largest difference from their exact mean "
            f"{self.difference:.1e}"
        )


class Rounds:
    """The last rounds of all peers."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[PeerId, Averaged]] = {}

    def __bool__(self) -> bool:
        return bool(self._rounds)

    @property
    def latest(self) -> int:
        return max(self._rounds, default=-1)

    def add(self, peer: PeerId, averaged: Averaged) -> None:
        self._rounds.setdefault(averaged.round, {})[peer] = averaged
        while len(self._rounds) > 3 * CALM_ROUNDS:
            del self._rounds[min(self._rounds)]

    def without(self, victim: PeerId, at: float, living: Iterable[PeerId]) -> int | None:
        """The first round that all `living` have ended after `at` without `victim`."""
        peers = list(living)
        for number, of in sorted(self._rounds.items()):
            those = [of.get(peer) for peer in peers]
            if all(a is not None and a.at > at and victim not in a.contributors for a in those):
                return number
        return None

    def death(
        self, stage: str, victim: PeerId, at: float, number: int, living: Iterable[PeerId]
    ) -> Death:
        """Of `victim`, at `at`, as seen in round `number`, which `without` has found."""
        ends = {k: max(a.at for a in of.values()) for k, of in sorted(self._rounds.items())}
        took = {k: ends[k] - ends[k - 1] for k in ends if k - 1 in ends}
        calm = [took[k] for k in took if ends[k] <= at][-CALM_ROUNDS:] or [0.0]
        slowest = max(took[k] for k in took if ends[k] > at and k <= number)
        those = self._rounds[number]
        survivors = [those[peer] for peer in living]
        in_time = [averaged for averaged in survivors if not averaged.late]
        return Death(
            stage=stage,
            victim=victim,
            round=number,
            delay_s=max(0.0, slowest - statistics.median(calm)),
            coverage=min((averaged.coverage for averaged in in_time), default=0.0),
            late=len(survivors) - len(in_time),
            difference=max((_difference(each, those) for each in in_time), default=float("nan")),
            survivors=len(survivors),
        )


def _difference(averaged: Averaged, of: dict[PeerId, Averaged]) -> float:
    """Between what one got and the exact mean of what the contributors brought; NaN where one of
    them has not told what that was."""
    brought = [of[peer] for peer in averaged.contributors if peer in of]
    if len(brought) < len(averaged.contributors) or not brought:
        return float("nan")
    total = sum(each.weight for each in brought)
    mean = np.zeros(averaged.got.shape, np.float64)
    for each in brought:
        mean += each.weight / total * each.brought.astype(np.float64)
    return float(np.max(np.abs(averaged.got - mean)))
