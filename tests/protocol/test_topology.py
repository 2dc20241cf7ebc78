"""W and A: stochastic, spanning, and named when they are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol import topology as graphs
from flwr_moshpit.protocol.machine import PeerId, PeerInfo, View
from flwr_moshpit.protocol.topology import Topology


def ids(count: int) -> list[PeerId]:
    return [PeerId(f"p{k:04}") for k in range(count)]


BUILDERS = {
    "binary": graphs.binary_tree,
    "ternary": lambda peers: graphs.kary_tree(peers, 3),
    "kept": lambda peers: graphs.kary_tree(peers, 2, stay=0.1),
    "line": graphs.line,
    "star": graphs.star,
    "ring": graphs.ring,
    "exponential": graphs.exponential,
    "complete": graphs.complete,
    "fleet": lambda peers: graphs.fleet_tree([PeerInfo(peer) for peer in peers]),
}


def dense(graph: Topology) -> tuple[np.ndarray, np.ndarray]:
    place = {peer: k for k, peer in enumerate(graph.peers)}
    w, a = np.zeros((2, len(place), len(place)))
    for i, row in graph.pull.items():
        for j, weight in row.items():
            w[place[i], place[j]] = weight
    for j, column in graph.push.items():
        for i, weight in column.items():
            a[place[i], place[j]] = weight
    return w, a


@pytest.mark.parametrize("name", BUILDERS)
@given(size=st.integers(1, 40))
@settings(deadline=None, max_examples=25)
def test_every_builder_spans_all_peers_with_stochastic_weights(name: str, size: int) -> None:
    graph = BUILDERS[name](ids(size))
    graph.check()
    w, a = dense(graph)
    assert sorted(graph.peers) == ids(size)
    np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(a.sum(axis=0), 1, atol=1e-12)
    # From the root everybody is reached along W, and it is reached by everybody along A.
    power = max(1, size)
    assert (np.linalg.matrix_power(np.eye(size) + w, power)[:, 0] > 0).all()
    assert (np.linalg.matrix_power(np.eye(size) + a, power)[0] > 0).all()


@pytest.mark.parametrize("name", BUILDERS)
@given(size=st.integers(1, 24))
@settings(deadline=None, max_examples=25)
def test_gain_is_that_of_the_dense_matrices(name: str, size: int) -> None:
    graph = BUILDERS[name](ids(size))
    w, a = dense(graph)

    def perron(matrix: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eig(matrix)
        vector = np.real(vectors[:, np.argmin(abs(values - 1))])
        return vector / vector.sum()

    expected = perron(w.T) @ (np.diag(a) * perron(a))
    assert graph.gain == pytest.approx(expected, rel=1e-6)


def test_known_gains_and_hops() -> None:
    assert graphs.binary_tree(ids(7)).gain == pytest.approx(1)
    assert graphs.ring(ids(7)).gain == pytest.approx(1 / 14)
    assert graphs.complete(ids(7)).gain == pytest.approx(1 / 49)
    assert graphs.binary_tree(ids(7)).hops == 4
    assert graphs.ring(ids(7)).hops == 12
    assert graphs.complete(ids(7)).hops == 2
    assert graphs.star(ids(1)).hops == 0


def test_trees_are_acyclic_and_rings_are_not() -> None:
    assert all(
        BUILDERS[name](ids(9)).acyclic for name in ("binary", "kept", "line", "star", "fleet")
    )
    assert not any(BUILDERS[name](ids(9)).acyclic for name in ("ring", "exponential", "complete"))


def test_w_and_a_may_be_different_trees() -> None:
    root, one, two = ids(3)
    graph = graphs.trees(down={one: root, two: one}, up={one: two, two: root}, root=root)
    graph.check()
    assert graph.listeners == {root: [one], one: [two]}
    assert graph.sources == {two: [one], root: [two]}
    assert graph.acyclic


def test_check_names_what_is_missing() -> None:
    peers = ids(6)
    good = graphs.binary_tree(peers)
    lonely = {peers[5]: {peers[5]: 1.0}}
    cases = [
        (
            replace(good, push={**good.push, **lonely}),
            "peer p0005 cannot reach the root p0000 in A",
        ),
        (
            replace(good, pull={**good.pull, **lonely}),
            "the root p0000 cannot reach peer p0005 in W",
        ),
        (
            replace(good, push={**good.push, peers[3]: {peers[1]: 0.9}}),
            "peer p0003's column in A sums to 0.9, not to 1",
        ),
        (
            replace(good, pull={**good.pull, peers[3]: {peers[1]: 1.5, peers[0]: -0.5}}),
            "peer p0003's row in W gives p0000 the weight -0.5",
        ),
        (
            replace(good, pull={**good.pull, peers[3]: {PeerId("x"): 1.0}}),
            "peer p0003's row in W names x",
        ),
        (
            replace(good, push={p: c for p, c in good.push.items() if p != peers[2]}),
            "peer p0002 has no column in A",
        ),
        (Topology((), {}, {}), "at least one peer"),
    ]
    for graph, message in cases:
        with pytest.raises(ConfigError, match=message):
            graph.check()


@pytest.mark.parametrize(
    ("size", "fan_out"), [(1, 4), (5, 4), (9, 8), (10, 4), (73, 8), (74, 4), (585, 8), (1000, 10)]
)
def test_fan_out_keeps_the_tree_shallow(size: int, fan_out: int) -> None:
    assert graphs.fan_out_for(size) == fan_out
    graph = graphs.fleet_tree([PeerInfo(peer) for peer in ids(size)])
    assert graph.hops <= 6


def test_fleet_tree_puts_slow_and_badly_connected_devices_at_the_leaves() -> None:
    infos = [
        PeerInfo(peer, speed=1 + k % 7, uplink_bytes_per_s=1e6 if k % 5 == 0 else 1e8)
        for k, peer in enumerate(ids(60))
    ]
    infos[13] = replace(infos[13], speed=1e6, dialable=False)
    graph = graphs.fleet_tree(infos)
    by_peer = {info.peer: info for info in infos}
    inner = [peer for peer in graph.peers if graph.sources.get(peer)]
    leaves = [peer for peer in graph.peers if not graph.sources.get(peer)]
    assert infos[13].peer in leaves, "nobody can open a connection to it"
    assert by_peer[graph.root].speed == 7
    assert min(by_peer[p].speed for p in inner) >= 6
    assert all(by_peer[p].uplink_bytes_per_s == 1e8 for p in inner)
    assert graph.peers == graphs.fleet_tree(infos[::-1]).peers, "equal views agree"


def test_machines_with_one_view_share_one_object() -> None:
    view = View({peer: PeerInfo(peer) for peer in ids(50)})
    shared = graphs.by_name("fleet", view)
    assert graphs.by_name("fleet", view) is shared
    assert graphs.by_name("fleet", view, fan_out=2) is not shared
    assert graphs.by_name("ring", view).hops == 98
    assert graphs.by_name("fleet", View(dict(view.peers))) == shared
