"""`flwr-moshpit demo`: eight real processes train while the ones they lean on are killed."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from flwr_moshpit.commands.swarm import local_peers, swarm_settings
from flwr_moshpit.commands.swarm_run import SwarmRun
from flwr_moshpit.commands.swarm_table import SwarmTable
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.flower.app_trainer import make_app_trainer
from flwr_moshpit.observe.swarm_results import SwarmResults
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.watched import LEADER, REDUCER, Arm, Averaged, MachineWatcher
from flwr_moshpit.runtime.worker import Gone

APP = "watch"
PEERS = 8
DURATION_S = 100.0
"""Of training; starting and ending come to that."""
CALM_ROUNDS = 10
"""Before the first death, and between two."""
HANG_S = 120.0
CONTACT = "contact"

_DEATHS = {
    REDUCER: "a reducer, in mid-average",
    LEADER: "the leader, while others arrive at it",
    CONTACT: "the contact by which all had found each other, who also plans the grid",
}


@dataclass(frozen=True, slots=True)
class Death:
    """What one death did to the others."""

    stage: str
    victim: PeerId
    round: int
    """The first round that the survivors finished without it."""
    delay_s: float
    """How much longer that round took than the median round before."""
    coverage: float
    """Mean over the survivors, of that round. One that came too late for its group, as happens on a
    busy machine, has none; the death did not do that."""
    difference: float
    """Largest, over the survivors and the vector, between what they got and the exact weighted mean
    of what the contributors had brought."""
    survivors: int


def demo(*, duration_s: float = DURATION_S, out: Path | None = None) -> SwarmResults:
    """Run it and print a line for every death. Raises MoshpitError if the swarm stands still."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    app = load_app(APP)
    gathered = swarm_settings(app, {}, {"peers": PEERS})
    settings = dataclasses.replace(gathered, rounds=None)
    table = SwarmTable(PEERS, None, quiet=False, console=console)
    make_trainer = make_app_trainer(app, settings.app, flower=False)
    console.print(f"{PEERS} peers, a process each and one for each trainer, over gRPC and TLS")
    with (
        tempfile.TemporaryDirectory(prefix="flwr-moshpit-") as folder,
        LocalSwarm(local_peers(app, settings, Path(folder), flower=False), MachineWatcher) as swarm,
        SwarmRun(swarm, settings, make_trainer, out or Path(folder), table) as run,
    ):
        shown = _Demo(run, console, Path(folder))
        interrupted = False
        try:
            shown.play(duration_s)
        except KeyboardInterrupt:
            interrupted = True
        results = run.end(interrupted)
    if out is not None:
        results.save(out)
    console.print(results.table())
    return results


class _Demo:
    def __init__(self, run: SwarmRun, console: Console, folder: Path) -> None:
        self.deaths: list[Death] = []
        self._run = run
        self._console = console
        self._folder = folder
        self._rounds: dict[int, dict[PeerId, Averaged]] = {}

    def play(self, duration_s: float) -> None:
        self._until(lambda: bool(self._rounds), "the first round")
        began_at = time.monotonic()
        for stage in _DEATHS:
            self._go_on(CALM_ROUNDS)
            self._console.print(f"accuracy {self._accuracy()}")
            self.deaths.append(self._kill(stage))
            self._console.print(_line(self.deaths[-1]))
        self._go_on(CALM_ROUNDS)
        ends_at = began_at + duration_s
        while time.monotonic() < ends_at:
            self._step(ends_at)

    def _kill(self, stage: str) -> Death:
        """Kill who is at `stage`, and see what it does to the others."""
        swarm = self._run.swarm
        before = dict(swarm.living)
        token = self._folder / stage
        if stage == CONTACT:
            at = time.monotonic()
            swarm.kill(swarm.contact)
        else:
            for peer in before:
                if peer != swarm.contact:
                    swarm.tell(peer, Arm(stage, token))
        self._until(lambda: len(swarm.living) < len(before), f"the death of {stage}")
        (victim,) = (peer for peer in before if peer not in swarm.living)
        if stage != CONTACT:
            at = float(token.read_text())
        self._until(lambda: self._round_without(victim, at) is not None, "the round after it")
        number = self._round_without(victim, at)
        assert number is not None
        return self._death(stage, victim, number)

    def _death(self, stage: str, victim: PeerId, number: int) -> Death:
        ends = {k: max(a.at for a in of.values()) for k, of in sorted(self._rounds.items())}
        took = {k: ends[k] - ends[k - 1] for k in ends if k - 1 in ends}
        calm = [took[k] for k in took if k < number][-CALM_ROUNDS:]
        those = self._rounds[number]
        survivors = [those[peer] for peer in self._run.swarm.living]
        return Death(
            stage=stage,
            victim=victim,
            round=number,
            delay_s=max(0.0, took[number] - statistics.median(calm)),
            coverage=statistics.fmean(averaged.coverage for averaged in survivors),
            difference=max(_difference(averaged, those) for averaged in survivors),
            survivors=len(survivors),
        )

    def _round_without(self, victim: PeerId, at: float) -> int | None:
        """The first round that all survivors have ended after `at` without `victim`."""
        living = self._run.swarm.living
        for number, of in sorted(self._rounds.items()):
            those = [of.get(peer) for peer in living]
            if all(a is not None and a.at > at and victim not in a.contributors for a in those):
                return number
        return None

    def _accuracy(self) -> str:
        """Of the mean model, measured now."""
        run = self._run
        known = len(run.points)
        run.measure()
        self._until(lambda: len(run.points) > known, "the models of all")
        accuracy = run.table.accuracy
        return "unknown" if accuracy is None else f"{accuracy:.3f} at round {run.table.round}"

    def _go_on(self, rounds: int) -> None:
        wanted = self._run.table.round + rounds
        self._until(lambda: self._run.table.round >= wanted, f"{rounds} rounds")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + HANG_S
        while not condition():
            if not self._step(ends_at):
                raise MoshpitError(f"nothing more is heard: {what} did not come in {HANG_S:g} s")

    def _step(self, ends_at: float) -> bool:
        """Whether anything came before `ends_at`."""
        heard = self._run.step(ends_at)
        if heard is None:
            return False
        peer, told = heard
        if isinstance(told, Gone) and not self._run.swarm.living:
            raise MoshpitError("nobody is left")
        if isinstance(told, Averaged):
            self._rounds.setdefault(told.round, {})[peer] = told
            while len(self._rounds) > 3 * CALM_ROUNDS:
                del self._rounds[min(self._rounds)]
        return time.monotonic() < ends_at


def _difference(averaged: Averaged, of: dict[PeerId, Averaged]) -> float:
    """Between what one got and the exact mean of what the contributors brought; NaN where one of
    them has not told what that was."""
    brought = [of[peer] for peer in averaged.contributors if peer in of]
    if len(brought) < len(averaged.contributors) or not brought:
        return float("nan")
    total = sum(each.weight for each in brought)
    mean = np.zeros(averaged.got.shape, np.float64)
    for each in brought:
        mean += each.weight / total * each.brought.astype(np.float64)
    return float(np.max(np.abs(averaged.got - mean)))


def _line(death: Death) -> str:
    return (
        f"SIGKILL of {death.victim}: {_DEATHS[death.stage]}\n"
        f"  round {death.round}, {death.survivors} survivors: delay {death.delay_s:.2f} s, "
        f"coverage {100 * death.coverage:.0f} %, largest difference from their exact mean "
        f"{death.difference:.1e}"
    )
