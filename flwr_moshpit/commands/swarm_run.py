"""One run of a swarm of processes, from its start to its results: listens, measures, ends it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from flwr_moshpit.commands.swarm_table import PeerRow, SwarmTable
from flwr_moshpit.observe.json_lines import JsonLines
from flwr_moshpit.observe.swarm_results import (
    EVENTS,
    Measured,
    SwarmResults,
    described,
    named_arrays,
)
from flwr_moshpit.protocol.machine import PeerId, Report, Vector
from flwr_moshpit.runtime.compute import MakeTrainer
from flwr_moshpit.runtime.failures import Failures
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.worker import (
    End,
    Ended,
    Failed,
    Finished,
    Gone,
    Listening,
    Loaded,
    Model,
    Reported,
    TellModel,
    Told,
)
from flwr_moshpit.settings import RunSettings

SHARE_OF_TIME = 0.1
"""Evaluations take at most about this share of the time: the peers need the processors."""
END_S = 30.0
"""How long peers may take to wind down, after which they are killed."""


class SwarmRun:
    """Drives one `LocalSwarm` to its end. `trainer` and `swarm` are there for who follows it."""

    def __init__(
        self,
        swarm: LocalSwarm,
        settings: RunSettings,
        make_trainer: MakeTrainer,
        out: Path,
        table: SwarmTable,
    ) -> None:
        self.swarm = swarm
        self.trainer = make_trainer()
        self.trainer.prepare(settings.peers, settings.dtype)
        self.points: list[Measured] = []
        self.table = table
        self.on_address: Callable[[str], None] | None = None
        """Is told where the first peer listens that does."""
        self._settings = settings
        self._mean: Vector = self.trainer.initial_params(settings.seed)
        self._rows = table.rows
        self._write = JsonLines(out / EVENTS, on_loss=self._say_loss)
        self._models: dict[PeerId, Model] = {}
        self._asked: dict[PeerId, None] = {}
        """Peers whose model is on its way."""
        self._measured_round = 0
        self._next_measure_at = 0.0
        self._finished: dict[PeerId, None] = {}
        self._failures = {peer: Failures() for peer in swarm.living}
        self._ended: dict[PeerId, Model | None] = {}
        """The last models of those who have ended by themselves."""
        self._began_at: float | None = None
        self._done_at: float | None = None
        self._sent_bytes = 0
        self._coverages: list[float] = []
        self._waits_s: list[float] = []
        self._exit = ExitStack()

    def __enter__(self) -> SwarmRun:
        self._rows.update({peer: PeerRow() for peer in self.swarm.living})
        self._exit.enter_context(self.table)
        self._exit.enter_context(self._write)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()

    def run(self) -> SwarmResults:
        """Until every living peer has finished, or Ctrl-C; without those whose training fails and
        fails. Raises what stops a peer from beginning: ConfigError, or TrainerError where the
        app's code raises."""
        interrupted = False
        try:
            while not self.done:
                self.step()
        except KeyboardInterrupt:
            interrupted = True
        return self.end(interrupted)

    @property
    def done(self) -> bool:
        """Whether all who live have finished."""
        return not self.swarm.living or all(peer in self._finished for peer in self.swarm.living)

    def step(self, ends_at: float | None = None) -> tuple[PeerId, Told] | None:
        """Take in what some peer tells next, by `ends_at`."""
        told = self.swarm.next(ends_at)
        if told is not None:
            self._take(*told)
        return told

    def measure(self) -> None:
        """Ask for all models; when they are here, their mean is evaluated."""
        if self._asked:
            return
        self._models.clear()
        self._asked = dict(self.swarm.living)
        for peer in self._asked:
            self.swarm.tell(peer, TellModel())

    def end(self, interrupted: bool) -> SwarmResults:
        """Let all end, with their last models, and say what came out."""
        self._done_at = time.monotonic()
        for peer in self.swarm.living:
            self.swarm.tell(peer, End())
        ends_at = time.monotonic() + END_S
        while any(peer not in self._ended for peer in self.swarm.living):
            told = self.swarm.next(ends_at)
            if told is None:
                break
            self._take(*told)
        self._models = {peer: model for peer, model in self._ended.items() if model is not None}
        if self._models:
            self._evaluate(len(self._models))
        return self._results(interrupted, len(self._models))

    def _say_loss(self, error: OSError) -> None:
        self.table.say(f"{self._write.path} ends here, the run goes on: {error.strerror or error}")

    # What peers tell

    def _take(self, peer: PeerId, told: Told) -> None:
        row = self._rows[peer]
        match told:
            case Loaded():
                row.state = "loaded"
            case Listening():
                row.state, row.address = "joining", told.address
                if self.on_address is not None:
                    self.on_address(told.address)
                    self.on_address = None
            case Reported():
                self._report(peer, row, told)
            case Finished():
                row.state = "finished"
                self._finished[peer] = None
            case Model():
                self._models[peer] = told
                self._answered(peer)
            case Failed():
                if self._failures[peer].told is None:
                    raise told.error()
                self.table.say(f"{peer} has ended: {told.text}")
            case Ended():
                row.state = "ended"
                self._ended[peer] = told.model
                self._sent_bytes += told.sent_bytes
            case Gone():
                if peer not in self._ended:
                    row.state = "dead"
                    self.table.alive -= 1
                self._answered(peer)
        self.table.update()

    def _report(self, peer: PeerId, row: PeerRow, told: Reported) -> None:
        report = told.report
        self._write(told.at - self.swarm.began_at, peer, report)
        self._failures[peer](told.at, peer, report)
        if self._began_at is None and report.name in ("plan", "group", "round"):
            self._began_at = told.at
        if report.name != "round":
            return
        values = report.values
        row.state = "training"
        row.completed += 1
        row.coverage = float(values.get("coverage", 1.0))
        row.contributors = int(values.get("contributors", 1))
        row.bytes_sent += int(values.get("bytes_sent", 0))
        self._coverages.append(row.coverage)
        if "wait_s" in values:
            row.wait_s, row.allreduce_s = float(values["wait_s"]), float(values["allreduce_s"])
            self._waits_s.append(row.wait_s)
        self._advance()

    def _advance(self) -> None:
        living = self.swarm.living
        completed = sorted(self._rows[peer].completed for peer in living)
        median = completed[len(completed) // 2] if completed else self.table.round
        rounds = self._settings.rounds
        self.table.round = median if rounds is None else min(median, rounds)
        if median > self._measured_round and time.monotonic() >= self._next_measure_at:
            self.measure()

    # The mean model

    def _answered(self, peer: PeerId) -> None:
        if self._asked.pop(peer, peer) is None and not self._asked and self._done_at is None:
            self._evaluate(len(self._models))

    def _evaluate(self, alive: int) -> None:
        began_at = time.monotonic()
        total = math.fsum(model.weight for model in self._models.values())
        if total > 0:
            mean = np.zeros(self._mean.shape, np.float64)
            for model in self._models.values():
                mean += model.weight / total * model.params
            self._mean = mean.astype(self._mean.dtype)
            self._mean.setflags(write=False)
        metrics = dict(self.trainer.evaluate(self._mean).metrics)
        now = time.monotonic()
        self._next_measure_at = now + (now - began_at) / SHARE_OF_TIME
        self._measured_round = self.table.round
        since = began_at if self._began_at is None else self._began_at
        self.points.append(Measured(began_at - since, self.table.round, alive, metrics))
        self.table.measured_round = self.table.round
        self.table.accuracy = metrics.get("accuracy")
        self.table.loss = metrics.get("loss")
        values = {**metrics, "round": self.table.round, "alive": alive}
        self._write(began_at - self.swarm.began_at, None, Report("swarm", values))

    def _results(self, interrupted: bool, alive: int) -> SwarmResults:
        assert self._done_at is not None
        began_at = self._done_at if self._began_at is None else self._began_at
        return SwarmResults(
            wall_s=self._done_at - began_at,
            start_s=began_at - self.swarm.began_at,
            bytes=self._sent_bytes,
            interrupted=interrupted,
            points=self.points,
            params=named_arrays(self.trainer.layout, self._mean) if self.points else {},
            coverage=float(np.mean(self._coverages)) if self._coverages else None,
            wait_s=float(np.mean(self._waits_s)) if self._waits_s else None,
            alive=alive,
            failed={p: each.told for p, each in self._failures.items() if each.told is not None},
            rounds=self.table.round,
            settings=described(self._settings),
        )
