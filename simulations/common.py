"""What the experiments share: an app's model and data without Flower's messages, and verdicts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flwr_moshpit.commands.compare import RunsProgress
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.simulation.compare import compare
from flwr_moshpit.simulation.comparison import Comparison, Ratio
from flwr_moshpit.simulation.contest import Contest
from flwr_moshpit.torch_trainer import TorchTrainer


@dataclass(frozen=True)
class AppTrainer:
    """Makes trainers of a bundled app's model, data and learning rate, times a factor.

    `TorchTrainer` takes half the time of calling the ClientApp where a job is a single step.
    """

    app: str = "watch"
    loader: dict[str, Any] = field(default_factory=dict)
    """More arguments of the app's `make_loader`."""

    def __call__(self, factor: float) -> TorchTrainer:
        # The models are small: more threads would wait for each other longer than they compute.
        torch.set_num_threads(1)
        app = load_app(self.app)
        make_loader = app.load(f"{self.app}.task:make_loader")
        return TorchTrainer(
            app.load(f"{self.app}.task:make_model"),
            lambda partition, count: make_loader(partition, count, **self.loader),
            lr=float(app.config["lr"]) * factor,
            make_test_loader=app.load(f"{self.app}.task:make_test_loader"),
        )


def parser(description: str | None, *, seeds: int, tries: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, default=seeds, help=f"how many ({seeds})")
    made.add_argument(
        "--tries", type=int, default=tries, help=f"learning rates that each method tries ({tries})"
    )
    made.add_argument("--workers", type=int, default=2, help="runs at once, in processes (2)")
    made.add_argument("--out", type=Path, help="folder for compare.json and compare.png")
    return made


def ran(title: str, contest: Contest, args: argparse.Namespace) -> Comparison:
    """Run `contest`, with progress on stderr, and print its table. Exits after Ctrl-C."""
    print(f"\n{title}\n", flush=True)
    name = title.split(":")[0].replace(", ", "-").replace(" ", "-")
    out = None if args.out is None else args.out / name
    with RunsProgress(contest) as progress:
        comparison = compare(contest, workers=args.workers, follower=progress, out=out)
    print(f"{comparison.table()}\n", flush=True)
    if comparison.interrupted:
        sys.exit(130)
    return comparison


def verdict(claim: str, ratio: Ratio | None, wanted: float) -> bool:
    """Print whether the mean ratio is at least `wanted`; whether it is."""
    if ratio is None:
        print(f"{claim}: not in every run at the target, {wanted:g}x wanted: DOES NOT HOLD")
        return False
    of = ratio.interval
    holds = of.mean >= wanted
    sign = "at least " if ratio.is_bound else ""
    bounds = f", 95 % interval [{of.low:.2f}, {of.high:.2f}]" if of.count > 1 else ""
    print(
        f"{claim}: {sign}{of.mean:.2f}x{bounds}, {wanted:g}x wanted: "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    return holds
