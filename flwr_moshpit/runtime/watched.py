"""A machine that is watched: what every round began and ended with, and death at a chosen stage."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_moshpit.protocol.machine import (
    Compute,
    Effect,
    Event,
    Machine,
    PeerId,
    Received,
    Report,
    Send,
    State,
    Vector,
)
from flwr_moshpit.protocol.messages import Arrive, Average, GroupId, GroupKey, Part
from flwr_moshpit.runtime.driver import Buildable
from flwr_moshpit.runtime.trace import Recipe
from flwr_moshpit.runtime.worker import Noticed, Tell, Watcher

BEFORE, MATCHING, EARLY, LATE = "before", "matchmaking", "early", "late"
REDUCER, LEADER = "reducer", "leader"
_COUNTED = {EARLY: 1, LATE: 5, REDUCER: 3, LEADER: 3}
"""Of how many others a victim has heard before it dies: the rest are still on their way."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A command: die by SIGKILL as soon as this peer is at `stage`, if it is the first to make
    `token`. Before: it trains. In matchmaking: it has told its leader that it is here. Early: the
    first part of another is here. Late: the averages of most reducers are. As a reducer: parts of
    three members are here and nothing has been averaged. As a leader: so many members have arrived
    and the group is not named."""

    stage: str
    token: Path


@dataclass(frozen=True, slots=True)
class Averaged(Noticed):
    """A round of this peer, from before the average to after it."""

    at: float
    """On the clock `monotonic`, which all processes of a machine share."""
    round: int
    contributors: tuple[PeerId, ...]
    coverage: float
    late: bool
    """It came when its group had begun, and is in the next one."""
    brought: Vector
    """(d,), its vector when it came to average."""
    weight: float
    got: Vector
    """(d,), what it had afterwards."""


class MachineWatcher(Watcher):
    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.armed: Arm | None = None

    def wrap(self, recipe: Recipe) -> Buildable:
        return _Watched(recipe, self)

    def command(self, command: Any) -> None:
        if isinstance(command, Arm):
            self.armed = command


@dataclass(frozen=True, slots=True)
class _Watched:
    recipe: Recipe
    watcher: MachineWatcher

    def build(self) -> Machine:
        return WatchedMachine(self.recipe.build(), self.watcher)


class WatchedMachine:
    """A `Machine` around another one, which it leaves alone."""

    def __init__(self, machine: Machine, watcher: MachineWatcher) -> None:
        self._machine = machine
        self._watcher = watcher
        self._heard: tuple[GroupId | GroupKey | None, dict[PeerId, None]] = (None, {})
        self._stage = ""
        """What it does until the next event, as far as its own effects say."""

    @property
    def deadline(self) -> float | None:
        return self._machine.deadline

    @property
    def params(self) -> Vector:
        return self._machine.params

    @property
    def weight(self) -> float:
        return self._machine.weight

    def handle(self, event: Event, now: float) -> list[Effect]:
        armed = self._watcher.armed
        if armed is not None and armed.stage == self._stage:
            _die_first(armed.token)
        if armed is not None and armed.stage in _COUNTED and isinstance(event, Received):
            self._count(armed, event)
        brought, weight = self.params, self.weight
        effects = self._machine.handle(event, now)
        for effect in effects:
            self._pass(effect)
            if isinstance(effect, Report) and effect.name == "round":
                values = effect.values
                averaged = Averaged(
                    time.monotonic(),
                    int(values["round"]),
                    tuple(values["contributor_ids"]),
                    float(values["coverage"]),
                    bool(values["late"]),
                    brought,
                    weight,
                    self.params,
                )
                self._watcher.tell(averaged)
        return effects

    def snapshot(self) -> State:
        return self._machine.snapshot()

    def _pass(self, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self._stage = BEFORE
        elif isinstance(effect, Send) and isinstance(effect.message, Arrive):
            self._stage = MATCHING
        elif isinstance(effect, Send) and isinstance(effect.message, Part):
            self._stage = ""

    def _count(self, armed: Arm, event: Received) -> None:
        message = event.message
        what: GroupId | GroupKey
        if armed.stage == LEADER and isinstance(message, Arrive):
            what = message.key
        elif isinstance(message, Average if armed.stage == LATE else Part):
            what = message.group
        else:
            return
        if self._heard[0] != what:
            self._heard = (what, {})
        heard = self._heard[1]
        heard[event.src] = None
        if len(heard) >= _COUNTED[armed.stage]:
            _die_first(armed.token)


def _die_first(token: Path) -> None:
    try:
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        # Another one has died in my place.
        return
    os.write(descriptor, repr(time.monotonic()).encode())
    os.kill(os.getpid(), signal.SIGKILL)
