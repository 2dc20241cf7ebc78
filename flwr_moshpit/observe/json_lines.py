"""Every report as one line of JSON: `{"t": 12.5, "peer": "p3", "name": "round", ...}`.

`t` is in seconds since the start, virtual in a simulation; `peer` is null where the report is about
the whole swarm. Numbers that JSON does not have (NaN, infinities) become null. Lines of one seed
are the same in every run.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from flwr_moshpit.protocol.machine import PeerId, Report


class JsonLines:
    """An observer that appends to `path`, which is made, with its folder, by the first report.

    Waiting for the first report leaves no empty folder behind when a run is refused.
    """

    def __init__(
        self,
        path: Path,
        *,
        resumes: bool = False,
        on_loss: Callable[[OSError], None] | None = None,
    ) -> None:
        """`resumes`: what is in the file stays. `on_loss` is told, once, that no line can be
        written any more, such as on a full disk; without it, whoever reports has to know."""
        self.path = path
        self._mode: Literal["a", "w"] = "a" if resumes else "w"
        self._on_loss = on_loss
        self._is_lost = False
        self._file: TextIO | None = None

    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        if self._is_lost:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open(self._mode, encoding="utf-8")
            self._file.write(json_line(now, peer, report))
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self._on_loss is None:
            raise error
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                # What it still holds cannot be written either.
                file.close()
        self._is_lost = True
        self._on_loss(error)

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
