"""A peer process and the ClientApp calls that look after it: they meet in a folder.

Flower makes a new process for every message, so nothing but files can outlive one. Each file has
one writer, is written whole, and is readable by its owner alone:

    join.json    the ClientApp    what the peer needs to listen
    peer.json    the peer         where it listens, and its public key
    start.json   the ClientApp    its certificate, and whom it meets
    events.jsonl the peer         every report
    model.npy    the peer         its parameters when it had finished
    end.json     the peer         that it has finished, or why it ended
    peer.log     the peer         what it and its trainer print
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.runtime.private_files import make_private, write_private


class PeerFolder:
    """One peer of one swarm, on this device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.model = path / "model.npy"
        self.log = path / "peer.log"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def of(cls, swarm: str, peer: str) -> PeerFolder:
        """Where all processes of this SuperNode look."""
        return cls(swarms_folder() / swarm / peer)

    def make(self) -> None:
        """Raises ConfigError where that is not possible."""
        try:
            make_private(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}") from error

    def write(self, name: str, content: dict[str, Any]) -> None:
        write_private(self.path / f"{name}.json", json.dumps(content).encode())

    def read(self, name: str) -> dict[str, Any] | None:
        """None if nobody has written it."""
        try:
            content: dict[str, Any] = json.loads((self.path / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None
        return content

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def pid(self) -> int | None:
        """Of the peer process, if it lives."""
        peer = self.read("peer")
        if peer is None or not is_alive(int(peer["pid"]), str(self.path)):
            return None
        return int(peer["pid"])


def swarms_folder() -> Path:
    home = os.environ.get("FLWR_HOME")
    return (Path(home) if home else Path.home() / ".flwr") / "moshpit"


def is_alive(pid: int, mark: str = "") -> bool:
    """Whether the process runs and, where that can be seen, has `mark` in its command line: the
    number may be another's by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return not mark
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return True
    return state != "Z" and mark in command
