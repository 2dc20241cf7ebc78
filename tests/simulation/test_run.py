"""Simulation and History, on a trainer with a known optimum and on machines that do little."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flwr_moshpit
from flwr_moshpit import ConfigError, FedAvg, Fleet, History, Moshpit, Network, RFast, Simulation
from flwr_moshpit.errors import TrainerError
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol.machine import (
    Compute,
    ComputeDone,
    Effect,
    Evaluated,
    Event,
    Finish,
    JobId,
    LocalSteps,
    PeerId,
    PeerInfo,
    Report,
    Start,
    State,
    Trained,
    Vector,
    View,
)
from flwr_moshpit.simulation import run as run_module
from flwr_moshpit.simulation.advice import batch_max, wire
from flwr_moshpit.simulation.meter import Rounds, Spacing, swarm_mean
from flwr_moshpit.simulation.run import peer_ids
from flwr_moshpit.trainer import Cost
from tests.trainers import QuadraticTrainer


@dataclass(frozen=True)
class Alone:
    """Settings of `AloneMachine`."""

    local_steps: int = 1


class AloneMachine:
    """Trains round after round and averages with nobody."""

    deadline = None

    def __init__(self, info: PeerInfo, params: Vector, steps: int) -> None:
        self.info = info
        self.params = params
        self.weight = 0.0
        self.round = 0
        self.steps = steps
        self.until_round: int | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Start):
            self.until_round = event.until_round
            return self._next()
        if isinstance(event, ComputeDone):
            assert isinstance(event.result, Trained)
            self.params = event.result.params
            self.weight = float(event.result.num_examples)
            self.round += 1
            report = Report("round", {"round": self.round - 1, "examples": int(self.weight)})
            return [report, *self._next()]
        return []

    def _next(self) -> list[Effect]:
        if self.round == self.until_round:
            return [Finish(self.params)]
        return [Compute(JobId(self.round), LocalSteps(self.params, self.steps))]

    def snapshot(self) -> State:
        return {}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[AloneMachine]:
    """Simulations run `AloneMachine`s, which are listed here."""
    made: list[AloneMachine] = []

    def build(
        algorithm: Alone,
        info: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        incarnation: int,
        schema: bytes,
    ) -> AloneMachine:
        made.append(AloneMachine(info, params, algorithm.local_steps))
        return made[-1]

    monkeypatch.setattr(run_module, "build_machine", build)
    return made


def fedavg(seed: int = 1, peers: int = 5, observe: Observer | None = None, **more: Any) -> History:
    trainer = QuadraticTrainer(num_examples=[3, 7, 20], lr=0.5)
    settings: dict[str, Any] = {"peers": peers, "seed": seed, **more}
    return Simulation(FedAvg(local_steps=1), trainer, observe=observe, **settings).run(rounds=40)


def test_fedavg_reaches_the_optimum_of_the_weighted_sum() -> None:
    trainer = QuadraticTrainer(num_examples=[3, 7, 20], lr=0.5)
    simulation = Simulation(FedAvg(local_steps=1), trainer, peers=5, seed=1)
    history = simulation.run(rounds=300)
    assert np.linalg.norm(history.params["x"] - trainer.optimum()) < 1e-9
    assert not history.interrupted
    assert history.points[-1].consensus_distance == 0
    assert history.points[0].loss == pytest.approx(
        trainer.evaluate(trainer.initial_params(1)).metrics["loss"]
    )
    assert history.loss == pytest.approx(trainer.evaluate(trainer.optimum()).metrics["loss"])


def test_moshpit_runs_to_its_end_and_its_last_sweep_agrees() -> None:
    trainer = QuadraticTrainer()
    simulation = Simulation(Moshpit(group_size=3, local_steps=2), trainer, peers=9, seed=1)
    history = simulation.run(rounds=4)
    last = history.points[-1]
    assert last.round == 4
    assert last.consensus_relative is not None
    assert last.consensus_relative < 1e-12
    assert {record.peer for record in history.rounds} == set(simulation.peers)


def test_one_seed_one_digest() -> None:
    first = fedavg(seed=1)
    assert first.digest == fedavg(seed=1).digest
    assert first.digest != fedavg(seed=2).digest


def test_a_simulation_can_be_run_again() -> None:
    simulation = Simulation(FedAvg(), QuadraticTrainer(noise=0.1), peers=3, seed=4)
    assert simulation.run(rounds=5).digest == simulation.run(rounds=5).digest


def test_observers_see_everything_and_change_nothing() -> None:
    seen: list[tuple[float, PeerId | None, Report]] = []
    history = fedavg(observe=lambda now, peer, report: seen.append((now, peer, report)))
    assert seen == list(history.events)
    assert history.digest == fedavg().digest == fedavg(evaluate_every=7).digest
    swarm = [report.values for _, peer, report in seen if report.name == "swarm"]
    assert {"round", "alive", "loss", "consensus_distance"} <= swarm[-1].keys()


def test_the_mean_is_weighted_over_the_living(alone: list[AloneMachine]) -> None:
    trainer = QuadraticTrainer(num_examples=[3, 7, 20])
    simulation = Simulation(Alone(), trainer, peers=3, faults="crash peer=2 at round 2")
    history = simulation.run(rounds=4)
    living = alone[:2]
    expected = np.sum([machine.weight * machine.params for machine in living], axis=0) / 10.0
    np.testing.assert_allclose(history.params["x"], expected, rtol=1e-14)
    last = history.points[-1]
    assert last.alive == 2
    distance = np.sqrt(np.mean([np.sum((m.params - expected) ** 2) for m in living]))
    assert last.consensus_distance == pytest.approx(distance)
    assert last.consensus_relative == pytest.approx(distance / np.linalg.norm(expected))
    assert last.loss == pytest.approx(trainer.evaluate(expected).metrics["loss"])


def test_when_nobody_lives_the_last_mean_stands(alone: list[AloneMachine]) -> None:
    trainer = QuadraticTrainer()
    simulation = Simulation(Alone(), trainer, peers=2, faults="crash 100% at 3 s", evaluate_every=1)
    history = simulation.run(rounds=10**6)
    assert history.points[-1].alive == 0
    assert history.points[-1].consensus_distance is None
    assert history.points[-1].loss == history.points[-2].loss
    assert 3.0 <= history.virtual_s < 3.1


def test_peers_are_told_what_their_devices_can_do(alone: list[AloneMachine]) -> None:
    fleet = Fleet.mix({"jetson-nano": 0.5, "cloud-t4@lte": 0.5}, 2)
    Simulation(Alone(), QuadraticTrainer(), fleet=fleet).run(rounds=1)
    for machine, device in zip(alone, fleet, strict=True):
        assert machine.info.speed == pytest.approx(device.flops_per_s / 1e9)
        assert machine.info.uplink_bytes_per_s == device.link.uplink_bytes_per_s
    alone.clear()
    network = Network.uniform(uplink_bytes_per_s=123.0)
    Simulation(Alone(), QuadraticTrainer(), fleet=fleet, network=network).run(rounds=1)
    assert [machine.info.uplink_bytes_per_s for machine in alone] == [123.0, 123.0]


def test_points_span_the_run_and_never_go_back() -> None:
    history = fedavg()
    times = [point.t for point in history.points]
    assert times[0] == 0
    assert times[-1] == history.virtual_s
    assert times == sorted(set(times))
    for name in ("round", "bytes", "joules"):
        values = [getattr(point, name) for point in history.points]
        assert values == sorted(values)
    assert [point.alive for point in history.points] == [5] * len(times)
    assert (history.bytes, history.joules) == (history.points[-1].bytes, history.points[-1].joules)


def test_evaluation_every_so_many_rounds(alone: list[AloneMachine]) -> None:
    history = Simulation(Alone(), QuadraticTrainer(), peers=3, evaluate_every=4).run(rounds=10)
    assert [point.round for point in history.points] == [0, 4, 8, 10]


def test_evaluations_by_the_clock_are_at_fixed_instants(
    alone: list[AloneMachine],
) -> None:
    trainer = QuadraticTrainer(flops_per_example=1e9)
    simulation = Simulation(Alone(), trainer, peers=3, evaluate_every_s=0.1)
    times = [point.t for point in simulation.run(until=0.75).points]
    assert times == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75])


def test_evaluation_stays_a_small_part_of_the_work(alone: list[AloneMachine]) -> None:
    class Slow(QuadraticTrainer):
        evaluations = 0

        def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
            self.evaluations += 1
            return Evaluated(1000, {"accuracy": 0.5})

    trainer = Slow(num_examples=10)
    # Forward on 1,000 examples is the work of training on 333; 20 times that are 6,667.
    history = Simulation(Alone(), trainer, peers=10).run(rounds=1000)
    trained = 1000 * 10 * 10
    assert trainer.evaluations == len(history.points)
    assert trained / 6667 * 0.8 < trainer.evaluations < trained / 6667 + 3
    assert history.accuracy == 0.5


def test_until_ends_a_run_without_rounds(alone: list[AloneMachine]) -> None:
    simulation = Simulation(Alone(), QuadraticTrainer(num_examples=[10, 200]), peers=2)
    history = simulation.run(until="2 min")
    assert history.virtual_s == 120.0
    assert {record.peer for record in history.rounds} == set(simulation.peers)
    assert simulation.run(until=7.5).virtual_s == 7.5


def test_ctrl_c_loses_nothing(alone: list[AloneMachine], tmp_path: Path) -> None:
    def interrupt(now: float, peer: PeerId | None, report: Report) -> None:
        if report.name == "round" and report.values["round"] == 5:
            signal.raise_signal(signal.SIGINT)

    simulation = Simulation(Alone(), QuadraticTrainer(), peers=2, observe=interrupt)
    history = simulation.run(rounds=1000, out=tmp_path)
    assert history.interrupted
    assert 5 <= history.points[-1].round <= 6
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"] is True
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == len(history.events)


def test_crashes_and_returns_show_in_the_curve(alone: list[AloneMachine]) -> None:
    simulation = Simulation(
        Alone(),
        QuadraticTrainer(num_examples=100),
        peers=4,
        faults=["crash peer=0,1 at 5 s, back after 5 s"],
        evaluate_every=1,
    )
    history = simulation.run(until=20)
    alive = {point.t: point.alive for point in history.points}
    assert {count for t, count in alive.items() if t < 5} == {4}
    assert {count for t, count in alive.items() if 5 < t < 10} == {2}
    assert {count for t, count in alive.items() if t > 10} == {4}
    assert len(alone) == 6


def test_a_fault_at_a_round_strikes_after_that_round(alone: list[AloneMachine]) -> None:
    history = Simulation(
        Alone(), QuadraticTrainer(), peers=3, faults="crash peer=1 at round 4"
    ).run(rounds=8)
    rounds = [record.round for record in history.rounds if record.peer == "peer-0001"]
    assert rounds == [0, 1, 2, 3]


def test_a_slower_peer_does_less_in_the_same_time(alone: list[AloneMachine]) -> None:
    simulation = Simulation(Alone(), QuadraticTrainer(), peers=2, faults="slow 10x peer=1")
    history = simulation.run(until=60)
    counts = [sum(record.peer == peer for record in history.rounds) for peer in simulation.peers]
    assert counts[0] == pytest.approx(10 * counts[1], abs=10)


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = Simulation(FedAvg(), QuadraticTrainer(), peers=3)
    simulation.run(rounds=10)
    assert not any(capsys.readouterr())
    simulation.run(rounds=10, progress=True)
    assert "round 10/10" in capsys.readouterr().err


def test_what_is_written(tmp_path: Path) -> None:
    trainer = QuadraticTrainer()
    simulation = Simulation(FedAvg(), trainer, peers=3, seed=2, faults="slow 2x peer=0")
    history = simulation.run(rounds=5, out=tmp_path / "streamed")
    history.save(tmp_path / "saved")
    names = ["events.jsonl", "model.npz", "summary.json"]
    for name in names:
        streamed = (tmp_path / "streamed" / name).read_bytes()
        assert streamed == (tmp_path / "saved" / name).read_bytes()
    summary = json.loads((tmp_path / "saved" / "summary.json").read_text())
    assert summary["digest"] == history.digest
    assert summary["virtual_s"] == history.virtual_s
    assert summary["bytes"] == history.bytes > 0
    assert summary["joules"] == history.joules > 0
    assert summary["accuracy"] is None
    assert (summary["algorithm"], summary["peers"], summary["seed"]) == ("FedAvg", 3, 2)
    assert summary["fleet"] == {"jetson-orin-nano": 3}
    assert summary["faults"] == ["slow 2x peer=0"]
    assert summary["rounds"] == 5
    with np.load(tmp_path / "saved" / "model.npz") as arrays:
        np.testing.assert_array_equal(arrays["x"], history.params["x"])


def test_the_picture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    history = fedavg()
    history.save(tmp_path)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert not caplog.records
    assert len(history.plot("loss").axes) == 1
    with pytest.raises(ConfigError, match="metric 'perplexity' was not measured; there are"):
        history.plot("perplexity")


def test_without_matplotlib_the_rest_is_written_and_a_hint_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*arguments: object) -> None:
        raise ConfigError("plots need matplotlib: pip install 'flwr-moshpit[plot]'")

    monkeypatch.setattr("flwr_moshpit.simulation.history.save_png", missing)
    fedavg().save(tmp_path)
    assert (tmp_path / "summary.json").exists()
    assert "flwr-moshpit[plot]" in caplog.text


def test_the_table_is_short_and_ends_with_the_digest() -> None:
    history = fedavg()
    lines = history.table(rows=5).splitlines()
    assert len(lines) == 1 + 5 + 3
    assert history.digest in lines[-1]


def test_another_models_cost_is_on_clock_and_links(alone: list[AloneMachine]) -> None:
    def run(cost_as: str | None) -> History:
        trainer = QuadraticTrainer(num_examples=8, flops_per_example=1e6)
        return Simulation(Alone(), trainer, peers=2, cost_as=cost_as).run(rounds=1)

    # A step of ResNet-50 is 32 images of 24.6 GFLOP.
    assert run(None).virtual_s == pytest.approx(8e6 / (1.28e12 * 0.17))
    assert run("resnet50").virtual_s == pytest.approx(32 * 24.6e9 / (1.28e12 * 0.17))


def test_another_models_parameters_are_on_the_wire() -> None:
    def sent(cost_as: str | None) -> int:
        trainer = QuadraticTrainer(dim=8, dtype="float32")
        return Simulation(FedAvg(), trainer, peers=1, cost_as=cost_as).run(rounds=1).bytes

    # The model, the update and the next model.
    header_bytes = sent(None) - 3 * 8 * 4
    assert 0 < header_bytes < 1000
    assert sent("resnet50") == header_bytes + 3 * 4 * 25_600_000


def test_peers_are_as_patient_and_share_as_finely_as_another_models_size_asks_for() -> None:
    """25.6 M parameters on 100 Mbit/s: every member sends 2 (M - 1) / M of them, once."""
    network = Network.uniform(uplink_bytes_per_s=12.5e6)
    trainer = QuadraticTrainer(dim=64)
    simulation = Simulation(
        Moshpit(group_size=8),
        trainer,
        peers=8,
        network=network,
        cost_as="resnet50",
        dtype="float32",
    )
    history = simulation.run(rounds=2)
    vector_bytes = 25_600_000 * 4
    num_groups = 2 + 1
    assert history.bytes == pytest.approx(num_groups * 8 * 2 * 7 / 8 * vector_bytes, rel=0.01)
    ideal_s = 2 * 7 / 8 * vector_bytes / 12.5e6
    assert all(r.values["allreduce_s"] < 1.1 * ideal_s for r in history.rounds)


def test_dtype_is_of_the_averaged_vectors() -> None:
    history = fedavg(dtype="float32")
    assert history.params["x"].dtype == np.float32
    assert history.settings["dtype"] == "float32"


def test_a_trainer_that_raises_is_named(alone: list[AloneMachine]) -> None:
    class Broken(QuadraticTrainer):
        def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
            if client == 1:
                raise ValueError("no such column")
            return super().train(client, params, num_steps, seed)

    with pytest.raises(TrainerError, match=r"client 1 .*no such column"):
        Simulation(Alone(), Broken(), peers=2).run(rounds=2)


def test_an_evaluation_that_raises_is_named(alone: list[AloneMachine]) -> None:
    class Broken(QuadraticTrainer):
        def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
            raise ValueError("no test data")

    with pytest.raises(TrainerError, match=r"evaluation of the mean model failed: .*no test data"):
        Simulation(Alone(), Broken(), peers=2).run(rounds=2)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda t: Simulation(Alone(), t), "the number of peers is missing"),
        (lambda t: Simulation(Alone(), t, peers=0), "peers must be at least 1, not 0"),
        (
            lambda t: Simulation(Alone(), t, fleet=Fleet.uniform("jetson-nano", 3), peers=4),
            "peers is 4, but the fleet has 3 devices",
        ),
        (lambda t: Simulation(Alone(), t, "toaster", peers=4), "device 'toaster' is unknown"),
        (lambda t: Simulation(Alone(), t, peers=2, faults="explode"), "'explode' is not underst"),
        (
            lambda t: Simulation(Alone(), t, peers=2, faults="crash peer=2 at 1 s"),
            "peer=2 does not exist",
        ),
        (lambda t: Simulation(Alone(), t, peers=2, seed=-1), "seed must not be negative"),
        (lambda t: Simulation(Alone(), t, peers=2, cost_as="gpt"), "cost-as: 'gpt' is neither"),
        (lambda t: Simulation(Alone(), t, peers=2, evaluate_every=0), "evaluate_every must be"),
        (lambda t: Simulation(Alone(), t, peers=2).run(), "a run needs an end"),
        (lambda t: Simulation(Alone(), t, peers=2).run(rounds=-1), "rounds must not be negative"),
        (lambda t: Simulation(Alone(), t, peers=2).run(until="soon"), "until: 'soon' is no dur"),
        (lambda t: Simulation(Alone(), t, peers=2).run(until=0), "until must be above 0"),
        (
            lambda t: Simulation(Alone(), QuadraticTrainer(memory_bytes=10**10), peers=2),
            "training needs 10,000,000,000 bytes of memory and jetson-orin-nano has 8,000,000,000",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    make: Callable[[QuadraticTrainer], object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make(QuadraticTrainer())
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_explain_says_what_follows_from_peers_model_and_profiles() -> None:
    fleet = Fleet.parse("jetson-nano:0.6,jetson-orin-nano:0.3,cloud-t4:0.1", 90)
    trainer = QuadraticTrainer(dim=1000)
    rows = Simulation(Moshpit(local_steps=20), trainer, fleet=fleet).explain()
    told = {setting: (value, why) for setting, value, why in rows}
    assert told["peers"][0] == "90"
    assert told["group-size"][0] == "10"
    assert told["grid"] == (
        "10 x 9",
        "averages through all peers in 2 rounds; every cell has a peer",
    )
    assert "8 kB" in told["model"][1]
    # 20 steps of 10 examples of 1 GFLOP at 0.236 x 0.17 TFLOP/s.
    assert told["local time, jetson-nano"][0] == "5 s"
    assert told["deadline"][0] == "1 s for a silent member"
    assert {"memory", "shares", "part-bytes", "all-reduce"} <= told.keys()


def test_explain_of_stand_ins_and_of_time_instead_of_steps() -> None:
    trainer = QuadraticTrainer()
    rows = Simulation(Moshpit(group_size=3, local_s=30.0), trainer, peers=5).explain()
    told = {setting: (value, why) for setting, value, why in rows}
    assert told["grid"][0] == "3 x 2"
    assert "the fastest peer stands in" in told["grid"][1]
    assert told["local time, jetson-orin-nano"][0] == "30 s"
    assert "652 steps" in told["local time, jetson-orin-nano"][1]


def test_explain_says_what_suits_each_kind_of_device() -> None:
    fleet = Fleet.parse("jetson-nano@lte:0.6,jetson-orin-nano:0.3,cloud-t4:0.1", 10)
    trainer = QuadraticTrainer(dim=1000)
    rows = Simulation(RFast(local_steps=20), trainer, fleet=fleet).explain()
    told = {setting: (value, why) for setting, value, why in rows}
    assert told["from the root down"][0] == "cloud-t4, jetson-orin-nano, jetson-nano@lte"
    # 8 kB are sent in 10 ms, and 20 steps take 5 s.
    assert told["wire, jetson-nano@lte"][0] == "as it is"
    rows = Simulation(RFast(topology="ring"), trainer, fleet=fleet).explain()
    assert "from the root down" not in {setting for setting, *_ in rows}


def test_batch_and_wire_follow_from_memory_and_line() -> None:
    [device] = Fleet.uniform("jetson-nano", 1)
    # 4 GB: half of it holds 3 x 0.1 GB and 1.7 GB of activations, 1 MB each.
    cost = Cost(1e9, examples_per_step=10, memory_bytes=310_000_000)
    assert batch_max(device, cost, 1e8) == 1024
    assert batch_max(device, replace(cost, memory_bytes=300_000_000), 1e8) is None
    assert wire(1e6, 1e6, local_s=1.0) == "none"
    assert wire(1e6, 2e6, local_s=1.0) == "float16"
    assert wire(1e6, 4.1e6, local_s=1.0) == "int8"


def test_explain_of_another_algorithm_lists_its_settings() -> None:
    rows = Simulation(FedAvg(fraction=0.5), QuadraticTrainer(), peers=5).explain()
    assert ("fraction", "0.5", "as set") in rows


def test_ids_sort_as_their_numbers_do() -> None:
    assert peer_ids(2) == ["peer-0000", "peer-0001"]
    many = peer_ids(12_000)
    assert many == sorted(many)


def test_a_mean_of_no_weight_is_none(alone: list[AloneMachine]) -> None:
    machine = AloneMachine(PeerInfo(PeerId("p")), np.ones(3), 1)
    assert swarm_mean([machine]) is None
    assert swarm_mean([]) is None


def test_the_median_peer_of_the_living_counts() -> None:
    a, b, c = peers = [PeerId(name) for name in "abc"]
    rounds = Rounds(peers)
    rounds.complete(a, 5)
    assert not rounds.may_have_advanced(3)
    assert rounds.advance(peers) is None
    rounds.complete(b, 2)
    assert rounds.may_have_advanced(3)
    assert rounds.advance(peers) == 2
    assert rounds.advance(peers) is None
    assert rounds.median([a, c]) == 5
    assert rounds.median([]) == 0
    rounds.complete(PeerId("server"), 9)
    assert rounds.median(peers) == 2


def test_spacing_by_rounds_and_by_work() -> None:
    by_rounds = Spacing(3, 1.0)
    by_rounds.evaluated(4, 0.0, 10)
    assert [by_rounds.is_due(r, 0.0) for r in (6, 7)] == [False, True]
    by_work = Spacing(None, 3.0)
    by_work.evaluated(0, 100.0, 10)
    # 10 examples forward are 10 FLOPs, a twentieth of 200.
    assert [by_work.is_due(1, flops) for flops in (299.0, 300.0)] == [False, True]


def test_public_names_are_there() -> None:
    for name in flwr_moshpit.__all__:
        if name != "TorchTrainer":
            assert getattr(flwr_moshpit, name).__name__ == name
    assert set(flwr_moshpit.__all__) <= set(dir(flwr_moshpit))
    with pytest.raises(AttributeError, match="no attribute 'Mosphit'"):
        flwr_moshpit.Mosphit  # noqa: B018


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing() -> None:
    assert fedavg(workers=2).digest == fedavg(workers=0).digest
