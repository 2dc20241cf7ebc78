"""A machine that is watched: what every round began and ended with, and death at a chosen stage."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_moshpit.protocol.machine import (
    Effect,
    Event,
    Machine,
    PeerId,
    Received,
    Report,
    State,
    Vector,
)
from flwr_moshpit.protocol.messages import Arrive, GroupId, GroupKey, Part
from flwr_moshpit.runtime.driver import Buildable
from flwr_moshpit.runtime.trace import Recipe
from flwr_moshpit.runtime.worker import Noticed, Tell, Watcher

REDUCER, LEADER = "reducer", "leader"
ENOUGH = 3
"""Peers that a victim has heard before it dies: the others' are still on their way."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A command: die by SIGKILL as soon as this peer is at `stage`, if it is the first to make
    `token`. As a reducer: parts of `ENOUGH` members are here and nothing has been averaged. As a
    leader: so many members have arrived and the group is not named."""

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
        if armed is not None and isinstance(event, Received):
            self._count(armed, event)
        brought, weight = self.params, self.weight
        effects = self._machine.handle(event, now)
        for effect in effects:
            if isinstance(effect, Report) and effect.name == "round":
                values = effect.values
                averaged = Averaged(
                    time.monotonic(),
                    int(values["round"]),
                    tuple(values["contributor_ids"]),
                    float(values["coverage"]),
                    brought,
                    weight,
                    self.params,
                )
                self._watcher.tell(averaged)
        return effects

    def snapshot(self) -> State:
        return self._machine.snapshot()

    def _count(self, armed: Arm, event: Received) -> None:
        message = event.message
        what: GroupId | GroupKey
        if armed.stage == REDUCER and isinstance(message, Part):
            what = message.group
        elif armed.stage == LEADER and isinstance(message, Arrive):
            what = message.key
        else:
            return
        if self._heard[0] != what:
            self._heard = (what, {})
        heard = self._heard[1]
        heard[event.src] = None
        if len(heard) >= ENOUGH:
            _die_first(armed.token)


def _die_first(token: Path) -> None:
    try:
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        # Another one has died in my place.
        return
    os.write(descriptor, repr(time.monotonic()).encode())
    os.kill(os.getpid(), signal.SIGKILL)
