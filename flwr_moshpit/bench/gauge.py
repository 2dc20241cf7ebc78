"""What a peer's process takes up, asked for from outside. From Linux's /proc."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.runtime.worker import Noticed, Tell, Watcher


@dataclass(frozen=True, slots=True)
class Measure:
    """A command, answered by a `Usage`."""


@dataclass(frozen=True, slots=True)
class Usage(Noticed):
    bytes: int
    """Of memory that the process has."""
    peak_bytes: int
    """The most that it has had since the last `Usage`, or its start."""
    trainer_bytes: int
    """Of memory that its trainer's process has."""
    descriptors: int
    """Open files and sockets."""


class Gauge(Watcher):
    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def command(self, command: Any) -> None:
        if isinstance(command, Measure):
            self._tell(usage())


def usage() -> Usage:
    """Of this process; its peak is counted anew from now on. Raises ConfigError where there is no
    /proc to read it from."""
    me = Path("/proc/self")
    try:
        taken = Usage(
            _bytes(me, "VmRSS"),
            _bytes(me, "VmHWM"),
            sum(_bytes(Path(f"/proc/{child.pid}"), "VmRSS") for child in _children()),
            len(os.listdir(me / "fd")),
        )
        (me / "clear_refs").write_text("5")
    except OSError as error:
        raise ConfigError(
            f"memory is measured by Linux's /proc, which fails here: {error}"
        ) from None
    return taken


def _children() -> list[Any]:
    return multiprocessing.active_children()


def _bytes(process: Path, name: str) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    # A process that is ending has none.
    return 0
