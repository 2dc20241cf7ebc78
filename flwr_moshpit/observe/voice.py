"""Lines for people that never hold up who says them, even where nobody reads them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from types import TracebackType
from typing import TextIO

LINES_MAX = 1000
"""So many wait to be read; beyond that they are left out."""
CLOSE_S = 1.0


class Voice:
    """A context manager. A thread of its own prints what is said: a pipe whose reader sleeps takes
    some 64 KiB and then blocks who writes to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor: int | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._unsaid = 0
        self._thread = threading.Thread(target=self._run, name="voice", daemon=True)

    def __enter__(self) -> Voice:
        self._stream.flush()
        try:
            # Below the stream and its lock: a thread that is stuck in it would hold up the end of
            # the process, which flushes it.
            self._descriptor = self._stream.fileno()
        except OSError:
            # Not a file, as in a test.
            self._descriptor = None
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for its lines to be read, for a second at most."""
        self._lines.put(None)
        self._thread.join(CLOSE_S)

    def say(self, line: str) -> None:
        """Never blocks."""
        if self._lines.qsize() >= LINES_MAX:
            self._unsaid += 1
            return
        if self._unsaid:
            self._lines.put(f"... {self._unsaid} lines left out: nobody was reading")
            self._unsaid = 0
        self._lines.put(line)

    def _run(self) -> None:
        # When the reader is gone, whoever speaks goes on.
        with contextlib.suppress(OSError):
            while (line := self._lines.get()) is not None:
                self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        if self._descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
