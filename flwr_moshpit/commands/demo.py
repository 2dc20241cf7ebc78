"""`flwr-moshpit demo`: eight real processes train while the ones they lean on are killed."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType

from flwr_moshpit.commands.deaths import CALM_ROUNDS, Death, Rounds
from flwr_moshpit.commands.swarm import local_peers, swarm_settings
from flwr_moshpit.commands.swarm_run import SwarmRun
from flwr_moshpit.commands.swarm_table import SwarmTable
from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.flower.app_trainer import make_app_trainer
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.swarm_results import SwarmResults
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.watched import LEADER, REDUCER, Arm, Averaged, MachineWatcher
from flwr_moshpit.runtime.worker import Gone
from flwr_moshpit.signals import ends_as_interrupt

APP = "watch"
PEERS = 8
DURATION_S = 100.0
"""Of training; starting and ending come to that."""
LEARNING_RATE = 0.01
"""A tenth of the app's, or little would be left to learn when the first peer is killed."""
HANG_S = 120.0
CONTACT = "contact"
DIFFERENCE_MAX = 1e-5
"""What rounding may make of the mean of a few float32 of the size of 1."""
RECORD_WIDTH = 128

_DEATHS = {
    REDUCER: "a reducer, in mid-average",
    LEADER: "the leader, while others arrive at it",
    CONTACT: "the contact by which all had found each other, who also plans the grid",
}


def demo(
    *, duration_s: float = DURATION_S, out: Path | None = None, record: Path | None = None
) -> SwarmResults:
    """Run it and print a line for every death. `record`: an SVG file of what was printed.

    Raises MoshpitError if the swarm stands still, or if what it should show did not happen: the
    survivors' contributions averaged, all of them and exactly, and an accuracy that rises.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if record is not None and not record.absolute().parent.is_dir():
        raise ConfigError(f"record {str(record)!r} is in a folder that is not there")
    console = _Screen(record)
    app = load_app(APP)
    gathered = swarm_settings(app, {}, {"peers": PEERS})
    settings = dataclasses.replace(gathered, rounds=None, app={**gathered.app, "lr": LEARNING_RATE})
    table = SwarmTable(PEERS, None, quiet=False, console=console.shown)
    make_trainer = make_app_trainer(app, settings.app, flower=False)
    with (
        ends_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="flwr-moshpit-") as folder,
        run_folder(out or Path(folder)) as results_folder,
    ):
        console.print(f"{PEERS} peers, a process each and one for each trainer, over gRPC and TLS")
        peers = local_peers(app, settings, Path(folder), flower=False)
        with (
            LocalSwarm(peers, MachineWatcher) as swarm,
            SwarmRun(swarm, settings, make_trainer, results_folder, table) as run,
        ):
            play = _Demo(run, console, Path(folder))
            interrupted = False
            try:
                play.play(duration_s)
            except KeyboardInterrupt:
                interrupted = True
            results = run.end(interrupted)
        if out is not None:
            results.save(out)
    console.print(results.table())
    flaw = None if interrupted else play.flaw()
    if flaw is None and not interrupted:
        console.print(
            f"through {len(play.deaths)} deaths all survivors averaged all they had, exactly"
        )
    console.save()
    if flaw is not None:
        raise MoshpitError(flaw)
    return results


class _Screen:
    """What is printed, and kept for an SVG file if one is wanted."""

    def __init__(self, record: Path | None) -> None:
        self.shown = Console(highlight=False, markup=False, soft_wrap=True)
        self._record = record
        self._kept = Console(
            file=io.StringIO(), width=RECORD_WIDTH, record=True, highlight=False, markup=False
        )

    def print(self, what: RenderableType) -> None:
        self.shown.print(what)
        self._kept.print(what)

    def save(self) -> None:
        if self._record is not None:
            self._kept.save_svg(str(self._record), title="flwr-moshpit demo")


class _Demo:
    def __init__(self, run: SwarmRun, console: _Screen, folder: Path) -> None:
        self.deaths: list[Death] = []
        self._accuracies: list[float] = []
        self._run = run
        self._console = console
        self._folder = folder
        self._rounds = Rounds()

    def play(self, duration_s: float) -> None:
        self._until(lambda: bool(self._rounds), "the first round")
        began_at = time.monotonic()
        self._console.print(f"accuracy {self._accuracy()}")
        for stage in _DEATHS:
            self._go_on(CALM_ROUNDS)
            self._console.print(f"accuracy {self._accuracy()}")
            self.deaths.append(self._kill(stage))
            self._console.print(_line(self.deaths[-1]))
        self._go_on(CALM_ROUNDS)
        ends_at = began_at + duration_s
        while time.monotonic() < ends_at:
            self._step(ends_at)
        self._console.print(f"accuracy {self._accuracy()}")

    def flaw(self) -> str | None:
        """What did not happen as it should have."""
        for death in self.deaths:
            if death.coverage < 1:
                return f"after the death of {death.victim} a survivor's vector was not averaged"
            if not death.difference <= DIFFERENCE_MAX:
                return (
                    f"after the death of {death.victim} an average differs by "
                    f"{death.difference:.1e} from that of its contributors"
                )
        if self._accuracies and self._accuracies[-1] < self._accuracies[0]:
            return f"accuracy fell from {self._accuracies[0]:.3f} to {self._accuracies[-1]:.3f}"
        return None

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
        found = functools.partial(self._rounds.without, victim, at, swarm.living)
        self._until(lambda: found() is not None, "the round after it")
        number = found()
        assert number is not None
        return self._rounds.death(stage, victim, at, number, swarm.living)

    def _accuracy(self) -> str:
        """Of the mean model, measured now."""
        run = self._run
        known = len(run.points)
        run.measure()
        self._until(lambda: len(run.points) > known, "the models of all")
        accuracy = run.table.accuracy
        if accuracy is None:
            return "unknown"
        self._accuracies.append(accuracy)
        return f"{accuracy:.3f} at round {run.table.round}"

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
            self._rounds.add(peer, told)
        return time.monotonic() < ends_at


def _line(death: Death) -> str:
    return f"SIGKILL of {death.victim}: {_DEATHS[death.stage]}\n  {death.told()}"
