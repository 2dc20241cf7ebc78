"""Jobs in a thread and in a process: same results, and no death takes the peer along."""

from __future__ import annotations

import functools
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    CorrectedSteps,
    Evaluate,
    Evaluated,
    Gradient,
    GradientResult,
    Job,
    JobId,
    LocalSteps,
    Trained,
    Vector,
)
from flwr_moshpit.runtime.compute import Answer, MakeTrainer, Task, ThreadCompute, run_job
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from tests.trainers import QuadraticTrainer

HANG_S = 60.0
DIM = 5
PARAMS = np.linspace(-1.0, 1.0, DIM)

JOBS: list[Job] = [
    LocalSteps(PARAMS, num_steps=3),
    Gradient(PARAMS),
    CorrectedSteps(PARAMS, np.ones(DIM), 2, 0.1),
    Evaluate(PARAMS),
]


class Moody(QuadraticTrainer):
    """Fails at a gradient, dies at an evaluation."""

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        raise ValueError("not today")

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Unloadable(QuadraticTrainer):
    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        raise ConfigError("data-dir must be a folder, not 'x'")


def make() -> QuadraticTrainer:
    return QuadraticTrainer(DIM, noise=0.1, num_examples=7)


def make_from_a_lock() -> QuadraticTrainer:
    raise RuntimeError("no data here")


def task(make_trainer: MakeTrainer = make) -> Task:
    return Task(make_trainer, client=1, num_clients=2, seed=(3, 4))


def answers(compute: ThreadCompute | ProcessCompute, jobs: list[Job]) -> list[Answer]:
    arrived: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    compute.start()
    compute.connect(arrived.put)
    with closing(compute):
        for number, job in enumerate(jobs):
            compute.submit(JobId(number), job)
        return [arrived.get(timeout=HANG_S) for _ in jobs]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Trained):
        return np.array_equal(a.params, b.params) and a.num_examples == b.num_examples
    if isinstance(a, GradientResult):
        return np.array_equal(a.gradient, b.gradient) and a.num_examples == b.num_examples
    return bool(a == b)


def test_a_process_does_what_a_thread_does() -> None:
    in_thread = answers(ThreadCompute(task()), JOBS)
    in_process = answers(ProcessCompute(task()), JOBS)
    for number, (one, other) in enumerate(zip(in_thread, in_process, strict=True)):
        assert isinstance(one, ComputeDone)
        assert isinstance(other, ComputeDone)
        assert one.job_id == other.job_id == number
        assert same(one.result, other.result)
    result = in_process[0]
    assert isinstance(result, ComputeDone)
    assert isinstance(result.result, Trained)
    assert not result.result.params.flags.writeable


@pytest.mark.parametrize("kind", [ThreadCompute, ProcessCompute])
def test_the_offer_is_the_common_model(kind: type[ThreadCompute]) -> None:
    trainer = make()
    trainer.prepare(2, "float32")
    wanted = trainer.initial_params(5)
    compute = kind(Task(make, 0, 2, seed=(1,), initial_seed=5, dtype="float32"))
    with closing(compute):
        offer = compute.start()
        compute.connect(lambda answer: None)
    assert offer.schema == trainer.layout.schema
    assert np.array_equal(offer.params, wanted)
    assert offer.params.dtype == np.float32


def test_what_the_users_code_raises_is_told_with_its_traceback() -> None:
    compute = ThreadCompute(task(functools.partial(Moody, DIM)))
    failed, done = answers(compute, [Gradient(PARAMS), LocalSteps(PARAMS, num_steps=1)])
    assert isinstance(failed, ComputeFailed)
    assert "ValueError: not today" in failed.error
    assert isinstance(done, ComputeDone)


def test_a_trainer_that_dies_fails_one_job_and_comes_back() -> None:
    jobs: list[Job] = [Gradient(PARAMS), Evaluate(PARAMS), LocalSteps(PARAMS, num_steps=1)]
    raised, died, done = answers(ProcessCompute(task(functools.partial(Moody, DIM))), jobs)
    assert isinstance(raised, ComputeFailed)
    assert "ValueError: not today" in raised.error
    assert isinstance(died, ComputeFailed)
    assert "signal 9" in died.error
    assert isinstance(done, ComputeDone)


@pytest.mark.parametrize("kind", [ThreadCompute, ProcessCompute])
def test_a_trainer_that_cannot_be_loaded_is_said(kind: type[ThreadCompute]) -> None:
    compute = kind(task(functools.partial(Unloadable, DIM)))
    with closing(compute), pytest.raises(ConfigError, match="data-dir must be a folder"):
        compute.start()
    compute = kind(Task(make, 2, 2, seed=(1,)))
    with closing(compute), pytest.raises(ConfigError, match="client must be in"):
        compute.start()


def test_errors_of_the_child_arrive_as_text() -> None:
    compute = ProcessCompute(task(make_from_a_lock))
    with closing(compute), pytest.raises(TrainerError, match="no data here"):
        compute.start()


def test_a_trainer_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match='compute to "thread"'):
        ProcessCompute(task(lambda: make())).start()


def test_a_job_that_waits_can_be_cancelled() -> None:
    arrived: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    compute = ThreadCompute(task())
    compute.start()
    for number in range(3):
        compute.submit(JobId(number), JOBS[0])
    compute.cancel(JobId(1))
    compute.cancel(JobId(99))
    compute.connect(arrived.put)
    with closing(compute):
        assert [arrived.get(timeout=HANG_S).job_id for _ in range(2)] == [0, 2]
    assert arrived.empty()


def test_closing_ends_the_child_in_mid_job() -> None:
    compute = ProcessCompute(task())
    compute.start()
    compute.connect(lambda answer: None)
    assert compute.pid is not None
    child = os.pidfd_open(compute.pid)
    try:
        compute.submit(JobId(0), LocalSteps(PARAMS, num_steps=10**9))
        compute.close()
        compute.close()
        assert select.select([child], [], [], HANG_S)[0]
    finally:
        os.close(child)


PARENT = """
import sys, time
from tests.runtime.test_compute import *
if __name__ == "__main__":
    compute = ProcessCompute(task())
    compute.start()
    compute.connect(lambda answer: None)
    compute.submit(JobId(0), LocalSteps(PARAMS, num_steps=10**9))
    print(compute.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent() -> Generator[subprocess.Popen[str], None, None]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        yield process
        process.kill()


def test_the_child_ends_with_its_parent(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        assert select.select([child], [], [], HANG_S)[0]
    finally:
        os.close(child)


# Budgets


class Clocked(QuadraticTrainer):
    """Each step takes `step_s` on its own clock, the first one ten times as long."""

    def __init__(self, step_s: float) -> None:
        super().__init__(DIM, num_examples=10)
        self.prepare(1)
        self.now = 0.0
        self.step_s = step_s
        self.steps: list[int] = []

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        self.now += self.step_s * (num_steps if self.steps else num_steps + 9)
        self.steps.append(num_steps)
        return super().train(client, params, num_steps, seed)


@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.2])
def test_a_budget_is_used_up_and_not_overrun_by_more_than_a_step(step_s: float) -> None:
    trainer = Clocked(step_s)
    job = LocalSteps(PARAMS, budget_s=5.0)
    result = run_job(trainer, 0, job, seed=1, clock=lambda: trainer.now)
    assert isinstance(result, Trained)
    assert 5.0 - 2 * step_s <= trainer.now <= 5.0 + 1e-9
    assert result.num_examples == 10 * sum(trainer.steps)
    assert len(trainer.steps) < 40
    expected = PARAMS
    for steps in trainer.steps:
        expected = QuadraticTrainer.train(trainer, 0, expected, steps, 0).params
    assert np.array_equal(result.params, expected)


def test_a_budget_below_one_step_is_one_step() -> None:
    trainer = Clocked(1.0)
    result = run_job(trainer, 0, LocalSteps(PARAMS, budget_s=0.1), 1, lambda: trainer.now)
    assert isinstance(result, Trained)
    assert trainer.steps == [1]


def test_local_steps_without_number_and_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_steps or budget_s"):
        run_job(make(), 0, LocalSteps(PARAMS), 1)


def test_seeds_differ_by_job_and_by_peer() -> None:
    seeds = {Task(make, 0, 1, seed=(a,)).job_seed(b) for a in range(20) for b in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 1 << 31 for seed in seeds)
