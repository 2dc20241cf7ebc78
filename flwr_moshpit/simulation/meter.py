"""The swarm's mean model and how far the peers are from it, measured while a simulation runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flwr_moshpit.protocol.machine import Machine, PeerId, Vector

SHARE_OF_WORK = 0.05
"""Evaluations take at most about this share of the work that training takes."""

_FORWARD_SHARE = 1 / 3
"""Forward's part of the FLOPs of a training step: backward costs twice what forward does."""


def swarm_mean(machines: Sequence[Machine]) -> Vector | None:
    """sum(weight * params) / sum(weight), (d,) in the machines' dtype; None if nobody has weight.

    Summed in float64, in the order of `machines`.
    """
    total = math.fsum(machine.weight for machine in machines)
    if not total > 0:
        return None
    mean = np.zeros(machines[0].params.shape, np.float64)
    for machine in machines:
        share = machine.weight / total
        if share:
            mean += share * machine.params
    mean = mean.astype(machines[0].params.dtype)
    mean.setflags(write=False)
    return mean


def consensus_distance(machines: Sequence[Machine], mean: Vector) -> float:
    """Root mean square over `machines` of ||params - mean||."""
    squares = []
    for machine in machines:
        difference = np.subtract(machine.params, mean, dtype=np.float64)
        squares.append(float(difference @ difference))
    return math.sqrt(math.fsum(squares) / len(squares))


class Rounds:
    """Completed rounds by peer, and when the median living peer completes another one."""

    def __init__(self, peers: Sequence[PeerId]) -> None:
        self._completed = dict.fromkeys(peers, 0)
        self._target = 1
        self._reached = 0

    def complete(self, peer: PeerId, completed: int) -> None:
        """`peer` has completed `completed` rounds in all."""
        before = self._completed.get(peer)
        if before is None:
            return
        self._completed[peer] = completed
        self._reached += (completed >= self._target) - (before >= self._target)

    def median(self, living: Sequence[PeerId]) -> int:
        """Completed by at least half of `living`."""
        completed = sorted(self._completed[peer] for peer in living)
        return completed[len(completed) // 2] if completed else 0

    def may_have_advanced(self, num_living: int) -> bool:
        """Whether the median may be past what `advance` found: cheap, asked at every report."""
        return 2 * self._reached >= num_living

    def advance(self, living: Sequence[PeerId]) -> int | None:
        """The median where it is past every earlier one, else None."""
        median = self.median(living)
        if median < self._target:
            return None
        self._target = median + 1
        self._reached = sum(count >= self._target for count in self._completed.values())
        return median


class Spacing:
    """When the mean model is evaluated.

    After a fixed number of rounds or of seconds, or such that evaluations stay within
    `SHARE_OF_WORK`, counted in FLOPs: real time would make two runs of one seed differ.
    """

    def __init__(
        self, every: int | None, flops_per_example: float, every_s: float | None = None
    ) -> None:
        """`every`: rounds; `every_s`: virtual seconds, which are the caller's to keep.
        `flops_per_example`: of training; an evaluation goes forward only."""
        self._every = every
        self.every_s = every_s
        self._flops_per_example = flops_per_example * _FORWARD_SHARE
        self._last_round = 0
        self._last_flops = 0.0
        self._cost = 0.0

    def is_due(self, round: int, training_flops: float) -> bool:
        """After `round` rounds and `training_flops` in all; evaluating then is the caller's."""
        if self.every_s is not None:
            return False
        if self._every is not None:
            return round - self._last_round >= self._every
        return (training_flops - self._last_flops) * SHARE_OF_WORK >= self._cost

    def evaluated(self, round: int, training_flops: float, num_examples: int) -> None:
        """An evaluation on `num_examples` examples was made."""
        self._last_round = round
        self._last_flops = training_flops
        self._cost = num_examples * self._flops_per_example
