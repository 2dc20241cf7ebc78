"""The rivals' parts, and what each of them does in its own way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.config import ADPSGD, DPSGD, OSGP, FedAvg, RandomGroups, algorithm_from_config
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.baselines.common import Backoff, usable, weighted_mean
from flwr_moshpit.protocol.baselines.fedavg import SERVER, FedAvgPeer
from flwr_moshpit.protocol.baselines.graphs import (
    neighbours,
    num_hops,
    pushed_by,
    pushes_to,
    random_group,
)
from flwr_moshpit.protocol.baselines.messages import ClientUpdate, GlobalModel
from flwr_moshpit.protocol.baselines.ring_reduce import RingReduce
from flwr_moshpit.protocol.machine import (
    LinkLost,
    PeerId,
    PeerInfo,
    Received,
    Report,
    Send,
    Start,
    TimerFired,
    View,
)
from tests.protocol.test_all_algorithms import StillTrainer, Swarm


def ids(size: int) -> list[PeerId]:
    return [PeerId(f"p{k:02d}") for k in range(size)]


# Graphs


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 33])
def test_neighbours_know_each_other(topology: str, size: int) -> None:
    peers = ids(size)
    graph = {peer: neighbours(topology, peers, peer) for peer in peers}
    for peer, others in graph.items():
        assert peer not in others
        assert len(set(others)) == len(others)
        assert all(peer in graph[other] for other in others)
    reached = {peers[0]}
    for _ in range(size):
        reached |= {other for peer in reached for other in graph[peer]}
    assert reached == set(peers)


def test_a_ring_has_two_neighbours_and_an_exponential_graph_few() -> None:
    peers = ids(64)
    assert neighbours("ring", peers, peers[0]) == [peers[1], peers[63]]
    assert len(neighbours("exponential", peers, peers[0])) == 11


@given(size=st.integers(2, 40), round_=st.integers(0, 100))
@settings(deadline=None)
def test_every_push_is_expected_by_its_receiver(size: int, round_: int) -> None:
    peers = ids(size)
    targets = {peer: pushes_to(peers, peer, round_) for peer in peers}
    assert sorted(targets.values()) == peers
    for peer, target in targets.items():
        assert target is not None
        assert target != peer
        assert pushed_by(peers, target, round_) == peer


@pytest.mark.parametrize("size", [2, 3, 5, 8, 9])
def test_pushes_reach_everybody_in_one_cycle(size: int) -> None:
    peers = ids(size)
    mass = np.eye(size)
    for round_ in range(num_hops(size)):
        targets = [peers.index(pushes_to(peers, peer, round_) or peer) for peer in peers]
        mass = mass / 2 + (mass / 2)[np.argsort(targets)]
    assert (mass > 0).all()


@given(size=st.integers(1, 60), group_size=st.integers(2, 9), round_=st.integers(0, 1000))
@settings(deadline=None)
def test_random_groups_deal_out_everybody(size: int, group_size: int, round_: int) -> None:
    peers = ids(size)
    groups = {random_group(peers, peer, round_, group_size) for peer in peers}
    assert sorted(peer for group in groups for peer in group) == peers
    sizes = [len(group) for group in groups]
    assert max(sizes) <= group_size
    assert max(sizes) - min(sizes) <= 1


def test_random_groups_differ_from_round_to_round_and_are_fair() -> None:
    peers = ids(12)
    met = Counter(
        other
        for round_ in range(1000)
        for other in random_group(peers, peers[0], round_, 4)
        if other != peers[0]
    )
    # Each of 11 others in 3 of 11 rounds: 273 of 1000, give or take five standard deviations.
    assert all(200 < met[peer] < 345 for peer in peers[1:])


# Arithmetic


@given(
    size=st.integers(1, 9),
    dim=st.integers(0, 20),
    weights=st.lists(st.floats(0, 1e6), min_size=9, max_size=9),
    dtype=st.sampled_from([np.float32, np.float64]),
)
@settings(deadline=None)
def test_a_ring_reduces_to_the_weighted_mean(
    size: int, dim: int, weights: list[float], dtype: type
) -> None:
    rng = np.random.default_rng(size * 100 + dim)
    vectors = rng.standard_normal((size, dim)).astype(dtype)
    weights = weights[:size]
    members = [RingReduce(k, weights, vectors[k]) for k in range(size)]
    waiting = [0] * size if size > 1 else []
    sent = [0] * size
    while waiting:
        chunks = [member.outgoing(step) for member, step in zip(members, waiting, strict=True)]
        steps = []
        for k, chunk in enumerate(chunks):
            receiver = members[(k + 1) % size]
            assert not receiver.flaw(waiting[k], chunk)
            steps.append(receiver.take(chunk))
            sent[k] += chunk.nbytes
        assert len(set(steps)) == 1
        waiting = [] if steps[0] is None else [steps[0]] * size
    results = [member.result for member in members]
    expected = weighted_mean(list(vectors), weights)
    for result in results:
        assert result is not None
        np.testing.assert_array_equal(result, results[0])
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    # 2 (N - 1) / N of the vector, but for chunks that differ by one element.
    bound = 2 * (size - 1) * (dim / size + 1) * np.dtype(dtype).itemsize
    assert max(sent) <= bound


def test_a_chunk_is_looked_at_before_it_is_taken() -> None:
    member = RingReduce(0, (1.0, 1.0, 1.0), np.ones(6, np.float32))
    assert member.flaw(0, np.ones(2, np.float32)) == ""
    assert "float64" in member.flaw(0, np.ones(2))
    assert "(3,)" in member.flaw(0, np.ones(3, np.float32))
    assert "step" in member.flaw(1, np.ones(2, np.float32))
    assert "finite" in member.flaw(0, np.array([1, np.nan], np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_usable_can_be_averaged(dtype: type) -> None:
    largest = np.finfo(dtype).max
    assert usable(np.array([], dtype))
    assert usable(np.array([largest / 8, -largest / 8], dtype))
    for bad in (np.nan, np.inf, -np.inf, largest, -largest):
        assert not usable(np.array([0.0, bad, 1.0], dtype))
    mean = weighted_mean([np.full(3, largest / 8, dtype)] * 7, [1e9] * 7)
    assert np.isfinite(mean).all()


def test_nobodys_weight_is_everybodys() -> None:
    vectors = [np.array([1.0]), np.array([3.0])]
    np.testing.assert_array_equal(weighted_mean(vectors, [0, 0]), [2.0])


def test_a_backoff_doubles_up_to_a_minute() -> None:
    backoff = Backoff()
    assert not backoff.due(1e9)
    backoff.arm(0.0)
    fired = [now for now in np.arange(0.0, 400.0, 0.5) if backoff.due(now)]
    assert fired[:4] == [1.0, 3.0, 7.0, 15.0]
    assert np.diff(fired).max() == 60.0


# Each rival in its own way


def test_fedavg_samples_the_fraction_asked_for() -> None:
    view = View({peer: PeerInfo(peer) for peer in [*ids(10), SERVER]})
    config = FedAvg(fraction=0.3)
    me = view.peers[SERVER]
    server = FedAvgPeer(config, me, np.zeros(2), view, np.random.default_rng(1))
    effects = server.handle(Start(5), 0.0)
    assert len({effect.dst for effect in effects if isinstance(effect, Send)}) == 3


def test_fedavg_listens_to_the_server_only() -> None:
    view = View({peer: PeerInfo(peer) for peer in [*ids(2), SERVER]})
    me = view.peers[PeerId("p00")]
    client = FedAvgPeer(FedAvg(), me, np.zeros(2), view, np.random.default_rng(1))
    client.handle(Start(5), 0.0)
    model = GlobalModel(0, np.ones(2), b"", False, 0, 0.0)
    effects = client.handle(Received(PeerId("p01"), model), 0.0)
    assert [type(effect) for effect in effects] == [Report]
    np.testing.assert_array_equal(client.params, np.zeros(2))


def ends(swarm: Swarm, peer: str) -> list[float]:
    return [t for t, by, report in swarm.reports if by == peer and report.name == "round"]


@pytest.mark.parametrize("name", ["ring", "dpsgd", "sgp", "fedavg"])
def test_in_step_all_wait_for_the_slowest(name: str) -> None:
    swarm = Swarm(name, 4, rounds=10)
    swarm.engine.schedule(0.0, lambda: swarm.engine.slow_down(PeerId("p02"), 10.0))
    swarm.run()
    # Ten rounds of 0.2 s become ten of 2 s; the last one's own end may be a hop or two earlier.
    assert ends(swarm, "p00")[-1] > 0.7 * 10 * 2.0


@pytest.mark.parametrize("name", ["adpsgd", "local"])
def test_at_their_own_pace_nobody_waits(name: str) -> None:
    swarm = Swarm(name, 4, rounds=10)
    swarm.engine.schedule(0.0, lambda: swarm.engine.slow_down(PeerId("p02"), 10.0))
    swarm.run()
    assert ends(swarm, "p00")[-1] < 1.2 * 10 * 0.2
    assert ends(swarm, "p02")[-1] > 10 * 2.0 - 0.1


def test_overlap_hides_the_network() -> None:
    times = {}
    for name in ("sgp", "osgp"):
        swarm = Swarm(name, 4, rounds=10, jitter_s=0.15)
        swarm.run()
        times[name] = ends(swarm, "p00")[-1]
    assert times["osgp"] < 0.9 * times["sgp"]


@pytest.mark.parametrize("at_s", np.linspace(0.2, 0.4, 9))
def test_no_contribution_enters_a_ring_twice(at_s: float) -> None:
    """Each peer brings a unit vector of its own, so the result shows who is in it."""
    size = 6
    swarm = Swarm("ring", size, StillTrainer(dim=size, num_examples=10), rounds=1)
    for k, peer in enumerate(swarm.peers):
        unit = np.zeros(size)
        unit[k] = 1.0
        swarm.initial[peer] = unit
    swarm.engine.schedule(at_s, lambda: swarm.engine.crash(PeerId("p02")))
    swarm.run()
    models = swarm.models()
    for model in models:
        np.testing.assert_array_equal(model, models[0])
        inside = model > 1e-12
        assert model.sum() == pytest.approx(1.0, rel=1e-12)
        np.testing.assert_allclose(model[inside], 1 / inside.sum(), rtol=1e-12)
        assert inside.sum() >= size - 1
    for values in swarm.named("round"):
        assert values["contributors"] in (size - 1, size)


def test_a_restarted_peer_takes_over_the_models_of_the_living() -> None:
    for name in ("fedavg", "ring", "dpsgd", "sgp", "osgp", "adpsgd", "random-groups"):
        swarm = Swarm(name, 5, rounds=40)
        peer = PeerId("p03")
        swarm.engine.schedule(3.0, lambda s=swarm, p=peer: s.engine.crash(p))
        swarm.engine.schedule(4.0, lambda s=swarm, p=peer: s.engine.restart(p))
        swarm.run()
        rounds = [
            report.values["round"]
            for t, by, report in swarm.reports
            if by == peer and report.name == "round" and t > 4.0
        ]
        assert rounds[0] >= 8, name


# Settings


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("local", "local-steps", 0),
        ("ring", "weight-max", 0.0),
        ("random-groups", "group-size", 1),
        ("dpsgd", "topology", "star"),
        ("adpsgd", "topology", "tree"),
        ("osgp", "overlap", 0),
        ("fedavg", "fraction", 0.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        algorithm_from_config(name, {key: value})


def test_settings_by_name() -> None:
    assert algorithm_from_config("dpsgd", {"topology": "ring"}) == DPSGD(topology="ring")
    assert algorithm_from_config("adpsgd", {"local-steps": 3}) == ADPSGD(local_steps=3)
    assert algorithm_from_config("osgp", {"overlap": 2}) == OSGP(overlap=2)
    assert RandomGroups().group_size_for(100) == 10


def test_a_client_that_missed_the_end_is_told_again() -> None:
    client = PeerId("p00")
    view = View({peer: PeerInfo(peer) for peer in (client, SERVER)})
    rng = np.random.default_rng(1)
    server = FedAvgPeer(FedAvg(), view.peers[SERVER], np.zeros(2), view, rng)
    server.handle(Start(1), 0.0)
    update = ClientUpdate(0, np.ones(2), 10.0, b"")
    last = [e for e in server.handle(Received(client, update), 1.0) if isinstance(e, Send)]
    assert [effect.message.final for effect in last] == [True]  # type: ignore[attr-defined]
    assert server.deadline is None
    # The link broke, for so short a time that no view changed.
    assert server.handle(LinkLost(client), 1.5) == []
    assert server.deadline is not None
    assert server.handle(TimerFired(), server.deadline) == last
    server.handle(TimerFired(), server.deadline)
    assert server.deadline is None
