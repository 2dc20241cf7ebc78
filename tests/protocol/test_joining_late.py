"""A peer that was not there when the others began: it takes their model, and then works as they do;
or, when they have finished, it has what they have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.testing import Swarm
from tests.trainers import QuadraticTrainer

DIM = 2000
SLOW = Network.uniform(uplink_bytes_per_s=50_000.0)
"""A model takes 0.3 s on its way, in several pieces."""


def moshpit_swarm(peers: int = 6, network: Network = SLOW) -> Swarm:
    trainer = QuadraticTrainer(dim=DIM, num_examples=[3, 10, 7], flops_per_example=5e9)
    algorithm = Moshpit(group_size=4, local_steps=2, part_bytes=2048)
    return Swarm(trainer, peers=peers, algorithm=algorithm, seed=2, network=network)


def joined(net: Swarm, peer: PeerId) -> list[dict[str, Any]]:
    return [dict(r.values) for _, who, r in net.history.named("joined") if who == peer]


def until_joined(net: Swarm, peer: PeerId) -> None:
    while not joined(net, peer):
        assert net.step()


@pytest.mark.parametrize("name", ["a-first", "z-last"])
def test_a_newcomer_begins_with_a_donors_model_and_its_own_weight(name: str) -> None:
    """The first in order is the one that would make plans, if it knew nobody else's."""
    net = moshpit_swarm()
    net.run(rounds=5)
    net.begin()
    others = list(net.peers)
    peer = net.join(name, client=1)
    held: set[bytes] = set()
    while not joined(net, peer):
        held.update(net.vector(other).tobytes() for other in others)
        assert net.step()
    (report,) = joined(net, peer)
    assert report["round"] >= 5
    assert net.weight(peer) == 0
    assert net.vector(peer).tobytes() in held
    net.run(rounds=6, sweep=True)
    rounds = [r for r in net.history.rounds if r.peer == peer]
    assert rounds[0].examples == 2 * 10, "it trains at once"
    assert report["round"] < rounds[0].round <= report["round"] + 3
    assert {other for r in rounds for other in r.values["contributor_ids"]} > {peer}
    assert net.consensus_distance() < 1e-9
    assert max(m.round for m in net.engine.machines.values()) == min(  # type: ignore[attr-defined]
        m.round  # type: ignore[attr-defined]
        for m in net.engine.machines.values()
    )


def test_the_donor_goes_on_while_its_snapshot_is_read() -> None:
    net = moshpit_swarm(peers=2, network=Network.uniform(uplink_bytes_per_s=5_000.0))
    net.run(rounds=3)
    net.begin()
    snapshots: dict[PeerId, Any] = {}

    def look(now: float, src: PeerId, dst: PeerId, message: Any) -> None:
        if type(message).__name__ == "StateOffer" and dst == "new":
            snapshots[src] = np.array(net.vector(src))

    net.engine.interceptors.append(look)
    peer = net.join("new")
    while not joined(net, peer):
        before = np.array(net.vector(peer))
        assert net.step()
    assert not np.array_equal(before, net.vector(peer))
    ((donor, snapshot),) = snapshots.items()
    assert np.array_equal(net.vector(peer), snapshot)
    assert not np.array_equal(net.vector(donor), snapshot)


def test_twenty_join_at_once_from_all_donors() -> None:
    net = moshpit_swarm(peers=5)
    net.run(rounds=3)
    net.begin()
    newcomers = [net.join(f"new-{k:02}", client=k) for k in range(20)]
    net.run(rounds=12, sweep=True)
    donors = Counter(joined(net, peer)[0]["donor"] for peer in newcomers)
    assert {*net.peers[:5]} <= {*donors}
    assert max(donors.values()) <= 8
    assert net.history.named("plan")[-1][2].values["peers"] == 25
    assert net.consensus_distance() < 1e-9


@pytest.mark.parametrize("sweep", [True, False])
def test_a_newcomer_after_the_end_has_the_result(sweep: bool) -> None:
    net = moshpit_swarm()
    net.run(rounds=5, sweep=sweep)
    calls = len(net.trainer.calls)
    peer = net.join("new")
    net.advance(60)
    models = [net.vector(other) for other in net.peers if other != peer]
    assert peer in net.engine.finished
    result = net.engine.finished[peer]
    assert any(np.array_equal(result, model) for model in models)
    assert not sweep or net.consensus_distance() < 1e-9
    assert [k for k in net.trainer.calls[calls:] if k[0] == "train"] in ([], [("train", 0)])


def test_a_newcomer_in_the_last_moment_waits_for_the_result() -> None:
    """Too late for any group, too early for the result."""
    for seconds in np.linspace(0.0, 3.0, 13):
        net = moshpit_swarm()
        net.run(rounds=5)
        net._round += 1
        net._tell_start(net._round, True)
        net.advance(float(seconds))
        net.join("new")
        net.advance(100)
        assert net.engine.all_finished
        results = list(net.engine.finished.values())
        assert max(np.linalg.norm(result - results[0]) for result in results) < 1e-9, seconds


def test_a_swarm_of_which_all_have_restarted_begins_again() -> None:
    net = moshpit_swarm(peers=2)
    net.run(rounds=2)
    for peer in net.peers:
        net.kill(peer)
    for peer in net.peers:
        net.restart(peer)
    net.run(rounds=3, sweep=True)
    assert net.consensus_distance() < 1e-9
    assert all(net.weight(peer) > 0 for peer in net.peers)


def rfast_swarm(peers: int = 6) -> Swarm:
    trainer = QuadraticTrainer(dim=DIM, flops_per_example=5e9)
    return Swarm(trainer, peers=peers, algorithm=RFast(fan_out=4), seed=2, network=SLOW)


def test_rfast_newcomers_are_given_the_model_by_their_parents() -> None:
    """Attachment is R-FAST's transfer of state; that of the tracker is that it begins with nothing
    received and nothing sent, which the books check."""
    net = rfast_swarm(peers=5)
    net.run(rounds=40)
    net.begin()
    far = np.linalg.norm(net.vector(0) - net.trainer.initial_params(2))
    newcomers = [net.join(f"new-{k:02}", client=k) for k in range(20)]
    net.advance(60)
    parents = Counter(net.machine(peer).parent for peer in newcomers)  # type: ignore[attr-defined]
    assert None not in parents
    assert max(parents.values()) <= 5
    for peer in newcomers:
        assert np.linalg.norm(net.vector(peer) - net.vector(0)) < 0.2 * far
    error = np.abs(net.tracked_mass() - net.gradient_sum()).max()
    assert error < 1e-9 * np.abs(net.gradient_sum()).max() + 1e-9


def test_an_rfast_newcomer_after_the_end_has_the_result() -> None:
    net = rfast_swarm()
    net.run(rounds=40)
    result = np.array(net.vector(0))
    peer = net.join("new")
    net.advance(400)
    assert peer in net.engine.finished
    assert np.array_equal(net.engine.finished[peer], net.vector(0))
    assert np.array_equal(net.vector(0), result)
