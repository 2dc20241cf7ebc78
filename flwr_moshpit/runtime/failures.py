"""A peer ends, and says why, when its client fails at every training, or all others refuse it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flwr_moshpit.errors import ConfigError, TrainerError
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
        is_useless = report.name == "refused" and report.values.get("what") == "training"
        if report.name == "training_failed" or is_useless:
            self._in_a_row += 1
            self._cause = in_short(str(report.values["reason" if is_useless else "error"]))
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


class Outcast:
    """Calls `stop` when a peer has been alone for long although there are others, because those it
    calls will never let it in: it would train for nobody."""

    LOOKS = 10

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._looks = 0
        self._why = ""

    def look(self, is_alone: bool, refused_by: Mapping[PeerId, str]) -> None:
        """Time and again, with who refuses the peer for good and why."""
        if self._looks == self.LOOKS:
            return
        self._looks = self._looks + 1 if is_alone and refused_by else 0
        if self._looks == self.LOOKS:
            peer, why = next(iter(refused_by.items()))
            self._why = f"{peer} refuses this peer: {why}"
            self._stop()

    def check(self) -> None:
        """Raises ConfigError if that was so."""
        if self._looks == self.LOOKS:
            raise ConfigError(self._why)


def in_short(error: str) -> str:
    """The line of a traceback that says what the client raised, and where if `user_code` knows."""
    found = re.search(r"client \d+, step \d+: .+", error)
    return found[0] if found else error.rstrip().rpartition("\n")[2]
