"""Several algorithms on one task: the same data, fleet, seeds and faults for each.

All runs end at the same virtual time, or after the same number of local steps per peer. Runs of one
seed share the initial model, the devices' order, the data, the batches and the faults, so methods
are compared seed by seed.

With `tries`, each method first gets the same number of runs with other learning rates, on a seed
that is not used afterwards; it then competes with the rate that reached the target first in virtual
time, or, if none did, with the one that came closest to it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import signal
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.parent import follow_parent
from flwr_moshpit.simulation.comparison import Comparison
from flwr_moshpit.simulation.contest import Contest, Task, settings_of, steps_per_round
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.history import History
from flwr_moshpit.simulation.reach import Run, best_try
from flwr_moshpit.simulation.run import SERVER, Simulation


class Follower(Protocol):
    """Is told of a comparison's progress."""

    def on_start(self, task: Task) -> Observer | None:
        """A run begins in this process; the observer, if any, is told what happens in it."""
        ...

    def on_end(self, task: Task, run: Run) -> None: ...


def compare(
    contest: Contest,
    *,
    workers: int = 0,
    follower: Follower | None = None,
    out: str | Path | None = None,
) -> Comparison:
    """Run everything; with `workers`, so many runs at once, each in a process of its own.

    The result does not depend on `workers`. Into the folder `out` goes compare.json after every
    run, and compare.png at the end. Ctrl-C ends it: what is complete is kept, the runs under way
    are not, and the comparison says that it was interrupted. Raises ConfigError for settings that
    cannot be, and TrainerError for what the training code raises.
    """
    if workers < 0:
        raise ConfigError(f"workers must be 0 (in this process) or more, not {workers}")
    if workers:
        _check_picklable(contest)
    tries: list[Run] = []
    runs: list[Run] = []
    factors = dict.fromkeys(contest.algorithms, contest.lr_factors[0])

    def run_all(tasks: Sequence[Task], into: list[Run]) -> None:
        # Each run is taken in as it ends, so that an interrupt leaves those that are done.
        with closing(_done(contest, tasks, workers, follower)) as done:
            for task, run in done:
                into.append(run)
                if follower is not None:
                    follower.on_end(task, run)
                if out is not None:
                    _comparison(contest, tries, runs, interrupted=True).save_json(Path(out))

    interrupted = False
    try:
        if contest.tries > 1:
            run_all(_tries(contest), tries)
            for name in contest.algorithms:
                factors[name] = best_try(tries, name, contest.target).lr_factor
        run_all(_runs(contest, factors), runs)
    except KeyboardInterrupt:
        interrupted = True
    comparison = _comparison(contest, tries, runs, interrupted)
    if out is not None:
        comparison.save(out)
    return comparison


def _tries(contest: Contest) -> list[Task]:
    return [
        Task(name, contest.tuning_seed, factor, is_try=True)
        for factor in contest.lr_factors
        for name in contest.algorithms
    ]


def _runs(contest: Contest, factors: Mapping[str, float]) -> list[Task]:
    # Seed by seed: whoever interrupts has compared all methods on the first ones.
    return [Task(name, seed, factors[name]) for seed in contest.seeds for name in factors]


def _comparison(
    contest: Contest, tries: Sequence[Run], runs: Sequence[Run], interrupted: bool
) -> Comparison:
    """Sorted, because worker processes end their runs in any order."""
    names = list(contest.algorithms)

    def place(run: Run) -> tuple[int, int, int]:
        factor = contest.lr_factors.index(run.lr_factor)
        return (names.index(run.algorithm), run.seed, factor)

    return Comparison(
        settings=settings_of(contest),
        algorithms=tuple(names),
        ends=contest.ends,
        given_target=contest.target,
        runs=tuple(sorted(runs, key=place)),
        tries=tuple(sorted(tries, key=place)),
        interrupted=interrupted,
    )


def run_task(contest: Contest, task: Task, observe: Observer | None = None) -> Run:
    """One run of `contest`. Raises KeyboardInterrupt where Ctrl-C ends it before its end."""
    algorithm = contest.algorithms[task.algorithm]
    if hasattr(algorithm, "learning_rate"):
        rate = algorithm.learning_rate * task.lr_factor
        algorithm = dataclasses.replace(algorithm, learning_rate=rate)
    fleet = contest.fleet
    if isinstance(fleet, str):
        fleet = Fleet.parse(fleet, contest.peers, seed=task.seed, catalogue=contest.catalogue)
    simulation = Simulation(
        algorithm,
        contest.make_trainer(task.lr_factor),
        fleet=fleet,
        peers=contest.peers,
        network=contest.network,
        faults=contest.faults,
        seed=task.seed,
        dtype=contest.dtype,
        cost_as=contest.cost_as,
        evaluate_every=contest.evaluate_every,
        evaluate_every_s=contest.evaluate_every_s,
        observe=observe,
    )
    history = simulation.run(until=contest.until_s, rounds=contest.rounds_of(task.algorithm))
    if history.interrupted:
        raise KeyboardInterrupt
    return Run(
        algorithm=task.algorithm,
        seed=task.seed,
        lr_factor=task.lr_factor,
        points=tuple(history.points),
        steps=_steps_taken(history, algorithm, simulation.cost.examples_per_step, contest.peers),
        digest=history.digest,
    )


def _steps_taken(history: History, algorithm: Any, examples_per_step: int, peers: int) -> float:
    """Local steps of completed rounds, by the mean peer."""
    steps = 0.0
    for record in history.rounds:
        if record.peer == SERVER:
            continue
        if "examples" in record.values:
            steps += record.examples / examples_per_step
        else:
            steps += steps_per_round(algorithm)
    return steps / peers


def _done(
    contest: Contest, tasks: Sequence[Task], workers: int, follower: Follower | None
) -> Generator[tuple[Task, Run], None, None]:
    """Every task with its run, as it ends."""
    return _in_workers(contest, tasks, workers) if workers else _here(contest, tasks, follower)


def _here(
    contest: Contest, tasks: Sequence[Task], follower: Follower | None
) -> Generator[tuple[Task, Run], None, None]:
    for task in tasks:
        observe = follower.on_start(task) if follower is not None else None
        yield task, run_task(contest, task, observe)


def _in_workers(
    contest: Contest, tasks: Sequence[Task], workers: int
) -> Generator[tuple[Task, Run], None, None]:
    # Forked children would inherit torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        try:
            futures = {pool.submit(run_task, contest, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise TrainerError(
                "a worker process died: out of memory, or killed; where a script starts the "
                "comparison, guard its start by `if __name__ == '__main__':`"
            ) from error
        except BaseException:
            # The runs under way would go on for minutes. A pool that has lost a worker gives up
            # all that is left, and ends.
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise


def _begin_worker() -> None:
    # Ctrl-C reaches the whole group of processes; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()


def _check_picklable(contest: Contest) -> None:
    try:
        pickle.dumps(contest)
    except Exception as error:
        raise ConfigError(
            f"this comparison cannot be sent to worker processes ({error}): put what makes the "
            "trainer into a module that can be imported, or set workers to 0"
        ) from error
