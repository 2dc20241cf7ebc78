"""Jobs in virtual time: each becomes due after its virtual cost, and really runs by then at the
latest, together with others that are outstanding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from struct import pack
from typing import Protocol

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Evaluate,
    Event,
    GradientResult,
    Job,
    JobId,
    LocalSteps,
    Trained,
)
from flwr_moshpit.simulation.agenda import Agenda, Ticket
from flwr_moshpit.simulation.backend import ComputeBackend, EarlyBackend, Outcome, WorkItem
from flwr_moshpit.trainer import Cost

_BATCH_BYTES = 1 << 30


class Device(Protocol):
    """What the clock needs to know of a device; `DeviceProfile` has it."""

    @property
    def flops_per_s(self) -> float: ...
    @property
    def power_w(self) -> float: ...
    @property
    def idle_w(self) -> float: ...


def job_seed(seed: int, index: int, incarnation: int, number: int) -> int:
    """The seed of training job `number`, from 0, of peer number `index` in that incarnation."""
    digest = hashlib.sha256(pack("<4q", seed, index, incarnation, number)).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class Slot:
    """One peer's processor."""

    __slots__ = ("busy_s", "client", "device", "factor", "incarnation", "index", "jobs", "started")

    def __init__(self, index: int, client: int, device: Device) -> None:
        self.index = index
        self.client = client
        self.device = device
        self.factor = 1.0
        """How many times slower than its device this peer is at present."""
        self.incarnation = 0
        self.started = 0
        """Training jobs of this incarnation."""
        self.jobs: dict[JobId, Pending] = {}
        self.busy_s = 0.0


class Pending:
    """A job that has been submitted and not answered."""

    __slots__ = ("began_s", "due_s", "has_run", "item", "job_id", "outcome", "slot", "ticket")

    def __init__(self, slot: Slot, job_id: JobId, item: WorkItem, now: float) -> None:
        self.slot = slot
        self.job_id = job_id
        self.item = item
        self.began_s = now
        self.due_s = math.inf
        self.ticket: Ticket | None = None
        """For what the agenda does at `due_s`."""
        self.outcome: Outcome | None = None
        self.has_run = False
        """Whether there is an outcome or, of a job that was begun early, one will be there."""


class JobPool:
    """All peers' jobs.

    Which jobs run together is decided by the virtual schedule alone: at most `batch_size`, those
    that fall due first, when the first of them does. So the number of workers changes nothing.
    """

    def __init__(
        self,
        agenda: Agenda,
        backend: ComputeBackend,
        cost: Cost,
        seed: int,
        tell: Callable[[int, Event], None],
        interrupted: Callable[[], bool],
        report_errors: bool,
        batch_size: int,
    ) -> None:
        self._agenda = agenda
        self._backend = backend
        self._early = backend if isinstance(backend, EarlyBackend) else None
        self._cost = cost
        self._seed = seed
        self._tell = tell
        self._interrupted = interrupted
        self._report_errors = report_errors
        self._batch_size = batch_size
        self._ticket = count().__next__
        self._postponed: list[tuple[float, int, Pending]] = []
        self._instant: list[Pending] = []
        """Jobs that run before time goes on: only running them tells when they are due."""

    def submit(self, slot: Slot, job_id: JobId, job: Job) -> None:
        """Raises ConfigError for a job without steps and without a budget."""
        now = self._agenda.now
        if isinstance(job, LocalSteps) and job.num_steps is None:
            job = replace(job, num_steps=self._steps_within(slot, job.budget_s))
        seed = 0
        if not isinstance(job, Evaluate):
            # Evaluation draws nothing, so that looking more often changes no training.
            seed = job_seed(self._seed, slot.index, slot.incarnation, slot.started)
            slot.started += 1
        pending = Pending(slot, job_id, WorkItem(slot.client, job, seed), now)
        slot.jobs[job_id] = pending
        if self._early is not None:
            self._early.begin(pending.item)
        known = None if isinstance(job, Evaluate) else self._backend.examples(slot.client, job)
        if known is not None:
            self._set_due(pending, now + self._duration_s(slot, known))
        self._wait(pending)

    def cancel(self, slot: Slot, job_id: JobId) -> None:
        """Forget a job; harmless if there is none."""
        pending = slot.jobs.pop(job_id, None)
        if pending is not None:
            if pending.ticket is not None:
                self._agenda.cancel(pending.ticket)
            if self._early is not None and pending.outcome is None:
                self._early.give_up(pending.item)
            self._account(pending)

    def clear(self, slot: Slot) -> None:
        """Forget all jobs of a peer that has died."""
        for job_id in list(slot.jobs):
            self.cancel(slot, job_id)

    def slow_down(self, slot: Slot, factor: float) -> None:
        """From now the peer is `factor` times slower than its device, in mid-job too."""
        now = self._agenda.now
        ratio = factor / slot.factor
        slot.factor = factor
        for pending in slot.jobs.values():
            if math.isfinite(pending.due_s):
                self._set_due(pending, now + (pending.due_s - now) * ratio)
                if not pending.has_run:
                    self._wait(pending)

    def busy_s(self, slot: Slot) -> float:
        """Seconds of training so far, that under way included."""
        now = self._agenda.now
        return slot.busy_s + sum(
            now - pending.began_s
            for pending in slot.jobs.values()
            if not isinstance(pending.item.job, Evaluate)
        )

    def _duration_s(self, slot: Slot, examples: int) -> float:
        flops = examples * self._cost.flops_per_example
        return slot.factor * flops / slot.device.flops_per_s

    def _steps_within(self, slot: Slot, budget_s: float | None) -> int:
        if budget_s is None:
            raise ConfigError("a LocalSteps job needs num_steps or budget_s")
        step_s = self._duration_s(slot, self._cost.examples_per_step)
        return max(1, int(budget_s / step_s)) if step_s > 0 else 1

    def _set_due(self, pending: Pending, due_s: float) -> None:
        if pending.ticket is not None:
            self._agenda.cancel(pending.ticket)
        pending.due_s = due_s
        pending.ticket = self._agenda.at(due_s, self._due, pending)

    def _is_wanted(self, pending: Pending) -> bool:
        return pending.slot.jobs.get(pending.job_id) is pending

    def _due(self, pending: Pending) -> None:
        if not pending.has_run:
            self._run(self._next_batch())
        self._finish(pending)

    def _next_batch(self) -> list[Pending]:
        """The jobs that fall due first; the one that is due now is the first of them."""
        batch: dict[Pending, None] = {}
        left_bytes = _BATCH_BYTES
        while self._postponed and len(batch) < self._batch_size and left_bytes > 0:
            due_s, _, pending = heappop(self._postponed)
            stale = pending.due_s != due_s or pending.has_run
            if not stale and self._is_wanted(pending):
                batch[pending] = None
                left_bytes -= pending.item.job.params.nbytes
        return list(batch)

    def _run_instant(self) -> None:
        batch = [pending for pending in self._instant if self._is_wanted(pending)]
        self._instant = batch[self._batch_size :]
        if self._instant:
            self._agenda.at(self._agenda.now, self._run_instant)
        self._run(batch[: self._batch_size])

    def _run(self, batch: list[Pending]) -> None:
        """Run jobs and keep their outcomes. Those that an interrupt or an error leaves undone wait
        again. Of those that were begun early nobody waits for the outcome before they are due."""
        if self._early is not None:
            self._settle(self._early, batch)
            return
        try:
            outcomes = self._backend.run([pending.item for pending in batch])
            for pending, outcome in zip(batch, outcomes, strict=False):
                self._keep(pending, self._checked(outcome))
                if self._backend.is_lazy and self._interrupted():
                    break
        finally:
            for pending in batch:
                if pending.outcome is None:
                    self._wait(pending)

    def _settle(self, early: EarlyBackend, batch: list[Pending]) -> None:
        for pending in batch:
            pending.has_run = True
            early.settle(pending.item)
        for pending in batch:
            if pending.due_s == math.inf:
                self._keep(pending, self._checked(early.outcome(pending.item)))

    def _checked(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, TrainerError) and not self._report_errors:
            raise outcome
        return outcome

    def _keep(self, pending: Pending, outcome: Outcome) -> None:
        pending.outcome, pending.has_run = outcome, True
        if pending.due_s == math.inf:
            examples = outcome.num_examples if isinstance(outcome, Trained | GradientResult) else 0
            self._set_due(pending, self._agenda.now + self._duration_s(pending.slot, examples))

    def _wait(self, pending: Pending) -> None:
        if pending.due_s < math.inf:
            heappush(self._postponed, (pending.due_s, self._ticket(), pending))
            return
        if not self._instant:
            self._agenda.at(self._agenda.now, self._run_instant)
        self._instant.append(pending)

    def _finish(self, pending: Pending) -> None:
        outcome = pending.outcome
        if outcome is None:
            assert self._early is not None
            outcome = self._checked(self._early.outcome(pending.item))
        del pending.slot.jobs[pending.job_id]
        self._account(pending)
        event: Event
        if isinstance(outcome, TrainerError):
            event = ComputeFailed(pending.job_id, str(outcome))
        else:
            event = ComputeDone(pending.job_id, outcome)
        self._tell(pending.slot.index, event)

    def _account(self, pending: Pending) -> None:
        if not isinstance(pending.item.job, Evaluate):
            pending.slot.busy_s += self._agenda.now - pending.began_s
