"""The pacer fills a link and keeps its queue short, on a modelled link, in virtual time."""

from __future__ import annotations

import heapq

import pytest

from flwr_moshpit.runtime.pacing import LEAST_BYTES, Pacer

MOST_BYTES = 1 << 23
CHUNK_BYTES = 1 << 20


class Line:
    """A link that queues without end, used as fast as a pacer allows."""

    def __init__(self, pacer: Pacer, rate_bytes_per_s: float, round_trip_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._pacer = pacer
        self._round_trip_s = round_trip_s
        self._now = self._free_at = 0.0
        self._sequence = 0
        self._receipts: list[tuple[float, int]] = []
        self.guesses: list[tuple[float, float]] = []
        """How long what was sent needs to leave: as the pacer says, and in truth."""

    def run(self, for_s: float) -> tuple[float, float]:
        """Returns the share of the time that it was busy, and the longest time in the queue."""
        until, carried, longest_s = self._now + for_s, 0, 0.0
        while self._now < until:
            while self._pacer.is_open:
                size = self._pacer.chunk_bytes(CHUNK_BYTES)
                carried += size
                longest_s = max(longest_s, self._send(size, self._pacer.wants_receipt(size)))
            if not self._pacer.waits_for_receipt:
                # As the sender does when the window has shrunk below what is under way.
                self._send(0, True)
            self._now, acknowledged = heapq.heappop(self._receipts)
            self._pacer.receipt(acknowledged, self._now)
        return carried / (self.rate_bytes_per_s * for_s), longest_s

    def _send(self, size: int, asks: bool) -> float:
        self._sequence += 1
        guess_s = self._pacer.leaves_s(size)
        self._pacer.sent(self._sequence, size, asks, self._now)
        self._free_at = max(self._free_at, self._now) + size / self.rate_bytes_per_s
        if asks:
            heapq.heappush(self._receipts, (self._free_at + self._round_trip_s, self._sequence))
        self.guesses.append((guess_s, self._free_at - self._now))
        return self._free_at - self._now


@pytest.mark.parametrize("rate", [125e3, 1.25e6, 12.5e6, 125e6])
@pytest.mark.parametrize("round_trip_s", [0.0005, 0.02, 0.2])
def test_a_link_is_full_and_its_queue_short(rate: float, round_trip_s: float) -> None:
    line = Line(Pacer(MOST_BYTES), rate, round_trip_s)
    line.run(20.0)
    busy, longest_s = line.run(60.0)
    # Of what the link carries, or of what the receiver holds in a round trip.
    assert busy >= 0.7 * min(1.0, MOST_BYTES / round_trip_s / rate)
    assert longest_s <= 0.6 + LEAST_BYTES / rate


@pytest.mark.parametrize("rate", [125e3, 1.25e6, 12.5e6])
@pytest.mark.parametrize("round_trip_s", [0.0005, 0.02, 0.2])
def test_when_something_leaves_is_known(rate: float, round_trip_s: float) -> None:
    pacer = Pacer(MOST_BYTES)
    line = Line(pacer, rate, round_trip_s)
    line.run(20.0)
    line.guesses.clear()
    line.run(20.0)
    assert pacer.round_trip_s is not None
    # What has left but has no receipt yet passes for waiting, so it is not as exact as could be.
    for guess_s, true_s in line.guesses:
        assert abs(guess_s - true_s) <= 0.1 * true_s + pacer.round_trip_s


def test_a_line_that_is_never_full_takes_what_comes_at_once() -> None:
    pacer = Pacer(MOST_BYTES)
    for sequence in range(100):
        pacer.sent(sequence, 1 << 15, True, float(sequence))
        pacer.receipt(sequence, sequence + 0.1)
    assert pacer.leaves_s(1 << 15) == pytest.approx(0.0, abs=1e-9)


def test_the_window_grows_on_a_fast_link_and_stays_on_an_idle_one() -> None:
    busy, idle = Pacer(MOST_BYTES), Pacer(MOST_BYTES)
    Line(busy, 1e9, 0.0005).run(0.1)
    assert busy.window_bytes == MOST_BYTES
    before = idle.window_bytes
    for sequence in range(100):
        idle.sent(sequence, 100, True, float(sequence))
        idle.receipt(sequence, sequence + 0.001)
    assert idle.window_bytes == before


def test_it_shrinks_when_the_link_gets_slow() -> None:
    pacer = Pacer(MOST_BYTES)
    line = Line(pacer, 125e6, 0.001)
    line.run(5.0)
    assert pacer.window_bytes == MOST_BYTES
    line.rate_bytes_per_s = 1.25e6
    line.run(60.0)
    busy, longest_s = line.run(60.0)
    assert busy > 0.7
    assert longest_s < 0.7


def test_a_small_window_is_never_passed() -> None:
    pacer = Pacer(1000)
    assert pacer.window_bytes == 1000
    line = Line(pacer, 1e9, 0.001)
    line.run(1.0)
    assert pacer.window_bytes == 1000
    line.rate_bytes_per_s = 100.0
    line.run(1000.0)
    assert pacer.window_bytes == 1000


def test_a_receipt_settles_everything_before_it() -> None:
    pacer = Pacer(MOST_BYTES)
    for sequence in range(5):
        pacer.sent(sequence, 1000, sequence == 2, 0.0)
    pacer.receipt(2, 1.0)
    assert pacer.under_way_bytes == 2000
    assert not pacer.waits_for_receipt
    pacer.receipt(4, 1.0)
    assert pacer.under_way_bytes == 0
