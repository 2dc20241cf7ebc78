"""Where a run's results go."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path

from flwr_moshpit.errors import ConfigError


def usable_folder(out: Path | None) -> Path:
    """`out`, which is made if it is not there; by default the first unused `runs/YYYY-MM-DD-N`,
    which is not made yet.

    Raises ConfigError if there is a file of that name, or no folder can be made.
    """
    if out is None:
        return next_run(Path("runs"))
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out {str(out)!r} is a file, not a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out {str(out)!r} cannot be made: {error.strerror}") from error
    return out


def next_run(folder: Path) -> Path:
    """The first unused `folder/YYYY-MM-DD-N`."""
    today = datetime.date.today().isoformat()
    paths = (folder / f"{today}-{number}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
