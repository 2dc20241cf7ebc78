"""What Moshpit averaging must hold to, on the machines that run on devices."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.config import Moshpit
from flwr_moshpit.protocol import messages
from flwr_moshpit.protocol.machine import Trained
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.membership import Delays
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.testing import Swarm
from tests.trainers import QuadraticTrainer

DRAWN = sorted(np.random.default_rng(7).choice(np.arange(3, 1100), 40, replace=False).tolist())
FIXED = [2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65]
LARGE = [1023, 1024, 1025, 1100]


class GivenVectors(QuadraticTrainer):
    """The first training of client i ends in vectors[i], whatever it started from; later ones
    change nothing. Every training is kept in `log`: (client, base, trained, examples)."""

    def __init__(self, vectors, examples):
        super().__init__(vectors.shape[1], dtype=str(vectors.dtype), flops_per_example=1e6)
        self.vectors = vectors
        self.given_examples = [int(n) for n in examples]
        self.log = []
        self.done: Counter[int] = Counter()

    def examples(self, client, num_steps):
        return 100

    def train(self, client, params, num_steps, seed):
        out = np.array(params if self.done[client] else self.vectors[client])
        self.done[client] += 1
        self.log.append((client, params, out, self.given_examples[client]))
        return Trained(out, self.given_examples[client])


class LoggedQuadratic(QuadraticTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log = []

    def train(self, client, params, num_steps, seed):
        result = super().train(client, params, num_steps, seed)
        self.log.append((client, params, result.params, result.num_examples))
        return result


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def exact_after_a_sweep(num_peers, group_size, dtype, dim=5):
    rng = np.random.default_rng(num_peers)
    vectors = rng.normal(1, 1, (num_peers, dim)).astype(dtype)
    examples = rng.integers(1, 100, num_peers)
    algorithm = Moshpit(group_size=group_size)
    net = Swarm(GivenVectors(vectors, examples), peers=num_peers, algorithm=algorithm, seed=1)
    net.run(rounds=1, sweep=True)
    # The round with training averages once more: by then the first axis is equal already.
    truth = np.average(vectors.astype(np.float64), axis=0, weights=examples)
    worst = max(relative(net.vector(peer), truth) for peer in net.peers)
    assert worst < {"float64": 1e-12, "float32": 1e-6}[dtype]
    assert all(record.coverage == 1 for record in net.history.rounds)
    assert sum(net.weight(peer) for peer in net.peers) == pytest.approx(examples.sum())


@pytest.mark.parametrize("num_peers", FIXED)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_sweep_ends_in_the_exact_weighted_mean(num_peers, dtype):
    exact_after_a_sweep(num_peers, 8, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("num_peers", DRAWN + LARGE)
def test_a_sweep_is_exact_for_any_number_of_peers(num_peers):
    exact_after_a_sweep(num_peers, 32, "float64")
    exact_after_a_sweep(num_peers, 32, "float32")


@pytest.mark.parametrize("fast", range(11))
def test_a_sweep_is_exact_whoever_stands_in(fast):
    """Also where both cells of a stand-in lie on one line, alone or with others."""
    for num_peers, group_size in [(3, 2), (5, 2), (11, 4)]:
        if fast >= num_peers:
            continue
        names = ["jetson-nano"] * num_peers
        names[fast] = "cloud-t4"
        fleet = Fleet(tuple(Fleet.uniform(name, 1)[0] for name in names))
        rng = np.random.default_rng(fast)
        vectors, examples = rng.normal(1, 1, (num_peers, 5)), rng.integers(1, 100, num_peers)
        trainer = GivenVectors(vectors, examples)
        algorithm = Moshpit(group_size=group_size)
        net = Swarm(trainer, peers=num_peers, algorithm=algorithm, seed=1, fleet=fleet)
        net.run(rounds=1, sweep=True)
        net.average()
        truth = np.average(vectors, axis=0, weights=examples)
        assert max(relative(net.vector(peer), truth) for peer in net.peers) < 1e-12


def test_a_sweep_is_exact_in_many_parts_and_shares():
    dim = 3000
    rng = np.random.default_rng(0)
    vectors = rng.normal(1, 1, (11, dim))
    examples = rng.integers(1, 100, 11)
    algorithm = Moshpit(group_size=4, part_bytes=1024, share_bytes_min=64)
    net = Swarm(GivenVectors(vectors, examples), peers=11, algorithm=algorithm, seed=1)
    net.average()
    net.run(rounds=1, sweep=True)
    truth = np.average(vectors, axis=0, weights=examples)
    assert max(relative(net.vector(peer), truth) for peer in net.peers) < 1e-12


@pytest.mark.parametrize(
    ("num_peers", "group_size", "delayed"), [(8, 8, False), (11, 4, False), (11, 4, True)]
)
def test_the_mean_moves_as_fedavgs(num_peers, group_size, delayed):
    trainer = LoggedQuadratic(num_examples=[3, 11, 7, 5, 400], flops_per_example=1e4)
    algorithm = Moshpit(group_size=group_size, local_steps=5, delayed=delayed)
    net = Swarm(trainer, peers=num_peers, algorithm=algorithm, seed=3)
    net.run(rounds=20, sweep=True)
    total = sum(trainer.num_examples(client) for client in range(num_peers))
    mean = trainer.initial_params(3).astype(np.float64)
    for client, base, trained, _ in trainer.log:
        mean += trainer.num_examples(client) / total * (trained - base)
    assert len(trainer.log) == 20 * num_peers
    for peer in net.peers:
        assert relative(net.vector(peer), mean) < 1e-10
    assert not any(record.values["late"] for record in net.history.rounds)


def test_one_group_is_fedavg_itself():
    trainer = QuadraticTrainer(num_examples=[3, 11, 7, 5], flops_per_example=1e6)
    net = Swarm(trainer, peers=7, algorithm=Moshpit(group_size=8, local_steps=5), seed=3)
    net.run(rounds=20)
    x = trainer.initial_params(3)
    weights = [trainer.num_examples(client) for client in range(7)]
    for _ in range(20):
        x = np.average([trainer.train(c, x, 5, 0).params for c in range(7)], 0, weights)
    assert relative(net.vector(0), x) < 1e-10


def test_alone_is_plain_training_bit_for_bit():
    trainer = QuadraticTrainer(dtype="float32")
    net = Swarm(trainer, peers=1, algorithm=Moshpit(local_steps=3), seed=5)
    net.run(rounds=10, sweep=True)
    x = trainer.initial_params(5)
    for _ in range(10):
        x = trainer.train(0, x, 3, 0).params
    assert np.array_equal(net.vector(0), x)


def test_a_swarm_shrinks_to_one_and_comes_back():
    trainer = QuadraticTrainer(flops_per_example=5e9)
    net = Swarm(trainer, peers=8, algorithm=Moshpit(group_size=4, local_steps=2), seed=2)
    net.run(rounds=3)
    for peer in range(1, 8):
        net.kill(peer)
        net.run(rounds=2)
    assert net.alive == [net.peers[0]]
    optimum = trainer.optimum([0])
    before = relative(net.vector(0), optimum)
    net.run(rounds=200)
    assert relative(net.vector(0), optimum) < before / 10
    for peer in range(1, 8):
        net.restart(peer)
    net.run(rounds=40, sweep=True)
    assert net.consensus_distance() < 1e-12
    assert relative(net.vector(7), trainer.optimum()) < 0.2
    assert relative(net.vector(7), trainer.optimum()) < relative(optimum, trainer.optimum())


STAGES = ["training", "matchmaking", "allreduce", "naming"]


def unit_swarm(seed, peers=8, group_size=8, **settings):
    """Peer i brings e_i once, with weight 1; many parts, so that faults fall between them."""
    dim = peers * 16
    vectors = np.tile(np.eye(peers), 16)
    assert vectors.shape == (peers, dim)
    algorithm = Moshpit(group_size=group_size, part_bytes=1024, share_bytes_min=8)
    trainer = GivenVectors(vectors, [1] * peers)
    return Swarm(trainer, peers=peers, algorithm=algorithm, seed=seed, **settings)


def check_one_round(net, num_peers):
    """Every living peer has the plain mean of the contributors that it reports, over the whole
    vector, and nobody's contribution is in two results that live on."""
    results = {}
    records = {r.peer: r for r in net.history.rounds if r.round == 0}
    for peer in net.alive:
        record = records[peer]
        pieces = net.vector(peer).reshape(16, num_peers)
        assert np.allclose(pieces, pieces[0]), "the vector is a patchwork of several averages"
        members = record.values["contributor_ids"]
        if record.coverage == 1:
            expected = [members.count(each) / len(members) for each in net.peers]
            results.setdefault(members, []).append(peer)
        else:
            assert record.coverage == 0
            expected = [float(each == peer) for each in net.peers]
        assert np.allclose(pieces[0], expected), record
    for members, holders in results.items():
        assert len(members) == record_contributors(records, holders)
        for member in members:
            assert member not in net.alive or member in holders
    counted = Counter(member for members in results for member in members)
    assert all(times == 1 for times in counted.values())
    return results


def record_contributors(records, holders):
    counts = {records[peer].contributors for peer in holders}
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.parametrize(
    ("stage", "victim"),
    [(stage, 3) for stage in STAGES] + [(stage, "leader") for stage in STAGES[1:]],
)
def test_a_death_at_any_stage_is_survived(stage, victim):
    fault_free = unit_swarm(0)
    fault_free.run(rounds=1)
    net = unit_swarm(0)
    if stage == "naming":
        net.kill(5, during="allreduce")
    target = net.leader(round=0) if victim == "leader" else victim
    trigger = net.kill(target, during=stage)
    net.run(rounds=1)
    assert trigger.fired_at is not None
    results = check_one_round(net, 8)
    assert len(results) == 1
    (holders,) = results.values()
    assert sorted(holders) == net.alive
    # Nobody waits longer than half a round beyond the time that it takes to notice.
    assert net.now < 1.5 * fault_free.now + Delays().loss_s[1]


@given(
    seed=st.integers(0, 2**32 - 1),
    kills=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_deaths_at_any_time_leave_one_result(seed, kills):
    fault_free = unit_swarm(seed)
    fault_free.run(rounds=1)
    net = unit_swarm(seed)
    for share, peer in kills:
        net.engine.schedule(share * fault_free.now, lambda peer=peer: net.kill(peer))
    net.run(rounds=1)
    results = check_one_round(net, 8)
    assert len(results) <= 1 or kills
    assert net.now < 1.5 * fault_free.now + 2 * Delays().loss_s[1]


@given(
    seed=st.integers(0, 2**32 - 1),
    kills=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), max_size=2),
    lost=st.integers(1, 3),
    probability=st.floats(0.01, 0.3),
)
@settings(deadline=None, max_examples=60)
def test_deaths_and_lost_messages_hang_nobody(seed, kills, lost, probability):
    net = unit_swarm(seed)
    net.drop(probability, limit=lost)
    for share, peer in kills:
        net.engine.schedule(share, lambda peer=peer: net.kill(peer))
    net.run(rounds=1)
    check_one_round(net, 8)


KINDS = [
    "Announce", "Arrive", "GroupNamed", "Part", "Average", "Query", "Answer", "Accuse", "Stands",
]  # fmt: skip


@pytest.mark.parametrize("rounds", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_one_lost_message_of_any_kind_delays_but_stops_nothing(kind, rounds):
    """Rounds that follow at once must not forget the one in which somebody waits."""
    net = unit_swarm(1)
    rule = net.drop(kind=kind, limit=1)
    if kind in ("Query", "Answer", "Accuse", "Stands"):
        net.kill(2, during="allreduce")
    net.run(rounds=rounds)
    assert rule.hits == 1 or kind in ("Announce", "Stands")
    assert net.now < 30
    if rounds == 1:
        check_one_round(net, 8)
    elif kind in ("Part", "Average"):
        assert [r.contributors for r in net.history.rounds if r.round == 0] == [8] * 8


@pytest.mark.parametrize("factor", [20, 200])
def test_links_that_are_far_slower_than_was_known_are_not_filled_with_copies(factor):
    """Nobody is silent here: what is asked for is on its way."""
    dim, peers = 100_000, 8
    trainer = GivenVectors(np.ones((peers, dim), np.float32), [1] * peers)
    network = Network.uniform(latency_s=0.005, uplink_bytes_per_s=12.5e6)
    algorithm = Moshpit(group_size=peers, part_bytes=1 << 16)
    net = Swarm(trainer, peers=peers, algorithm=algorithm, seed=1, network=network)
    for peer in net.peers:
        port = net.engine._peer(peer).port
        for pipe in (port.up, port.down):
            pipe.capacity = pipe.level = pipe.capacity / factor
    net.run(rounds=1)
    rounds = net.history.rounds
    assert [r.contributors for r in rounds] == [peers] * peers
    sent = sum(r.values["bytes_sent"] for r in rounds)
    assert sent < 1.3 * 2 * (peers - 1) * dim * 4


@pytest.mark.parametrize("group_size", [2, 8])
def test_a_straggler_costs_its_group_a_quarter_at_most(group_size):
    trainer = QuadraticTrainer(flops_per_example=4e9)
    net = Swarm(trainer, peers=8, algorithm=Moshpit(group_size=group_size), seed=1)
    net.slow_down(3, 10)
    net.run(rounds=12)
    local_s = np.median([r.local_s for r in net.history.rounds if r.local_s and r.peer != "peer-3"])
    waits = {
        (r.round, r.values["contributor_ids"]): r.values["wait_s"]
        for r in sorted(net.history.rounds, key=lambda r: r.values["wait_s"], reverse=True)
        if r.coverage == 1 and "peer-3" not in r.values["contributor_ids"]
    }
    assert len(waits) > 5
    # Whoever comes last waits for nobody but the straggler.
    assert max(waits.values()) <= 0.25 * local_s
    rounds = [r for r in net.history.rounds if r.peer == "peer-0"]
    assert rounds[-1].t < 12 * 1.3 * local_s + 10 * local_s
    # It is late, keeps its work, and is back in the next open round.
    late = [r for r in net.history.rounds if r.peer == "peer-3"]
    assert any(r.values["late"] for r in late)
    assert any(r.coverage == 1 and r.round > 5 for r in late)


def poisoned(value):
    def change(part):
        data = np.array(part.data)
        data[-1] = value
        return messages.Part(part.group, part.offset, data)

    return change


BAD_PARTS = {
    "NaN": poisoned(np.nan),
    "Inf": poisoned(np.inf),
    "overflow": poisoned(1e200),
    "wrong length or type": lambda part: messages.Part(part.group, part.offset, part.data[:-1]),
}


@pytest.mark.parametrize("reason", BAD_PARTS)
def test_a_peer_that_sends_rubbish_is_left_out_and_named(reason):
    net = unit_swarm(4)
    net.tamper(BAD_PARTS[reason], kind="Part", src=6)
    net.run(rounds=1)
    (holders,) = (h for m, h in check_one_round(net, 8).items() if len(m) > 1)
    assert sorted(holders) == [peer for peer in net.peers if peer != "peer-6"]
    refused = {(r.values["peer"], r.values["reason"]) for _, _, r in net.history.named("refused")}
    assert refused == {("peer-6", reason)}


def changed_arrival(**fields):
    def change(arrive):
        values = {name: getattr(arrive, name) for name in arrive.__dataclass_fields__}
        return messages.Arrive(**{**values, **fields})

    return change


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight": -1.0}, "bad weight -1.0"),
        ({"weight": float("nan")}, "bad weight nan"),
        ({"weight": 1e12}, "bad weight 1000000000000.0"),
        ({"dim": 7}, "7 elements instead of 128"),
        ({"schema": b"another"}, "another schema"),
    ],
)
def test_an_arrival_that_cannot_be_is_refused_and_named(fields, reason):
    net = unit_swarm(4)
    leader = net.peers[0]
    sender = net.peers[5]
    net.tamper(changed_arrival(**fields), kind="Arrive", src=sender)
    net.run(rounds=1)
    results = check_one_round(net, 8)
    (holders,) = (h for m, h in results.items() if len(m) > 1)
    assert sender not in holders
    assert leader in holders
    refused = {(r.values["peer"], r.values["reason"]) for _, _, r in net.history.named("refused")}
    assert refused == {(sender, reason)}


def test_training_that_ends_in_nan_keeps_the_old_model():
    class Exploding(QuadraticTrainer):
        def train(self, client, params, num_steps, seed):
            result = super().train(client, params, num_steps, seed)
            if client == 2:
                return Trained(np.full_like(params, np.nan), result.num_examples)
            return result

    net = Swarm(Exploding(), peers=4, algorithm=Moshpit(), seed=1)
    net.run(rounds=3, sweep=True)
    assert np.isfinite(net.mean()).all()
    assert net.consensus_distance() < 1e-12
    assert {r.values["peer"] for _, _, r in net.history.named("refused")} == {"peer-2"}


def test_a_partition_heals_into_one_swarm():
    trainer = QuadraticTrainer(flops_per_example=5e9)
    net = Swarm(trainer, peers=10, algorithm=Moshpit(group_size=5, local_steps=2), seed=2)
    net.run(rounds=3)
    net.partition(range(4), range(4, 10))
    net.run(rounds=20)
    halves = [np.mean([net.vector(p) for p in side], 0) for side in (range(4), range(4, 10))]
    assert relative(*halves) > 1e-3
    net.heal()
    net.run(rounds=20, sweep=True)
    assert net.consensus_distance() < 1e-12
    assert all(np.isfinite(net.vector(peer)).all() for peer in net.peers)


def test_mass_that_a_partition_may_have_doubled_is_reported():
    net = Swarm(QuadraticTrainer(flops_per_example=5e9), peers=6, algorithm=Moshpit(), seed=2)
    net.run(rounds=1)

    def cut(now, src, dst, message):
        if type(message).__name__ == "Part" and not parted:
            parted.append(now)
            net.partition(range(3), range(3, 6))

    parted = []
    net.engine.interceptors.append(cut)
    net.run(rounds=1)
    assert not net.history.named("may_duplicate")
    net.heal()
    net.run(rounds=4)
    doubted = {report.values["peer"] for _, _, report in net.history.named("may_duplicate")}
    assert doubted >= {"peer-3", "peer-4", "peer-5"}


def test_a_newcomer_takes_the_model_and_a_cell_of_its_own():
    trainer = QuadraticTrainer(flops_per_example=5e9)
    net = Swarm(trainer, peers=9, algorithm=Moshpit(group_size=3, local_steps=2), seed=2)
    net.run(rounds=3)
    net.kill(4)
    net.run(rounds=20)
    net.restart(4)
    net.run(rounds=10)
    (given,) = [report for _, peer, report in net.history.named("joined") if peer == "peer-4"]
    assert given.values["round"] >= 23
    plans = net.history.named("plan")
    assert plans[-1][2].values["peers"] == 9
    net.average()
    assert net.consensus_distance() < 1e-12


def test_equal_time_lets_fast_devices_do_more():
    fleet = Fleet.mix({"jetson-nano": 0.5, "cloud-t4": 0.5}, 8, seed=1)
    trainer = LoggedQuadratic(num_examples=1, flops_per_example=1e9)
    net = Swarm(trainer, peers=8, algorithm=Moshpit(local_s=5.0), seed=1, fleet=fleet)
    net.run(rounds=5, sweep=True)
    assert all(record.coverage == 1 for record in net.history.rounds)
    steps = Counter()
    for client, _, _, examples in trainer.log:
        steps[client] += examples
    fast = [steps[i] for i in range(8) if fleet[i].name == "cloud-t4"]
    slow = [steps[i] for i in range(8) if fleet[i].name == "jetson-nano"]
    assert min(fast) > 10 * max(slow)
    assert net.consensus_distance() < 1e-12


@pytest.mark.parametrize(("delayed", "seed"), [(False, 1), (True, 1), (True, 2), (True, 4)])
def test_very_unequal_devices_do_not_diverge(delayed, seed):
    """A T4 does 34 times what a Nano does in the same time, and counts as much.

    No local training leads further from its start than to the client's own optimum, so the mean
    stays among these.
    """
    mix = {"jetson-nano": 0.5, "jetson-orin-nano": 0.3, "cloud-t4": 0.2}
    fleet = Fleet.mix(mix, 21, seed=seed)
    trainer = QuadraticTrainer(dim=16, num_examples=[3, 10, 7], flops_per_example=2e9)
    algorithm = Moshpit(group_size=8, local_s=0.46, delayed=delayed)
    net = Swarm(trainer, peers=21, algorithm=algorithm, seed=seed, fleet=fleet)
    net.run(rounds=60, sweep=True)
    optima = [
        np.linalg.solve(trainer.matrix(client), trainer.target(client)) for client in range(21)
    ]
    assert np.linalg.norm(net.mean()) < max(np.linalg.norm(optimum) for optimum in optima)
    assert net.consensus_distance() < 1e-9


def test_small_groups_start_at_once():
    """Six peers in groups of four: nobody waits for members that do not exist."""
    net = Swarm(QuadraticTrainer(), peers=6, algorithm=Moshpit(group_size=4), seed=1)
    net.run(rounds=5)
    for _, _, report in net.history.named("group"):
        assert report.values["missing"] == 0
        assert report.values["wait_s"] < 0.1


def cut_off_for_a_moment(seed):
    """Some links of four peers are cut for less than membership needs to notice, at one drawn stage
    of the first round. Everybody brings a unit vector, once."""
    rng = np.random.default_rng(seed)
    trainer = GivenVectors(np.tile(np.eye(4), 16), [1] * 4)
    algorithm = Moshpit(group_size=4, part_bytes=1024, share_bytes_min=8)
    net = Swarm(
        trainer, peers=4, algorithm=algorithm, seed=seed, network=Network.uniform(latency_s=0.05)
    )
    sides = [([0, 1], [2, 3]), ([0], [1, 2, 3]), ([0, 1, 2], [3]), ([0, 2], [1, 3])]
    side = sides[rng.integers(len(sides))]
    stage = str(rng.choice(["Average", "Part", "GroupNamed", "Arrive"]))
    begin_s, long_s = rng.uniform(0, 0.08), float(rng.choice([0.02, 0.1, 0.3, 1]))
    struck = []

    def strike(now, src, dst, message):
        if type(message).__name__ == stage and not struck:
            struck.append(now)
            net.engine.schedule(now + begin_s, lambda: net.partition(*side))
            net.engine.schedule(now + begin_s + long_s, net.heal)

    net.engine.interceptors.append(strike)
    net.run(rounds=40)
    assert struck
    assert [net.weight(peer) for peer in net.peers] == [1.0] * 4
    mass = sum(net.vector(peer)[:4] for peer in net.peers)
    assert mass == pytest.approx(np.ones(4), abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_that_nobody_notices_loses_and_doubles_nothing(seed):
    cut_off_for_a_moment(seed)


@pytest.mark.slow
def test_many_cuts_that_nobody_notices_lose_and_double_nothing():
    for seed in range(12, 200):
        cut_off_for_a_moment(seed)


@pytest.mark.parametrize(("num_peers", "victim"), [(2, 1), (4, 2), (8, 5)])
def test_a_peer_that_restarts_is_given_the_model_before_it_trains(num_peers, victim):
    trainer = LoggedQuadratic(dim=16, flops_per_example=2e10, condition=2)
    algorithm = Moshpit(group_size=2, local_steps=10)
    net = Swarm(trainer, peers=num_peers, algorithm=algorithm, seed=3)
    net.run(rounds=5)
    initial = trainer.initial_params(3)
    net.begin(20)
    net.advance(2)
    net.kill(victim)
    net.advance(5)
    calls = len(trainer.log)
    net.restart(victim)
    net.run(rounds=20)
    first = next(base for client, base, *_ in trainer.log[calls:] if client == victim)
    assert np.linalg.norm(first - initial) > 1
    assert net.weight(victim) == net.weight(0)
