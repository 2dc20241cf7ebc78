"""Where a peer trains: in a process of its own (`trainer_process.py`), or in a thread of this one.

A `Compute` takes jobs one after the other and answers each with one event, unless it is cancelled
first. What a job does is the same in both places: `run_job`.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Protocol, TypeAlias

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    CorrectedSteps,
    Gradient,
    GradientResult,
    Job,
    JobId,
    LocalSteps,
    Result,
    Trained,
    Vector,
)
from flwr_moshpit.trainer import Cost, Trainer

MakeTrainer: TypeAlias = Callable[[], Trainer]
"""Makes the trainer, where it will be used. For a process of its own it has to be picklable, such
as a function of a module, or a `functools.partial` of one."""

Answer: TypeAlias = ComputeDone | ComputeFailed


@dataclass(frozen=True, slots=True)
class Offer:
    """What a trainer brings to the swarm."""

    schema: bytes
    """Of its layout: peers with another one cannot average with this one."""
    params: Vector
    """(d,), the common initial model."""
    cost: Cost | None = None
    """Of training, where the task asks for it."""


@dataclass(frozen=True, slots=True)
class Task:
    """Whose trainer this is."""

    make_trainer: MakeTrainer
    client: int
    num_clients: int
    seed: tuple[int, ...]
    """Pins the batches: of two peers, and of two lives of one peer, it should differ."""
    initial_seed: int = 0
    """Of the initial model: the same for all peers."""
    dtype: str | None = None
    """float32, float64, or None for the trainer's own."""
    tells_cost: bool = False
    """Whether the trainer is to find out what training costs, which may take it a step of it."""

    def job_seed(self, number: int) -> int:
        """The seed of the `number`-th job, 0 <= seed < 2^31."""
        hashed = hashlib.sha256(pack(f"<{len(self.seed) + 1}q", *self.seed, number)).digest()
        return int.from_bytes(hashed[:4], "little") >> 1

    def offer(self, trainer: Trainer) -> Offer:
        """Prepare `trainer` and say what it brings."""
        if not 0 <= self.client < self.num_clients:
            raise ConfigError(f"client must be in 0..{self.num_clients - 1}, not {self.client}")
        trainer.prepare(self.num_clients, self.dtype)
        params = trainer.initial_params(self.initial_seed)
        params.setflags(write=False)
        cost = trainer.cost() if self.tells_cost else None
        return Offer(trainer.layout.schema, params, cost)


class Compute(Protocol):
    """Carries out the jobs of one peer."""

    def start(self) -> Offer:
        """Load the trainer; blocks. Raises TrainerError or ConfigError when it cannot be loaded."""
        ...

    def connect(self, answer: Callable[[Answer], None]) -> None:
        """Answers go to `answer`, which is called in a thread of this object."""
        ...

    def submit(self, job_id: JobId, job: Job) -> None: ...

    def cancel(self, job_id: JobId) -> None:
        """Do not begin this job. One that has begun goes on, and the next one waits for it: its
        answer may still come."""
        ...

    def close(self) -> None:
        """End, with what is under way. Harmless twice."""
        ...


class JobThread:
    """Jobs in the order in which they came, each carried out by `execute(job, number)`."""

    def __init__(self, execute: Callable[[Job, int], Result]) -> None:
        self._execute = execute
        self._answer: Callable[[Answer], None] = lambda answer: None
        self._waiting: dict[JobId, Job] = {}
        self._order: queue.SimpleQueue[JobId | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def connect(self, answer: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._thread.start()

    def submit(self, job_id: JobId, job: Job) -> None:
        self._waiting[job_id] = job
        self._order.put(job_id)

    def cancel(self, job_id: JobId) -> None:
        self._waiting.pop(job_id, None)

    def close(self, timeout_s: float | None = None) -> None:
        self._closed = True
        self._order.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        number = 0
        while (job_id := self._order.get()) is not None and not self._closed:
            job = self._waiting.pop(job_id, None)
            if job is None:
                continue
            answer = self._carry_out(job_id, job, number)
            number += 1
            if not self._closed:
                self._answer(answer)
            # Each holds a model, which would stay until the next job.
            del job, answer

    def _carry_out(self, job_id: JobId, job: Job, number: int) -> Answer:
        try:
            return ComputeDone(job_id, self._execute(job, number))
        except Exception as error:
            # Whatever the user's code raises, the peer goes on without this job.
            # An error of ours says it all, and has the user's traceback where there is one.
            if isinstance(error, MoshpitError):
                return ComputeFailed(job_id, str(error))
            return ComputeFailed(job_id, "".join(traceback.format_exception(error)).rstrip())


class ThreadCompute:
    """Trains in a thread of this process: for tests, and for trainers that cost little."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._trainer: Trainer | None = None
        self._jobs = JobThread(self._execute)

    def start(self) -> Offer:
        trainer = self._trainer = self._task.make_trainer()
        return self._task.offer(trainer)

    def connect(self, answer: Callable[[Answer], None]) -> None:
        self._jobs.connect(answer)

    def submit(self, job_id: JobId, job: Job) -> None:
        self._jobs.submit(job_id, job)

    def cancel(self, job_id: JobId) -> None:
        self._jobs.cancel(job_id)

    def close(self) -> None:
        # A thread cannot be ended from outside: it ends with the job that it is at.
        self._jobs.close(timeout_s=1.0)

    def _execute(self, job: Job, number: int) -> Result:
        assert self._trainer is not None
        return run_job(self._trainer, self._task.client, job, self._task.job_seed(number))


def run_job(
    trainer: Trainer,
    client: int,
    job: Job,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Carry out `job`; the arrays of the result are read-only. Raises what the trainer raises."""
    if isinstance(job, LocalSteps):
        return _frozen(_local_steps(trainer, client, job, seed, clock))
    if isinstance(job, Gradient):
        return _frozen(trainer.gradient(client, job.params, seed))
    if isinstance(job, CorrectedSteps):
        result = trainer.corrected_steps(
            client, job.params, job.correction, job.num_steps, job.learning_rate, seed
        )
        return _frozen(result)
    return trainer.evaluate(job.params, client)


def _local_steps(
    trainer: Trainer, client: int, job: LocalSteps, seed: int, clock: Callable[[], float]
) -> Trained:
    if job.num_steps is not None:
        return trainer.train(client, job.params, job.num_steps, seed)
    if job.budget_s is None:
        raise ConfigError("a LocalSteps job needs num_steps or budget_s")
    ends_at = clock() + job.budget_s
    params, num_examples, steps, number = job.params, 0, 1, 0
    while True:
        began_at = clock()
        done = trainer.train(client, params, steps, (seed + number) % (1 << 31))
        now = clock()
        params, num_examples, number = done.params, num_examples + done.num_examples, number + 1
        # Half of what seems to be left at a time, because the first steps are slower than others.
        left = (ends_at - now) / max((now - began_at) / steps, 1e-6)
        if left < 1:
            return Trained(params, num_examples, done.metrics)
        steps = max(1, int(left / 2))


def _frozen(result: Trained | GradientResult) -> Trained | GradientResult:
    arrays: Sequence[Vector] = [result.params] if isinstance(result, Trained) else [result.gradient]
    for array in arrays:
        array.setflags(write=False)
    return result
