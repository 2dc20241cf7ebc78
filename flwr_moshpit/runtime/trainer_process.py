"""A peer's trainer in a process of its own: whatever it does, the peer goes on answering others.

Parent and child talk over a pipe: a small header, then the raw bytes of each array, so a vector is
copied once on each side. When the child dies (out of memory, killed) the job that it was at has
failed, and the next one starts a new child. When the parent dies the child ends, in mid-job too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.parent import follow_parent
from flwr_moshpit.protocol.machine import Job, JobId, Result, Vector
from flwr_moshpit.runtime.compute import Answer, JobThread, Offer, Task, run_job
from flwr_moshpit.signals import deaf_children

_ARRAYS = ("params", "correction", "gradient")
"""Fields of jobs and results that are vectors."""


class ProcessCompute:
    """Trains in a child process; see the module's docstring."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._child: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._closed = False
        self._jobs = JobThread(self._execute)

    @property
    def pid(self) -> int | None:
        """The child's, if there is one."""
        return None if self._child is None else self._child.pid

    def start(self) -> Offer:
        try:
            pickle.dumps(self._task)
        except Exception as error:
            raise ConfigError(
                f"the trainer cannot be sent to a process of its own ({error}): make it with a "
                'function of a module that can be imported, or set compute to "thread"'
            ) from error
        return self._begin()

    def connect(self, answer: Callable[[Answer], None]) -> None:
        self._jobs.connect(answer)

    def submit(self, job_id: JobId, job: Job) -> None:
        self._jobs.submit(job_id, job)

    def cancel(self, job_id: JobId) -> None:
        self._jobs.cancel(job_id)

    def close(self) -> None:
        self._closed = True
        self._end_child()
        self._jobs.close()
        if self._pipe is not None:
            self._pipe.close()

    def _begin(self) -> Offer:
        """Start a child and wait until it has loaded the trainer."""
        # A forked child would inherit this process's threads in an unknown state.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        child = context.Process(target=_serve, args=(there, self._task), daemon=True)
        with deaf_children():
            child.start()
        there.close()
        self._pipe, self._child = here, child
        if self._closed:
            self._end_child()
        offer: Offer = self._answer()
        return offer

    def _execute(self, job: Job, number: int) -> Result:
        if self._child is None:
            self._begin()
        assert self._pipe is not None
        try:
            _send(self._pipe, (job, self._task.job_seed(number)))
        except OSError:
            self._raise_dead()
        result: Result = self._answer()
        return result

    def _answer(self) -> Any:
        """What the child says next. Raises TrainerError if it dies, or says that it failed."""
        pipe, child = self._pipe, self._child
        assert pipe is not None
        assert child is not None
        try:
            if pipe not in wait([pipe, child.sentinel]):
                raise EOFError
            answer = _receive(pipe)
        except (EOFError, OSError):
            self._raise_dead()
        if isinstance(answer, _Failure):
            raise answer.error()
        return answer

    def _raise_dead(self) -> NoReturn:
        child, pipe = self._child, self._pipe
        assert child is not None
        assert pipe is not None
        self._end_child()
        self._child = self._pipe = None
        pipe.close()
        code = child.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise TrainerError(
            f"the trainer's process died of {how}: out of memory, or killed from outside"
        )

    def _end_child(self) -> None:
        child = self._child
        if child is None:
            return
        child.terminate()
        child.join(1.0)
        if child.is_alive():
            child.kill()
            child.join()


class _Failure:
    """What went wrong in the child, as texts: the exception itself may not be importable here."""

    def __init__(self, error: BaseException) -> None:
        self.is_config = isinstance(error, ConfigError)
        self.text = str(error) if self.is_config else _describe(error)

    def error(self) -> Exception:
        return ConfigError(self.text) if self.is_config else TrainerError(self.text)


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


# The pipe


def _send(pipe: Connection, value: Any) -> None:
    """`value` is a job and its seed, a result, an offer or a failure."""
    holder, rest = value if isinstance(value, tuple) else (value, None)
    arrays = {name: getattr(holder, name) for name in _ARRAYS if hasattr(holder, name)}
    if arrays:
        holder = replace(holder, **dict.fromkeys(arrays))
    shapes = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    pipe.send((holder, rest, shapes))
    for array in arrays.values():
        pipe.send_bytes(_bytes_of(np.ascontiguousarray(array)))


def _receive(pipe: Connection) -> Any:
    """What `_send` sent from another process of this peer; nothing of it comes from a network."""
    holder, rest, shapes = pipe.recv()
    arrays = {}
    for name, (dtype, shape) in shapes.items():
        array = np.empty(shape, dtype)
        pipe.recv_bytes_into(_bytes_of(array))
        array.setflags(write=False)
        arrays[name] = array
    if arrays:
        holder = replace(holder, **arrays)
    return holder if rest is None else (holder, rest)


def _bytes_of(array: Vector) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# The child


def _serve(pipe: Connection, task: Task) -> None:
    # Ctrl-C reaches the whole group of processes; the parent ends this one when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    # A broken pipe says that the parent has died: nobody is left to be told.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            trainer = task.make_trainer()
            offer = task.offer(trainer)
        except Exception as error:
            _send(pipe, _Failure(error))
            return
        _send(pipe, offer)
        while True:
            job, seed = _receive(pipe)
            answer: Any
            try:
                answer = run_job(trainer, task.client, job, seed)
            except Exception as error:
                answer = _Failure(error)
            _send(pipe, answer)
