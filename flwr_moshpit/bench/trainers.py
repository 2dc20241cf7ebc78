"""Trainers for measurements: one that costs next to nothing, and one that times another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import Evaluated, GradientResult, Trained, Vector
from flwr_moshpit.trainer import Cost, Trainer
from flwr_moshpit.vector import Layout


class DriftTrainer:
    """Training adds a number of the client's own to every parameter, and takes no time."""

    def __init__(self, dim: int) -> None:
        self._layout = Layout.of({"x": np.zeros(dim, np.float32)})

    @property
    def layout(self) -> Layout:
        return self._layout

    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        self._layout = self._layout.with_dtype(dtype)

    def initial_params(self, seed: int) -> Vector:
        return np.zeros(self._layout.dim, self._layout.dtype)

    def cost(self) -> Cost:
        return Cost(flops_per_example=1e9, examples_per_step=32, memory_bytes=10**6)

    def examples(self, client: int, num_steps: int) -> int:
        return 32 * num_steps

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        moved = params + params.dtype.type(0.01 * (client % 7 - 3))
        moved.setflags(write=False)
        return Trained(moved, self.examples(client, num_steps))

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        gradient = np.full_like(params, 0.01 * (client % 7 - 3))
        return GradientResult(gradient, self.examples(client, 1))

    def corrected_steps(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> GradientResult:
        """The gradient is the same everywhere, so the mean of the steps' is any one's."""
        return self.gradient(client, params, seed)

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        return Evaluated(1, {"loss": abs(float(params[0]))})


class Stopwatch:
    """Another trainer, and the seconds spent inside it: of CPU, or of another `clock`."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float] = time.process_time) -> None:
        self._trainer = trainer
        self._clock = clock
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        return self._timed(value) if callable(value) else value

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += self._clock() - started

        return timed
