"""One peer's messages are changed at random on their way: nobody crashes, nobody hangs, and what
the others hold stays finite. That they stay right is not claimed: that takes robust aggregation."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flwr_moshpit.config import Moshpit
from flwr_moshpit.protocol.groups import PAST_MAX
from flwr_moshpit.protocol.machine import Learned, PeerId, Received, Record, Report, Round
from flwr_moshpit.protocol.matchmaking import LOBBIES_MAX
from flwr_moshpit.protocol.messages import (
    Announce,
    GroupId,
    GroupNamed,
    Hold,
    Late,
    Member,
    NewerPlan,
    Plan,
    PlanId,
    Share,
    Stands,
    Version,
    Waiting,
)
from flwr_moshpit.testing import Swarm
from tests.trainers import QuadraticTrainer


def changed(value, rng):
    """`value` with one number or name somewhere inside it replaced."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return int(rng.choice([-1, 0, 1, 7, 1 << 20, (1 << 31) - 1, 1 << 62]))
    if isinstance(value, float):
        return float(rng.choice([-1.0, 0.0, 1e300, np.nan, np.inf]))
    if isinstance(value, str):
        return str(rng.choice(["", "nobody", "peer-0", "peer-1"]))
    if isinstance(value, bytes):
        return b"other"
    if isinstance(value, np.ndarray):
        return rng.choice([1.0, np.nan, 1e300]) * value[: rng.integers(0, len(value) + 1)]
    if isinstance(value, tuple) and value:
        index = int(rng.integers(len(value)))
        items = [changed(item, rng) if k == index else item for k, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        if fields:
            field = fields[int(rng.integers(len(fields)))]
            return dataclasses.replace(
                value, **{field.name: changed(getattr(value, field.name), rng)}
            )
    return value


def net_of(seed):
    algorithm = Moshpit(group_size=4, local_steps=2, part_bytes=1024, share_bytes_min=8)
    trainer = QuadraticTrainer(dim=64, flops_per_example=5e9)
    return Swarm(trainer, peers=7, algorithm=algorithm, seed=seed)


@example(seed=3, probability=0.5)
@example(seed=250, probability=0.5)
@example(seed=255, probability=0.5)
@example(seed=9379, probability=0.5)
@given(seed=st.integers(0, 2**32 - 1), probability=st.sampled_from([0.05, 0.5]))
@settings(deadline=None, max_examples=40)
def test_any_field_of_any_message(seed, probability):
    rng = np.random.default_rng(seed)
    net = net_of(seed)
    net.tamper(lambda message: changed(message, rng), probability, src=6)
    if seed % 2:
        net.kill(3, during="allreduce")
    net.run(rounds=3, sweep=True)
    for peer in net.alive[:-1]:
        assert np.isfinite(net.vector(peer)).all()


def test_a_group_that_would_fill_the_memory_is_refused():
    """A finished group whose share ends at 2^40 is announced to a member."""
    net = net_of(1)

    def forge(named):
        share = Share(0, 1 << 40, named.ranks[0])
        return Stands(dataclasses.replace(named, shares=(share,)), named.ranks[0])

    net.tamper(lambda part: forge_from(part, net, forge), kind="Part", limit=3)
    net.run(rounds=2, sweep=True)
    assert {r.values["reason"] for _, _, r in net.history.named("refused")} >= {"forged"}


def forge_from(part, net, forge):
    for machine in net.engine.machines.values():
        for seat in machine._seats:
            if seat.allreduce and seat.allreduce.group == part.group:
                return forge(seat.allreduce.named)
    return part


@pytest.mark.parametrize(
    "plan",
    [
        Plan(PlanId(9, PeerId("x")), (), (), 0),
        Plan(PlanId(9, PeerId("x")), (0,), (), 0),
        Plan(PlanId(9, PeerId("x")), (1 << 40, 1 << 40), (PeerId("x"),), 0),
        Plan(PlanId(9, PeerId("x")), (1,) * 1000, (PeerId("x"),), 0),
        Plan(PlanId(9, PeerId("x")), (1,), (PeerId("x"),), 1 << 62),
        Plan(PlanId(1 << 62, PeerId("x")), (1,), (PeerId("x"),), 0),
    ],
)
def test_plans_that_cannot_be_are_refused(plan):
    net = net_of(1)
    net.run(rounds=1)
    for peer in net.alive:
        machine = net.machine(peer)
        effects = machine.handle(Learned(Record(("plan",), tuple(plan.id), plan)), net.now)
        assert [effect.name for effect in effects] == ["refused"]
    net.run(rounds=2, sweep=True)
    assert net.consensus_distance() < 1e-12


@pytest.mark.parametrize("kind", ["Announce", "Arrive", "Late"])
def test_one_liar_about_the_round_does_not_end_the_others_run(kind):
    """Whoever is late is told by a leader in which round the others are; leaders hear of that from
    others, and may lie. It costs some rounds: without the lie there would be 201 trainings."""
    net = net_of(1)
    net.slow_down(3, 4)
    net.tamper(in_a_far_round, kind=kind, src=6)
    net.run(rounds=40, sweep=True)
    trained = [r for r in net.history.rounds if r.examples and r.peer != net.peers[6]]
    assert len(trained) > 80


def in_a_far_round(message):
    far = Round(message.key.round + 2_000_000)
    if isinstance(message, Late):
        return dataclasses.replace(message, round=far)
    return dataclasses.replace(message, key=message.key._replace(round=far))


def test_who_only_says_wait_is_not_waited_for_for_ever():
    net = net_of(1)
    net.tamper(lambda message: Waiting(message.group), kind="Average", src=6)
    net.run(rounds=1)
    assert [r.coverage for r in net.history.rounds if r.peer != net.peers[6]] == [1.0] * 6


def test_a_leader_that_only_says_wait_is_left_for_another():
    net = net_of(1)
    net.tamper(lambda named: Hold(named.group.key), kind="GroupNamed", src=6)
    net.run(rounds=4)
    assert sum(r.coverage == 1 for r in net.history.rounds if r.peer != net.peers[6]) > 6


def test_a_peer_that_is_named_into_groups_without_end_does_not_grow():
    net = net_of(1)
    named = []
    net.tamper(lambda message: named.append(message) or message, kind="GroupNamed", limit=1)
    net.run(rounds=2, sweep=True)
    machine = net.machine(0)
    for number in range(2000):
        group = named[0].group._replace(leader=net.peers[6], incarnation=number)
        forged = dataclasses.replace(named[0], group=group)
        machine.handle(Received(net.peers[6], forged), net.now)
    assert len(machine._groups._past) <= PAST_MAX
    assert len(machine._groups._groups) < 20


def test_what_is_of_a_round_long_over_is_counted_and_changes_nothing():
    """Every message of the first rounds, sent again later, as a late peer or a liar would."""
    net = net_of(1)
    net.kill(3, during="allreduce")
    recorded = []

    def record(now, src, dst, message):
        is_of_round = hasattr(message, "key") or hasattr(message, "group")
        if is_of_round and src != dst:
            recorded.append((src, dst, message))

    net.engine.interceptors.append(record)
    net.run(rounds=2)
    first, kinds = list(recorded), {type(message).__name__ for _, _, message in recorded}
    assert kinds >= {"Announce", "Arrive", "GroupNamed", "Part", "Average"}
    net.run(rounds=8)
    net.advance(3600.0)
    net.run(rounds=2)
    for src, dst, message in first:
        if dst not in net.alive:
            continue
        machine = net.machine(dst)
        before, state = net.vector(dst).copy(), machine.snapshot()
        effects = machine.handle(Received(src, message), net.now)
        reports = [effect for effect in effects if isinstance(effect, Report)]
        assert [(r.name, r.values["peer"]) for r in reports] == [("expired", src)], message
        assert len(effects) <= 2
        np.testing.assert_array_equal(net.vector(dst), before)
        assert machine.snapshot() == state


def waiting(net):
    """(a machine that waits for its group to be named, its seat)."""
    net.begin()
    while True:
        net.step()
        for peer in net.peers[:6]:
            machine = net.machine(peer)
            for seat in machine._seats:
                if seat.waits:
                    return machine, seat


def test_who_blames_another_for_a_plan_that_cannot_be_is_blamed():
    net = net_of(1)
    net.run(rounds=2)
    machine, liar = net.machine(0), net.peers[6]
    plan = machine._planner.newest
    forged = dataclasses.replace(plan, id=PlanId(plan.id.term + 1, net.peers[0]), radices=())
    [report] = machine.handle(Received(liar, NewerPlan(forged)), net.now)
    assert (report.name, report.values["peer"]) == ("refused", liar)


def test_rounds_that_nobody_is_in_fill_no_memory_and_keep_nobody_out():
    net = net_of(1)
    net.run(rounds=2)
    machine, liar = net.machine(0), net.peers[6]
    grid = machine._planner.grid
    lines = [grid.key(Round(r), grid.cells_of[liar][0]) for r in range(10**6, 10**6 + 4000)]
    effects = [
        effect
        for key in lines
        for effect in machine.handle(Received(liar, Announce(key, 1.0, 1.0)), net.now)
    ]
    assert len(machine._rendezvous._lobbies) <= LOBBIES_MAX
    reasons = {e.values["reason"] for e in effects if isinstance(e, Report) and e.name == "refused"}
    assert reasons == {"too far ahead"}
    key = grid.key(machine.round, grid.cells_of[net.peers[1]][0])
    assert key not in machine._rendezvous._lobbies
    machine.handle(Received(net.peers[1], Announce(key, 1.0, 1.0)), net.now)
    assert key in machine._rendezvous._lobbies


def test_members_by_the_thousand_of_a_group_not_yet_named_fill_no_memory():
    net = net_of(1)
    machine, seat = waiting(net)
    liar = net.peers[6]
    group = GroupId(seat.key, PeerId("nobody"), 0)
    members = tuple(Member(PeerId(f"{k}"), 1.0, 1, 0) for k in range(4000))
    ranks = tuple(member.peer for member in members)
    named = GroupNamed(group, Version(0, 0), members, (), ranks, 64, 16, 2.0, False, "none")
    answers = [machine.handle(Received(liar, Stands(named, liar)), net.now) for _ in range(10)]
    assert any(answers)
    assert sum(len(m.named.members) for _, _, m in machine._groups._early) <= 4000
    net.run(rounds=3)
