"""Every report as one line of JSON: `{"t": 12.5, "peer": "p3", "name": "round", ...}`.

`t` is in seconds since the start, virtual in a simulation; `peer` is null where the report is about
the whole swarm. Numbers that JSON does not have (NaN, infinities) become null. Lines of one seed
are the same in every run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from flwr_moshpit.protocol.machine import PeerId, Report


class JsonLines:
    """An observer that appends to `path`, which is made, with its folder, by the first report.

    Waiting for the first report leaves no empty folder behind when a run is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        self._file.write(json_line(now, peer, report))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def json_line(now: float, peer: PeerId | None, report: Report) -> str:
    """The line of one report, with its end."""
    line = {"t": now, "peer": peer, "name": report.name, **report.values}
    return json.dumps(plain(line), separators=(",", ":"), allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """`value` in the types that JSON has; numpy's scalars and arrays become numbers and lists."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
