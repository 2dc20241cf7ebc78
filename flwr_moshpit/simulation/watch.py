"""Looks at a run while it goes on: rounds, the mean model's curve, faults at a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flwr_moshpit.errors import MoshpitError, TrainerError
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.observe.progress import SWARM_REPORT
from flwr_moshpit.protocol.machine import PeerId, Report, Vector
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.simulation.engine import Engine
from flwr_moshpit.simulation.faults import FaultSchedule
from flwr_moshpit.simulation.history import Point
from flwr_moshpit.simulation.meter import Rounds, Spacing, consensus_distance, swarm_mean
from flwr_moshpit.trainer import Trainer


class Watch:
    """Drives one engine to its end and measures on the way, changing nothing."""

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        devices: Mapping[PeerId, DeviceProfile],
        params: Vector,
        faults: FaultSchedule,
        spacing: Spacing,
        until_round: int | None,
        server: PeerId | None = None,
    ) -> None:
        """`devices`: of the peers that train, so not of the `server`, if there is one. `params`:
        what all begin with. `until_round`: where training ends, None for nowhere."""
        self.observers: list[Observer] = []
        self.points: list[Point] = []
        self.events: list[tuple[float, PeerId | None, Report]] = []
        self.mean = params
        """The swarm's mean model when it was last measured, (d,)."""
        self._engine = engine
        self._trainer = trainer
        self._devices = devices
        self._everybody = [*devices, *([server] if server is not None else [])]
        self._faults = faults
        self._spacing = spacing
        self._until_round = until_round
        self._rounds = Rounds(list(devices))
        self._looks = False
        self._periods = 0
        """Evaluations by the clock so far."""

    def run(self, until_s: float | None) -> bool:
        """Run until every living peer has finished, or `until_s`; whether it was interrupted."""
        engine = self._engine
        engine.observe.append(self._on_report)
        self._faults.start(engine)
        engine.schedule(0.0, self._measure)
        if self._spacing.every_s is not None:
            engine.schedule(self._spacing.every_s, self._measure_again)
        interrupted = False
        try:
            engine.run(until_s, lambda: engine.all_finished)
        except KeyboardInterrupt:
            interrupted = True
        self._measure()
        return interrupted

    def _on_report(self, now: float, peer: PeerId | None, report: Report) -> None:
        self.events.append((now, peer, report))
        for observer in self.observers:
            observer(now, peer, report)
        if report.name == "round" and peer is not None:
            completed = int(report.values["round"]) + 1
            self._rounds.complete(peer, completed)
            self._faults.on_round(self._engine, peer, completed)
            if not self._looks and self._rounds.may_have_advanced(self._engine.num_alive):
                # Not at once: others may end their rounds at this very instant.
                self._looks = True
                self._engine.schedule(now, self._look)

    def _look(self) -> None:
        """A peer has completed a round; has the median one?"""
        self._looks = False
        living = self._living()
        completed = self._rounds.advance(living)
        if completed is None:
            return
        if self._spacing.is_due(completed, self._training_flops()):
            self._measure()
        else:
            self._tell({"round": self._capped(completed), "alive": len(living)})

    def _measure_again(self) -> None:
        assert self._spacing.every_s is not None
        self._measure()
        # Counted from the beginning, or sums of seconds would drift apart.
        self._periods += 1
        self._engine.schedule((self._periods + 1) * self._spacing.every_s, self._measure_again)

    def _measure(self) -> None:
        engine = self._engine
        if self.points and self.points[-1].t == engine.now:
            self.points.pop()
        living = self._living()
        distance, relative = self._take_mean(living)
        metrics, num_examples = _evaluate(self._trainer, self.mean)
        completed = self._rounds.median(living)
        self._spacing.evaluated(completed, self._training_flops(), num_examples)
        usage = [engine.usage(peer) for peer in self._everybody]
        point = Point(
            t=engine.now,
            round=self._capped(completed),
            alive=len(living),
            accuracy=metrics.get("accuracy"),
            loss=metrics.get("loss"),
            consensus_distance=distance,
            consensus_relative=relative,
            bytes=sum(used.sent_bytes for used in usage),
            joules=sum(used.joules for used in usage),
            metrics=metrics,
        )
        self.points.append(point)
        known = {
            **metrics,
            "round": point.round,
            "alive": point.alive,
            "consensus_distance": distance,
            "consensus_relative": relative,
        }
        self._tell({key: value for key, value in known.items() if value is not None})

    def _take_mean(self, living: list[PeerId]) -> tuple[float | None, float | None]:
        """Keep the mean of the moment; how far the living are from it, absolute and relative."""
        machines = self._engine.machines
        mean = swarm_mean(list(machines.values()))
        if mean is None:
            # Nobody has trained, or nobody lives who has: the last mean there was stands.
            return None, None
        self.mean = mean
        if not living:
            return None, None
        distance = consensus_distance([machines[peer] for peer in living], mean)
        norm = float(np.linalg.norm(mean))
        return distance, distance / norm if norm > 0 else None

    def _tell(self, values: dict[str, Any]) -> None:
        self._on_report(self._engine.now, None, Report(SWARM_REPORT, values))

    def _living(self) -> list[PeerId]:
        return [peer for peer in self._devices if self._engine.is_alive(peer)]

    def _training_flops(self) -> float:
        """That all peers have done, from the time that they trained."""
        return sum(
            self._engine.usage(peer).busy_s * device.flops_per_s
            for peer, device in self._devices.items()
        )

    def _capped(self, completed: int) -> int:
        """The closing sweep's rounds train nothing and are not counted."""
        return completed if self._until_round is None else min(completed, self._until_round)


def _evaluate(trainer: Trainer, params: Vector) -> tuple[dict[str, float], int]:
    """(metrics, examples) on the test data of the whole task."""
    try:
        result = trainer.evaluate(params)
    except MoshpitError:
        raise
    except Exception as error:
        raise TrainerError(f"the evaluation of the mean model failed: {error!r}") from error
    return {name: float(value) for name, value in result.metrics.items()}, result.num_examples
