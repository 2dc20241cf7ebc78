"""How fast this peer's line takes what it sends, seen from when receivers say that they have it.

While enough is under way the line is what holds everything up, so what arrives in a second then is
what it carries. Where one receiver is slower than the line it is less; of several measurements the
best one counts, and old ones are forgotten, because lines change. What was measured while others
had the processor says what that carries, not the line: it is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from flwr_moshpit.runtime.memory import waited_s

WINDOW_S = 1.0
"""One measurement takes so long, at least."""
FULL_BYTES = 1 << 16
"""With less than this under way the line may be idle."""
KEPT = 20
WAITED_MAX = 0.2
"""A measurement counts if this peer waited for the processor for less than this part of it."""
NEWS = 1.5
"""Measurements differ by less than this factor without meaning anything."""


class UplinkMeter:
    """Told of every byte that a peer sends on any link."""

    def __init__(self, waited_s: Callable[[], float] = waited_s) -> None:
        """`waited_s()`: for how long, in all, this peer has waited for the processor."""
        self._waited_s = waited_s
        self._waited_before_s = 0.0
        self._under_way_bytes = 0
        self._arrived_bytes = 0
        self._began_at: float | None = None
        """When the measurement under way began; None: too little is under way."""
        self._measured: deque[float] = deque(maxlen=KEPT)

    @property
    def bytes_per_s(self) -> float | None:
        """None as long as there was never enough to send."""
        return max(self._measured, default=None)

    def changed(self, num_bytes: int, now: float) -> None:
        """So many more bytes are under way on some link; fewer, if negative, because these have
        arrived."""
        self._under_way_bytes += num_bytes
        if num_bytes < 0 and self._began_at is not None:
            self._arrived_bytes -= num_bytes
            passed_s = now - self._began_at
            if passed_s >= WINDOW_S:
                if self._waited_s() - self._waited_before_s < WAITED_MAX * passed_s:
                    self._measured.append(self._arrived_bytes / passed_s)
                self._begin(now)
        if self._under_way_bytes < FULL_BYTES:
            self._began_at = None
        elif self._began_at is None:
            self._begin(now)

    def lost(self, num_bytes: int) -> None:
        """So many bytes were under way on a link that is no more."""
        self._under_way_bytes -= num_bytes
        self._began_at = None

    def _begin(self, now: float) -> None:
        self._began_at, self._arrived_bytes = now, 0
        self._waited_before_s = self._waited_s()


def worth_telling(
    measured: float, told: float | None, others: Iterable[float | None]
) -> float | None:
    """What to tell of a line that was `measured`, in bytes per second; None: nothing new.

    Shares of a vector follow differences between lines more than proportionally. So equal lines,
    which are never measured as equal, must be told as equal. What is told by this peer or another
    is told again where it may be true of this line as well; of several such rates the highest,
    since lines are measured too low more often than too high, and since all must pick the same one.
    """
    if measured <= 0:
        return None
    alike = [
        rate for rate in (told, *others) if rate and abs(math.log(rate / measured)) < math.log(NEWS)
    ]
    rate = max(alike, default=measured)
    return None if rate == told else rate
