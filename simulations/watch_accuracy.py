"""Does Moshpit learn what FedAvg learns, and does it still when a fifth of the peers crash?

The app `watch` with 100 peers on Jetsons, the same number of local steps for everybody, and the
accuracy of the swarm's mean model on two people whom no client has seen. Runs of one seed share
initial model, devices and batches, so differences are taken seed by seed. Criteria:

- the mean of Moshpit - FedAvg is at least -1 point;
- the same with 20 % of Moshpit's peers crashing a third of the way and coming back a sixth of the
  run later, with nothing, against FedAvg without faults: at least -2 points.

Exit code 1 when one of them fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from flwr_moshpit.config import FedAvg, Moshpit
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.observe.text import duration
from flwr_moshpit.parent import follow_parent
from flwr_moshpit.simulation.intervals import mean_interval
from flwr_moshpit.simulation.run import Simulation

METHODS = ("FedAvg", "Moshpit", "Moshpit, crashes")
CRITERIA = {"Moshpit": -0.01, "Moshpit, crashes": -0.02}


@dataclass(frozen=True)
class Task:
    method: str
    seed: int
    peers: int
    rounds: int
    group_size: int | None


def accuracy(task: Task) -> float:
    """Of the mean model at the end of one run."""
    app = load_app("watch")
    local_steps = int(app.config["local-steps"])
    algorithm: Any = Moshpit(group_size=task.group_size, local_steps=local_steps)
    faults: list[str] = []
    if task.method == "FedAvg":
        algorithm = FedAvg(local_steps=local_steps)
    elif task.method == "Moshpit, crashes":
        gone, back = max(1, task.rounds // 3), max(1, task.rounds // 6)
        faults = [f"crash 20% at round {gone}, back after {back} rounds"]
    history = Simulation(
        algorithm,
        app.trainer(),
        fleet=str(app.config["fleet"]),
        peers=task.peers,
        faults=faults,
        seed=task.seed,
        evaluate_every=task.rounds,
    ).run(rounds=task.rounds)
    if history.interrupted:
        raise KeyboardInterrupt
    assert history.accuracy is not None
    return history.accuracy


def outcomes(tasks: list[Task], workers: int) -> Iterator[tuple[Task, float]]:
    """Each task with its accuracy as it gets done, `workers` of them at once."""
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=follow_parent) as pool:
        futures = {pool.submit(accuracy, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            # After an error or Ctrl-C nobody wants the runs that have not begun.
            pool.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--group-size", type=int, help="of Moshpit (derived from the peers)")
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    tasks = [
        Task(method, seed, args.peers, args.rounds, args.group_size)
        for seed in seeds
        for method in METHODS
    ]
    groups = Moshpit(group_size=args.group_size).group_size_for(args.peers)
    print(
        f"watch, {args.peers} peers in groups of at most {groups}, {args.rounds} rounds of the "
        "app's local steps",
        flush=True,
    )
    found: dict[tuple[str, int], float] = {}
    began = time.monotonic()
    try:
        for task, value in outcomes(tasks, args.workers):
            found[task.method, task.seed] = value
            passed_s = time.monotonic() - began
            left = duration(passed_s * (len(tasks) - len(found)) / len(found))
            print(
                f"  {len(found)}/{len(tasks)}  seed {task.seed}  {task.method}: {value:.4f}, "
                f"{left} left",
                flush=True,
            )
    except KeyboardInterrupt:
        print("interrupted: what is done")
    return 0 if judge(found, list(seeds)) else 1


def judge(found: dict[tuple[str, int], float], seeds: list[int]) -> bool:
    """Print table and verdicts over the seeds that are complete; whether all criteria hold."""
    print("\nseed" + "".join(f"{method:>18}" for method in METHODS))
    complete = [seed for seed in seeds if all((method, seed) in found for method in METHODS)]
    for seed in complete:
        print(f"{seed:4}" + "".join(f"{found[method, seed]:18.4f}" for method in METHODS))
    if not complete:
        return False
    means = [sum(found[m, s] for s in complete) / len(complete) for m in METHODS]
    print("mean" + "".join(f"{mean:18.4f}" for mean in means) + "\n")
    holds = True
    for method, least in CRITERIA.items():
        gap = mean_interval([found[method, s] - found["FedAvg", s] for s in complete])
        kept = gap.mean >= least
        holds &= kept
        print(
            f"{method} - FedAvg: {100 * gap.mean:+.2f} points, 95 % interval "
            f"[{100 * gap.low:+.2f}, {100 * gap.high:+.2f}] over {gap.count} paired seeds; "
            f"at least {100 * least:+.0f} wanted: {'holds' if kept else 'DOES NOT HOLD'}"
        )
    return holds and complete == seeds


if __name__ == "__main__":
    sys.exit(main())
