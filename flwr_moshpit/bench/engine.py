"""`flwr-moshpit bench engine`: what the simulation engine costs, beside its bounds.

Every case runs in a process of its own, so that its peak of memory is its own. CPU time, never
wall time, and of the run alone: loading frameworks and data is not the engine's. The swarms of
thousands train by adding a number, so that all the time is the engine's and the protocol's.

`python -m flwr_moshpit.bench.engine CASE` runs one case and prints its figures as JSON.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from flwr_moshpit.bench.bounds import Bound, at_most, show
from flwr_moshpit.bench.trainers import DriftTrainer, Stopwatch
from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.settings import gather
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.run import Simulation


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case cost."""

    cpu_s: float
    peak_bytes: int
    peer_rounds: int
    """Rounds of all peers together, those of the closing sweep among them."""
    trainer_s: float = 0.0
    """Of `cpu_s`, inside the trainer."""


def bench(console: Console | None = None) -> bool:
    """Run all cases, print each figure beside its bound, and return whether all are kept."""
    console = console or Console()
    figures = {}
    for name in CASES:
        console.print(f"running {name} ...", style="dim")
        figures[name] = _in_child(name)
    return show(console, judge(figures))


def judge(figures: dict[str, Figures]) -> list[Bound]:
    """Each figure beside its bound, from the figures of all `CASES`."""
    thousand, large = figures["1000x10"], figures["10000x4"]
    share = figures["watch"].trainer_s / figures["watch"].cpu_s
    return [
        at_most("1,000 peers x 10 rounds, CPU", thousand.cpu_s, 10.0, "s"),
        at_most("10,000 peers x 4 rounds, CPU", large.cpu_s, 90.0, "s"),
        at_most("10,000 peers x 4 rounds, memory", large.peak_bytes, 4e9, "B"),
        _growth(figures, 1_000),
        _growth(figures, 10_000),
        (
            "trainer's share of CPU, watch with 100 peers",
            f"{100 * share:.1f} %",
            "at least 80 %",
            share >= 0.8,
        ),
        *_rfast(figures["rfast"], figures["rfast, 11x d"]),
    ]


def _rfast(small: Figures, large: Figures) -> list[Bound]:
    """From a thousand peers on a tree, where the mean degree is 2; the two cases differ by
    `_MORE_DIM` parameters. x, g and z, a model and a running sum on the edge up, and two sums on
    the edge down are the paper's own count."""
    speed = small.peer_rounds / (small.cpu_s - small.trainer_s)
    vectors = (large.peak_bytes - small.peak_bytes) / (1_000 * _MORE_DIM * 4)
    return [
        (
            "R-FAST, 1,000 peers, steps a CPU-second",
            f"{speed:,.0f}",
            "at least 5,000",
            speed >= 5_000,
        ),
        ("R-FAST, vectors in memory per peer", f"{vectors:.1f}", "at most 7", vectors <= 7),
    ]


def _growth(figures: dict[str, Figures], num_peers: int) -> Bound:
    """How much more a peer-round costs in a swarm of `num_peers` than in one of 100: no more than
    log N."""
    small, large = figures["100x4"], figures[f"{num_peers}x4"]
    growth = (large.cpu_s / large.peer_rounds) / (small.cpu_s / small.peer_rounds)
    what = f"cost per peer-round, {num_peers:,} over 100 peers"
    return at_most(what, growth, math.log(num_peers) / math.log(100), "x")


def _in_child(name: str) -> Figures:
    command = [sys.executable, "-m", "flwr_moshpit.bench.engine", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise MoshpitError(f"bench case {name} failed with exit code {done.returncode}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def _drift(num_peers: int, rounds: int, runs: int = 1) -> Figures:
    """Groups of 10, d = 1,000; equal devices, so that every peer does every round."""
    done = [
        _measured(
            Simulation(
                Moshpit(group_size=10, local_steps=20),
                DriftTrainer(dim=1_000),
                fleet=Fleet.uniform("jetson-orin-nano", num_peers),
                seed=seed,
            ),
            rounds,
        )
        for seed in range(runs)
    ]
    return Figures(
        sum(figures.cpu_s for figures in done),
        max(figures.peak_bytes for figures in done),
        sum(figures.peer_rounds for figures in done),
    )


def _rfast_steps(dim: int, rounds: int) -> Figures:
    """A thousand peers on a tree; the trainer's own time is told, so that it can be left out."""
    trainer = Stopwatch(DriftTrainer(dim))
    simulation = Simulation(
        RFast(), trainer, fleet=Fleet.uniform("jetson-orin-nano", 1_000), seed=0
    )
    trainer.spent_s = 0.0
    figures = _measured(simulation, rounds)
    return replace(figures, trainer_s=trainer.spent_s)


def _watch() -> Figures:
    """What `flwr-moshpit simulate watch --peers 100 --rounds 5` trains."""
    app = load_app("watch")
    settings = gather(app.config, {}, {"peers": 100, "rounds": 5})
    trainer = Stopwatch(app.trainer(settings.app))
    simulation = Simulation(
        settings.algorithm,
        trainer,
        fleet=Fleet.parse(settings.fleet, settings.peers),
        seed=settings.seed,
    )
    trainer.spent_s = 0.0  # until here it loaded its data, which is not the run's
    figures = _measured(simulation, 5)
    return replace(figures, trainer_s=trainer.spent_s)


_MORE_DIM = 10_000

CASES = {
    "100x4": lambda: _drift(100, 4, runs=10),
    "1000x4": lambda: _drift(1_000, 4),
    "1000x10": lambda: _drift(1_000, 10),
    "10000x4": lambda: _drift(10_000, 4),
    "rfast": lambda: _rfast_steps(1_000, 20),
    "rfast, 11x d": lambda: _rfast_steps(1_000 + _MORE_DIM, 20),
    "watch": _watch,
}


def _measured(simulation: Simulation, rounds: int) -> Figures:
    started = time.process_time()
    history = simulation.run(rounds=rounds)
    cpu_s = time.process_time() - started
    # Linux counts the peak in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Figures(cpu_s, peak_bytes, len(history.rounds))


def main(argv: Sequence[str]) -> int:
    """Run the case named by `argv` and print its figures as one line of JSON."""
    sys.stdout.write(json.dumps(asdict(CASES[argv[0]]())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
