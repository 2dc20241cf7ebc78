"""How fast TCP sends on a line that loses packets.

It sends a window of segments in each round trip. A window that arrives whole makes the next one
larger by a segment, or doubles it as long as it is below what held before; one that does not is
followed by half of it (RFC 5681). Which do is drawn, segment for segment: this is the model of
Padhye et al. (SIGCOMM 1998), whose mean is the square-root law of Mathis et al. (1997), about
sqrt(3 / (2 p)) segments in a round trip. Where a loss has too little behind it to be noticed it
costs a timeout. After a pause a stream begins again with less (RFC 2861).
"""

from __future__ import annotations

import math
from collections.abc import Callable

SEGMENT_BYTES = 1448
"""What one Ethernet frame carries, with TCP's timestamps."""
INITIAL_SEGMENTS = 10.0
"""RFC 6928."""
QUEUE_S = 0.2
"""How long a packet may wait at a line before it is dropped: no window is larger than what the line
and this queue hold."""
_TIMEOUT_MORE_S = 0.2
"""Linux waits for this much longer than the round trip, at least."""
_NOTICED_SEGMENTS = 4.0
"""One lost and three behind it, which are acknowledged twice."""
_FLIGHTS_DRAWN = 64
"""What would take more of them goes on as it went so far."""


class Window:
    """Of one stream, over all of its messages."""

    __slots__ = ("_loss", "_most", "_round_trip_s", "_segments", "_threshold", "_until_s")

    def __init__(self, round_trip_s: float, loss: float, line_bytes_per_s: float) -> None:
        """`loss`: how likely one segment does not arrive."""
        self._round_trip_s = round_trip_s
        self._loss = loss
        self._most = max(
            INITIAL_SEGMENTS, line_bytes_per_s * (round_trip_s + QUEUE_S) / SEGMENT_BYTES
        )
        self._segments = INITIAL_SEGMENTS
        self._threshold = math.inf
        self._until_s = math.inf
        """When the last message had left."""

    @property
    def segments(self) -> float:
        return self._segments

    def paused(self, until_s: float) -> None:
        """Nothing is sent from `until_s` on."""
        self._until_s = until_s

    def send(self, size: int, now: float, draw: Callable[[], float]) -> tuple[float, float]:
        """The next message, of `size` bytes: how many bytes per second TCP allows it at most, and
        by how many seconds its last byte is late, because it had to be sent again."""
        self._resume(now)
        timeout_s = self._round_trip_s + _TIMEOUT_MORE_S
        segments = left = size / SEGMENT_BYTES
        took_s = late_s = 0.0
        for _ in range(_FLIGHTS_DRAWN):
            flight = min(self._segments, left)
            left -= flight
            took_s += self._round_trip_s * flight / self._segments
            if draw() >= (1 - self._loss) ** flight:
                is_noticed = self._segments >= _NOTICED_SEGMENTS
                self._threshold = max(self._segments / 2, 2.0)
                self._segments = self._threshold if is_noticed else 1.0
                if left <= 0:
                    late_s = self._round_trip_s if is_noticed else timeout_s
                elif not is_noticed:
                    took_s += timeout_s
            elif self._segments < self._threshold:
                self._segments = min(self._segments + flight, self._threshold, self._most)
            else:
                self._segments = min(self._segments + flight / self._segments, self._most)
            if left <= 0:
                break
        took_s *= segments / (segments - left)
        return (size / took_s if took_s > 0 else math.inf), late_s

    def _resume(self, now: float) -> None:
        paused_s = now - self._until_s
        timeout_s = self._round_trip_s + _TIMEOUT_MORE_S
        if paused_s >= timeout_s:
            self._threshold = max(self._threshold, 0.75 * self._segments)
            halved = self._segments / 2.0 ** min(paused_s // timeout_s, 64.0)
            self._segments = min(self._segments, max(halved, INITIAL_SEGMENTS))
