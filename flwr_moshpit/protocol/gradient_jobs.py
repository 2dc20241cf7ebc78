"""The training jobs of one R-FAST peer: one is always out, and the next one follows at once.

Only where a job takes less time than news takes to travel it is held back a little, by
`Tracking.ready_at`: a peer whose model has not changed has little to say that is new.
"""

from __future__ import annotations

import math
from math import inf

import numpy as np

from flwr_moshpit.protocol.ledger import usable
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    CorrectedSteps,
    Finish,
    Gradient,
    GradientResult,
    Job,
    JobId,
    Report,
    Start,
    Vector,
)
from flwr_moshpit.protocol.step_size import EXPLODED
from flwr_moshpit.protocol.tracking import Core, Tracking


class GradientJobs:
    """Asks for gradients at the model of the moment, and hands them to the ledger and `tracking`.

    With `local_steps` above 1 it asks for corrected local epochs, y <- y - lr (grad(y) + h - g),
    with h the mean gradient at the root and g the peer's own: see `corrections.py`.
    """

    def __init__(self, core: Core, tracking: Tracking, done: int) -> None:
        self.round = done
        """Jobs answered, by earlier incarnations too."""
        self.refused = 0
        """Messages and results that could not be used."""
        self._core = core
        self._tracking = tracking
        self.due = inf
        """When the next job may begin."""
        self._until_round: int | None = None
        self._job: JobId | None = None
        self._num_jobs = 0
        self._params = core.x
        self._step = 0
        self._began_at = -inf
        self._took_at: float | None = None
        self._largest = 0.0
        """Norm of the gradients so far that had not exploded."""
        self._exploded = False
        self._has_heard = False

    @property
    def waits(self) -> bool:
        """For its time, or for news."""
        return self._job is None and self._core.training

    def start(self, event: Start, now: float) -> None:
        self._until_round = event.until_round
        self._core.training = True
        self.go_on(now)

    def stop(self) -> None:
        self._core.training = False
        self._cancel()

    def on_done(self, job_id: JobId, result: object, now: float) -> None:
        if job_id != self._job:
            return
        core, config = self._core, self._core.config
        self._job = None
        self.round += 1
        gradient, weight = None, 1.0
        if isinstance(result, GradientResult):
            gradient = np.asarray(result.gradient, dtype=core.x.dtype)
            if config.weigh_examples:
                weight = min(float(result.num_examples), config.weight_max)
        if gradient is None or not usable(gradient, core.identity.dim, core.x.dtype) or weight <= 0:
            values = {"peer": core.identity.me, "reason": "no usable gradient", "what": "training"}
            self.refused += 1
            core.emit(Report("refused", {**values, "count": self.refused}))
        else:
            self._take(gradient, weight, now)
        self.go_on(now)

    def on_failed(self, job_id: JobId, error: str, now: float) -> None:
        """A job without a result counts, or a client that always fails would never end."""
        if job_id == self._job:
            self._job = None
            self.round += 1
            self._core.emit(Report("training_failed", {"error": error}))
            self.go_on(now)

    def heard_a_model(self, now: float) -> None:
        """A newcomer's first gradient should not be at a model that the others left long ago."""
        if self._has_heard:
            return
        self._has_heard = True
        is_first = not self._core.weight and self._job is not None
        if is_first and not np.array_equal(self._params, self._core.x):
            self._cancel()
            self._began_at = -inf
            self.go_on(now)

    def _take(self, gradient: Vector, weight: float, now: float) -> None:
        core = self._core
        self._look_at(gradient)
        core.corrections.took(None if self._exploded else gradient)
        weighted = gradient if weight == 1.0 else gradient * core.x.dtype.type(weight)
        core.ledger.set_gradient(weighted)
        core.weight, core.seen = weight, self._step
        core.lag = max(0, core.step - self._step)
        if self._took_at is not None:
            period_s = now - self._took_at
            core.period_s += (period_s - core.period_s) / (8 if core.period_s else 1)
        self._took_at = now
        self._tracking.step(now)
        values = {
            "round": self.round,
            "contributors": core.contributors,
            "coverage": min(1.0, core.contributors / len(core.view)),
            "staleness": core.lag,
        }
        core.emit(Report("round", values))

    def _look_at(self, gradient: Vector) -> None:
        with np.errstate(over="ignore"):
            norm = math.sqrt(float(np.vdot(gradient, gradient)))
        self._exploded = 0 < EXPLODED * self._largest < norm
        if not self._exploded:
            self._largest = max(self._largest, norm)

    def go_on(self, now: float) -> None:
        """The next job, as soon as it may begin, or the end of training."""
        core = self._core
        self.due = inf
        if not core.training or self._job is not None:
            return
        if self._until_round is not None and self.round >= self._until_round:
            core.training = False
            core.emit(Finish(core.x))
            return
        ready_at = self._tracking.ready_at(self._began_at)
        if ready_at > now:
            self.due = ready_at
            return
        self._num_jobs += 1
        self._job = JobId(self._num_jobs)
        self._params, self._step, self._began_at = core.x, core.step, now
        core.trained_version = core.version
        core.emit(Compute(self._job, self._next_job()))

    def _next_job(self) -> Job:
        core, config = self._core, self._core.config
        if config.local_steps == 1:
            return Gradient(core.x)
        correction = np.zeros_like(core.x)
        # Local epochs that have run away correct the next ones by what they met on the way, and
        # would lead these further astray: those begin without any correction.
        own = core.corrections.gradient
        if own is not None and core.direction is not None and not self._exploded:
            correction += core.direction
            correction -= own
        correction.setflags(write=False)
        return CorrectedSteps(core.x, correction, config.local_steps, config.learning_rate)

    def _cancel(self) -> None:
        if self._job is not None:
            self._core.emit(Cancel(self._job))
            self._job = None
