"""Faults: what the text means, and that a schedule does exactly that."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.simulation.fault_grammar import parse_duration, parse_faults
from flwr_moshpit.simulation.faults import (
    AfterRounds,
    AfterTime,
    AtRate,
    AtRound,
    AtTime,
    Crash,
    Fault,
    FaultSchedule,
    Partition,
    SlowDown,
    Who,
)


class FakeEngine:
    """Time and a log of (seconds, what, argument)."""

    def __init__(self, peers: Sequence[PeerId]) -> None:
        self.now = 0.0
        self.alive = dict.fromkeys(peers, True)
        self.log: list[tuple[float, str, object]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def is_alive(self, peer: PeerId) -> bool:
        return self.alive[peer]

    def crash(self, peer: PeerId) -> None:
        assert self.alive[peer]
        self.alive[peer] = False
        self.log.append((self.now, "crash", peer))

    def restart(self, peer: PeerId) -> None:
        assert not self.alive[peer]
        self.alive[peer] = True
        self.log.append((self.now, "restart", peer))

    def slow_down(self, peer: PeerId, factor: float) -> None:
        self.log.append((self.now, "slow", (peer, factor)))

    def partition(self, sides: Sequence[Sequence[PeerId]]) -> None:
        self.log.append((self.now, "partition", [list(side) for side in sides]))

    def schedule(self, at_s: float, call: Callable[[], None]) -> None:
        assert at_s >= self.now
        heapq.heappush(self._heap, (at_s, self._count, call))
        self._count += 1

    def run(self, until_s: float) -> list[tuple[float, str, object]]:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = until_s
        return self.log


def started(
    faults: str | list[str], num_peers: int = 4, seed: int = 0
) -> tuple[FaultSchedule, FakeEngine]:
    peers = [PeerId(f"p{index}") for index in range(num_peers)]
    schedule = FaultSchedule(parse_faults(faults), peers, np.random.default_rng(seed))
    engine = FakeEngine(peers)
    schedule.start(engine)
    return schedule, engine


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("crash peer=3 at 60 s", Crash(Who((3,)), AtTime(60.0))),
        ("crash peer=3 at 1 h, back after 2 min", Crash(Who((3,)), AtTime(3600.0), AfterTime(120))),
        ("crash 20% at 10min", Crash(Who(share=0.2), AtTime(600.0))),
        (
            "crash peer=3 at round 5, back after 2 rounds",
            Crash(Who((3,)), AtRound(5), AfterRounds(2)),
        ),
        (
            "crash 20% per hour, back after 120 s",
            Crash(Who(share=1.0), AtRate(0.2 / 3600), AfterTime(120.0)),
        ),
        ("crash 5% per 10 min", Crash(Who(share=1.0), AtRate(0.05 / 600))),
        (
            "churn 10% per hour, back after 60 s",
            Crash(Who(share=1.0), AtRate(0.1 / 3600), AfterTime(60.0)),
        ),
        ("restart peer=3 at 90 s", Crash(Who((3,)), AtTime(90.0), AfterTime(0.0))),
        ("slow 10x peer=3", SlowDown(Who((3,)), 10.0)),
        ("slow 10x peer=3 at 100 s for 60 s", SlowDown(Who((3,)), 10.0, AtTime(100.0), 60.0)),
        ("slow 2.5x 50% at round 3", SlowDown(Who(share=0.5), 2.5, AtRound(3))),
        ("partition 50% at 60 s for 30 s", Partition(Who(share=0.5), AtTime(60.0), 30.0)),
        ("partition peers=1,0 at round 2", Partition(Who((0, 1)), AtRound(2))),
        ("  CRASH   peer=0  at 1.5 min ", Crash(Who((0,)), AtTime(90.0))),
    ],
)
def test_text_means(text: str, fault: Fault) -> None:
    assert parse_faults(text) == (fault,)


def test_several_faults_in_one_text_and_in_several() -> None:
    one, two = parse_faults("slow 2x peer=1; crash peer=0 at 5 s;")
    assert parse_faults(["slow 2x peer=1", two]) == (one, two)
    assert parse_faults(()) == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("explode peer=3", "faults are crash, churn, restart, slow, partition, as in: crash 20%"),
        ("crash", "'crash' is not understood: crash WHO WHEN"),
        ("crash peer=3", "crash WHO WHEN"),
        ("crash peer=-3 at 5 s", "crash WHO WHEN"),
        ("crash peer=3 at 5 parsecs", "WHEN is at 60 s or at round 5"),
        ("churn 10% per hour", "churn N% per TIME, back after TIME"),
        ("slow peer=3", "slow Nx WHO"),
        ("slow 0.5x peer=3", "a peer is slowed 1x or more, not 0.5x"),
        ("crash 120% at 5 s", "above 0% and at most 100%"),
        ("partition 0% at 5 s", "above 0% and at most 100%"),
        ("crash 0% per hour", "a rate is above 0%"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line_with_the_form_wanted(
    text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_faults(text)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90 s", 90.0), ("2min", 120.0), ("1.5 h", 5400.0), ("hour", 3600.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1 s", "3 d", "1e3 s"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ConfigError, match=r"until: .* is no duration"):
        parse_duration(text, "until")


def test_a_peer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="peer=4 does not exist, the last is 3"):
        started("crash peer=4 at 5 s")


def test_at_a_time_and_back() -> None:
    _, engine = started("crash peer=1 at 10 s, back after 5 s; restart peer=2 at 12 s")
    assert engine.run(100) == [
        (10.0, "crash", "p1"),
        (12.0, "crash", "p2"),
        (12.0, "restart", "p2"),
        (15.0, "restart", "p1"),
    ]


def test_two_faults_do_not_crash_a_dead_peer_or_start_a_living_one() -> None:
    _, engine = started("crash peer=1 at 10 s, back after 5 s; crash peer=1 at 12 s")
    assert engine.run(100) == [(10.0, "crash", "p1"), (15.0, "restart", "p1")]


def test_at_a_round_and_back_after_rounds() -> None:
    schedule, engine = started("crash peer=1 at round 2, back after 3 rounds")
    for now, peer, completed in [
        (1.0, "p1", 1),
        (2.0, "p0", 2),  # another's round
        (3.0, "p1", 2),
        (4.0, "p0", 4),
        (5.0, "p3", 5),  # the furthest is 3 rounds past the crash
        (6.0, "p0", 5),
    ]:
        engine.run(now)
        schedule.on_round(engine, PeerId(peer), completed)
    assert engine.run(10) == [(3.0, "crash", "p1"), (5.0, "restart", "p1")]


def test_a_share_is_drawn_once_by_the_seed() -> None:
    def struck(seed: int) -> list[object]:
        return [peer for _, _, peer in started("crash 30% at 1 s", 100, seed)[1].run(2)]

    assert len(struck(1)) == len(set(map(str, struck(1)))) == 30
    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert len(started("crash 1% at 1 s", 4)[1].run(2)) == 1


def test_a_rate_strikes_as_often_as_it_says() -> None:
    _, engine = started("crash 20% per hour, back after 0 s", 500)
    crashes = [at for at, what, _ in engine.run(10 * 3600) if what == "crash"]
    # 500 peers x 10 h x 0.2 = 1,000, with a standard deviation of 32.
    assert abs(len(crashes) - 1000) < 5 * 32
    halves = [sum(at < 5 * 3600 for at in crashes), sum(at >= 5 * 3600 for at in crashes)]
    assert abs(halves[0] - halves[1]) < 5 * 32


def test_a_rate_without_a_return_strikes_once() -> None:
    _, engine = started("crash 100% per hour", 50)
    log = engine.run(100 * 3600)
    assert [what for _, what, _ in log] == ["crash"] * 50
    # Independent exponential times: their mean is an hour, within five standard errors.
    assert np.mean([at for at, _, _ in log]) == pytest.approx(3600, abs=5 * 3600 / 50**0.5)


def test_one_peers_crashes_do_not_depend_on_the_other_faults_of_the_list() -> None:
    def of_p1(faults: str) -> list[float]:
        return [
            at for at, what, who in started(faults)[1].run(36000) if (what, who) == ("crash", "p1")
        ]

    churn = "churn 300% per hour, back after 10 s"
    assert len(of_p1(churn)) > 5
    assert of_p1(churn) == of_p1(f"{churn}; slow 2x 50%; partition 50% at 5 s")


def test_a_peer_down_by_another_fault_is_found_later_by_a_rate() -> None:
    _, engine = started(
        "crash peer=0 at 0 s, back after 1 h; churn 600% per hour, back after 1 s", 1
    )
    log = engine.run(4 * 3600)
    assert log[:2] == [(0.0, "crash", "p0"), (3600.0, "restart", "p0")]
    assert len([what for _, what, _ in log if what == "crash"]) > 5


def test_slow_downs_multiply_and_end() -> None:
    _, engine = started("slow 10x peer=0; slow 2x peer=0 at 5 s for 10 s")
    assert engine.run(100) == [
        (0.0, "slow", ("p0", 10.0)),
        (5.0, "slow", ("p0", 20.0)),
        (15.0, "slow", ("p0", 10.0)),
    ]


def test_partitions_cross_and_heal() -> None:
    _, engine = started("partition peer=0,1 at 5 s for 10 s; partition peer=1,2 at 10 s for 10 s")
    # Peers on no side are one side together, as for the engine.
    assert engine.run(100) == [
        (5.0, "partition", [["p0", "p1"]]),
        (10.0, "partition", [["p0"], ["p1"], ["p2"]]),
        (15.0, "partition", [["p1", "p2"]]),
        (20.0, "partition", []),
    ]


def test_a_partition_at_a_round_begins_with_the_first_peer_that_reaches_it() -> None:
    schedule, engine = started("partition 50% at round 3")
    engine.run(7.0)
    schedule.on_round(engine, PeerId("p2"), 3)
    ((at, what, sides),) = engine.run(8.0)
    assert (at, what) == (7.0, "partition")
    assert [len(side) for side in sides] == [2]  # type: ignore[attr-defined]
