"""R-FAST: what it tracks is conserved whatever happens, and it mends itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flwr_moshpit.config import RFast, algorithm_from_config
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    ComputeDone,
    ComputeFailed,
    CorrectedSteps,
    Finish,
    Gradient,
    GradientResult,
    JobId,
    Learned,
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
    View,
    ViewChanged,
)
from flwr_moshpit.protocol.messages import (
    Attach,
    Detach,
    Detached,
    EdgeId,
    Grant,
    Label,
    Model,
    Push,
    RootClaim,
    Subtree,
)
from flwr_moshpit.protocol.rfast import RFastPeer
from flwr_moshpit.protocol.topology import trees
from tests.protocol.harness import LeastSquares, Net

SMALL = LeastSquares.drawn(10, dim=3)
PROBLEM = LeastSquares.drawn(8, dim=6)


def config(topology: str = "binary", problem: LeastSquares = PROBLEM, **changes: Any) -> RFast:
    settings_ = {"learning_rate": 0.8 * problem.learning_rate(), "lease_s": 12.0}
    return RFast(topology=topology, **(settings_ | changes))


def ids(*numbers: int) -> list[PeerId]:
    return [PeerId(f"p{k:03}") for k in numbers]


def settled(net: Net, limit: float = 600.0, tolerance: float = 1e-6) -> float:
    """When the living reach the optimum of their own sum."""
    optimum = net.problem.optimum(net.numbers())
    return net.run_until(lambda: net.error(optimum) < tolerance, net.now + limit, every=5)


def put_to_rest(net: Net) -> None:
    """Let everybody finish, and everything arrive."""
    net.loss = min(net.loss, 0.3)
    for host in net.living():
        net._tell(host, Start(host.machine.round))
    net.run(net.now + 60 + 4 * net.config.lease_s)
    # What is lost now is sent again once or twice a lease, and may be lost again.
    limit = net.now + 40 * net.config.lease_s
    net.run_until(lambda: net.unrest() is None, limit, every=net.config.lease_s)


# Schedules of faults.

FAULTS = (
    "crash",
    "leave",
    "join",
    "restart",
    "restart from checkpoint",
    "cut",
    "partition",
    "suspect",
    "heal",
    "slow down",
)

schedules = st.lists(
    st.tuples(
        st.sampled_from(FAULTS), st.floats(0.1, 20.0), st.integers(0, 99), st.integers(0, 99)
    ),
    min_size=1,
    max_size=8,
)
networks = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "num_peers": st.integers(2, 6),
        "loss": st.sampled_from([0.0, 0.3, 0.6]),
        "delay_s": st.sampled_from([0.02, 0.1, 0.3]),
        "duplicate": st.sampled_from([0.0, 0.2]),
        "detect_s": st.sampled_from([(0.5, 3.0), (3.0, 12.0)]),
    }
)


def inflict(net: Net, fault: str, one: int, other: int) -> None:
    living = [host.info.peer for host in net.living()]
    peer, second = living[one % len(living)], living[other % len(living)]
    anybody = net.ids()[one % len(net.hosts)]
    match fault:
        case "crash" if len(living) > 1:
            net.crash(peer)
        case "leave" if len(living) > 1:
            net.leave(peer)
        case "join" if len(net.hosts) < len(SMALL.a):
            net.join(len(net.hosts))
        case "restart":
            net.restart(anybody)
        case "restart from checkpoint":
            net.restart(anybody, net.hosts[anybody].machine.snapshot())
        case "cut" if peer != second:
            net.cut(peer, second)
        case "partition":
            net.partition([p for k, p in enumerate(living) if (other >> (k % 6)) & 1])
        case "suspect" if peer != second:
            net.suspect(peer, second)
        case "heal":
            net.heal()
        case "slow down":
            net.slow_down(peer, 3.0)


def through_faults(topology: str, network: dict[str, Any], faults: Any, limit: float) -> None:
    lease_s = max(6.0, 40 * network["delay_s"])
    net = Net(SMALL, config=config(topology, SMALL, lease_s=lease_s), **network)
    for fault, gap, one, other in faults:
        net.run(net.now + gap)
        inflict(net, fault, one, other)
    # The books were checked after every event. Now let it mend.
    net.heal()
    net.loss = min(net.loss, 0.3)
    for host in net.living():
        host.step_s = 1.0
    assert settled(net, limit) < np.inf, f"still {net.error(SMALL.optimum(net.numbers()))} away"
    put_to_rest(net)
    if net.config.is_tree:
        net.check_tree_at_rest()
    else:
        net.check_at_rest()


LATE = {"loss": 0.6, "delay_s": 0.3, "duplicate": 0.2, "detect_s": (0.5, 3.0)}
"""Leases lapse on such a network, at rest too."""


@given(
    topology=st.sampled_from(["binary", "fleet", "line", "star"]),
    network=networks,
    faults=schedules,
)
@example("fleet", {"seed": 379, "num_peers": 6} | LATE, [("heal", 1.0, 0, 0)])
@example(
    "fleet",
    {"seed": 9, "num_peers": 5} | LATE,
    [
        ("restart", 2.1065, 98, 0),
        ("leave", 17.1645, 11, 0),
        ("slow down", 18.8708, 93, 0),
        ("join", 13.5315, 0, 0),
        ("crash", 19.2849, 77, 0),
        ("partition", 17.484375, 0, 1),
        ("restart", 16.34375, 0, 0),
        ("join", 14.75390625, 0, 0),
    ],
)
@settings(deadline=None, max_examples=12)
def test_no_schedule_of_faults_breaks_a_tree(topology: str, network: Any, faults: Any) -> None:
    through_faults(topology, network, faults, 600)


@given(network=networks, faults=schedules)
@settings(deadline=None, max_examples=3)
def test_no_schedule_of_faults_breaks_a_graph(network: Any, faults: Any) -> None:
    network["num_peers"] = min(4, network["num_peers"])
    through_faults("exponential", network, faults[:4], 2000)


@pytest.mark.slow
@given(
    topology=st.sampled_from(
        ["binary", "fleet", "line", "star", "ring", "exponential", "complete"]
    ),
    network=networks,
    faults=schedules,
)
@settings(deadline=None, max_examples=60)
def test_no_schedule_of_faults_breaks_anything(topology: str, network: Any, faults: Any) -> None:
    through_faults(topology, network, faults, 6000)


# One fault at a time.


def churned(**changes: Any) -> Net:
    """A binary tree of seven, well into its way: p0 is root, p1 and p2 inner, the others leaves."""
    given_ = {"loss": 0.3, "delay_s": 0.2, "duplicate": 0.1, "detect_s": (2.0, 10.0), "seed": 3}
    net = Net(PROBLEM, 7, config(), **(given_ | changes))
    net.run(80)
    return net


@pytest.mark.parametrize(
    "dead", [ids(6), ids(1), ids(0), ids(0, 1), ids(1, 4)], ids=lambda dead: "+".join(dead)
)
def test_survivors_of_a_crash_reach_their_own_optimum_and_none_waits(dead: list[PeerId]) -> None:
    net = churned()
    for peer in dead:
        net.crash(peer)
    assert settled(net) < np.inf
    assert len(net.roots()) == 1
    put_to_rest(net)
    net.check_tree_at_rest()


def test_a_leaving_peer_hands_its_children_over_at_once() -> None:
    net = churned(loss=0.0, detect_s=(50.0, 60.0))
    net.leave(PeerId("p001"))
    net.run(net.now + 3)
    assert net.hosts[PeerId("p003")].machine.parent == "p000"
    assert net.hosts[PeerId("p004")].machine.parent == "p000"
    net.leave(PeerId("p000"))
    net.run(net.now + 3)
    assert len(net.roots()) == 1, "the next root does not wait for the news either"
    assert settled(net) < np.inf


def test_a_newcomer_joins_with_the_model_of_its_parent() -> None:
    net = churned()
    before = net.error(PROBLEM.optimum(net.numbers()))
    machine = net.hosts[net.join(7)].machine
    net.run_until(lambda: machine.parent is not None, net.now + 20)
    net.run(net.now + 3)
    assert before < 0.1
    optimum = PROBLEM.optimum(list(range(7)))
    assert np.linalg.norm(machine.params - optimum) < 0.5 * np.linalg.norm(optimum)
    assert settled(net) < np.inf


@pytest.mark.parametrize("from_checkpoint", [False, True])
@pytest.mark.parametrize("number", [0, 1, 6])
def test_a_restarted_peer_is_taken_in_again(number: int, from_checkpoint: bool) -> None:
    net = churned()
    (peer,) = ids(number)
    state = net.hosts[peer].machine.snapshot() if from_checkpoint else None
    net.crash(peer)
    net.run(net.now + 1)
    net.restart(peer, state)
    others = [host for host in net.living() if host.info.peer != peer]
    optimum = PROBLEM.optimum(list(range(7)))
    worst = 0.0
    for _ in range(20):
        net.run(net.now + 1)
        errors = [np.linalg.norm(host.machine.params - optimum) for host in others]
        worst = max(worst, max(errors) / np.linalg.norm(optimum))
    assert worst < 0.7, "nobody goes back to the model that a restarted root begins with"
    assert settled(net) < np.inf
    assert len(net.roots()) == 1


def test_both_sides_of_a_partition_go_on_and_the_larger_one_keeps_its_root() -> None:
    net = churned()
    small, large = ids(0, 3), ids(1, 2, 4, 5, 6)
    net.partition(small)
    net.run(net.now + 150)
    roots = net.roots()
    assert len(roots) == 2
    for side in (small, large):
        optimum = PROBLEM.optimum([net.hosts[peer].number for peer in side])
        errors = [np.linalg.norm(net.hosts[peer].machine.params - optimum) for peer in side]
        assert max(errors) < 1e-3 * np.linalg.norm(optimum)
    (keeper,) = [root for root in roots if root in large]
    net.heal()
    assert settled(net) < np.inf
    assert net.roots() == [keeper]


def test_a_cut_link_is_gone_round() -> None:
    net = churned()
    net.cut(*ids(0, 1))
    net.run(net.now + 40)
    assert net.roots() == ids(0)
    assert net.hosts[PeerId("p001")].machine.parent not in (None, "p000")
    assert settled(net) < np.inf


def test_a_peer_that_is_wrongly_believed_dead_is_never_counted_twice() -> None:
    net = churned()
    # Child by parent, parent by child, and both by each other; the books are checked throughout.
    net.suspect(*ids(0, 1))
    net.suspect(*ids(5, 2))
    net.run(net.now + 30)
    net.suspect(*ids(2, 0))
    net.suspect(*ids(0, 2))
    net.run(net.now + 30)
    net.heal()
    assert settled(net) < np.inf
    put_to_rest(net)
    net.check_tree_at_rest()


def test_a_paused_parent_drops_what_lapsed_before_it_uses_anything() -> None:
    """SIGSTOP and SIGCONT: the first thing that a machine hears after the pause may be a push."""
    net = churned(loss=0.0)
    paused = PeerId("p001")
    net.pause(paused)
    net.run(net.now + 30)
    ledger = net.hosts[paused].machine.ledger
    children = list(ledger.ins)
    assert children, "it knows nothing of the time that passed"
    assert net.hosts[children[0]].machine.parent != paused, "its children have gone elsewhere"
    subtree = Subtree(1, 1, 1.0, 0, 1.0)
    held = ledger.ins[children[0]]
    late = Push(held.edge, held.counter + 1, np.ones(6), net.now - 30, subtree)
    net.resume(paused, Received(children[0], late))
    assert not ledger.ins
    assert settled(net) < np.inf


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("topology", ["exponential", "ring", "complete"])
def test_a_graph_closes_up_when_a_peer_dies_and_opens_when_one_comes(
    topology: str, dead: int
) -> None:
    net = Net(PROBLEM, 4, config(topology), loss=0.2, delay_s=0.1, seed=8)
    net.run(150)
    net.crash(ids(dead)[0])
    assert settled(net, 12_000) < np.inf
    net.join(5)
    net.restart(ids(3)[0])
    assert settled(net, 12_000) < np.inf
    put_to_rest(net)
    net.check_at_rest()


# What a machine does, by hand.


class Hand:
    """One machine, and the messages that others would send."""

    def __init__(self, me: int, size: int = 7, **changes: Any) -> None:
        self.ids = ids(*range(size))
        self.config = RFast(topology="binary", learning_rate=0.1, **changes)
        self.dim = 4
        infos = {peer: PeerInfo(peer) for peer in self.ids}
        self.machine = RFastPeer(
            self.config,
            infos[self.ids[me]],
            np.zeros(self.dim),
            View(infos),
            np.random.default_rng(0),
        )
        self.now = 0.0
        self.effects: list[Any] = []
        self.everything: list[tuple[PeerId, Any]] = []
        """All that was ever sent."""

    def do(self, event: Any, later: float = 0.0) -> list[Any]:
        self.now += later
        self.effects = self.machine.handle(event, self.now)
        self.everything += [(e.dst, e.message) for e in self.effects if isinstance(e, Send)]
        return self.effects

    def hear(self, src: int, message: Any, later: float = 0.0) -> list[Any]:
        return self.do(Received(self.ids[src], message), later)

    def sent(self, kind: type) -> list[tuple[PeerId, Any]]:
        return [
            (e.dst, e.message)
            for e in self.effects
            if isinstance(e, Send) and isinstance(e.message, kind)
        ]

    def reports(self, name: str) -> list[dict[str, Any]]:
        return [dict(e.values) for e in self.effects if isinstance(e, Report) and e.name == name]

    def attach(
        self, child: int, epoch: int = 0, label: Label | None = None, **changes: Any
    ) -> EdgeId:
        edge = EdgeId(0, epoch)
        label = Label(-1, PeerId(""), 0) if label is None else label
        values = {"step": 0, "dim": self.dim, "schema": b"", "insist": False} | changes
        self.hear(child, Attach(edge, label, **values))
        return edge

    def push(self, child: int, edge: EdgeId, counter: int, value: float, **changes: Any) -> Push:
        subtree = Subtree(1, 1, 1.0, 0, 1.0)
        rho = np.full(self.dim, value)
        message = replace(Push(edge, counter, rho, self.now, subtree), **changes)
        self.hear(child, message)
        return message


def root() -> Hand:
    hand = Hand(0)
    hand.do(Start())
    return hand


def test_the_fittest_is_root_at_once_and_trains() -> None:
    hand = Hand(0)
    effects = hand.do(Start())
    assert hand.machine.is_root
    assert next(e.job for e in effects if isinstance(e, Compute)).params is hand.machine.params
    assert hand.reports("root") == [{"term": 0, "live": 1}]


def test_alone_it_is_gradient_descent_bit_for_bit() -> None:
    hand = Hand(0, size=1)
    x = np.zeros(4)
    job = hand.do(Start())[-1]
    for step in range(1, 6):
        assert isinstance(job, Compute)
        np.testing.assert_array_equal(job.job.params, x)
        gradient = np.sin(np.arange(4.0) + step)
        # The round trip of a single peer is one step.
        x = x - 0.1 * gradient
        effects = hand.do(ComputeDone(job.job_id, GradientResult(gradient, 5)), later=1.0)
        (job,) = [e for e in effects if isinstance(e, Compute)]
        assert hand.reports("round")[0]["round"] == step
    np.testing.assert_array_equal(hand.machine.params, x)


def test_only_the_newest_push_of_an_edge_counts() -> None:
    hand = root()
    edge = hand.attach(1)
    assert [dst for dst, _ in hand.sent(Grant)] == ids(1)
    assert [dst for dst, _ in hand.sent(Model)] == ids(1), "the model comes with the grant"
    hand.push(1, edge, 0, 1.0)
    hand.push(1, edge, 5, 3.0)
    for counter in (5, 3, 0):
        hand.push(1, edge, counter, 100.0)
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 3.0))


def test_an_edge_that_is_over_never_counts_again() -> None:
    hand = root()
    old = hand.attach(1)
    hand.push(1, old, 7, 1.0)
    new = hand.attach(1, epoch=1)
    np.testing.assert_array_equal(hand.machine.tracked, np.zeros(4))
    hand.push(1, old, 8, 5.0)
    assert hand.sent(Detached) == [(hand.ids[1], Detached(old, "over"))]
    hand.push(1, new, 0, 2.0)
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 2.0))
    hand.attach(1, epoch=0)
    assert hand.sent(Detached) == [(hand.ids[1], Detached(old, "over"))]
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 2.0))


def test_a_push_on_an_edge_that_nobody_asked_for_is_refused_for_ever() -> None:
    hand = root()
    edge = EdgeId(0, 4)
    hand.push(1, edge, 0, 1.0)
    assert hand.sent(Detached) == [(hand.ids[1], Detached(edge, "over"))]
    hand.attach(1, epoch=4)
    assert hand.sent(Grant) == []
    np.testing.assert_array_equal(hand.machine.tracked, np.zeros(4))


def seen_dead(hand: Hand, *dead: int) -> ViewChanged:
    lost = tuple(hand.ids[k] for k in dead)
    return ViewChanged(View({p: PeerInfo(p) for p in hand.ids if p not in lost}), lost=lost)


def test_a_dead_child_is_taken_out_at_once() -> None:
    hand = root()
    hand.push(1, hand.attach(1), 0, 1.0)
    hand.push(2, hand.attach(2), 0, 5.0)
    hand.do(seen_dead(hand, 1))
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 5.0))
    assert list(hand.machine.ledger.ins) == ids(2)


def test_a_finished_inner_peer_tells_its_parent_what_it_has_dropped() -> None:
    for fault in ("crash", "leave"):
        net = Net(PROBLEM, 7, config(), until_round=10, seed=2)
        net.run(60)
        getattr(net, fault)(PeerId("p006"))
        net.run(net.now + 60)
        net.check_tree_at_rest()


def test_what_was_pushed_into_a_dead_parent_comes_back_when_the_lease_is_over() -> None:
    hand = attached_child()
    hand.push(3, EdgeId(0, 0), 0, 5.0)
    np.testing.assert_array_equal(hand.machine.tracked, np.zeros(4))
    hand.do(seen_dead(hand, 0), later=1.0)
    assert hand.sent(Detach), "in case that it is not dead after all"
    hand.push(3, EdgeId(0, 0), 1, 7.0)
    assert not hand.sent(Push)
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 2.0))
    for _ in range(3):
        # The child keeps its own lease.
        hand.now += 0.7
        hand.push(3, EdgeId(0, 0), hand.machine.ledger.ins[hand.ids[3]].counter + 1, 7.0)
    hand.do(TimerFired(), later=0.3)
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 7.0))
    assert hand.machine.is_root


BAD = {
    "NaN": np.array([0, np.nan, 0, 0]),
    "Inf": np.array([0, 0, -np.inf, 0]),
    "sums would overflow": np.full(4, 1e307),
    "another shape": np.zeros(5),
    "two dimensions": np.zeros((4, 1)),
    "another dtype": np.zeros(4, np.float32),
    "integers": np.zeros(4, np.int64),
    "no array": [0.0] * 4,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_what_is_no_usable_vector_never_reaches_z_or_x(bad: Any) -> None:
    hand = root()
    edge = hand.attach(1)
    hand.push(1, edge, 0, 1.0)
    hand.push(1, edge, 1, 0.0, rho=bad)
    (report,) = hand.reports("refused")
    assert report["peer"] == "p001"
    assert report["what"] == "Push"
    assert report["count"] == 1
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 1.0))
    # The next good one makes up for it, although its counter was seen on the bad one.
    hand.push(1, edge, 1, 2.0)
    np.testing.assert_array_equal(hand.machine.tracked, np.full(4, 2.0))

    child = attached_child()
    x = child.machine.params
    for change in ({"v": bad}, {"direction": bad}):
        child.hear(0, replace(model(child), **change))
        assert child.reports("refused")[0]["peer"] == "p000"
        assert child.machine.params is x


@pytest.mark.parametrize(
    "subtree",
    [
        Subtree(1, 1, float("nan"), 0, 1.0),
        Subtree(1, 1, -1.0, 0, 1.0),
        Subtree(1, 1, 1e10, 0, 1.0),
        Subtree(1, -1, 1.0, 0, 1.0),
        Subtree(1, 1, 1.0, 0, float("inf")),
    ],
)
def test_a_push_with_an_impossible_weight_is_refused(subtree: Subtree) -> None:
    hand = root()
    hand.push(1, hand.attach(1), 0, 1.0, subtree=subtree)
    assert hand.reports("refused")[0]["peer"] == "p001"
    np.testing.assert_array_equal(hand.machine.tracked, np.zeros(4))


@pytest.mark.parametrize("bad", list(BAD.values())[:3])
def test_ones_own_bad_gradient_is_not_used_either(bad: Any) -> None:
    hand = Hand(0, size=1)
    (job,) = [e for e in hand.do(Start(until_round=2)) if isinstance(e, Compute)]
    effects = hand.do(ComputeDone(job.job_id, GradientResult(bad, 1)), later=1.0)
    assert hand.reports("refused")[0]["peer"] == "p000"
    np.testing.assert_array_equal(hand.machine.tracked, np.zeros(4))
    (job,) = [e for e in effects if isinstance(e, Compute)]
    effects = hand.do(ComputeFailed(job.job_id, "out of memory"), later=1.0)
    assert hand.reports("training_failed") == [{"error": "out of memory"}]
    assert isinstance(effects[-1], Finish), "a client that always fails comes to an end too"


def test_a_peer_with_another_model_is_refused() -> None:
    hand = root()
    for child, changes in ((1, {"schema": b"other"}), (2, {"dim": 9})):
        hand.attach(child, **changes)
        assert hand.reports("refused") == [
            {"peer": hand.ids[child], "reason": "schema", "what": "Attach"}
        ]
        assert hand.sent(Detached)[0][1].reason == "schema"
        assert not hand.machine.ledger.ins


def attached_child(**changes: Any) -> Hand:
    """p1, attached to the root p0 with the leaf p3 below it."""
    hand = Hand(1, **changes)
    hand.do(Start())
    ((asked, attach),) = hand.sent(Attach)
    assert asked == "p000"
    hand.hear(0, Grant(attach.edge, 0, 0.0, Label(0, hand.ids[0], 0), (), -1, False))
    assert hand.machine.parent == "p000"
    hand.attach(3)
    return hand


def model(hand: Hand, counter: int = 0, **changes: Any) -> Model:
    edge = hand.machine.ledger.outs[hand.ids[0]].edge
    v = np.full(hand.dim, 1.0 + counter)
    label = Label(0, hand.ids[0], 1 + counter)
    message = Model(0, counter, v, edge, hand.now, label, (), counter, 1.0, 3, 1.0)
    return replace(message, **changes)


def test_an_inner_peer_relays_both_ways_without_a_gradient_of_its_own() -> None:
    hand = attached_child()
    edge = EdgeId(0, 0)
    hand.push(3, edge, 0, 5.0)
    ((parent, push),) = hand.sent(Push)
    assert parent == "p000"
    np.testing.assert_array_equal(push.rho, np.full(4, 5.0))
    assert push.subtree.contributors == 1
    hand.hear(0, model(hand), later=1.0)
    ((child, passed_on),) = hand.sent(Model)
    assert child == "p003"
    np.testing.assert_array_equal(passed_on.v, np.ones(4))
    assert passed_on.path == ("p000",)


def test_relays_are_not_more_frequent_than_four_a_step_of_the_root() -> None:
    hand = attached_child(lease_s=60.0)
    hand.hear(0, model(hand), later=1.0)
    edge = EdgeId(0, 0)
    pushes = 0
    for counter in range(100):
        hand.now += 0.01
        hand.push(3, edge, counter, float(counter))
        pushes += len(hand.sent(Push))
    assert pushes in (4, 5), "the root steps once in the second that this took"
    assert hand.machine.deadline is not None
    hand.do(TimerFired(), later=1.0)
    ((_, push),) = hand.sent(Push)
    np.testing.assert_array_equal(push.rho, np.full(4, 99.0))


def finish_job(hand: Hand, job: Compute, took_s: float) -> list[Compute]:
    effects = hand.do(ComputeDone(job.job_id, GradientResult(np.ones(4), 1)), later=took_s)
    return [e for e in effects if isinstance(e, Compute)]


def test_a_leaf_with_no_new_model_trains_no_faster_than_the_root_steps() -> None:
    hand = attached_child()
    effects = hand.hear(0, model(hand), later=0.1)
    (job,) = [e for e in effects if isinstance(e, Compute)]
    assert finish_job(hand, job, took_s=0.01) == [], "at this model it has a gradient already"
    assert hand.machine.deadline == pytest.approx(1.1), "the root takes 1 s for a step"
    effects = hand.hear(0, model(hand, 1), later=0.01)
    (job,) = [e for e in effects if isinstance(e, Compute)]
    assert finish_job(hand, job, took_s=0.01) == []
    (job,) = [e for e in hand.do(TimerFired(), later=1.0) if isinstance(e, Compute)]
    assert len(finish_job(hand, job, took_s=1.0)) == 1, "who is not faster is not held back"


def test_a_hanging_trainer_does_not_make_the_root_step_less_and_less() -> None:
    hand = attached_child(lease_s=60.0)
    effects = hand.hear(0, model(hand), later=0.1)
    (job,) = [e for e in effects if isinstance(e, Compute)]
    hand.hear(0, model(hand, 4), later=1.0)
    (hanging,) = finish_job(hand, job, took_s=1.0)
    assert isinstance(hanging.job, Gradient)
    hand.hear(0, model(hand, 1000), later=1.0)
    hand.do(TimerFired(), later=1.0)
    hand.push(3, EdgeId(0, 0), 0, 1.0, subtree=Subtree(1, 0, 0.0, 0, 1.0))
    ((_, push),) = hand.sent(Push)
    assert push.subtree.seen == 1000 - 9, "twice the 4 steps that its first gradient took, and one"


def test_a_root_steps_only_a_few_times_while_gradients_come_back() -> None:
    hand = root()
    edge = hand.attach(1)
    (job,) = [Compute(JobId(1), Gradient(hand.machine.params))]
    steps = 0
    while hand.now < 12.0:
        jobs = finish_job(hand, job, took_s=0.02)
        while not jobs:
            hand.now += 0.01
            if hand.now % 2.0 < 0.01:
                # Once in two seconds a gradient comes, at the newest model.
                seen = Subtree(1, 1, 1.0, hand.machine._core.step, 1.0)
                hand.push(1, edge, int(hand.now / 2), 1.0, subtree=seen)
            jobs = [e for e in hand.effects if isinstance(e, Compute)]
            jobs = jobs or [e for e in hand.do(TimerFired()) if isinstance(e, Compute)]
        (job,) = jobs
        steps += 1
    assert 12 <= steps <= 150, "not 50 a second"


def test_a_model_of_before_is_not_taken() -> None:
    hand = attached_child()
    hand.hear(0, model(hand, 3), later=1.0)
    for stale in (model(hand, 3), model(hand, 1), model(hand, 9, edge=EdgeId(0, 44))):
        hand.hear(0, replace(stale, v=np.full(4, 77.0)))
        np.testing.assert_array_equal(hand.machine.params, np.full(4, 4.0))
    hand.hear(5, model(hand, 10))
    np.testing.assert_array_equal(hand.machine.params, np.full(4, 4.0))


def test_a_newcomers_first_gradient_is_taken_at_the_others_model() -> None:
    hand = Hand(1)
    hand.do(Start())
    ((_, attach),) = hand.sent(Attach)
    (first,) = [e for e in hand.effects if isinstance(e, Compute)]
    hand.hear(0, Grant(attach.edge, 0, 0.0, Label(0, hand.ids[0], 9), (), -1, False))
    effects = hand.hear(0, model(hand, 8), later=0.5)
    assert Cancel(first.job_id) in effects
    (second,) = [e for e in effects if isinstance(e, Compute)]
    np.testing.assert_array_equal(second.job.params, np.full(4, 9.0))
    effects = hand.hear(0, model(hand, 9), later=0.5)
    assert not [e for e in effects if isinstance(e, Cancel)], "once, or slow peers never finish"


def test_a_peer_below_is_refused_at_once() -> None:
    hand = attached_child()
    hand.attach(0, label=Label(9, hand.ids[0], 0))
    assert hand.sent(Detached)[0][1].reason == "below"


def test_stale_paths_cannot_close_a_cycle() -> None:
    """p1 believes to hang below p2 as long as it has not heard that p2 was cut off; p2 asks it,
    through a path that does not show p2. The label does not let it."""
    hand = attached_child()
    hand.hear(0, model(hand, 4, path=(hand.ids[5],)), later=1.0)
    label = Label(0, hand.ids[0], 7)
    hand.attach(2, label=label)
    assert not hand.sent(Grant)
    assert hand.ids[2] not in hand.machine.ledger.ins
    # Once there is newer news of the root than p2 has ever had, p2 cannot be above.
    hand.hear(0, model(hand, 9), later=1.0)
    assert hand.ids[2] in [dst for dst, _ in hand.sent(Grant)]


def claims_to_be_root(peer: PeerId, live: int, term: int = 3, serial: int = 1) -> Learned:
    return Learned(Record(("root", peer), (0, serial), RootClaim(term, live, float(live))))


def test_a_root_that_hears_of_a_larger_tree_attaches_to_it() -> None:
    hand = root()
    hand.do(claims_to_be_root(hand.ids[3], live=5))
    ((asked, attach),) = hand.sent(Attach)
    assert asked == "p003"
    assert hand.machine.is_root, "until it is granted"
    hand.hear(3, Grant(attach.edge, 0, 0.0, Label(4, hand.ids[3], 0), (), -1, False))
    assert hand.machine.parent == "p003"
    assert not hand.machine.is_root
    assert [e.record.value for e in hand.effects if isinstance(e, Publish)] == [None]


def test_a_root_that_hears_of_a_smaller_tree_lets_it_attach() -> None:
    hand = root()
    edge = hand.attach(1)
    hand.now += 2.0
    hand.push(1, edge, 0, 1.0, subtree=Subtree(6, 6, 6.0, 0, 1.0))
    hand.do(TimerFired(), later=1.0)
    hand.do(claims_to_be_root(hand.ids[3], live=2, term=8))
    assert not hand.sent(Attach)
    (published,) = [e.record.value for e in hand.effects if isinstance(e, Publish)]
    assert published == RootClaim(9, 7, 6.0), "the other's label is below this term"


def test_a_grant_that_has_fallen_below_ones_own_label_is_not_taken() -> None:
    """Two roots may ask each other, and both be granted: only one of the labels is the higher."""
    hand = root()
    hand.do(claims_to_be_root(hand.ids[3], live=5))
    ((_, attach),) = hand.sent(Attach)
    hand.attach(3, label=Label(7, hand.ids[3], 0))
    ((_, grant),) = hand.sent(Grant)
    assert grant.label == Label(8, hand.ids[0], 0), "a root raises its term to take somebody in"
    hand.hear(3, Grant(attach.edge, 0, 0.0, Label(7, hand.ids[3], 1), (), -1, False))
    assert hand.machine.is_root
    assert (hand.ids[3], Detach(attach.edge)) in hand.sent(Detach)
    assert not hand.machine.ledger.outs


def test_a_full_peer_sends_newcomers_to_its_children() -> None:
    hand = Hand(0, size=30)
    hand.do(Start())
    for child in range(1, 5):
        hand.attach(child)
        assert hand.sent(Grant)
    hand.push(1, EdgeId(0, 0), 0, 1.0, subtree=Subtree(9, 9, 9.0, 0, 1.0))
    hand.attach(5)
    ((_, refusal),) = hand.sent(Detached)
    assert refusal.reason == "full"
    assert list(refusal.instead) == ids(2, 3, 4), "those with the fewest below them"
    hand.attach(5, epoch=1, insist=True)
    assert hand.sent(Grant), "rather a crowd than an orphan"


def test_finish_after_the_jobs_that_were_asked_for_and_then_serve() -> None:
    net = Net(PROBLEM, 7, config(), loss=0.3, until_round=20, seed=2, slow={6: 3})
    net.run(100)
    assert all(host.machine.round == 20 for host in net.living())
    assert all(host.finished is not None for host in net.living())
    peer = net.join(7)
    net.run(net.now + 60)
    assert all(host.machine.round == 20 for host in net.living()), "only the newcomer trains"
    put_to_rest(net)
    net.check_tree_at_rest()
    for host in net.living():
        np.testing.assert_array_equal(host.machine.params, net.hosts[peer].machine.params)


def test_a_second_start_goes_on() -> None:
    hand = Hand(0, size=1)
    (job,) = [e for e in hand.do(Start(until_round=1)) if isinstance(e, Compute)]
    effects = hand.do(ComputeDone(job.job_id, GradientResult(np.ones(4), 1)), later=1.0)
    assert isinstance(effects[-1], Finish)
    effects = hand.do(Start(until_round=2))
    assert [type(e) for e in effects] == [Compute]
    assert hand.do(Start(until_round=2)) == [], "one job at a time"


def test_stop_ends_everything() -> None:
    hand = root()
    hand.attach(1)
    effects = hand.do(Stop())
    assert Cancel(JobId(1)) in effects
    assert hand.sent(Detached)[0][0] == "p001"
    assert hand.machine.deadline is None
    hand.push(1, EdgeId(0, 0), 0, 1.0)
    assert hand.effects == []


def test_results_of_unknown_jobs_and_unknown_messages_change_nothing() -> None:
    hand = root()
    assert hand.do(ComputeDone(JobId(77), GradientResult(np.ones(4), 1))) == []
    hand.hear(1, object())
    assert hand.reports("refused")[0]["reason"] == "unknown message"
    assert hand.do(TimerFired()) == []


def test_a_checkpoint_holds_what_a_new_incarnation_needs() -> None:
    net = churned()
    host = net.hosts[PeerId("p001")]
    state = host.machine.snapshot()
    assert state["round"] == host.machine.round
    np.testing.assert_array_equal(state["params"], host.machine.params)
    # One instant: the formula holds for what was saved.
    z = state["gradient"] + sum(state["rho_buf"].values()) - sum(state["rho"].values())
    np.testing.assert_allclose(z, host.machine.tracked, atol=1e-12)
    again = RFastPeer(
        config(), host.info, np.zeros(6), host.view, np.random.default_rng(0), 1, state=state
    )
    assert again.round == state["round"]
    np.testing.assert_array_equal(again.params, host.machine.params)
    np.testing.assert_array_equal(again.tracked, np.zeros(6))


def test_memory_is_a_few_vectors_a_neighbour() -> None:
    net = Net(PROBLEM, 7, config("star"), loss=0.3, seed=1)
    net.run(100)
    for host in net.living():
        ledger = host.machine.ledger
        degree = len(ledger.ins) + len(ledger.outs)
        state = host.machine.snapshot()
        vectors = 1 + ("gradient" in state) + len(state["rho"]) + len(state["rho_buf"])
        assert vectors <= 2 + degree
        assert degree == (6 if host.number == 0 else 1)


# Settings.


def test_gradients_weighed_by_examples_minimise_the_loss_of_all_examples() -> None:
    examples = [1, 5, 2, 8, 3, 3, 10]
    net = Net(
        PROBLEM, 7, config(weigh_examples=True), loss=0.3, seed=4, examples=examples, slow={6: 3}
    )
    optimum = PROBLEM.optimum(list(range(7)), examples)
    assert net.run_until(lambda: net.error(optimum) < 1e-6, 800, every=5) < np.inf
    assert [host.machine.weight for host in net.living()] == examples
    assert net.error(PROBLEM.optimum(list(range(7)))) > 1e-2, "which is another point"


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_root_may_run_another_optimizer(optimizer: str) -> None:
    rate = {"momentum": PROBLEM.learning_rate(), "adam": 0.02}[optimizer]
    settings_ = config(optimizer=optimizer, learning_rate=rate)
    net = Net(PROBLEM, 7, settings_, loss=0.3, seed=5, books=False)
    optimum = PROBLEM.optimum(list(range(7)))
    tolerance = {"momentum": 1e-6, "adam": 1e-2}[optimizer]
    assert net.run_until(lambda: net.error(optimum) < tolerance, 900, every=10) < np.inf


def test_a_rate_that_is_too_large_is_halved_until_it_converges() -> None:
    net = Net(PROBLEM, 7, config(learning_rate=12 * PROBLEM.learning_rate()), loss=0.3, seed=6)
    assert settled(net, 1500) < np.inf
    halved = [report for _, _, report in net.reports if report.name == "step_size"]
    assert 1 <= len(halved) <= 8
    assert "lower learning-rate" in halved[0].values["reason"]
    sane = Net(PROBLEM, 7, config(), loss=0.3, seed=6)
    sane.run(200)
    assert not [report for _, _, report in sane.reports if report.name == "step_size"]


def train_alone(hand: Hand, values: list[float]) -> list[np.ndarray]:
    """The models after gradients with all elements equal to these values."""
    (job,) = [e for e in hand.do(Start()) if isinstance(e, Compute)]
    models = []
    for value in values:
        result = GradientResult(np.full(4, value), 1)
        effects = hand.do(ComputeDone(job.job_id, result), later=1.0)
        models.append(hand.machine.params)
        (job,) = [e for e in effects if isinstance(e, Compute)]
    return models


def test_a_gradient_that_has_exploded_does_not_lead_the_model_away() -> None:
    hand = Hand(0, size=1)
    *_, before, after, later, last = train_alone(hand, [1.0] * 10 + [1e12, 1e13, 1e200])
    # Ten times what it was at first, at the rate of 0.1, halved.
    np.testing.assert_allclose(before - after, 0.05 * 10)
    np.testing.assert_allclose(after - later, 0.05 * 10)
    np.testing.assert_array_equal(later, last, "what is too large to be measured has no direction")


def epochs(hand: Hand, effects: list[Any], value: float, counter: int, taken: int) -> list[Any]:
    """The job in `effects` is done, when a new model has come, so that the next one follows."""
    (job,) = [e for e in effects if isinstance(e, Compute)]
    hand.hear(0, model(hand, counter, direction=np.full(4, 0.5), taken=taken), later=0.5)
    return hand.do(ComputeDone(job.job_id, GradientResult(np.full(4, value), 1)), later=0.5)


def correction(effects: list[Any]) -> np.ndarray:
    (job,) = [e.job for e in effects if isinstance(e, Compute)]
    assert isinstance(job, CorrectedSteps)
    return job.correction


def test_local_epochs_are_corrected_by_the_newest_and_by_what_is_in_the_mean() -> None:
    hand = attached_child(local_steps=3, lease_s=60.0)
    effects = epochs(hand, hand.hear(0, model(hand), later=0.1), 1.0, counter=1, taken=-1)
    ((_, first),) = hand.sent(Push)
    np.testing.assert_array_equal(correction(effects), np.zeros(4), "it has none in the mean")
    below = EdgeId(0, 0)
    hand.push(3, below, 7, 5.0)
    hand.do(TimerFired(), later=0.3)
    ((_, second),) = hand.sent(Push)
    hand.push(3, below, 8, 6.0)
    effects = epochs(hand, effects, 2.0, counter=2, taken=first.counter)
    np.testing.assert_array_equal(correction(effects), np.full(4, 0.5 - (1.0 + 2.0) / 2))
    effects = epochs(hand, effects, 3.0, counter=3, taken=second.counter)
    np.testing.assert_array_equal(correction(effects), np.full(4, 0.5 - (1.0 + 3.0) / 2))
    hand.hear(0, model(hand, 4, direction=np.full(4, 0.5), taken=second.counter), later=1.0)
    ((child, passed_on),) = hand.sent(Model)
    assert (child, passed_on.taken) == ("p003", 7), "the child's push that was in the second"
    ((_, newest),) = [sent for sent in hand.everything if isinstance(sent[1], Push)][-1:]
    effects = epochs(hand, effects, 4.0, counter=5, taken=newest.counter)
    np.testing.assert_array_equal(correction(effects), np.full(4, 0.5 - (3.0 + 4.0) / 2))


def test_local_epochs_that_ran_away_do_not_correct_the_next_ones() -> None:
    for value, corrected in ((9.0, True), (11.0, False)):
        hand = attached_child(local_steps=3, lease_s=60.0)
        effects = epochs(hand, hand.hear(0, model(hand), later=0.1), 1.0, counter=1, taken=-1)
        ((_, push),) = hand.sent(Push)
        effects = epochs(hand, effects, value, counter=2, taken=push.counter)
        own = (1.0 + value) / 2
        np.testing.assert_array_equal(correction(effects), np.full(4, corrected * (0.5 - own)))


def test_local_epochs_in_step_with_each_other_converge_at_large_rates() -> None:
    # All jobs end at one instant, so each peer's newest gradient is one that no mean has yet.
    algorithm = config("star", learning_rate=0.25 * PROBLEM.learning_rate(), local_steps=20)
    net = Net(PROBLEM, 7, algorithm, seed=1, jitter=0.0, delay_s=0.02)
    assert settled(net, 400) < np.inf
    assert not [report for _, _, report in net.reports if report.name == "step_size"]


def test_local_epochs_of_one_slow_peer_do_not_hold_up_the_others() -> None:
    # 3e-5 if each peer's gradient in the mean alone corrects it, 1e-6 with half of the newest.
    algorithm = config(learning_rate=0.1 * PROBLEM.learning_rate(), local_steps=20)
    net = Net(PROBLEM, 7, algorithm, seed=1, slow={6: 10.0})
    net.run(400)
    assert net.error(PROBLEM.optimum(range(7))) < 6e-6


def test_w_and_a_may_be_different_trees() -> None:
    peers = ids(*range(6))
    root_, *others = peers
    down = dict.fromkeys(others[:2], root_) | dict.fromkeys(others[2:], others[0])
    up = {others[k + 1]: others[k] for k in range(4)} | {others[0]: root_}
    graph = trees(down, up, root_, stay=0.2)
    net = Net(PROBLEM, 6, config(), topology=graph, loss=0.2, delay_s=0.2, seed=7)
    assert settled(net, 1500, 1e-3) < np.inf


def test_settings_that_cannot_work_are_named() -> None:
    cases = [
        ({"topology": "tree"}, "topology must be one of fleet, binary, star, line, ring"),
        ({"topology": "ring", "local-steps": 5}, "local-steps must be 1 on a ring, not 5"),
        ({"topology": "complete", "optimizer": "adam"}, "optimizer must be sgd on a complete"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, momentum, adam, not 'lion'"),
        ({"learning-rate": 0.0}, "learning-rate must be above 0, not 0.0"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"fan-out": 0}, "fan-out must be at least 1, not 0"),
        ({"lease-s": 0}, "lease-s must be above 0"),
        ({"local-steps": 0}, "local-steps must be at least 1, not 0"),
    ]
    for values, message in cases:
        with pytest.raises(ConfigError, match=message):
            algorithm_from_config("rfast", values)
    graph = trees({}, {}, PeerId("someone else"))
    with pytest.raises(ConfigError, match="p000 is not in the topology"):
        Net(PROBLEM, 1, config(), topology=graph)


def test_local_epochs_are_asked_for_in_the_corrected_form() -> None:
    hand = Hand(0, size=1, local_steps=3)
    (job,) = [e for e in hand.do(Start()) if isinstance(e, Compute)]
    assert isinstance(job.job, CorrectedSteps)
    np.testing.assert_array_equal(job.job.correction, np.zeros(4))
    gradient = np.arange(4.0)
    effects = hand.do(ComputeDone(job.job_id, GradientResult(gradient, 1)), later=1.0)
    (job,) = [e for e in effects if isinstance(e, Compute)]
    # Alone, the mean gradient at the root is one's own: nothing to correct.
    np.testing.assert_array_equal(job.job.correction, np.zeros(4))
    assert job.job.num_steps == 3
    assert job.job.learning_rate == 0.1
    plain = Hand(0, size=1)
    (job,) = [e for e in plain.do(Start()) if isinstance(e, Compute)]
    assert isinstance(job.job, Gradient)
