"""A peer whose client fails at every training ends, and says why."""

from __future__ import annotations

import re
from collections.abc import Callable

from flwr_moshpit.errors import TrainerError
from flwr_moshpit.protocol.machine import PeerId, Report


class Failures:
    """An observer of one peer that calls `stop` when training has failed again and again, with no
    success in between: such a peer is of no use to the others, and fills its disk with what it
    says."""

    MAX = 10

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self._stop = stop
        self._in_a_row = 0
        self._cause = ""

    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        if self._in_a_row == self.MAX:
            return
        if report.name == "training_failed":
            self._in_a_row += 1
            self._cause = in_short(str(report.values["error"]))
            if self._in_a_row == self.MAX:
                self._stop()
        elif report.name == "round" and report.values.get("examples", 1):
            self._in_a_row = 0

    @property
    def told(self) -> str | None:
        """What has gone wrong since training last succeeded, in one line; None if nothing has."""
        if not self._in_a_row:
            return None
        times = "once" if self._in_a_row == 1 else f"{self._in_a_row} times in a row"
        return f"training failed {times}: {self._cause}"

    def check(self) -> None:
        """Raises TrainerError if they were too many."""
        if self._in_a_row == self.MAX:
            raise TrainerError(self.told)


def in_short(error: str) -> str:
    """The line of a traceback that says what the client raised, and where if `user_code` knows."""
    found = re.search(r"client \d+, step \d+: .+", error)
    return found[0] if found else error.rstrip().rpartition("\n")[2]
