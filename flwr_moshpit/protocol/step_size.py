"""How far the root steps, and in which direction.

The limit on asynchronous tracking is one of delay: with L the smoothness of the mean loss,
step * L * (round trip root -> peers -> root, in root steps) must stay below about 1.5 to 3. So the
step on the mean gradient is the trainer's learning rate divided by the measured round trip: a rate
that suits training in one place suits the swarm, wherever its slow peers sit.

What counts is the mean round trip over the peers, sum L_i tau_i / sum L_i in the linear case: with
the median, a peer a hundred times slower whose loss is the steepest in some direction, as when each
peer has a class of its own, makes the swarm swing for ever around the optimum.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import Vector

EXPLODED = 10.0
"""So many times what was usual is too much."""

_ADAM_SECOND_MOMENT = 0.999
_ADAM_EPSILON = 1e-8


class StepSize:
    """rate = scale * learning_rate / round_trip.

    scale is 1 until the tracked norm explodes: when the norm of the mean gradient passes 10 times
    the largest that it had during settling (3 round trips from the start and from every change of
    the contributors), scale is halved, and not again before another 3 round trips. Until the halved
    rate shows, `norm_max` bounds the steps: what has exploded would lead the model so far away that
    no later gradient brings it back.
    """

    def __init__(self, learning_rate: float, round_trip: float) -> None:
        self.scale = 1.0
        self.round_trip = max(1.0, round_trip)
        """In root steps, smoothed."""
        self._learning_rate = learning_rate
        self._largest = 0.0
        self._ceiling = math.inf
        self._wait = 3 * self.round_trip
        self._settling = True
        self._contributors = 0

    @property
    def rate(self) -> float:
        return self.scale * self._learning_rate / self.round_trip

    @property
    def norm_max(self) -> float:
        """Of the mean gradient; a longer one is to be shortened to this before it is used."""
        return self._ceiling if self._settling else EXPLODED * self._largest

    def observe(self, round_trip: float) -> None:
        """One more measurement, in steps."""
        self.round_trip += (max(1.0, round_trip) - self.round_trip) / 16

    def watch(self, norm: float, contributors: int) -> bool:
        """One step was made at this norm of the mean gradient; True if it halved the scale."""
        self._wait -= 1
        if contributors != self._contributors:
            self._contributors = contributors
            self._settling, self._wait = True, 3 * self.round_trip
            self._ceiling = EXPLODED * self._largest or math.inf
        if self._settling:
            if math.isfinite(norm):
                self._largest = max(self._largest, min(norm, self._ceiling))
            self._settling = self._wait > 0
            return False
        if self._wait > 0 or norm <= EXPLODED * self._largest:
            return False
        self.scale /= 2
        self._wait = 3 * self.round_trip
        return True


class Optimizer:
    """What the root does with the mean gradient: x <- x - rate * direction(mean gradient).

    "sgd"; "momentum", m <- b m + (1 - b) g, at half the rate, since with momentum the limit by
    delay is half as wide; "adam" (Kingma, Ba, arXiv 1412.6980) with this b and 0.999.
    """

    def __init__(self, kind: str, momentum: float) -> None:
        self._kind = kind
        self._momentum = momentum
        self._first: Vector | None = None
        self._second: Vector | None = None
        self._count = 0

    def direction(self, gradient: Vector) -> Vector:
        if self._kind == "sgd":
            return gradient
        b = self._momentum
        self._count += 1
        if self._first is None:
            self._first = np.zeros_like(gradient)
        self._first = b * self._first + (1 - b) * gradient
        if self._kind == "momentum":
            return 0.5 * self._first
        if self._second is None:
            self._second = np.zeros_like(gradient)
        c = _ADAM_SECOND_MOMENT
        self._second = c * self._second + (1 - c) * gradient**2
        first = self._first / (1 - b**self._count)
        second = self._second / (1 - c**self._count)
        return first / (np.sqrt(second) + _ADAM_EPSILON)

    def snapshot(self) -> dict[str, Any]:
        state: dict[str, Any] = {"count": self._count}
        if self._first is not None:
            state["first"] = self._first
        if self._second is not None:
            state["second"] = self._second
        return state

    def restore(self, state: dict[str, Any]) -> None:
        self._count = int(state["count"])
        self._first, self._second = state.get("first"), state.get("second")
