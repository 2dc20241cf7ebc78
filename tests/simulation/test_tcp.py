"""What a window of TCP lets through, against flights counted by hand and the square-root law."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from flwr_moshpit.simulation.tcp import SEGMENT_BYTES, Window

RTT_S = 0.1
FAST = 1e9


def luck(*flights: str) -> Callable[[], float]:
    """Which of the flights arrive whole; all later ones do."""
    draws = iter(flights)
    return lambda: 1.0 - 1e-9 if next(draws, "whole") == "lossy" else 0.0


def sent(window: Window, segments: float, *flights: str, now: float = 0.0) -> list[float]:
    """Round trips that `segments` took, and seconds by which the last of them was late."""
    size = int(segments * SEGMENT_BYTES)
    rate, late_s = window.send(size, now, luck(*flights))
    return [size / rate / RTT_S, late_s]


def test_a_new_stream_doubles_its_window_until_a_segment_is_lost() -> None:
    window = Window(RTT_S, 0.01, FAST)
    # 10, 20, 40, and of 80 a half.
    assert sent(window, 110) == pytest.approx([3.5, 0.0])
    assert window.segments == pytest.approx(120)
    # 120 are lost in part: half of it, and one more with each whole flight.
    assert sent(window, 120 + 60 + 61, "lossy") == pytest.approx([3.0, 0.0])
    assert window.segments == pytest.approx(62)


def test_a_loss_is_seen_when_the_last_flight_is_sent_again() -> None:
    window = Window(RTT_S, 0.01, FAST)
    assert sent(window, 10, "lossy") == pytest.approx([1.0, RTT_S])
    assert window.segments == 5.0


def test_with_nothing_behind_it_a_loss_costs_a_timeout_and_the_window() -> None:
    window = Window(RTT_S, 0.01, FAST)
    sent(window, 10, "lossy")
    sent(window, 5, "lossy")
    assert window.segments == 2.5
    # 2.5 are lost: 3 round trips of waiting. Then 1, and after it 2, since before it were 2.5.
    assert sent(window, 5.5, "lossy") == pytest.approx([1 + 3 + 1 + 1, 0.0])
    assert sent(Window(RTT_S, 0.01, FAST), 3, "lossy")[1] == pytest.approx(RTT_S)
    tiny = Window(RTT_S, 0.01, FAST)
    for size in (10, 5, 2.5):
        _, late_s = sent(tiny, size, "lossy")
    assert late_s == pytest.approx(0.3)


def test_no_window_is_larger_than_the_line_and_its_queue() -> None:
    window = Window(RTT_S, 0.01, 20 * SEGMENT_BYTES / RTT_S)
    sent(window, 10_000)
    assert window.segments == pytest.approx(60)


def test_after_a_pause_a_stream_begins_with_less() -> None:
    window = Window(RTT_S, 0.01, FAST)
    sent(window, 150)
    assert window.segments == pytest.approx(160)
    window.paused(1.0)
    # Less than a timeout, 0.3 s, changes nothing: half of the window takes half a round trip.
    assert sent(window, 80, now=1.29)[0] == pytest.approx(0.5)
    window.paused(2.0)
    # Two timeouts: a quarter of 240, which doubles since three quarters of it are safe.
    assert sent(window, 60, now=2.65)[0] == pytest.approx(1.0)
    assert window.segments == pytest.approx(120)
    window.paused(3.0)
    assert sent(window, 10, now=1e6)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("loss", [0.0005, 0.002, 0.01])
@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_the_mean_rate_is_the_square_root_law(loss: float, size: int) -> None:
    """Mathis et al.: sqrt(3 / (2 p)) segments in a round trip."""
    window, draw = Window(RTT_S, loss, FAST), random.Random(0).random
    count = int(1_000 / loss * SEGMENT_BYTES / size)
    lasted_s = sum(size / window.send(size, 0.0, draw)[0] for _ in range(count))
    rate = count * size / lasted_s
    assert rate == pytest.approx(math.sqrt(1.5 / loss) * SEGMENT_BYTES / RTT_S, rel=0.12)


def test_a_message_of_any_size_costs_few_draws() -> None:
    draws = 0

    def draw(chances: Iterable[float] = iter(random.Random(0).random, None)) -> float:
        nonlocal draws
        draws += 1
        return next(iter(chances))

    rate, _ = Window(RTT_S, 0.01, FAST).send(1 << 30, 0.0, draw)
    assert draws == 64
    assert 0 < rate < FAST


def test_without_a_round_trip_only_timeouts_limit() -> None:
    assert Window(0.0, 0.01, FAST).send(1 << 20, 0.0, luck())[0] == math.inf
