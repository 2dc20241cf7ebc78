"""Everything that one machine was told, in a file, and the same machine told it again.

A machine has no clock and no randomness but what it was made with, so what made it and its events
with their times are all there is to know of a failure in the field. A trace is a sequence of blocks
(`plain.py`): first the `Recipe`; then, for each event, `("event", now, event)` before it is handed
over, and `("effects", digest, deadline)` after, so that a crash leaves the event that caused it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.build import build_machine
from flwr_moshpit.protocol.machine import (
    Effect,
    Event,
    Machine,
    PeerInfo,
    State,
    Vector,
    View,
)
from flwr_moshpit.runtime.plain import TornError, digest, read_block, write_block

log = logging.getLogger(__name__)

_FORMAT = "flwr-moshpit trace 1"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that makes a machine; see `build_machine`."""

    algorithm: Any
    """Settings, such as `config.Moshpit()`."""
    me: PeerInfo
    params: Vector
    """(d,)."""
    view: View
    seed: tuple[int, ...]
    """Of its `numpy.random.Generator`."""
    schema: bytes = b""
    state: State | None = None

    def build(self) -> Machine:
        """Raises ConfigError for settings that no machine belongs to."""
        return build_machine(
            self.algorithm,
            self.me,
            self.params,
            self.view,
            np.random.default_rng(self.seed),
            incarnation=self.me.incarnation,
            schema=self.schema,
            state=self.state,
        )


class Recorder:
    """Writes a trace to `path`."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when `path` cannot be written. When it cannot be any more, such as on
        a full disk, the trace ends there and the peer goes on; the log says so."""
        self._path = path
        self._file: BinaryIO | None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"trace file {path} cannot be written: {error}") from error

    def recipe(self, recipe: Recipe) -> None:
        fields = [
            recipe.algorithm,
            recipe.me,
            recipe.params,
            recipe.view,
            recipe.seed,
            recipe.schema,
            recipe.state,
        ]
        self._write((_FORMAT, fields))

    def event(self, now: float, event: Event) -> None:
        self._write(("event", now, event), flush=True)

    def effects(self, effects: Sequence[Effect], deadline: float | None) -> None:
        self._write(("effects", digest(list(effects)), deadline))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._say_loss(error)

    def _write(self, block: Any, *, flush: bool = False) -> None:
        if self._file is None:
            return
        try:
            write_block(self._file, block)
            if flush:
                self._file.flush()
        except OSError as error:
            self._say_loss(error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                # What it still holds cannot be written either.
                file.close()

    def _say_loss(self, error: OSError) -> None:
        log.warning("trace %s ends here, the peer goes on: %s", self._path, error)


@dataclass(slots=True)
class Replay:
    """What came out when a machine was told again what it had been told."""

    machine: Machine
    num_events: int = 0
    began_at: float = 0.0
    """`now` of the first event."""
    ended_at: float = 0.0
    difference: str | None = None
    """The first event after which the machine did something else than then; None: it did all the
    same, bit for bit."""
    error: BaseException | None = None
    """What the machine raised at the last event; then, too, unless there is a `difference`."""
    is_torn: bool = False
    """The file ends within a block: its writer was killed."""


def replay(path: Path) -> Replay:
    """Tell a machine all that is in `path`, until the end or until it does something else.

    Raises ConfigError when `path` is no trace.
    """
    try:
        with path.open("rb") as file:
            return _replay(file, path)
    except OSError as error:
        raise ConfigError(f"trace file {path} cannot be read: {error}") from error


def _replay(file: BinaryIO, path: Path) -> Replay:
    try:
        form, fields = read_block(file)
        if form != _FORMAT:
            raise ValueError(form)
        machine = Recipe(*fields).build()
    except (EOFError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no trace of this version: {error}") from error
    done = Replay(machine)
    event: Event | None = None
    mine: list[Any] = []
    for kind, *content in _blocks(file, done):
        if kind == "event" and done.error is None:
            now, event = content
            done.began_at = done.began_at if done.num_events else now
            done.ended_at = now
            done.num_events += 1
            try:
                effects = machine.handle(event, now)
            except Exception as error:
                done.error = error
                continue
            mine = [digest(effects), machine.deadline]
        elif done.error is not None or content != mine:
            name = type(event).__name__
            done.difference = f"after event {done.num_events} at {done.ended_at} s: {name}"
            break
    return done


def _blocks(file: BinaryIO, done: Replay) -> Iterator[Any]:
    try:
        while True:
            block = read_block(file)
            if not isinstance(block, tuple) or len(block) != 3:
                raise TornError("neither an event nor what came of one")
            yield block
    except EOFError:
        return
    except TornError:
        done.is_torn = True
