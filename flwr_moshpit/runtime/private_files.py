"""Files that nobody but their owner can read: keys, certificates, invitations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flwr_moshpit.errors import ConfigError

T = TypeVar("T")


def make_private(directory: Path) -> None:
    """Make `directory`, or close it to others."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.chmod(0o700)


def write_private(path: Path, content: bytes) -> None:
    """Atomic, and never readable by others, not even for a moment."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_private(path: Path) -> bytes:
    """Raises `ConfigError`, with the cure, when others can read the file too."""
    if _reading(path, path.stat).st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others: run chmod 600 {path}")
    return read(path)


def read(path: Path) -> bytes:
    return _reading(path, path.read_bytes)


def _reading(path: Path, act: Callable[[], T]) -> T:
    try:
        return act()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
