"""What a line carries, from what arrives."""

from __future__ import annotations

import pytest

from flwr_moshpit.runtime.uplink import FULL_BYTES, KEPT, UplinkMeter, worth_telling

CHUNK = FULL_BYTES


def send(meter: UplinkMeter, rate: float, seconds: float, began_at: float = 0.0) -> float:
    """A line of `rate` with three chunks under way at any time; returns when that ends."""
    now = began_at
    meter.changed(3 * CHUNK, now)
    for _ in range(int(rate * seconds / CHUNK)):
        now += CHUNK / rate
        meter.changed(-CHUNK, now)
        meter.changed(CHUNK, now)
    for _ in range(3):
        now += CHUNK / rate
        meter.changed(-CHUNK, now)
    return now


@pytest.mark.parametrize("rate", [50e3, 1e6, 100e6])
def test_a_line_that_is_kept_busy_is_measured(rate: float) -> None:
    meter = UplinkMeter(waited_s=lambda: 0.0)
    send(meter, rate, 10.0)
    assert meter.bytes_per_s == pytest.approx(rate, rel=0.1)


def test_what_does_not_fill_the_line_says_nothing_of_it() -> None:
    meter = UplinkMeter(waited_s=lambda: 0.0)
    for k in range(1000):
        meter.changed(200, 0.1 * k)
        meter.changed(-200, 0.1 * k + 0.05)
    assert meter.bytes_per_s is None
    now = send(meter, 1e6, 0.5, began_at=100.0)
    assert meter.bytes_per_s is None, "too short to tell"
    send(meter, 1e6, 3.0, began_at=now + 60)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.1)


def test_the_best_of_the_last_counts() -> None:
    meter = UplinkMeter(waited_s=lambda: 0.0)
    now = send(meter, 1e6, 5.0)
    now = send(meter, 2e5, 5.0, began_at=now)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.1), "one slow receiver is not the line"
    send(meter, 2e5, KEPT * 1.5, began_at=now)
    assert meter.bytes_per_s == pytest.approx(2e5, rel=0.1)


def test_what_was_measured_while_others_had_the_processor_does_not_count() -> None:
    busy = [0.0]

    def waited_s() -> float:
        busy[0] += busy_s
        return busy[0]

    busy_s = 0.3
    meter = UplinkMeter(waited_s)
    now = send(meter, 1e6, 5.0)
    assert meter.bytes_per_s is None
    busy_s = 0.0
    send(meter, 1e6, 5.0, began_at=now + 1.0)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.1)


def test_a_link_that_is_lost_takes_its_bytes_along() -> None:
    meter = UplinkMeter(waited_s=lambda: 0.0)
    meter.changed(5 * CHUNK, 0.0)
    meter.lost(5 * CHUNK)
    meter.changed(200, 1.0)
    meter.changed(-200, 9.0)
    assert meter.bytes_per_s is None


def test_equal_lines_are_told_as_equal() -> None:
    told: dict[int, float] = {}
    for peer, measured in enumerate((100.0, 80.0, 130.0, 9.0, 12.0, 100.0)):
        rate = worth_telling(measured, None, [*told.values(), None])
        assert rate is not None
        told[peer] = rate
    assert list(told.values()) == [100.0, 100.0, 100.0, 9.0, 9.0, 100.0]
    assert worth_telling(130.0, 100.0, []) is None
    assert worth_telling(70.0, 100.0, []) is None
    assert worth_telling(40.0, 100.0, [100.0, 35.0]) == 35.0
    assert worth_telling(0.0, None, []) is None


def test_lines_that_turn_out_faster_end_equal_whoever_sees_it_first() -> None:
    told = dict.fromkeys(range(4), 767.0)
    for measured in ((1198.0, 1140.0, 1064.0, 861.0), (1198.0, 1146.0, 1064.0, 1080.0)):
        for peer, rate in enumerate(measured):
            others = [told[other] for other in told if other != peer]
            told[peer] = worth_telling(rate, told[peer], others) or told[peer]
    assert len({*told.values()}) == 1
    # And nobody has more to say.
    assert all(worth_telling(rate, told[0], told.values()) is None for rate in (1198.0, 1064.0))
