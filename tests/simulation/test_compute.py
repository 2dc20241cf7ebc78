"""Jobs: their virtual cost, when they really run, what happens when they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
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
from flwr_moshpit.simulation.backend import (
    Outcome,
    WorkItem,
    trainer_backend,
)
from flwr_moshpit.simulation.compute import job_seed
from flwr_moshpit.trainer import Cost
from tests.simulation.recorder import Box, Swarm, started
from tests.trainers import QuadraticTrainer

ROOT = Path(__file__).parents[2]
X = np.zeros(4, np.float32)
COST = Cost(flops_per_example=1.0, examples_per_step=10, memory_bytes=1)
"""On a `Box` of 1 FLOP/s an example takes a second, a step ten."""


class Batches:
    """A backend that writes down what it ran, and when."""

    is_lazy = True

    def __init__(self, *, known: bool = True) -> None:
        self.known = known
        self.ran: list[list[tuple[int, int]]] = []
        """(client, examples) of each job, by batch."""
        self.seeds: list[int] = []
        self.failing: dict[int, None] = {}

    def examples(self, client: int, job: Job) -> int | None:
        return self._examples(job) if self.known else None

    def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        self.ran.append([])
        for item in batch:
            examples = self._examples(item.job)
            self.ran[-1].append((item.client, examples))
            self.seeds.append(item.seed)
            if item.client in self.failing:
                yield TrainerError(f"client {item.client} failed at step 3")
            elif isinstance(item.job, Evaluate):
                yield Evaluated(7, {"loss": 1.0})
            elif isinstance(item.job, LocalSteps):
                yield Trained(item.job.params, examples)
            else:
                yield GradientResult(item.job.params, examples)

    def close(self) -> None:
        pass

    def _examples(self, job: Job) -> int:
        if isinstance(job, LocalSteps | CorrectedSteps):
            assert job.num_steps is not None
            return 10 * job.num_steps
        return 10 if isinstance(job, Gradient) else 0


def swarm_of(num_peers: int, backend: Batches | None = None, **settings: object) -> Swarm:
    return started(
        num_peers, backend=backend or Batches(), cost=COST, **{"batch_size": 4, **settings}
    )


def train(number: int = 0, *, steps: int | None = 1, budget_s: float | None = None) -> Compute:
    return Compute(JobId(number), LocalSteps(X, steps, budget_s))


class TestCost:
    @pytest.mark.parametrize("known", [True, False])
    def test_time_is_examples_over_the_devices_rate(self, known: bool) -> None:
        swarm = started(
            2,
            boxes=[Box(flops_per_s=1.0), Box(flops_per_s=4.0)],
            backend=Batches(known=known),
            cost=COST,
        )
        for k in range(2):
            swarm.do(k, train(steps=3))
        swarm.run()
        assert swarm[0].times(ComputeDone) == [30.0]
        assert swarm[1].times(ComputeDone) == [7.5]
        assert swarm[0].events(ComputeDone) == [ComputeDone(JobId(0), Trained(X, 30))]

    def test_gradients_and_corrected_steps_cost_as_training_does(self) -> None:
        swarm = swarm_of(1)
        swarm.do(0, Compute(JobId(0), Gradient(X)))
        swarm.run()
        swarm.do(0, Compute(JobId(1), CorrectedSteps(X, X, 3, 0.1)))
        swarm.run()
        assert swarm[0].times(ComputeDone) == [10.0, 40.0]

    def test_evaluation_is_free_and_at_once(self) -> None:
        swarm = swarm_of(1)
        swarm.do(0, train(0), Compute(JobId(1), Evaluate(X)))
        swarm.run()
        assert swarm[0].times(ComputeDone) == [0.0, 10.0]
        assert swarm[0].events(ComputeDone)[0].result == Evaluated(7, {"loss": 1.0})
        assert swarm.engine.usage(swarm.peers[0]).busy_s == 10.0

    @pytest.mark.parametrize(("budget_s", "steps"), [(35.0, 3), (40.0, 4), (1.0, 1)])
    def test_a_budget_is_as_many_steps_as_fit_and_at_least_one(
        self, budget_s: float, steps: int
    ) -> None:
        swarm = swarm_of(1)
        swarm.do(0, train(steps=None, budget_s=budget_s))
        swarm.run()
        assert swarm[0].events(ComputeDone)[0].result.num_examples == 10 * steps

    def test_a_job_without_steps_and_budget_is_refused(self) -> None:
        swarm = swarm_of(1)
        swarm.do(0, train(steps=None))
        with pytest.raises(ConfigError, match="needs num_steps or budget_s"):
            swarm.run()

    def test_slowing_down_stretches_what_is_left_of_a_job(self) -> None:
        swarm = swarm_of(1)
        peer = swarm.peers[0]
        swarm.do(0, train())
        swarm.at(4.0, swarm.engine.slow_down, peer, 10.0)
        swarm.at(14.0, swarm.engine.slow_down, peer, 2.0)
        swarm.run()
        # 4 s at full speed, 10 s for one more, and the last 5 at half speed.
        assert swarm[0].times(ComputeDone) == [pytest.approx(24.0)]
        swarm.engine.slow_down(peer, 1.0)
        swarm.do(0, train(1))
        swarm.run()
        assert swarm[0].times(ComputeDone)[1] == pytest.approx(34.0)

    def test_slowing_down_reaches_a_job_that_has_really_run(self) -> None:
        swarm = swarm_of(2)
        swarm.do(0, train(steps=1))
        swarm.do(1, train(steps=2))
        swarm.at(12.0, swarm.engine.slow_down, swarm.peers[1], 2.0)
        swarm.run()
        assert swarm[1].times(ComputeDone) == [28.0]

    def test_joules_are_power_while_training_and_idle_power_while_up(self) -> None:
        swarm = swarm_of(1)
        swarm.do(0, train())
        swarm.at(30.0, swarm.engine.crash, swarm.peers[0])
        swarm.at(100.0, swarm.engine.restart, swarm.peers[0])
        swarm.run(110.0)
        usage = swarm.engine.usage(swarm.peers[0])
        assert (usage.busy_s, usage.up_s) == (10.0, 40.0)
        assert usage.joules == 10.0 * 10.0 + 1.0 * 30.0

    def test_work_that_is_broken_off_was_work(self) -> None:
        swarm = swarm_of(2)
        swarm.do(0, train())
        swarm.do(1, train())
        swarm.at(3.0, swarm.do, 0, Cancel(JobId(0)))
        swarm.at(4.0, swarm.engine.crash, swarm.peers[1])
        swarm.run(20.0)
        assert [swarm.engine.usage(peer).busy_s for peer in swarm.peers] == [3.0, 4.0]


class TestBatches:
    def test_known_jobs_run_together_when_the_first_falls_due(self) -> None:
        backend = Batches()
        swarm = swarm_of(3, backend)
        for k, steps in enumerate([3, 1, 2]):
            swarm.do(k, train(steps=steps))
        swarm.run(9.9)
        assert backend.ran == []
        swarm.run()
        assert backend.ran == [[(1, 10), (2, 20), (0, 30)]]
        assert [swarm[k].times(ComputeDone) for k in range(3)] == [[30.0], [10.0], [20.0]]

    def test_a_batch_is_bounded_and_takes_those_that_are_due_first(self) -> None:
        backend = Batches()
        swarm = swarm_of(6, backend)
        for k in range(6):
            swarm.do(k, train(steps=6 - k))
        swarm.run()
        clients = [[client for client, _ in batch] for batch in backend.ran]
        assert clients == [[5, 4, 3, 2], [1, 0]]

    def test_unknown_jobs_of_an_instant_run_before_time_goes_on(self) -> None:
        backend = Batches(known=False)
        swarm = swarm_of(6, backend)
        for k in range(6):
            swarm.do(k, train())
        swarm.run(0.0)
        clients = [[client for client, _ in batch] for batch in backend.ran]
        assert clients == [[0, 1, 2, 3], [4, 5]]
        swarm.run()
        assert all(swarm[k].times(ComputeDone) == [10.0] for k in range(6))

    def test_what_is_cancelled_or_dead_does_not_run(self) -> None:
        backend = Batches()
        swarm = swarm_of(3, backend)
        for k in range(3):
            swarm.do(k, train())
        swarm.at(1.0, swarm.do, 0, Cancel(JobId(0)), Cancel(JobId(77)))
        swarm.at(2.0, swarm.engine.crash, swarm.peers[1])
        swarm.at(3.0, swarm.engine.restart, swarm.peers[1])
        swarm.run()
        assert backend.ran == [[(2, 10)]]
        assert swarm[0].events(ComputeDone) == swarm[1].events(ComputeDone) == []

    def test_a_cancelled_job_that_has_run_is_not_answered(self) -> None:
        swarm = swarm_of(2)
        swarm.do(0, train(steps=1))
        swarm.do(1, train(steps=2))
        swarm.at(15.0, swarm.do, 1, Cancel(JobId(0)), train(1))
        swarm.run()
        assert [event.job_id for event in swarm[1].events(ComputeDone)] == [1]

    def test_seeds_tell_peers_jobs_and_incarnations_apart(self) -> None:
        backend = Batches()
        swarm = swarm_of(2, backend, seed=5)
        for number in range(2):
            for k in range(2):
                swarm.do(k, train(number), Compute(JobId(10), Evaluate(X)))
            swarm.run()
        backend.seeds = [seed for seed in backend.seeds if seed]
        swarm.engine.crash(swarm.peers[0])
        swarm.engine.restart(swarm.peers[0])
        swarm.run()
        swarm.do(0, train())
        swarm.run()
        expected = [job_seed(5, k, 0, number) for number in range(2) for k in range(2)]
        assert backend.seeds == [*expected, job_seed(5, 0, 1, 0)]
        assert len(dict.fromkeys(backend.seeds)) == 5

    def test_ctrl_c_ends_a_batch_early_and_it_goes_on_later(self) -> None:
        class Interrupting(Batches):
            def run(self, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
                for outcome in super().run(batch):
                    if self.seeds[1:] == []:
                        os.kill(os.getpid(), signal.SIGINT)
                    yield outcome

        backend = Interrupting()
        swarm = swarm_of(3, backend)
        for k in range(3):
            swarm.do(k, train(steps=1 + k))
        with pytest.raises(KeyboardInterrupt):
            swarm.run()
        assert backend.ran == [[(0, 10)]]
        assert swarm[0].times(ComputeDone) == [10.0]
        swarm.run()
        assert backend.ran == [[(0, 10)], [(1, 20), (2, 30)]]
        assert swarm[2].times(ComputeDone) == [30.0]


class TestFailures:
    @pytest.mark.parametrize("known", [True, False])
    def test_a_trainers_error_ends_the_run(self, known: bool) -> None:
        backend = Batches(known=known)
        backend.failing[1] = None
        swarm = swarm_of(3, backend)
        for k in range(3):
            swarm.do(k, train())
        with pytest.raises(TrainerError, match="client 1 failed at step 3"):
            swarm.run()

    @pytest.mark.parametrize("known", [True, False])
    def test_or_is_reported_to_the_machine(self, known: bool) -> None:
        backend = Batches(known=known)
        backend.failing[1] = None
        swarm = swarm_of(2, backend, on_trainer_error="report")
        for k in range(2):
            swarm.do(k, train())
        swarm.run()
        assert swarm[1].events(ComputeFailed) == [
            ComputeFailed(JobId(0), "client 1 failed at step 3")
        ]
        assert swarm[0].times(ComputeDone) == [10.0]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_user_code_raises_names_the_client_and_keeps_its_traceback(
        self, workers: int
    ) -> None:
        trainer = Broken()
        trainer.prepare(2)
        backend = trainer_backend(trainer, workers)
        try:
            items = [WorkItem(k, LocalSteps(X.astype(np.float64), 1), 0) for k in range(2)]
            fine, broken = backend.run(items)
        finally:
            backend.close()
        assert isinstance(fine, Trained)
        assert isinstance(broken, TrainerError)
        assert str(broken) == "client 1 failed in LocalSteps: ZeroDivisionError('no data')"
        cause = broken.__cause__
        assert cause is not None
        assert isinstance(cause, ZeroDivisionError) or "raise ZeroDivisionError" in str(cause)

    def test_what_cannot_be_sent_to_workers_is_refused_with_the_cure(self) -> None:
        trainer = QuadraticTrainer(4)
        trainer.hook = lambda: None  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"cannot be sent to worker.* or set workers to 0"):
            trainer_backend(trainer, 1)

    def test_what_workers_cannot_load_is_refused_with_the_cure(self) -> None:
        trainer = Unloadable(4)
        with pytest.raises(ConfigError, match=r"cannot load the trainer .*gone.*workers to 0"):
            trainer_backend(trainer, 1)

    def test_what_is_defined_at_a_prompt_is_refused_with_the_cure(self) -> None:
        code = (
            "from tests.trainers import QuadraticTrainer\n"
            "from flwr_moshpit.simulation.backend import trainer_backend\n"
            "class Mine(QuadraticTrainer): pass\n"
            "trainer_backend(Mine(4), 1)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert "ConfigError: worker processes cannot see what is defined in a notebook" in (
            done.stderr
        )
        assert "or set workers to 0" in done.stderr

    def test_a_negative_number_of_workers_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="workers must be 0 or more, not -1"):
            trainer_backend(QuadraticTrainer(4), -1)


class Broken(QuadraticTrainer):
    def __init__(self) -> None:
        super().__init__(4)

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        if client == 1:
            raise ZeroDivisionError("no data")
        return super().train(client, params, num_steps, seed)


def _gone() -> None:
    raise FileNotFoundError("the data are gone")


class Unloadable(QuadraticTrainer):
    def __reduce__(self) -> tuple[object, ...]:
        return (_gone, ())


@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_job_runs(workers: int) -> None:
    """Against direct calls; results are read-only."""
    trainer, oracle = (QuadraticTrainer(4, noise=0.1) for _ in range(2))
    for each in (trainer, oracle):
        each.prepare(3)
    x = trainer.initial_params(0)
    items = [
        WorkItem(0, LocalSteps(x, 3), 5),
        WorkItem(1, Gradient(x), 6),
        WorkItem(2, CorrectedSteps(x, x, 2, 0.1), 7),
        WorkItem(1, Evaluate(x), 8),
    ]
    backend = trainer_backend(trainer, workers)
    try:
        trained, gradient, corrected, evaluated = backend.run(items)
        assert backend.examples(0, LocalSteps(x, 3)) == 30
        assert backend.examples(0, Gradient(x)) == 10
        assert backend.examples(0, CorrectedSteps(x, x, 2, 0.1)) == 20
    finally:
        backend.close()
    assert isinstance(trained, Trained)
    assert isinstance(gradient, GradientResult)
    assert isinstance(corrected, GradientResult)
    np.testing.assert_array_equal(trained.params, oracle.train(0, x, 3, 5).params)
    np.testing.assert_array_equal(gradient.gradient, oracle.gradient(1, x, 6).gradient)
    expected = oracle.corrected_steps(2, x, x, 2, 0.1, 7)
    np.testing.assert_array_equal(corrected.gradient, expected.gradient)
    assert evaluated == oracle.evaluate(x, 1)
    assert not trained.params.flags.writeable
    assert not gradient.gradient.flags.writeable
