"""Where training really happens: in this process or in worker processes. Results are the same."""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol, runtime_checkable

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.parent import follow_parent
from flwr_moshpit.protocol.machine import (
    CorrectedSteps,
    Evaluate,
    Gradient,
    GradientResult,
    Job,
    LocalSteps,
    Result,
    Trained,
)
from flwr_moshpit.trainer import Trainer
from flwr_moshpit.user_code import one_torch_thread


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One job as a trainer sees it."""

    client: int
    job: Job
    """`LocalSteps` have their `num_steps` here, whoever set the budget."""
    seed: int


Outcome = Result | TrainerError


class ComputeBackend(Protocol):
    """Carries out jobs. What comes out must depend on nothing but the items and their order."""

    is_lazy: bool
    """Whether a job does not run before its outcome is asked for."""

    def examples(self, client: int, job: Job) -> int | None:
        """How many examples `job` will go over, or None if only running it tells."""
        ...

    def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        """The outcomes in the order of `batch`, which holds at most one training job a client.

        If it is lazy the caller may stop asking before the end.
        """
        ...

    def close(self) -> None:
        """Give back processes and memory. Harmless twice."""
        ...


@runtime_checkable
class EarlyBackend(ComputeBackend, Protocol):
    """Begins jobs when they are submitted, so that all its processors have work all the time.

    What comes out is the same: a job that is given up before it is settled was never done.
    """

    def begin(self, item: WorkItem) -> None:
        """Carry it out as soon as may be."""
        ...

    def settle(self, item: WorkItem) -> None:
        """From now what it has changed counts: others would run it now."""
        ...

    def give_up(self, item: WorkItem) -> None:
        """Nobody asks for its outcome; if it is not settled, take back what it has changed."""
        ...

    def outcome(self, item: WorkItem) -> Outcome:
        """Wait for it, once."""
        ...


def trainer_backend(trainer: Trainer, workers: int = 0) -> ComputeBackend:
    """A backend over `trainer`: in this process, or in as many worker processes as asked.

    Raises ConfigError for a negative number, and for a trainer that cannot be sent to a worker.
    """
    if workers < 0:
        raise ConfigError(f"workers must be 0 or more, not {workers}")
    return WorkerBackend(trainer, workers) if workers else InProcessBackend(trainer)


class InProcessBackend:
    """Runs jobs here, one after the other, each when its outcome is asked for."""

    is_lazy = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def examples(self, client: int, job: Job) -> int | None:
        return examples_of(self._trainer, client, job)

    def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        for item in batch:
            with one_torch_thread():
                outcome = outcome_of(self._trainer, item)
            yield outcome

    def close(self) -> None:
        pass


class WorkerBackend:
    """Runs jobs in processes of their own; client i always in process i modulo their number,
    because a trainer keeps what belongs to a client between its jobs."""

    is_lazy = False

    def __init__(self, trainer: Trainer, workers: int) -> None:
        self._trainer = trainer
        payload = _pickled(trainer)
        # Forked children would inherit torch's threads in an unknown state.
        context = get_context("spawn")
        self._pools = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_begin_worker)
            for _ in range(workers)
        ]
        try:
            for ready in [pool.submit(_load, payload) for pool in self._pools]:
                ready.result()
        except Exception as error:
            self.close()
            raise ConfigError(
                f"a worker process cannot load the trainer ({error}): define it in a module that "
                "can be imported, guard the script's own start by `if __name__ == '__main__':`, "
                "or set workers to 0"
            ) from error

    def examples(self, client: int, job: Job) -> int | None:
        return examples_of(self._trainer, client, job)

    def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        shares: list[list[WorkItem]] = [[] for _ in self._pools]
        for item in batch:
            shares[item.client % len(shares)].append(item)
        futures: list[Future[list[_Sent]] | None] = [
            pool.submit(_run, share) if share else None
            for pool, share in zip(self._pools, shares, strict=True)
        ]
        try:
            outcomes = [iter(future.result() if future else []) for future in futures]
        except BrokenProcessPool as error:
            raise TrainerError(
                "a worker process died while it trained: out of memory, or killed"
            ) from error
        for item in batch:
            yield _unpacked(next(outcomes[item.client % len(outcomes)]))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def examples_of(trainer: Trainer, client: int, job: Job) -> int | None:
    """See `ComputeBackend.examples`."""
    if isinstance(job, LocalSteps):
        assert job.num_steps is not None
        return trainer.examples(client, job.num_steps)
    if isinstance(job, CorrectedSteps):
        return trainer.examples(client, job.num_steps)
    if isinstance(job, Gradient):
        return trainer.examples(client, 1)
    return 0


def outcome_of(trainer: Trainer, item: WorkItem) -> Outcome:
    """Run one job; what the user's code raises becomes a TrainerError that names the client."""
    try:
        result = _result_of(trainer, item)
    except TrainerError as error:
        return error
    except ConfigError:
        raise
    except Exception as error:
        kind = type(item.job).__name__
        wrapped = TrainerError(f"client {item.client} failed in {kind}: {error!r}")
        wrapped.__cause__ = error
        return wrapped
    return read_only(result)


def read_only(result: Result) -> Result:
    """`result`, whose vector nobody can change any more."""
    if isinstance(result, Trained):
        result.params.setflags(write=False)
    elif isinstance(result, GradientResult):
        result.gradient.setflags(write=False)
    return result


def _result_of(trainer: Trainer, item: WorkItem) -> Result:
    job = item.job
    if isinstance(job, LocalSteps):
        assert job.num_steps is not None
        return trainer.train(item.client, job.params, job.num_steps, item.seed)
    if isinstance(job, Gradient):
        return trainer.gradient(item.client, job.params, item.seed)
    if isinstance(job, CorrectedSteps):
        return trainer.corrected_steps(
            item.client,
            job.params,
            job.correction,
            job.num_steps,
            job.learning_rate,
            item.seed,
        )
    assert isinstance(job, Evaluate)
    return trainer.evaluate(job.params, item.client)


# In the worker processes. Results and errors travel between our own processes only.


class WorkerTraceback(Exception):
    """Where in a worker process a trainer raised, as text: the cause of a TrainerError."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_Sent = Result | tuple[str, str]
"""A result, or a TrainerError's message and the traceback of what caused it."""

_loaded: list[Trainer] = []


def _begin_worker() -> None:
    # Ctrl-C reaches the whole group of processes; the engine ends the workers when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()


def _load(payload: bytes) -> None:
    _loaded.append(pickle.loads(payload))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _run(batch: list[WorkItem]) -> list[_Sent]:
    sent: list[_Sent] = []
    for item in batch:
        with one_torch_thread():
            outcome = outcome_of(_loaded[0], item)
        if isinstance(outcome, TrainerError):
            cause = outcome.__cause__ or outcome
            text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
            sent.append((str(outcome), text))
        else:
            sent.append(outcome)
    return sent


def _unpacked(sent: _Sent) -> Outcome:
    if not isinstance(sent, tuple):
        # Pickling loses the flag.
        return read_only(sent)
    message, text = sent
    error = TrainerError(message)
    error.__cause__ = WorkerTraceback(text)
    return error


def _pickled(trainer: Trainer) -> bytes:
    cure = "put it into a module that can be imported, or set workers to 0"
    try:
        payload = pickle.dumps(trainer)
    except Exception as error:
        raise ConfigError(
            f"the trainer cannot be sent to worker processes ({error}): {cure}"
        ) from error
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    if interactive and b"__main__" in payload:
        raise ConfigError(
            f"worker processes cannot see what is defined in a notebook or at a prompt: {cure}"
        )
    return payload
