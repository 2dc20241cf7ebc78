"""How much to have under way on a link, so that it is full but its queues are not.

Heartbeats share the link with models. Whatever lies before them, in the kernel or at a slow
uplink, delays them, and a peer whose heartbeats come late is taken for dead. So the bytes under way
are kept to what the link carries in its round trip and a fifth of a second more, which is seen from
how long receipts take (as TCP Vegas and LEDBAT, RFC 6817, do it).
"""

from __future__ import annotations

from collections import deque

QUEUE_S = 0.2
"""How long the queue may be."""
LEAST_BYTES = 1 << 16
"""Also the first window: many links that all begin with more would fill a slow line for seconds;
a fast one doubles it with every round trip."""
LEARNING_BYTES = LEAST_BYTES // 4
"""How long less than this takes says little of the line, and more of who had the processor."""


class Pacer:
    """The window of one link's sender. `most_bytes`: what the receiver can hold."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.window_bytes = min(LEAST_BYTES, most_bytes)
        self.under_way_bytes = 0
        self.round_trip_s: float | None = None
        """The shortest seen."""
        self._unasked_bytes = self.window_bytes
        """Sent since a receipt was last asked for. The first frame asks."""
        self._frames: deque[tuple[int, int]] = deque()
        """(sequence, bytes) of frames without a receipt."""
        self._asked: deque[tuple[int, float, int, int]] = deque()
        """(sequence, when, what was under way then, of how large a window)."""
        self._s_per_byte = 0.0
        self._last = 0
        """The sequence of the last frame sent."""
        self._changed = 0
        """The one when the window last changed: what was sent before says nothing of it."""

    @property
    def is_open(self) -> bool:
        return self.under_way_bytes < self.window_bytes

    @property
    def waits_for_receipt(self) -> bool:
        return bool(self._asked)

    def leaves_s(self, num_bytes: int) -> float:
        """How long what is under way, and a frame of `num_bytes` behind it, needs until the line
        has taken it; exact to a round trip. It is seen from by how much the last receipt took
        longer than the quickest."""
        return (self.under_way_bytes + num_bytes) * self._s_per_byte

    def chunk_bytes(self, most: int) -> int:
        """How much data to put into one frame: whole parts, if they do not hold others up."""
        if self.window_bytes >= most:
            return most
        return max(1 << 14, self.window_bytes // 4)

    def wants_receipt(self, num_bytes: int) -> bool:
        """Whether the next frame, of `num_bytes`, should ask for a receipt. One costs as much as a
        small message, and where the window cannot grow there is less to learn from it."""
        share = 2 if self.window_bytes == self._most_bytes else 4
        return self._unasked_bytes + num_bytes >= self.window_bytes // share

    def sent(self, sequence: int, num_bytes: int, asks: bool, now: float) -> None:
        self._last = sequence
        self._frames.append((sequence, num_bytes))
        self.under_way_bytes += num_bytes
        self._unasked_bytes += num_bytes
        if asks:
            self._unasked_bytes = 0
            self._asked.append((sequence, now, self.under_way_bytes, self.window_bytes))

    def receipt(self, sequence: int, now: float) -> None:
        """Everything up to `sequence` has arrived."""
        while self._frames and self._frames[0][0] <= sequence:
            self.under_way_bytes -= self._frames.popleft()[1]
        while self._asked and self._asked[0][0] <= sequence:
            asked, asked_at, under_way_bytes, window_bytes = self._asked.popleft()
            round_trip_s = now - asked_at
            if self.round_trip_s is None or round_trip_s < self.round_trip_s:
                self.round_trip_s = round_trip_s
            if under_way_bytes >= LEARNING_BYTES:
                self._s_per_byte = (round_trip_s - self.round_trip_s) / under_way_bytes
            # Twice at most, up or down: one receipt that was late for other reasons says little.
            fit = min(2.0, max(0.5, (self.round_trip_s + QUEUE_S) / max(round_trip_s, 1e-6)))
            was_full = 2 * under_way_bytes >= window_bytes
            if asked > self._changed and (was_full or fit < 1.0):
                self._resize(int(self.window_bytes * fit))

    def _resize(self, window_bytes: int) -> None:
        least = min(LEAST_BYTES, self._most_bytes)
        window_bytes = min(max(window_bytes, least), self._most_bytes)
        if window_bytes != self.window_bytes:
            self.window_bytes = window_bytes
            self._changed = self._last
