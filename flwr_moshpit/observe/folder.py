"""Where a run's results go."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr_moshpit.errors import ConfigError

RUNS = Path("runs")
RESULTS = ("events.jsonl", "summary.json", "model.npz", "compare.json")
"""What runs of any kind write."""


@contextmanager
def run_folder(out: Path | None, *, resumes: bool = False) -> Iterator[Path]:
    """The folder `out`, by default the first unused `runs/YYYY-MM-DD-N`, while a run writes to it.

    It is made at once, so that of two runs that begin together each gets its own, and removed again
    if nothing was written. Raises ConfigError if there is a file of that name, if no folder can be
    made or written to, and if it holds the results of another run, which `resumes` allows.
    """
    if out is not None and not resumes:
        _refuse_used(out)
    wanted = RUNS if out is None else out
    new = [folder for folder in (wanted, *wanted.parents) if not folder.exists()]
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        folder = _next_run(wanted) if out is None else out
    except OSError as error:
        raise ConfigError(f"out {str(wanted)!r} cannot be made: {error.strerror}") from error
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"out {str(folder)!r} cannot be written to: choose another folder")
        yield folder
    finally:
        with contextlib.suppress(OSError):
            # Up to the first that is not empty.
            for empty in new if out is not None else [folder, *new]:
                empty.rmdir()


def _next_run(folder: Path) -> Path:
    """Makes the first unused `folder/YYYY-MM-DD-N`."""
    today = datetime.date.today().isoformat()
    for number in itertools.count(1):
        path = folder / f"{today}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def _refuse_used(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out {str(out)!r} is a file, not a folder")
    stats = [(out / name).stat() for name in RESULTS if (out / name).exists()]
    times = [stat.st_mtime for stat in stats if stat.st_size]
    if times:
        date = f"{datetime.datetime.fromtimestamp(max(times)):%Y-%m-%d %H:%M}"
        raise ConfigError(
            f"out: {str(out)!r} holds a run of {date}; choose another folder or remove it"
        )
