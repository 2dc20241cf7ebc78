"""Peers of tests as processes: `peer_process.py`, and what they report."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HANG_S = 60.0

Line = dict[str, Any]


class Peer:
    """A peer's process and what it reports."""

    def __init__(
        self, folder: Path, index: int, prefix: Sequence[str] = (), **options: Any
    ) -> None:
        """`prefix`: of the command, such as that which runs it somewhere; `options`: see
        `peer_process.Options`."""
        self.name = f"p{index}"
        self.lines: list[Line] = []
        """All that were looked at."""
        words = json.dumps({"folder": str(folder), "index": index, **options})
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.runtime.peer_process", words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "GRPC_VERBOSITY": "NONE",
            },
        )
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, condition: Callable[[Line], Any], timeout_s: float = HANG_S) -> Line:
        """The next line that fulfils `condition`; each has to come within `timeout_s`."""
        while True:
            self.lines.append(json.loads(self._queue.get(timeout=timeout_s)))
            if condition(self.lines[-1]):
                return self.lines[-1]

    def until_named(self, name: str) -> Line:
        return self.until(lambda line: line["name"] == name)

    def until_round(self, *others: int, without: int | None = None) -> Line:
        """A round with these contributors."""
        return self.until(
            lambda line: (
                line["name"] == "round"
                and all(f"p{other}" in line["contributor_ids"] for other in others)
                and (without is None or f"p{without}" not in line["contributor_ids"])
            )
        )

    def until_round_after(self, at: float) -> Line:
        """A round that ends after `at`, on the clock of `time.time`."""
        return self.until(lambda line: line["name"] == "round" and line["at"] >= at)

    def until_status(self, peer: int, status: str) -> Line:
        return self.until(
            lambda line: (
                line["name"] == "peer" and line["peer"] == f"p{peer}" and line["status"] == status
            )
        )

    def tell(self, line: str) -> None:
        """See `peer_process.obey`."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
