"""How much to have under way on a link, so that it is full but its queues are not.

Heartbeats share the link with models. Whatever lies before them, in the kernel or at a slow
uplink, delays them, and a peer whose heartbeats come late is taken for dead. So the bytes under way
are kept to about what the link carries in its round trip and a fifth of a second more, in the
manner of LEDBAT (RFC 6817): more while receipts come back quickly, less when they take longer.
"""

from __future__ import annotations

from collections import deque

QUICK_S = 0.1
"""Receipts that take no longer than this beyond the shortest round trip let the window grow."""
SLOW_S = 0.25
"""Longer than this, and it shrinks."""
LEAST_BYTES = 1 << 16
FIRST_BYTES = 1 << 18


class Pacer:
    """The window of one link's sender. `most_bytes`: what the receiver can hold."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.window_bytes = min(FIRST_BYTES, most_bytes)
        self.under_way_bytes = 0
        self.round_trip_s: float | None = None
        """The shortest seen."""
        self._unasked_bytes = self.window_bytes
        """Sent since a receipt was last asked for. The first frame asks."""
        self._frames: deque[tuple[int, int]] = deque()
        """(sequence, bytes) of frames without a receipt."""
        self._asked: deque[tuple[int, float, bool]] = deque()
        """(sequence, when, whether the window was full enough to judge by)."""
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

    def chunk_bytes(self, most: int) -> int:
        """How much data to put into one frame: whole parts, if they do not hold others up."""
        if self.window_bytes >= most:
            return most
        return max(1 << 14, self.window_bytes // 4)

    def wants_receipt(self, num_bytes: int) -> bool:
        """Whether the next frame, of `num_bytes`, should ask for a receipt."""
        return self._unasked_bytes + num_bytes >= self.window_bytes // 4

    def sent(self, sequence: int, num_bytes: int, asks: bool, now: float) -> None:
        self._last = sequence
        self._frames.append((sequence, num_bytes))
        self.under_way_bytes += num_bytes
        self._unasked_bytes += num_bytes
        if asks:
            self._unasked_bytes = 0
            self._asked.append((sequence, now, 2 * self.under_way_bytes >= self.window_bytes))

    def receipt(self, sequence: int, now: float) -> None:
        """Everything up to `sequence` has arrived."""
        while self._frames and self._frames[0][0] <= sequence:
            self.under_way_bytes -= self._frames.popleft()[1]
        while self._asked and self._asked[0][0] <= sequence:
            asked, asked_at, was_full = self._asked.popleft()
            round_trip_s = now - asked_at
            if self.round_trip_s is None or round_trip_s < self.round_trip_s:
                self.round_trip_s = round_trip_s
            if asked > self._changed:
                self._judge(round_trip_s - self.round_trip_s, was_full)

    def _judge(self, queue_s: float, was_full: bool) -> None:
        before = self.window_bytes
        if queue_s > SLOW_S:
            shrunk = int(self.window_bytes * max(0.5, SLOW_S / queue_s))
            self.window_bytes = max(shrunk, min(LEAST_BYTES, self._most_bytes))
        elif was_full and queue_s < QUICK_S:
            self.window_bytes = min(2 * self.window_bytes, self._most_bytes)
        if self.window_bytes != before:
            self._changed = self._last
