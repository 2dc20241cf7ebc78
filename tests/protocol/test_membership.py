"""Membership: everybody ends with one view and one set of records, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.protocol.machine import (
    Learned,
    LinkLost,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Record,
    Report,
    Send,
    Start,
    Stop,
    TimerFired,
    ViewChanged,
)
from flwr_moshpit.protocol.membership import Membership, Renewed, Timing
from flwr_moshpit.protocol.membership_messages import (
    ALIVE,
    DEAD,
    LEFT,
    SUSPECT,
    Ack,
    Claim,
    Gossip,
    LifeName,
    Listing,
    MembershipMessage,
    News,
    Ping,
    PingFor,
    RecordName,
    Summary,
    Update,
    Vouch,
    Want,
)
from tests.protocol.membership_swarm import MembershipSwarm, peer_id

BOUND_S = 3.0
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def claim(peer: PeerId, status: str = ALIVE, version: int = 0, **info: Any) -> Claim:
    return Claim(PeerInfo(peer, **info), f"{peer}:1", version, 7, status)


def member(*known: Claim, contacts: dict[PeerId, str] | None = None) -> Membership:
    machine = Membership(PeerInfo(A), "a:1", contacts or {}, np.random.default_rng(0), None, known)
    machine.handle(Start(), 0.0)
    return machine


def tell(machine: Membership, *claims: Claim, at: float = 0.1) -> list[Any]:
    return machine.handle(Received(B, Gossip(News(claims))), at)


def only(kind: type, effects: list[Any]) -> list[Any]:
    return [effect for effect in effects if type(effect) is kind]


def advance(machine: Membership, until: float) -> list[Any]:
    effects: list[Any] = []
    while machine.deadline is not None and machine.deadline <= until:
        effects += machine.handle(TimerFired(), machine.deadline)
    return effects


# What one peer believes


def test_a_newcomer_is_in_the_view_as_soon_as_somebody_says_so() -> None:
    machine = member()
    (changed,) = only(ViewChanged, tell(machine, claim(B), claim(C, speed=2.0)))
    assert changed.joined == (B, C)
    assert changed.lost == ()
    assert list(changed.view) == [A, B, C]
    assert machine.view.peers[C].speed == 2.0
    assert machine.addresses == {A: "a:1", B: "b:1", C: "c:1"}
    assert machine.moved() == {B: "b:1", C: "c:1"}
    assert machine.moved() == {}


def test_old_claims_change_nothing() -> None:
    machine = member(claim(B, version=3, incarnation=1))
    assert not only(ViewChanged, tell(machine, claim(B, DEAD, version=9)))
    assert not only(ViewChanged, tell(machine, claim(B, LEFT, version=2, incarnation=1)))


def test_a_suspect_lives_until_the_suspicion_runs_out() -> None:
    machine = member(claim(B), claim(C))
    assert not only(ViewChanged, tell(machine, claim(C, SUSPECT), at=1.0))
    ends_at = 1.0 + Timing().suspicion_s
    assert not only(ViewChanged, advance(machine, ends_at - 1e-9))
    (changed,) = only(ViewChanged, advance(machine, ends_at))
    assert changed.lost == (C,)


def test_a_refuted_suspicion_ends() -> None:
    machine = member(claim(B), claim(C))
    tell(machine, claim(C, SUSPECT), at=1.0)
    tell(machine, claim(C, version=1), at=1.5)
    machine.heard(B)
    lost = [changed.lost for changed in only(ViewChanged, advance(machine, 2.4))]
    assert (C,) not in lost


def test_a_restarted_peer_is_lost_and_joined() -> None:
    machine = member(claim(B))
    (changed,) = only(ViewChanged, tell(machine, claim(B, incarnation=1)))
    assert changed.joined == changed.lost == (B,)


def test_a_peer_that_leaves_is_lost_at_once() -> None:
    machine = member(claim(B), claim(C))
    (changed,) = only(ViewChanged, tell(machine, claim(C, LEFT)))
    assert changed.lost == (C,)


def test_the_death_of_one_who_was_never_suspected_is_put_to_it() -> None:
    machine = member(claim(B), claim(C))
    effects = tell(machine, claim(C, DEAD, version=2), at=0.1)
    assert not only(ViewChanged, effects)
    pings = [e for e in only(Send, effects) if isinstance(e.message, Ping) and e.dst == C]
    assert claim(C, DEAD, version=2) in pings[0].message.news.claims
    # It does not answer: suspected first, then lost.
    lost = [peer for e in only(ViewChanged, advance(machine, 3.0)) for peer in e.lost]
    assert C in lost


def test_the_death_of_a_suspect_is_believed() -> None:
    machine = member(claim(B), claim(C))
    tell(machine, claim(C, SUSPECT))
    (changed,) = only(ViewChanged, tell(machine, claim(C, DEAD)))
    assert changed.lost == (C,)


@pytest.mark.parametrize("status", [SUSPECT, DEAD, LEFT])
def test_what_is_said_about_me_is_refuted(status: str) -> None:
    machine = member(claim(B))
    mine = machine.claim
    effects = tell(machine, dataclasses.replace(mine, version=4, status=status))
    assert machine.claim.status == ALIVE
    assert machine.claim.order > (0, 4, 3)
    assert [report.name for report in only(Report, effects)] == ["refuted"]
    said = [send.message.news.claims[0] for send in only(Send, effects)]
    assert said
    assert all(first == machine.claim for first in said)


@pytest.mark.parametrize("status", [ALIVE, DEAD])
def test_who_was_here_before_under_another_life_gets_a_new_incarnation(status: str) -> None:
    machine = member()
    tell(machine, claim(A, status, version=5, incarnation=2))
    assert machine.claim.stamp == (3, 0)
    assert machine.view.peers[A].incarnation == 3


def test_who_pings_under_an_old_claim_is_told() -> None:
    machine = member(claim(B, DEAD, version=2))
    effects = machine.handle(Received(B, Ping(News((claim(B),)))), 0.1)
    (ack,) = [send.message for send in only(Send, effects) if isinstance(send.message, Ack)]
    assert claim(B, DEAD, version=2) in ack.news.claims


def test_a_new_address_is_told_and_taken_up() -> None:
    machine = member(claim(B))
    machine.moved()
    effects = tell(machine, dataclasses.replace(claim(B, version=1), address="elsewhere:2"))
    assert machine.moved() == {B: "elsewhere:2"}
    assert not only(ViewChanged, effects)
    effects = machine.handle(Renewed(PeerInfo(A, speed=3.0), "new:1"), 0.3)
    (changed,) = only(ViewChanged, effects)
    assert changed.joined == changed.lost == ()
    assert changed.view.peers[A].speed == 3.0
    assert machine.claim.stamp == (0, 1)
    assert machine.claim.address == "new:1"


def test_who_stops_says_so_and_falls_silent() -> None:
    machine = member(claim(B), claim(C))
    effects = machine.handle(Stop(), 0.2)
    claims = {send.dst: send.message.news.claims[0] for send in only(Send, effects)}
    assert sorted(claims) == [B, C]
    assert {c.status for c in claims.values()} == {LEFT}
    assert machine.deadline is None
    assert machine.handle(Received(B, Ping(News())), 0.3) == []


def test_a_lost_link_is_followed_up_at_once() -> None:
    machine = member(claim(B), claim(C))
    (ping,) = only(Send, machine.handle(LinkLost(C), 0.01))[:1]
    assert ping.dst == C
    assert isinstance(ping.message, Ping)
    assert machine.handle(LinkLost(PeerId("nobody")), 0.02) == []


@pytest.mark.parametrize("somebody_hears_it", [False, True])
def test_before_it_is_suspected_a_peer_is_asked_again_and_by_others(
    somebody_hears_it: bool,
) -> None:
    machine = member(claim(B), claim(C), claim(PeerId("d")))
    effects = machine.handle(LinkLost(C), 0.0) + advance(machine, 0.5)
    sends = only(Send, effects)
    assert len([send for send in sends if send.dst == C and isinstance(send.message, Ping)]) == 3
    helpers = [send.dst for send in sends if isinstance(send.message, PingFor)]
    assert {B, "d"} <= set(helpers)
    if somebody_hears_it:
        machine.handle(Received(B, Vouch(C)), 0.55)
    reports = [r.values for r in only(Report, advance(machine, 0.6)) if r.name == "peer"]
    suspected = [values["peer"] for values in reports if values["status"] == SUSPECT]
    assert (C in suspected) == (not somebody_hears_it)


def test_who_is_asked_for_a_ping_passes_the_answer_on() -> None:
    machine = member(claim(B), claim(C))
    effects = machine.handle(Received(B, PingFor(C, News((claim(B),)))), 0.01)
    (ping,) = [send.message for send in only(Send, effects) if send.dst == C]
    assert ping.behalf == B
    effects = machine.handle(Received(C, Ack(News((claim(C),)), ping.behalf)), 0.02)
    assert Send(B, Vouch(C)) in effects


def test_a_dead_peer_is_forgotten_in_the_end() -> None:
    timing = Timing(forget_s=10.0)
    machine = Membership(PeerInfo(A), "", {}, np.random.default_rng(0), timing, [claim(B)])
    machine.handle(Start(), 0.0)
    tell(machine, claim(B, LEFT))
    assert B in [peer for peer, *_ in machine.snapshot()["peers"]]
    advance(machine, 12.0)
    assert [peer for peer, *_ in machine.snapshot()["peers"]] == [A]


def test_who_was_not_running_accuses_nobody() -> None:
    machine = member(claim(B), claim(C))
    advance(machine, 0.9)
    effects = machine.handle(TimerFired(), 60.0)
    assert "stalled" in [report.name for report in only(Report, effects)]
    machine.heard(B)
    machine.heard(C)
    assert not only(ViewChanged, advance(machine, 60.3))


# Records


def test_of_two_records_the_higher_rank_is_learned_in_either_order() -> None:
    low, high = Record(("plan",), (1, "b"), "low"), Record(("plan",), (2, "a"), "high")
    for order in ([low, high], [high, low]):
        machine = member(claim(B))
        learned = []
        for record in order:
            effects = machine.handle(Received(B, Update(records=(record,))), 0.1)
            learned += [effect.record for effect in only(Learned, effects)]
        assert learned[-1] == high


def test_a_publisher_learns_its_own_record_once() -> None:
    machine = member()
    record = Record(("plan",), (1,), "x")
    assert only(Learned, machine.handle(Publish(record), 0.1)) == [Learned(record)]
    assert only(Learned, machine.handle(Publish(record), 0.2)) == []


def test_a_value_travels_only_to_those_who_ask() -> None:
    machine = member(claim(B))
    record = Record(("plan",), (1,), "x" * 10_000)
    effects = machine.handle(Publish(record), 0.1) + advance(machine, 3.0)
    messages = [send.message for send in only(Send, effects)]
    assert any(RecordName(("plan",), (1,)) in m.news.names for m in messages)
    assert not only(Update, messages)
    effects = machine.handle(Received(B, Want(keys=(("plan",), ("no",)))), 3.0)
    assert Send(B, Update(records=(record,))) in effects


def test_a_record_is_asked_for_once_at_a_time() -> None:
    machine = member(claim(B), claim(C))
    news = News((), (RecordName(("plan",), (1,)),))
    asked = []
    for at in (0.1, 0.11, 0.5):
        sends = only(Send, machine.handle(Received(B, Gossip(news)), at))
        asked.append(Send(B, Want(keys=(("plan",),))) in sends)
    assert asked == [True, False, True]


def test_records_take_a_bounded_amount_of_memory() -> None:
    machine = member(claim(B))
    text, refused = "x" * 200_000, 0
    for number in range(100):
        record = Record((f"k{number}",), (1,), text)
        effects = machine.handle(Received(B, Update(records=(record,))), 0.1)
        refused += "refused" in [report.name for report in only(Report, effects)]
    assert 15 <= refused <= 20, "16 MiB of 20 MB are kept"
    # What is there is replaced, and what that frees can be used.
    for number in range(80):
        effects = machine.handle(Publish(Record((f"k{number}",), (2,), "small")), 0.2)
        assert only(Learned, effects)
    assert only(Learned, machine.handle(Publish(Record(("new",), (1,), text)), 0.3))


def test_ranks_that_cannot_be_compared_do_no_harm() -> None:
    machine = member(claim(B))
    machine.handle(Publish(Record(("k",), (1,), "mine")), 0.1)
    effects = machine.handle(Received(B, Update(records=(Record(("k",), ("x",), "other"),))), 0.2)
    assert not only(Learned, effects)


def test_what_cannot_be_spread_is_refused_to_the_publisher() -> None:
    with pytest.raises(ValueError, match="cannot be spread"):
        member().handle(Publish(Record((), (1,), None)), 0.1)


def exchange(a: Membership, b: Membership, at: float) -> list[Any]:
    """`a` finds that its digest differs from `b`'s: all that follows, without other probes."""
    ack = Ack(News((b.claim,), digest=1))
    waiting = [(a, B, ack)]
    out: list[Any] = []
    while waiting:
        machine, src, message = waiting.pop(0)
        effects = machine.handle(Received(src, message), at)
        out += effects
        other, me = (b, A) if machine is a else (a, B)
        waiting += [
            (other, me, send.message)
            for send in only(Send, effects)
            if send.dst == other.me and isinstance(send.message, Summary | Listing | Want | Update)
        ]
    return out


def test_two_who_know_different_things_know_the_same_after_one_exchange() -> None:
    peers = [PeerId(f"x{k}") for k in range(40)]
    a = member(*[claim(p, version=k % 3) for k, p in enumerate(peers[:30])])
    b = Membership(PeerInfo(B), "b:1", {}, np.random.default_rng(1), None)
    b.handle(Start(), 0.0)
    for k, peer in enumerate(peers[10:], 10):
        b.handle(Received(A, Gossip(News((claim(peer, version=k % 4),)))), 0.0)
    for k in range(60):
        if k < 40:
            a.handle(Publish(Record(("r", str(k)), (k % 5,), f"a{k}")), 0.0)
        if k >= 20:
            b.handle(Publish(Record(("r", str(k)), (k % 7,), f"b{k}")), 0.0)
    exchange(a, b, 1.0)
    assert dict(a.view.peers) == dict(b.view.peers)
    assert len(a.view) == 42
    stamps = [
        {peer: version for peer, _, _, _, version in machine.snapshot()["peers"]}
        for machine in (a, b)
    ]
    assert stamps[0] == stamps[1]
    for k in range(60):
        wanted = f"b{k}" if k >= 40 or (k >= 20 and k % 7 > k % 5) else f"a{k}"
        for machine in (a, b):
            (update,) = [
                send.message
                for send in only(
                    Send, machine.handle(Received(C, Want(keys=(("r", str(k)),))), 1.1)
                )
                if isinstance(send.message, Update)
            ]
            if k < 20 or k >= 40 or k % 7 != k % 5:
                assert update.records[0].value == wanted


@pytest.mark.parametrize("sender_knows", ["death", "life"])
def test_who_holds_a_dead_peer_for_alive_asks_it(sender_knows: str) -> None:
    alive, dead = claim(C), claim(C, DEAD)
    a = member(claim(B), alive if sender_knows == "life" else dead)
    b = Membership(
        PeerInfo(B),
        "b:1",
        {},
        np.random.default_rng(1),
        None,
        [dead if sender_knows == "life" else alive],
    )
    b.handle(Start(), 0.0)
    pings = [
        send.message.news.claims
        for send in only(Send, exchange(a, b, 0.01))
        if send.dst == C and isinstance(send.message, Ping)
    ]
    assert any(dead in claims for claims in pings)


# Bad input


GOOD = News((claim(B),), (RecordName(("k",), (1,)),), 3)
IMPOSSIBLE: list[MembershipMessage] = [
    Ping(News((claim(PeerId("")),))),
    Ping(News((claim(B, "zombie"),))),
    Ping(News((claim(B, version=-1),))),
    Ping(News((claim(B, incarnation=1 << 60),))),
    Ping(News((claim(B, speed=math.nan),))),
    Ping(News((claim(B, speed=0.0),))),
    Ping(News((claim(B, uplink_bytes_per_s=-1.0),))),
    Ping(News((claim(B, dialable=None),))),
    Ping(News((dataclasses.replace(claim(B), address="x" * 300),))),
    Ping(News(digest=-1)),
    Ping(News(digest=1 << 64)),
    Ping(GOOD, PeerId("x" * 300)),
    Ack(News(names=(RecordName((), (1,)),))),
    Ack(News(names=(RecordName(("k",), (math.nan,)),))),
    Ack(News(names=(RecordName(("k",), ((((1,),),),)),))),
    Gossip(None),  # type: ignore[arg-type]
    PingFor(PeerId(""), GOOD),
    Vouch(3),  # type: ignore[arg-type]
    Summary((1, 2, 3)),
    Summary(tuple([-1] * 32)),
    Listing((99,), (), ()),
    Listing((1,), (LifeName(B, -1, 0),), ()),
    Listing((1,) * 50, (), ()),
    Want(keys=((),)),
    Want(peers=(PeerId(""),)),
    Want(peers=(B,) * 10_000),
    Update(records=(Record((3,), (1,), None),)),  # type: ignore[arg-type]
    Update(claims=(None,)),  # type: ignore[arg-type]
    MembershipMessage(),
]


@pytest.mark.parametrize("message", IMPOSSIBLE, ids=lambda m: type(m).__name__)
def test_the_impossible_is_dropped_and_counted(message: MembershipMessage) -> None:
    machine = member(claim(B))
    before = machine.snapshot()
    effects = machine.handle(Received(B, message), 0.01)
    assert [report.name for report in only(Report, effects)] == ["refused"]
    assert machine.snapshot() == before


def test_good_messages_of_all_kinds_are_not_refused() -> None:
    machine = member(claim(B), claim(C))
    for message in (
        Ping(GOOD, C),
        Ack(GOOD, C),
        Gossip(GOOD),
        PingFor(C, GOOD),
        Vouch(C),
        Summary(tuple(range(32))),
        Listing((1, 2), (LifeName(C, 0, 0),), (RecordName(("k", "2"), (1, "x", 2.0, (3,))),)),
        Want((C,), (("k",),)),
        Update((claim(C),), (Record(("k",), (1,), "v"),)),
    ):
        effects = machine.handle(Received(B, message), 0.01)
        assert not [report for report in only(Report, effects) if report.name == "refused"]


texts = st.sampled_from(["a", "b", "c", "", "\ud800", "x" * 300])
numbers = st.one_of(st.integers(-2, 5), st.sampled_from([1 << 53, 1 << 64, True, None, 1.5]))
claims = st.builds(
    Claim,
    st.builds(PeerInfo, texts, numbers, numbers, numbers, numbers, st.sampled_from([True, 1])),
    texts,
    numbers,
    numbers,
    st.sampled_from([ALIVE, SUSPECT, DEAD, LEFT, "", None]),
)
keys = st.lists(texts, max_size=3).map(tuple)
ranks = st.lists(st.one_of(numbers, texts, st.just(math.nan)), max_size=3).map(tuple)
names = st.builds(RecordName, keys, ranks)
news = st.builds(
    News,
    st.lists(claims, max_size=3).map(tuple),
    st.lists(names, max_size=2).map(tuple),
    numbers,
)
messages = st.one_of(
    st.builds(Ping, news, texts),
    st.builds(Ack, news, texts),
    st.builds(Gossip, news),
    st.builds(PingFor, texts, news),
    st.builds(Vouch, texts),
    st.builds(Summary, st.lists(st.integers(-1, 1 << 64), max_size=33).map(tuple)),
    st.builds(
        Listing,
        st.lists(st.integers(-1, 33), max_size=4).map(tuple),
        st.lists(st.builds(LifeName, texts, numbers, numbers), max_size=3).map(tuple),
        st.lists(names, max_size=3).map(tuple),
    ),
    st.builds(Want, st.lists(texts, max_size=3).map(tuple), st.lists(keys, max_size=2).map(tuple)),
    st.builds(
        Update,
        st.lists(claims, max_size=3).map(tuple),
        st.lists(st.builds(Record, keys, ranks, st.none()), max_size=2).map(tuple),
    ),
)


@given(st.lists(st.tuples(texts, messages), max_size=12))
@settings(deadline=None, max_examples=80)
def test_no_message_raises(received: list[tuple[str, MembershipMessage]]) -> None:
    machine = member(claim(B))
    now = 0.0
    for src, message in received:
        now += 0.05
        machine.handle(Received(PeerId(src), message), now)
        assert machine.deadline is not None
    advance(machine, now + 4.0)
    assert A in machine.view


# Swarms


@pytest.mark.parametrize("num_peers", [2, 8, 64])
@pytest.mark.parametrize("links_break", [False, True])
def test_a_death_is_known_to_all_in_time(num_peers: int, links_break: bool) -> None:
    swarm = MembershipSwarm(num_peers)
    swarm.begin_complete(num_peers)
    for dead in (peer_id(0), peer_id(num_peers // 2)):
        swarm.run(2.37)
        if len(swarm.living) == 1:
            break
        swarm.crash(dead)
        died_at = swarm.now
        if links_break:
            swarm.break_links(dead)
        swarm.run(BOUND_S)
        assert max(swarm.lost_by(dead)) - died_at < BOUND_S
        assert swarm.agree()


@pytest.mark.slow
def test_a_death_is_known_to_a_thousand_in_time() -> None:
    swarm = MembershipSwarm(1)
    swarm.begin_complete(1000)
    swarm.run(1.0)
    swarm.crash(peer_id(500))
    died_at = swarm.now
    swarm.run(BOUND_S)
    assert max(swarm.lost_by(peer_id(500))) - died_at < BOUND_S
    assert swarm.agree()
    assert max(swarm.sent.values()) / swarm.now < 25


def test_the_load_does_not_grow_with_the_swarm() -> None:
    rates = []
    for num_peers in (8, 200):
        swarm = MembershipSwarm(3)
        swarm.begin_complete(num_peers)
        swarm.run(3.0)
        swarm.sent.clear()
        swarm.kinds.clear()
        swarm.run(4.0)
        assert sorted(swarm.kinds) == ["Ack", "Ping"]
        rates.append(sum(swarm.sent.values()) / num_peers / 4.0)
        assert max(swarm.sent.values()) / 4.0 <= 16
    assert max(rates) <= 12.5


@pytest.mark.parametrize("num_peers", [2, 9, 40])
def test_all_that_start_at_once_find_each_other(num_peers: int) -> None:
    swarm = MembershipSwarm(2)
    swarm.begin(num_peers)
    swarm.run_until_agreed(within_s=2.0)
    swarm.run(3.5)
    assert all(seat.machine.settled for seat in swarm.seats.values())
    assert all(not seat.lost for seat in swarm.seats.values())


def test_a_newcomer_learns_peers_and_records_from_one_contact() -> None:
    swarm = MembershipSwarm(4, num_contacts=1)
    swarm.begin(12)
    swarm.run(2.0)
    for number in range(30):
        swarm.publish(peer_id(3), Record(("attachment", str(number)), (1,), number))
    swarm.run(2.0)
    newcomer = peer_id(50)
    swarm.start(newcomer)
    assert swarm.run_until_agreed(within_s=1.0) < 1.0
    swarm.run(1.5)
    assert len(swarm.seats[newcomer].learned) == 30


def test_nobody_at_the_contacts_and_later_somebody() -> None:
    swarm = MembershipSwarm(5, num_contacts=1)
    late = peer_id(7)
    swarm.start(late)
    swarm.run(Timing().settle_s + 1.0)
    assert swarm.seats[late].machine.settled
    swarm.start(peer_id(0))
    swarm.run_until_agreed(within_s=1.0)


def test_a_partition_and_after_it_one_swarm_again() -> None:
    swarm = MembershipSwarm(6)
    swarm.begin_complete(16)
    swarm.run(1.0)
    peers = [peer_id(k) for k in range(16)]
    left, right = peers[:5], peers[5:]
    swarm.divide(left)
    swarm.run_until_agreed(5.0, left)
    swarm.run_until_agreed(5.0, right)
    swarm.publish(left[0], Record(("plan",), (2,), "left"))
    swarm.publish(right[0], Record(("plan",), (3,), "right"))
    swarm.run(5.0)
    swarm.divide()
    swarm.run_until_agreed(5.0)
    swarm.run(2.0)
    for peer, seat in swarm.seats.items():
        side, other = (left, right) if peer in left else (right, left)
        assert {seat.lost[p] for p in side} == {0}
        assert {seat.lost[p] for p in other} == {seat.joined[p] for p in other} == {1}
        assert seat.learned["plan",].value == "right"


def test_a_link_cut_for_thirty_seconds() -> None:
    swarm = MembershipSwarm(7)
    swarm.begin_complete(8)
    swarm.run(1.0)
    swarm.divide([peer_id(3)])
    swarm.run(30.0)
    assert swarm.view_of(peer_id(3)) == [peer_id(3)]
    swarm.divide()
    assert swarm.run_until_agreed(within_s=2.0) < 2.0


def test_a_stopped_process_is_lost_and_comes_back_by_itself() -> None:
    swarm = MembershipSwarm(8)
    swarm.begin_complete(8)
    swarm.run(1.0)
    sleeper = peer_id(2)
    incarnation = swarm.seats[sleeper].machine.claim.info.incarnation
    swarm.pause(sleeper)
    swarm.run(10.0)
    others = [peer for peer in swarm.living if peer != sleeper]
    assert swarm.agree(others)
    swarm.resume(sleeper)
    swarm.run_until_agreed(within_s=1.5)
    swarm.run(5.0)
    assert swarm.agree()
    for peer in others:
        seat = swarm.seats[peer]
        assert (seat.lost[sleeper], seat.joined[sleeper]) == (1, 1)
    seat = swarm.seats[sleeper]
    assert not seat.lost
    assert seat.reports["stalled"] == 1
    assert seat.machine.claim.info.incarnation == incarnation
    assert seat.machine.claim.version > 0


def test_a_restart_before_anybody_noticed_is_noticed() -> None:
    swarm = MembershipSwarm(9)
    swarm.begin_complete(8)
    swarm.run(1.0)
    swarm.crash(peer_id(4))
    swarm.run(0.3)
    swarm.start(peer_id(4), incarnation=0)
    swarm.run(2.0)
    assert swarm.seats[peer_id(4)].machine.claim.info.incarnation == 1
    for peer in swarm.living:
        seat = swarm.seats[peer]
        if peer != peer_id(4):
            assert (seat.lost[peer_id(4)], seat.joined[peer_id(4)]) == (1, 1)


def test_half_of_all_peers_at_once() -> None:
    swarm = MembershipSwarm(10)
    swarm.begin_complete(32)
    swarm.run(1.0)
    for k in range(0, 32, 2):
        swarm.crash(peer_id(k))
    assert swarm.run_until_agreed(within_s=6.0) < 6.0


def test_one_seed_is_one_run() -> None:
    counts = []
    for _ in range(2):
        swarm = MembershipSwarm(11, loss=0.2)
        swarm.begin(12)
        swarm.run(5.0)
        counts.append((dict(swarm.sent), swarm.seats[peer_id(1)].machine.snapshot()))
    assert counts[0] == counts[1]


# Fault schedules

actions = st.one_of(
    st.tuples(st.just("run"), st.floats(0.05, 4.0)),
    st.tuples(st.sampled_from(["crash", "restart", "leave", "pause", "resume"]), st.integers(0, 5)),
    st.tuples(st.just("divide"), st.integers(1, 5)),
    st.tuples(st.just("heal"), st.just(0)),
    st.tuples(st.just("publish"), st.integers(0, 5)),
)


def perform(swarm: MembershipSwarm, schedule: list[tuple[str, Any]]) -> None:
    published = 0
    for name, argument in schedule:
        if name == "run":
            swarm.run(argument)
            continue
        if name == "divide":
            swarm.divide([peer_id(k) for k in range(argument)])
            continue
        if name == "heal":
            swarm.divide()
            continue
        peer = peer_id(argument)
        seat = swarm.seats[peer]
        up = seat.alive and not seat.paused
        if name == "publish" and up:
            published += 1
            swarm.publish(peer, Record(("plan",), (published, str(peer)), published))
        elif name == "restart" and not seat.alive:
            swarm.start(peer)
        elif name == "crash" and len(swarm.living) > 1:
            swarm.crash(peer)
        elif name == "leave" and up and len(swarm.living) > 1:
            swarm.leave(peer)
        elif name == "pause" and up:
            swarm.pause(peer)
        elif name == "resume" and seat.paused and seat.alive:
            swarm.resume(peer)


@given(
    seed=st.integers(0, 1000),
    loss=st.sampled_from([0.0, 0.1, 0.3]),
    duplicates=st.sampled_from([0.0, 0.2]),
    schedule=st.lists(actions, max_size=14),
)
@settings(deadline=None, max_examples=40)
def test_after_any_faults_all_agree(
    seed: int, loss: float, duplicates: float, schedule: list[tuple[str, Any]]
) -> None:
    swarm = MembershipSwarm(seed, loss=loss, duplicates=duplicates, num_contacts=6)
    swarm.begin(6)
    swarm.run(1.0)
    perform(swarm, schedule)
    swarm.divide()
    for peer in swarm.living:
        if swarm.seats[peer].paused:
            swarm.resume(peer)
    held = [swarm.seats[peer].learned.get(("plan",)) for peer in swarm.living]
    swarm.loss = 0.0
    swarm.run_until_agreed(within_s=20.0)
    swarm.run(4.0)
    assert swarm.agree()
    views = [swarm.seats[peer].machine.view.peers for peer in swarm.living]
    assert all(view == views[0] for view in views)
    best = max(
        (record for record in held if record is not None), key=lambda r: r.rank, default=None
    )
    for peer in swarm.living:
        assert swarm.seats[peer].learned.get(("plan",)) == best


crashes = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.floats(0.05, 4.0)),
        st.tuples(st.sampled_from(["crash", "restart"]), st.integers(0, 5)),
    ),
    max_size=12,
)


@given(seed=st.integers(0, 1000), schedule=crashes)
@settings(deadline=None, max_examples=40)
def test_without_loss_only_those_that_died_are_lost_and_in_time(
    seed: int, schedule: list[tuple[str, Any]]
) -> None:
    swarm = MembershipSwarm(seed, num_contacts=6)
    swarm.begin_complete(6)
    swarm.run(0.5)
    perform(swarm, schedule)
    mortal = {peer_id(k) for name, k in schedule if name in ("crash", "restart")}
    swarm.run(BOUND_S)
    assert swarm.agree()
    for peer in swarm.living:
        assert set(swarm.seats[peer].lost) <= mortal


def test_views_settle_under_a_loss_of_thirty_percent() -> None:
    swarm = MembershipSwarm(12, loss=0.3)
    swarm.begin_complete(16)
    swarm.run(20.0)
    false_deaths = sum(sum(seat.lost.values()) for seat in swarm.seats.values())
    assert false_deaths <= 16
    swarm.crash(peer_id(3))
    swarm.run(5.0)
    assert all(peer_id(3) not in swarm.view_of(peer) for peer in swarm.living)
