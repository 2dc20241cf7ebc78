"""What every algorithm must hold to, whatever it is: Moshpit, R-FAST and each rival."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.config import (
    ADPSGD,
    ALGORITHMS,
    DPSGD,
    OSGP,
    SGP,
    FedAvg,
    Local,
    Moshpit,
    RandomGroups,
    RFast,
    Ring,
)
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.baselines.fedavg import SERVER
from flwr_moshpit.protocol.build import build_machine
from flwr_moshpit.protocol.machine import (
    GradientResult,
    Message,
    PeerId,
    PeerInfo,
    Report,
    Start,
    Stop,
    Trained,
    Vector,
    View,
)
from flwr_moshpit.simulation.backend import InProcessBackend
from flwr_moshpit.simulation.engine import Engine
from flwr_moshpit.simulation.membership import Delays
from flwr_moshpit.simulation.network import Link, Network, Replace
from tests.trainers import QuadraticTrainer

ROUNDS = 6


@dataclass(frozen=True)
class Traits:
    """One algorithm, and what it promises."""

    config: Any
    keeps_mean: bool = True
    """sum(w x) / sum(w) stays what it is while training changes nothing."""
    agrees: bool = True
    """While training changes nothing all models become equal."""
    rounds_to_agree: int = 40
    plain_alone: bool = True
    """A single peer does exactly what its trainer does."""
    needs: str = ""
    """Its module, while it is being written."""


ALL = {
    "moshpit": Traits(Moshpit(group_size=3, local_steps=2)),
    # x flows from the root of the trees: all agree on the root's model. The step is R-FAST's own.
    "rfast": Traits(
        RFast(learning_rate=0.1), keeps_mean=False, plain_alone=False, needs="protocol.rfast"
    ),
    "fedavg": Traits(FedAvg(local_steps=2)),
    "ring": Traits(Ring(local_steps=2)),
    "random-groups": Traits(RandomGroups(group_size=3, local_steps=2)),
    "dpsgd": Traits(DPSGD(local_steps=2)),
    "adpsgd": Traits(ADPSGD(local_steps=2)),
    "sgp": Traits(SGP(local_steps=2)),
    "osgp": Traits(OSGP(local_steps=2), rounds_to_agree=80),
    "local": Traits(Local(local_steps=2), agrees=False),
}
# Where a peer's module is not there yet its properties cannot be tested; `test_nobody_is_left_out`
# fails as soon as this list and the algorithms differ.
NAMES = [
    name
    for name, traits in ALL.items()
    if not traits.needs or importlib.util.find_spec(f"flwr_moshpit.{traits.needs}")
]
EVERY = pytest.mark.parametrize("name", NAMES)


@dataclass(frozen=True)
class Box:
    """A device on which one example takes 10 ms."""

    flops_per_s: float = 1e11
    power_w: float = 10.0
    idle_w: float = 1.0
    link: Link = field(default=Link(1e6, 1e6, 0.005))


class StillTrainer(QuadraticTrainer):
    """Training changes nothing."""

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        return Trained(params, num_steps * self.num_examples(client))

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        return GradientResult(np.zeros_like(params), self.num_examples(client))


class Swarm:
    """An engine full of one algorithm's peers, and what they reported."""

    def __init__(
        self,
        name: str,
        size: int,
        trainer: QuadraticTrainer | None = None,
        *,
        rounds: int = ROUNDS,
        seed: int = 3,
        scattered: bool = False,
        jitter_s: float = 0.002,
    ) -> None:
        self.trainer = trainer or QuadraticTrainer(num_examples=10)
        self.trainer.prepare(size)
        self.reports: list[tuple[float, PeerId, Report]] = []
        self.rounds = rounds
        config = ALL[name].config
        self.peers = [PeerId(f"p{k:02d}") for k in range(size)]
        self.initial = {
            peer: self.trainer.initial_params(k if scattered else 0)
            for k, peer in enumerate([*self.peers, SERVER])
        }
        self.engine = Engine(
            seed=seed,
            network=Network.uniform(jitter_s=jitter_s),
            backend=InProcessBackend(self.trainer),
            cost=self.trainer.cost(),
            start=Start(rounds),
            delays=Delays(loss_s=(0.5, 1.5)),
        )
        self.engine.observe.append(self._observe)

        def factory(me: PeerInfo, view: View, rng: np.random.Generator, incarnation: int) -> Any:
            return build_machine(config, me, self.initial[me.peer], view, rng, incarnation)

        for peer in [*self.peers, *([SERVER] if config.needs_server else [])]:
            self.engine.add(peer, factory, PeerInfo(peer), Box())

    def _observe(self, now: float, peer: PeerId | None, report: Report) -> None:
        assert peer is not None
        self.reports.append((now, peer, report))

    def run(self, until_s: float = 600.0, faults_until_s: float = 0.0) -> Swarm:
        """To the end of all peers, and of all faults."""
        engine = self.engine
        engine.run(faults_until_s)
        engine.run(until_s, stop=lambda: engine.all_finished)
        # What is still on its way belongs to the mean too.
        engine.run(engine.now + 5.0)
        return self

    def hanging(self) -> list[PeerId]:
        return [peer for peer in self.engine.machines if peer not in self.engine.finished]

    def named(self, name: str, peer: PeerId | None = None) -> list[dict[str, Any]]:
        return [
            dict(report.values)
            for _, by, report in self.reports
            if report.name == name and peer in (None, by)
        ]

    def models(self) -> list[Vector]:
        return [machine.params for machine in self.engine.machines.values()]

    def mean(self) -> Vector:
        machines = list(self.engine.machines.values())
        weights = [machine.weight for machine in machines]
        return np.average([machine.params for machine in machines], axis=0, weights=weights)


def with_arrays(message: Message, change: Any) -> Message | None:
    """`message` with every array in it changed; None if it has none."""
    arrays = {
        field.name: change(getattr(message, field.name))
        for field in dataclasses.fields(message)  # type: ignore[arg-type]
        if isinstance(getattr(message, field.name), np.ndarray)
    }
    return dataclasses.replace(message, **arrays) if arrays else None  # type: ignore[type-var]


def test_nobody_is_left_out() -> None:
    assert set(ALL) == set(ALGORITHMS)
    for name, traits in ALL.items():
        assert type(traits.config) is ALGORITHMS[name]


def test_settings_of_no_algorithm_are_refused() -> None:
    me = PeerInfo(PeerId("p"))
    with pytest.raises(ConfigError, match="algorithm"):
        build_machine(object(), me, np.zeros(3), View({me.peer: me}), np.random.default_rng(1))


@EVERY
def test_one_seed_one_run(name: str) -> None:
    def digest(seed: int) -> str:
        trainer = QuadraticTrainer(num_examples=[5, 10, 20], noise=0.1)
        swarm = Swarm(name, 5, trainer, seed=seed, rounds=3)
        swarm.engine.schedule(0.5, lambda: swarm.engine.crash(PeerId("p02")))
        return swarm.run().engine.digest

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


@EVERY
def test_alone_it_trains_plainly(name: str) -> None:
    swarm = Swarm(name, 1).run()
    assert not swarm.hanging()
    x = swarm.initial[swarm.peers[0]]
    if ALL[name].plain_alone:
        for _ in range(ROUNDS):
            x = swarm.trainer.train(0, x, 2, 0).params
        for model in swarm.models():
            np.testing.assert_array_equal(model, x)
    else:
        reached = swarm.trainer.loss(0, swarm.models()[0])
        assert reached < swarm.trainer.loss(0, x)


@EVERY
@pytest.mark.parametrize("size", [2, 3, 8])
def test_everybody_gets_there(name: str, size: int) -> None:
    swarm = Swarm(name, size).run()
    assert swarm.hanging() == []
    assert swarm.named("refused") == []
    for peer in swarm.peers:
        rounds = [values["round"] for values in swarm.named("round", peer)]
        assert len(rounds) >= ROUNDS
        assert rounds == sorted(rounds)
    for values in swarm.named("round"):
        assert 0.0 <= values.get("coverage", 1.0) <= 1.0
        assert values.get("contributors", 0) >= 0
        assert values.get("wait_s", 0.0) >= 0
        assert values.get("allreduce_s", 0.0) >= 0


@EVERY
def test_a_later_start_lets_it_go_on(name: str) -> None:
    swarm = Swarm(name, 4, rounds=2).run()
    before = len(swarm.named("round", PeerId("p01")))
    for peer in swarm.engine.machines:
        swarm.engine.tell(peer, Start(5))
    # The Starts are on their way: until they are there everybody still counts as finished.
    swarm.engine.run(swarm.engine.now + 0.001)
    swarm.run()
    assert swarm.hanging() == []
    assert len(swarm.named("round", PeerId("p01"))) >= before + 3


@EVERY
def test_stop_ends_a_run_without_an_end(name: str) -> None:
    swarm = Swarm(name, 4)
    swarm.engine.start_event = Start(None)
    swarm.engine.run(3.0)
    rounds = len(swarm.named("round"))
    assert rounds > 0
    for peer in swarm.engine.machines:
        swarm.engine.tell(peer, Stop())
    swarm.engine.run(60.0)
    assert len(swarm.named("round")) <= rounds + 4 * 2


@EVERY
@pytest.mark.parametrize("victims", [["p00"], ["p03"], ["p00", "p01"], ["p02", "p05"]])
def test_a_crash_leaves_nobody_hanging(name: str, victims: list[str]) -> None:
    # Local steps take 0.2 s, so that these instants meet every stage of the first three rounds.
    for at_s in np.linspace(0.15, 0.7, 8):
        swarm = Swarm(name, 6)
        for k, victim in enumerate(victims):
            crash = swarm.engine.crash
            swarm.engine.schedule(at_s + 0.02 * k, lambda v=victim, c=crash: c(PeerId(v)))
        swarm.run()
        assert swarm.hanging() == [], f"crash at {at_s} s"
        assert len(swarm.engine.finished) == len(swarm.engine.machines)


@EVERY
@pytest.mark.parametrize("back_s", [0.1, 2.0, 8.0])
def test_a_peer_that_restarts_takes_part_again(name: str, back_s: float) -> None:
    for at_s in (0.1, 0.29):
        swarm = Swarm(name, 6, rounds=36)
        for k, victim in enumerate([PeerId("p00"), PeerId("p04")]):
            engine = swarm.engine
            engine.schedule(at_s + 0.02 * k, lambda v=victim, e=engine: e.crash(v))
            engine.schedule(at_s + back_s, lambda v=victim, e=engine: e.restart(v))
        swarm.run(faults_until_s=at_s + back_s + 0.1)
        assert swarm.hanging() == []
        assert len(swarm.engine.machines) == len(swarm.engine.finished) >= 6
        assert all(np.isfinite(model).all() for model in swarm.models())


@EVERY
def test_down_to_one_and_back(name: str) -> None:
    swarm = Swarm(name, 4, rounds=36)
    engine = swarm.engine
    for k, peer in enumerate(swarm.peers[1:]):
        engine.schedule(1.0 + 0.5 * k, lambda p=peer: engine.crash(p))
        engine.schedule(6.0 + 0.5 * k, lambda p=peer: engine.restart(p))
    swarm.run(faults_until_s=8.0)
    assert swarm.hanging() == []
    assert len(swarm.engine.finished) == len(swarm.engine.machines) >= 4


@EVERY
def test_a_straggler_comes_along(name: str) -> None:
    swarm = Swarm(name, 5)
    swarm.engine.schedule(0.0, lambda: swarm.engine.slow_down(PeerId("p02"), 10.0))
    swarm.run()
    assert swarm.hanging() == []


BAD_ARRAYS = {
    "NaN": lambda a: np.full_like(a, np.nan),
    "infinite": lambda a: np.full_like(a, np.inf),
    "huge": lambda a: np.full_like(a, np.finfo(a.dtype).max),
    "short": lambda a: a[:-1],
    "float32": lambda a: a.astype(np.float32),
}


@EVERY
@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_what_cannot_be_averaged_is_refused(name: str, kind: str) -> None:
    liar = PeerId("p03")
    swarm = Swarm(name, 6)
    lies = []

    def lie(now: float, src: PeerId, dst: PeerId, message: Message) -> Replace | None:
        bad = with_arrays(message, BAD_ARRAYS[kind]) if src == liar else None
        if bad is None:
            return None
        lies.append(dst)
        return Replace(bad)

    swarm.engine.interceptors.append(lie)
    swarm.run()
    assert swarm.hanging() == []
    honest = {peer: m for peer, m in swarm.engine.machines.items() if peer != liar}
    for machine in honest.values():
        assert np.isfinite(machine.params).all()
        assert np.abs(machine.params).max() < 100
    refused = [
        report.values["peer"]
        for _, peer, report in swarm.reports
        if report.name == "refused" and peer != liar
    ]
    assert bool(refused) == bool(lies)
    assert set(refused) <= {liar}


@EVERY
@pytest.mark.parametrize("weight", [math.nan, -1.0, math.inf, 1e12])
def test_what_nobody_can_weigh_is_refused(name: str, weight: float) -> None:
    liar = PeerId("p03")
    swarm = Swarm(name, 6)
    lies = []

    def lie(now: float, src: PeerId, dst: PeerId, message: Message) -> Replace | None:
        fields = {field.name for field in dataclasses.fields(message)}  # type: ignore[arg-type]
        claim = fields & {"weight", "num_examples"}
        if src != liar or not claim:
            return None
        lies.append(dst)
        return Replace(dataclasses.replace(message, **dict.fromkeys(claim, weight)))  # type: ignore[type-var]

    swarm.engine.interceptors.append(lie)
    swarm.run()
    assert swarm.hanging() == []
    refused = [values["peer"] for values in swarm.named("refused")]
    assert bool(refused) == bool(lies)
    assert set(refused) <= {liar}
    for model in swarm.models():
        assert np.isfinite(model).all()
        assert np.abs(model).max() < 100


@EVERY
def test_params_are_read_only_and_of_their_dtype(name: str) -> None:
    for dtype in ("float32", "float64"):
        swarm = Swarm(name, 4, QuadraticTrainer(num_examples=10, dtype=dtype))
        while swarm.hanging() or not swarm.engine.delivered:
            assert swarm.engine.step()
            for model in swarm.models():
                assert not model.flags.writeable
                assert model.dtype == np.dtype(dtype)


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | np.ndarray)


@EVERY
def test_snapshots_hold_what_a_file_can_hold(name: str) -> None:
    swarm = Swarm(name, 4, rounds=4)
    states = []

    def keep() -> None:
        states.extend(machine.snapshot() for machine in swarm.engine.machines.values())

    for at_s in np.linspace(0.0, 1.0, 21):
        swarm.engine.schedule(at_s, keep)
    swarm.run()
    keep()
    assert len(states) >= 4 * 22
    assert all(map(is_plain, states))


@EVERY
def test_a_snapshot_starts_a_new_incarnation(name: str) -> None:
    swarm = Swarm(name, 2).run()
    peer = swarm.peers[0]
    before = swarm.engine.machines[peer]
    me = PeerInfo(peer, incarnation=1)
    again = build_machine(
        ALL[name].config,
        me,
        swarm.initial[peer],
        View({peer: me}),
        np.random.default_rng(1),
        incarnation=1,
        state=before.snapshot(),
    )
    np.testing.assert_array_equal(again.params, before.params)


@EVERY
def test_the_mean_is_kept_where_that_is_promised(name: str) -> None:
    if not ALL[name].keeps_mean:
        assert name in ("rfast",)
        return
    swarm = Swarm(name, 7, StillTrainer(num_examples=10), scattered=True, rounds=9)
    before = [swarm.initial[SERVER]] if name == "fedavg" else list(swarm.initial.values())[:-1]
    swarm.run()
    np.testing.assert_allclose(swarm.mean(), np.mean(before, axis=0), rtol=1e-12, atol=1e-12)


@EVERY
def test_examples_weigh(name: str) -> None:
    if not ALL[name].keeps_mean or name == "fedavg":
        assert name in ("rfast", "fedavg")
        return
    sizes = [10, 20, 40, 5, 80]
    swarm = Swarm(name, 5, StillTrainer(num_examples=sizes), scattered=True, rounds=9)
    before = np.average(list(swarm.initial.values())[:-1], axis=0, weights=sizes)
    swarm.run()
    np.testing.assert_allclose(swarm.mean(), before, rtol=1e-12, atol=1e-12)


@EVERY
def test_without_training_all_agree(name: str) -> None:
    if not ALL[name].agrees:
        assert name == "local"
        return
    rounds = ALL[name].rounds_to_agree
    swarm = Swarm(name, 7, StillTrainer(num_examples=10), scattered=True, rounds=rounds).run()
    spread = np.ptp(swarm.models(), axis=0).max()
    assert spread < 1e-6


@pytest.mark.parametrize("name", ["sgp", "osgp"])
def test_push_sums_weights_add_up(name: str) -> None:
    swarm = Swarm(name, 6, QuadraticTrainer(num_examples=[10, 20, 30]), rounds=9)
    swarm.engine.schedule(0.0, lambda: swarm.engine.slow_down(PeerId("p01"), 3.0))
    swarm.run()
    total = sum(machine.weight for machine in swarm.engine.machines.values())
    assert total == pytest.approx(2 * (10 + 20 + 30) * 2, rel=1e-12)


@EVERY
def test_everybody_gets_near_the_optimum(name: str) -> None:
    trainer = QuadraticTrainer(num_examples=10, lr=0.1, condition=4.0)
    swarm = Swarm(name, 6, trainer, rounds=80).run(until_s=6000)
    x0 = swarm.initial[swarm.peers[0]]
    goal = trainer.optimum()
    worst = max(float(np.linalg.norm(model - goal)) for model in swarm.models())
    if ALL[name].agrees:
        assert worst < 0.25 * np.linalg.norm(x0 - goal)
    else:
        # What averaging is for: alone each peer ends at an optimum of its own.
        assert worst > 0.25 * np.linalg.norm(x0 - goal)


def with_random_faults(name: str, seed: int) -> Swarm:
    """Up to eight crashes with restarts, slow-downs and partitions, anywhere in the run."""
    rng = np.random.default_rng([seed, 5])
    size = int(rng.integers(2, 8))
    swarm = Swarm(name, size, seed=seed, rounds=12)
    engine = swarm.engine
    last_s = 0.0
    for _ in range(rng.integers(1, 9)):
        at_s = rng.uniform(0, 4)
        over_s = at_s + rng.choice([0.05, 0.5, 2, 5])
        peer = swarm.peers[rng.integers(size)]
        side = [other for other in swarm.peers if rng.random() < 0.5]
        match rng.choice(["crash", "crash", "slow", "partition"]):
            case "crash":
                engine.schedule(at_s, lambda p=peer: engine.crash(p))
                engine.schedule(over_s, lambda p=peer: engine.restart(p))
            case "slow":
                engine.schedule(at_s, lambda p=peer: engine.slow_down(p, 5.0))
            case _:
                engine.schedule(at_s, lambda s=side: engine.partition([s]))
                engine.schedule(over_s, engine.heal)
        last_s = max(last_s, over_s)
    return swarm.run(faults_until_s=last_s + 0.1)


def check_after_faults(swarm: Swarm) -> None:
    assert swarm.hanging() == []
    assert swarm.named("refused") == []
    assert len(swarm.engine.machines) >= len(swarm.peers)
    assert all(np.isfinite(model).all() for model in swarm.models())


@EVERY
@pytest.mark.parametrize("seed", range(8))
def test_random_faults_leave_nobody_hanging(name: str, seed: int) -> None:
    check_after_faults(with_random_faults(name, seed))


@EVERY
@pytest.mark.slow
def test_many_random_faults_leave_nobody_hanging(name: str) -> None:
    for seed in range(8, 150):
        check_after_faults(with_random_faults(name, seed))
