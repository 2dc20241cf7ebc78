"""What a peer goes on from after it was killed: `checkpoint-NUMBER` files in a folder of its own.

A file is a line that says what it is, one block of values (`plain.py`) and the SHA-256 of all of
that. It is written beside, flushed to the disk and renamed, so under its name it is whole, unless
the disk itself lies; then the checksum shows it and an older one is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.runtime.plain import TornError, read_block, write_block

log = logging.getLogger(__name__)

_FIRST_LINE = b"flwr-moshpit checkpoint 1\n"
_CHECKSUM_BYTES = 32
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found."""

    content: dict[str, Any]
    path: Path
    refused: tuple[str, ...]
    """Newer files that cannot be used, each with why."""


class Checkpoints:
    """The checkpoints of one peer in `folder`, of which the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """Makes the folder. Raises ConfigError where that, or writing in it, is not possible."""
        self.folder = folder
        self._keep = max(1, keep)
        self._claimed: int | None = None
        """A descriptor of the folder, on which the lock is."""
        self._saving = threading.Lock()
        """Whoever waits for a save may give up before the thread that writes has done so."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("checkpoint-*.partial"):
                left.unlink()
        except OSError as error:
            raise ConfigError(f"state folder {folder} cannot be used: {error}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"state folder {folder} cannot be written to")
        self._next = max((_number(path) for path in self._files()), default=0) + 1

    def claim(self) -> None:
        """Have the folder alone until `release` or the end of this process, however it ends: two
        lives of one peer would overwrite each other's checkpoints, and the swarm takes only the
        later one. Raises ConfigError while another has it."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(
                f"state folder {self.folder} is in use by a peer that still runs: end that one "
                "first, or give each peer a folder of its own"
            ) from error
        except OSError as error:
            # Some file systems over a network have no locks.
            log.warning("state folder %s cannot be locked: %s", self.folder, error)
        self._claimed = descriptor

    def release(self) -> None:
        """Another may have the folder now. Harmless twice."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def save(self, content: dict[str, Any]) -> Path:
        """Write `content`: numbers, texts, bytes, arrays, and lists, tuples and dicts of them. From
        any thread; one after the other.

        Raises OSError when the disk is full or gone; what was there before stays.
        """
        with self._saving:
            return self._save(content)

    def load(self) -> Loaded | None:
        """The newest that is whole, or None if there is none."""
        refused: list[str] = []
        for path in reversed(self._files()):
            found = _read_or_reason(path)
            if not isinstance(found, str):
                return Loaded(found, path, tuple(refused))
            log.warning("checkpoint %s is refused: %s", path, found)
            refused.append(f"{path.name}: {found}")
        return None

    def _save(self, content: dict[str, Any]) -> Path:
        path = self.folder / f"checkpoint-{self._next:08d}"
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as raw:
                file = _Hashing(raw)
                file.write(_FIRST_LINE)
                write_block(cast(BinaryIO, file), content)
                raw.write(file.hashed.digest())
                raw.flush()
                os.fsync(raw.fileno())
            partial.replace(path)
            _flush_folder(self.folder)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        self._next += 1
        for old in self._files()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def _files(self) -> list[Path]:
        """From the oldest to the newest."""
        found = [path for path in self.folder.glob("checkpoint-*") if _number(path) > 0]
        return sorted(found, key=_number)


class _Hashing:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hashed = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hashed.update(data)
        return self._file.write(data)


def _read_or_reason(path: Path) -> dict[str, Any] | str:
    try:
        return _read(path)
    except (TornError, OSError) as error:
        return str(error)


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END) - _CHECKSUM_BYTES
        file.seek(0)
        if file.readline(len(_FIRST_LINE)) != _FIRST_LINE:
            raise TornError("not a checkpoint of this version")
        file.seek(0)
        hashed = hashlib.sha256()
        while size > 0:
            data = file.read(min(size, _CHUNK_BYTES))
            if not data:
                raise TornError("it ends too early")
            hashed.update(data)
            size -= len(data)
        if file.read() != hashed.digest():
            raise TornError("its checksum is wrong")
        file.seek(len(_FIRST_LINE))
        try:
            content = read_block(file)
        except EOFError as error:
            raise TornError("it is empty") from error
    if not isinstance(content, dict):
        raise TornError("it holds no checkpoint")
    return content


def _number(path: Path) -> int:
    digits = path.name.removeprefix("checkpoint-")
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _flush_folder(folder: Path) -> None:
    """Make the renaming itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
