"""Equal peers lose no round by how they time each other: not by the first job, which takes longer
than all others since it loads data and code, nor by jobs that take now a little more, now less."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.config import Moshpit
from flwr_moshpit.protocol.machine import (
    Compute,
    ComputeDone,
    Learned,
    PeerId,
    PeerInfo,
    Publish,
    Start,
    TimerFired,
    Trained,
    View,
)
from flwr_moshpit.protocol.moshpit import MoshpitPeer, Phase
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.testing import Swarm
from tests.trainers import QuadraticTrainer


def paced_swarm(num_peers, local_s, loads, seed):
    """Peers whose jobs take `local_s`, give or take a twentieth of it; the first one of peer i
    takes loads[i] times as long."""
    trainer = QuadraticTrainer()
    net = Swarm(trainer, peers=num_peers, algorithm=Moshpit(), seed=seed)
    full_speed_s = []
    rng = np.random.default_rng(seed)
    begun = dict.fromkeys(net.peers, 0)

    def pace(peer):
        (job,) = net.engine._peer(peer).slot.jobs.values()
        if not full_speed_s:
            full_speed_s.append(job.due_s - net.now)
        load = 1 if begun[peer] else loads.get(net.peers.index(peer), 1)
        begun[peer] += 1
        factor = local_s / full_speed_s[0] * load * rng.uniform(0.95, 1.05)
        net.slow_down(peer, factor)

    net.engine.on_job.append(pace)
    return net


def by_round(history):
    found = {}
    for record in history.rounds:
        found.setdefault(record.round, []).append(record)
    return found


def num_in(record):
    """How many averaged, with nobody's round a group of one."""
    return max(record.contributors, 1)


PACES = {
    "num_peers": st.sampled_from([2, 3, 8]),
    "local_s": st.sampled_from([0.05, 1.0, 20.0]),
    "load": st.sampled_from([10, 30]),
    "seed": st.integers(0, 2**32 - 1),
}


@given(**PACES)
@settings(deadline=None, max_examples=15)
def test_a_first_job_that_takes_long_for_all_costs_nobody_a_round(num_peers, local_s, load, seed):
    loads = dict.fromkeys(range(num_peers), load)
    net = paced_swarm(num_peers, local_s, loads, seed)
    net.run(rounds=8)
    assert [r.contributors for r in net.history.rounds] == [num_peers] * 8 * num_peers


@given(**PACES, slow=st.integers(0, 7))
@settings(deadline=None, max_examples=15)
def test_one_whose_first_job_takes_long_is_missed_until_it_has_done_it(
    num_peers, local_s, load, seed, slow
):
    net = paced_swarm(num_peers, local_s, {slow % num_peers: load}, seed)
    net.run(rounds=load + 15)
    slow = net.peers[slow % num_peers]
    rounds = by_round(net.history)
    assert all(num_in(r) >= num_peers - 1 for r in net.history.rounds if r.peer != slow)
    back_s = next(r.t for r in net.history.rounds if r.peer == slow)
    begun = max(r.round for r in net.history.rounds if r.t <= back_s) + 1
    later = [round for round in rounds if round > begun]
    assert len(later) > 5
    for round in later:
        assert [r.contributors for r in rounds[round]] == [num_peers] * num_peers


@pytest.mark.parametrize("num_peers", [2, 3, 8])
@pytest.mark.parametrize("local_s", [0.05, 1.0, 20.0])
def test_a_little_more_or_less_is_no_reason_to_go_on_without_somebody(num_peers, local_s):
    net = paced_swarm(num_peers, local_s, {}, seed=1)
    net.run(rounds=30)
    assert [r.contributors for r in net.history.rounds] == [num_peers] * 30 * num_peers


def test_a_checkpoint_knows_the_pace_that_the_first_job_after_it_does_not_show():
    me = PeerInfo(PeerId("a"))
    params = np.zeros(3)

    def life(begins, ends, state=None):
        """Jobs end then; what the peer says of its pace after each, and what it saves."""
        rng = np.random.default_rng(0)
        machine = MoshpitPeer(Moshpit(), me, params, View({me.peer: me}), rng, state=state)
        effects, known_s = machine.handle(Start(), begins), []
        planned = machine.handle(TimerFired(), begins)
        (plan,) = [effect.record for effect in planned if isinstance(effect, Publish)]
        machine.handle(Learned(plan), begins)
        for now in ends:
            (job,) = [effect.job_id for effect in effects if isinstance(effect, Compute)]
            effects = machine.handle(ComputeDone(job, Trained(params, 10)), now)
            known_s.append(machine.snapshot()["local_s"])
        return known_s, machine.snapshot()

    known_s, state = life(0.0, [30.0, 32.0])
    assert known_s == [0, 2]
    again_s, _ = life(100.0, [130.0, 133.0], state)
    assert again_s == [2, 3]


def test_who_is_averaging_says_when_it_will_be_through() -> None:
    """Called by another group's leader. Who said a whole average more, though it was nearly
    through, was left out of group after group."""
    network = Network.uniform(latency_s=0.01, uplink_bytes_per_s=4e5)
    trainer = QuadraticTrainer(100_000, num_examples=[3])
    net = Swarm(trainer, peers=4, algorithm=Moshpit(local_steps=1), network=network, seed=1)
    net.begin()
    said: dict[PeerId, list[float]] = {peer: [] for peer in net.peers}
    rounds = dict.fromkeys(net.peers, 0)
    errors: list[float] = []
    for _ in range(600):
        net.advance(0.1)
        for peer in net.peers:
            machine = net.machine(peer)
            if machine.round > rounds[peer]:
                rounds[peer] = machine.round
                errors += [abs(free_at - net.now) for free_at in said[peer]]
                said[peer].clear()
            elif machine.phase is Phase.MEETING and machine.round > 1:
                said[peer].append(net.now + machine._left_s(net.now))
    assert len(errors) > 100
    assert max(errors) < 0.5, "an average takes 3 s, a job next to nothing"
