"""When a leader stops waiting: `Lobby.decide` on hand-made books."""

import pytest

from flwr_moshpit.protocol.lobby import (
    CALLS_MAX,
    MODEL_WAIT_S_MAX,
    PATIENCE_S,
    SLACK,
    SWEEP_WAIT_S_MAX,
    Arrival,
    Lobby,
)
from flwr_moshpit.protocol.machine import PeerId, Round
from flwr_moshpit.protocol.messages import GroupKey, PlanId

KEY = GroupKey(PlanId(1, PeerId("a")), Round(3), 0, 0)


def lobby(size, here=(), coming=(), guesses=(), sweep=False):
    """`size` members; here: (arrived at, local time); coming and guesses: eta, local time."""
    peers = [PeerId(chr(ord("a") + index)) for index in range(size)]
    made = Lobby(KEY, dict.fromkeys(peers, 1), peers)
    rest = iter(peers)
    for at, local_s in here:
        made.arrive(next(rest), Arrival(at, 1.0, 0), local_s, sweep)
    for eta, local_s in coming:
        made.announce(next(rest), eta - SLACK * local_s, local_s, 0.0)
    for eta in guesses:
        made.announce(next(rest), eta, 0.0, 0.0)
    return made


def closes_at(made, now, group_s=0.0):
    """Follow the wake-ups until the lobby closes; (when, whether it called the silent)."""
    called = False
    for _ in range(50):
        decision = made.decide(now, 0.25, group_s)
        if decision.close:
            return now, called
        if decision.call:
            called = bool(made.call(now))
            continue
        if decision.wake_at is None:
            return None, called
        assert decision.wake_at > now
        now = decision.wake_at
    raise AssertionError("it never decides")


def test_nobody_here_decides_nothing():
    assert closes_at(lobby(4, coming=[(5, 1)]), 0.0) == (None, False)


def test_all_here_starts_at_once():
    assert closes_at(lobby(3, here=[(1, 1), (2, 1), (9, 1)]), 9.0) == (9.0, False)


def test_announced_members_are_waited_for():
    made = lobby(4, here=[(10, 10), (10, 10)], coming=[(10.5, 10), (11, 10)])
    at, called = closes_at(made, 10.0)
    # Both are overdue at 11; what ends it is the patience with who says nothing.
    assert at == pytest.approx(12.5)
    assert called


def test_when_most_say_nothing_a_whole_local_time_may_pass():
    at, called = closes_at(lobby(3, here=[(10, 10)]), 10.0)
    assert called
    assert at == pytest.approx(20)


def test_a_straggler_that_said_so_is_not_waited_for():
    assert closes_at(lobby(3, here=[(10, 10), (10.1, 10)], coming=[(100, 100)]), 10.1) == (
        10.1,
        False,
    )


def test_somewhat_slower_members_are_worth_it():
    # Three at 10 s a round, one at 13: 3.5 contributions per 13 s beat 2.5 per 10 s.
    made = lobby(4, here=[(10, 10)] * 3, coming=[(13, 13)])
    assert made.decide(10.0, 0.25, 0.0).wake_at == pytest.approx(13)


def test_a_silent_member_is_called_and_costs_its_patience():
    at, called = closes_at(lobby(4, here=[(10, 10)] * 3), 10.0)
    assert called
    assert at == pytest.approx(12.5)


def test_patience_is_never_below_a_round_trip():
    at, called = closes_at(lobby(4, here=[(10, 0.001)] * 3), 10.0)
    assert called
    assert at == pytest.approx(10 + PATIENCE_S)


def test_a_fast_minority_does_not_run_away():
    """One device is 30 times faster than the nine others: the group goes at their pace."""
    coming = [(30 + index / 100, 30) for index in range(9)]
    made = lobby(10, here=[(1, 1)], coming=coming)
    assert made.decide(1.0, 0.25, 0.0).wake_at == pytest.approx(30)
    at, _ = closes_at(made, 1.0)
    assert at >= 30


def test_guesses_count_for_the_pace_but_are_no_promise():
    # Most are in their first job ever: wait for the middle one's guess, which slips will move.
    made = lobby(5, here=[(1, 1)], guesses=[4.0, 5.0, 6.0, 7.0])
    decision = made.decide(1.0, 0.25, 0.0)
    assert not decision.close
    # One single guess beside those who are here is not waited for beyond the patience.
    at, _ = closes_at(lobby(2, here=[(1, 1)], guesses=[50.0]), 1.0)
    assert at == pytest.approx(1.25)


def test_a_sweep_waits_for_all_who_announced():
    at, _ = closes_at(lobby(4, here=[(10, 1)] * 3, coming=[(60, 40)], sweep=True), 10.0)
    assert at >= 60


def test_a_sweep_does_not_wait_for_ever_for_one_that_never_comes():
    made = lobby(4, here=[(10, 1)] * 3, coming=[(1e300, 1)], sweep=True)
    at, _ = closes_at(made, 10.0)
    assert at == pytest.approx(10 + SWEEP_WAIT_S_MAX)


def test_who_needs_a_model_asks_the_others_before_it_goes_without():
    made = lobby(3)
    made.arrive(PeerId("a"), Arrival(10, 0.0, 0), 1.0, False)
    now, calls = 10.0, 0
    while not (decision := made.decide(now, 0.25, 0.0)).close:
        if decision.call:
            made.call(now)
            calls += 1
        now = decision.wake_at
    assert calls == CALLS_MAX


def test_a_slip_corrects_the_announcement():
    made = lobby(3, here=[(10, 10), (10, 10)], coming=[(11, 10)])
    assert made.decide(10.0, 0.25, 0.0).wake_at == pytest.approx(11)
    made.announce(PeerId("c"), 60.0, 10.0, 0.0)
    assert made.decide(10.5, 0.25, 0.0).close


def test_who_is_elsewhere_or_dead_is_not_expected():
    made = lobby(3, here=[(10, 10), (10, 10)])
    assert not made.decide(10.0, 0.25, 0.0).close
    made.drop(PeerId("c"))
    assert made.decide(10.0, 0.25, 0.0).reason == "all are here"


def test_who_breaks_a_promise_is_asked_again():
    made = lobby(5, here=[(10, 10), (10, 10), (10, 10)], coming=[(10.5, 10), (13, 10)])
    assert not made.silent(10.4)
    assert made.decide(10.6, 0.25, 0.0).call
    assert made.call(10.6) == [PeerId("d")]
    assert not made.decide(10.7, 0.25, 0.0).call
    made.announce(PeerId("d"), 0.3, 10, 10.8)
    assert made.decide(12, 0.25, 0.0).call


def test_who_promises_to_be_there_in_no_time_is_not_asked_all_the_time():
    made = lobby(2, here=[(0.0, 1e-9)])
    now, num_calls = 0.0, 0
    while not (decision := made.decide(now, 0.25, 0.0)).close:
        if decision.call:
            num_calls += 1
            for peer in made.call(now):
                made.announce(peer, 1e-9, 1e-9, now)
        else:
            now = decision.wake_at
        assert num_calls < 20
    assert num_calls > 1


def test_who_only_says_that_it_comes_delays_those_without_a_model_for_a_while():
    made = lobby(2)
    made.arrive(PeerId("a"), Arrival(5.0, 0.0, 0), 1.0, False)
    now, decision = 5.0, made.decide(5.0, 0.25, 0.0)
    wakes = 0
    while not decision.close:
        made.announce(PeerId("b"), 1e9, 1.0, now)
        now, wakes = made.decide(now, 0.25, 0.0).wake_at, wakes + 1
        decision = made.decide(now, 0.25, 0.0)
    assert now == 5.0 + MODEL_WAIT_S_MAX
    assert wakes < 3
