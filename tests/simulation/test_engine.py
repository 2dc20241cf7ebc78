"""The engine: order, timers, digests, faults, interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.errors import ConfigError, LocalProtocolError
from flwr_moshpit.protocol.machine import (
    Compute,
    ComputeDone,
    Effect,
    Event,
    Finish,
    JobId,
    LinkLost,
    LocalSteps,
    PeerId,
    PeerInfo,
    Received,
    Report,
    Send,
    Start,
    TimerFired,
    ViewChanged,
)
from flwr_moshpit.simulation.backend import trainer_backend
from flwr_moshpit.simulation.network import Network
from tests.simulation.recorder import Box, Letter, Postcard, Recorder, Swarm, started
from tests.trainers import QuadraticTrainer

ROOT = Path(__file__).parents[2]


class TestDelivery:
    def test_start_comes_first_and_once(self) -> None:
        swarm = Swarm(3, start=Start(until_round=7))
        swarm.run()
        for k in range(3):
            assert swarm[k].log == [(0.0, Start(until_round=7))]

    def test_what_happens_at_one_instant_happens_in_the_order_of_scheduling(self) -> None:
        swarm = started(1)
        happened: list[int] = []
        for number in range(20):
            swarm.at(1.0, happened.append, number)
        swarm.at(0.5, happened.append, -1)
        swarm.run()
        assert happened == [-1, *range(20)]

    def test_effects_are_carried_out_in_order(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.0))
        seen: list[str] = []
        swarm.engine.observe.append(lambda now, peer, report: seen.append(report.name))
        swarm.engine.interceptors.append(lambda *call: seen.append(f"letter {call[3].number}"))
        to = swarm.peers[1]
        swarm.do(0, Report("a", {}), Send(to, Letter(1)), Report("b", {}), Send(to, Letter(2)))
        swarm.run()
        assert seen == ["a", "letter 1", "b", "letter 2"]
        assert swarm[1].numbers() == [1, 2]

    def test_a_letter_to_oneself_arrives_as_an_event_of_its_own(self) -> None:
        swarm = started(1)
        swarm.send(0, 0, Letter(1), Letter(2))
        swarm.run()
        assert swarm[0].numbers() == [1, 2]
        assert swarm[0].times(Received) == [0.0, 0.0]
        assert swarm.engine.usage(swarm.peers[0]).sent_bytes == 0

    def test_step_delivers_one_event(self) -> None:
        swarm = Swarm(2)
        assert swarm.engine.step()
        assert (len(swarm[0].log), len(swarm[1].log)) == (1, 0)
        assert swarm.engine.step()
        assert not swarm.engine.step()
        assert swarm.engine.delivered == 2

    def test_run_pauses_at_a_time_and_goes_on(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=1.0))
        swarm.send(0, 1, Letter(1))
        swarm.run(0.5)
        assert swarm.engine.now == 0.5
        assert swarm[1].numbers() == []
        swarm.run()
        assert swarm[1].numbers() == [1]

    def test_run_pauses_when_it_is_told_to(self) -> None:
        def reply(machine: Recorder, event: Event, now: float) -> Sequence[Effect]:
            if isinstance(event, Received) and isinstance(event.message, Letter):
                return [Send(event.src, Letter(event.message.number + 1))]
            return []

        swarm = started(2, reply)
        swarm.send(0, 1, Letter(0))
        swarm.engine.run(stop=lambda: len(swarm[1].numbers()) == 5)
        assert swarm[1].numbers() == [0, 2, 4, 6, 8]

    def test_finish_is_kept_until_the_peer_starts_again_or_dies(self) -> None:
        swarm = started(2)
        for k in range(2):
            swarm.do(k, Finish(np.full(1, k)))
        swarm.run()
        assert swarm.engine.all_finished
        assert swarm.engine.finished[swarm.peers[1]] == 1
        swarm.engine.tell(swarm.peers[0], Start())
        swarm.run()
        assert not swarm.engine.all_finished
        swarm.engine.crash(swarm.peers[0])
        assert swarm.engine.all_finished

    def test_what_is_no_effect_is_a_bug_with_a_name(self) -> None:
        swarm = started(1)
        swarm.do(0, "hello")  # type: ignore[arg-type]
        with pytest.raises(LocalProtocolError, match="p00 returned str"):
            swarm.run()


class TestTimers:
    def test_fires_when_the_deadline_is_due(self) -> None:
        swarm = started(1)
        swarm[0].deadline = 2.5
        swarm.do(0)
        swarm.at(1.0, swarm.do, 0)
        swarm.run(2.0)
        assert swarm[0].times(TimerFired) == [0.0, 1.0]
        swarm[0].react = _disarm
        swarm.run()
        assert swarm[0].times(TimerFired) == [0.0, 1.0, 2.5]

    def test_a_deadline_that_is_put_off_does_not_fire_early(self) -> None:
        swarm = started(1, _disarm_late)
        swarm[0].deadline = 1.0
        swarm.do(0)
        swarm.run(0.5)
        swarm[0].deadline = 3.0
        swarm.run()
        assert swarm[0].times(TimerFired) == [0.0, 3.0]

    def test_a_deadline_that_comes_nearer_fires_once(self) -> None:
        swarm = started(1, _disarm_late)
        swarm[0].deadline = 3.0
        swarm.do(0)
        swarm.run(0.5)
        swarm[0].deadline = 1.0
        swarm.do(0)
        swarm.run()
        assert swarm[0].times(TimerFired) == [0.0, 0.5, 1.0]

    @pytest.mark.parametrize("never", [None, float("inf")])
    def test_a_deadline_that_is_taken_back_does_not_fire(self, never: float | None) -> None:
        swarm = started(2)
        for k in range(2):
            swarm[k].deadline = 1.0
            swarm.do(k)
        swarm.run(0.5)
        swarm[0].deadline = swarm[1].deadline = never
        swarm.do(1)
        swarm.run()
        assert swarm[0].times(TimerFired) == [0.0]
        assert swarm[1].times(TimerFired) == [0.0, 0.5]

    def test_time_does_not_run_to_what_will_not_happen(self) -> None:
        swarm = started(1)
        swarm[0].deadline = 1_000.0
        swarm.do(0)
        swarm.run(1.0)
        swarm[0].deadline = None
        swarm.do(0)
        swarm.run()
        assert swarm.engine.now == 1.0

    def test_a_deadline_in_the_past_fires_now(self) -> None:
        swarm = started(1, _disarm_late)
        swarm.run(2.0)
        swarm[0].deadline = 1.0
        swarm.engine.tell(swarm.peers[0], ViewChanged(swarm[0].view))
        swarm.run()
        assert swarm[0].times(TimerFired) == [2.0]

    def test_a_dead_peers_timer_does_not_wake_its_successor(self) -> None:
        swarm = started(1)
        swarm[0].deadline = 5.0
        swarm.do(0)
        swarm.at(1.0, swarm.engine.crash, swarm.peers[0])
        swarm.at(2.0, swarm.engine.restart, swarm.peers[0])
        swarm.run()
        assert swarm[0].incarnation == 1
        assert swarm[0].times(TimerFired) == []

    def test_a_deadline_that_never_moves_is_a_bug_with_a_name(self) -> None:
        swarm = started(1)
        swarm[0].deadline = 1.0
        swarm.do(0)
        with pytest.raises(LocalProtocolError, match=r"p00's deadline stays at 1\.0 s"):
            swarm.run()


def _disarm(machine: Recorder, event: Event, now: float) -> Sequence[Effect]:
    machine.deadline = None
    return []


def _disarm_late(machine: Recorder, event: Event, now: float) -> Sequence[Effect]:
    due = machine.deadline is not None and now >= machine.deadline
    if due and isinstance(event, TimerFired):
        machine.deadline = None
    return []


class TestFaults:
    def test_a_crash_takes_machine_timer_and_pending_effects(self) -> None:
        swarm = started(2)
        peers = swarm.peers
        swarm.engine.observe.append(lambda now, peer, report: swarm.engine.crash(peer))
        swarm.do(0, Send(peers[1], Letter(1)), Report("last words", {}), Send(peers[1], Letter(2)))
        swarm.run()
        assert swarm[1].numbers() == [1]
        assert list(swarm.engine.machines) == [peers[1]]
        assert not swarm.engine.is_alive(peers[0])
        assert swarm.engine.num_alive == 1

    def test_a_restarted_peer_has_a_new_machine_incarnation_and_randomness(self) -> None:
        swarm = started(2)
        old = swarm[0]
        swarm.engine.crash(swarm.peers[0])
        swarm.run(10.0)
        swarm.engine.restart(swarm.peers[0])
        swarm.run()
        new = swarm[0]
        assert new is not old
        assert (new.incarnation, new.info.incarnation) == (1, 1)
        assert new.view.peers[swarm.peers[0]].incarnation == 1
        assert new.times(Start) == [10.0]
        assert old.rng.random() != new.rng.random()

    def test_faults_that_change_nothing_are_harmless(self) -> None:
        swarm = started(2)
        swarm.engine.restart(swarm.peers[0])
        swarm.engine.crash(swarm.peers[1])
        swarm.engine.crash(swarm.peers[1])
        swarm.run()
        assert len(swarm.lives[swarm.peers[0]]) == 1
        assert swarm.engine.num_alive == 1

    def test_a_newcomer_sees_all_and_is_seen(self) -> None:
        swarm = started(2)
        swarm.run(5.0)
        peer = PeerId("new")
        swarm.engine.add(peer, swarm.make, PeerInfo(peer), Box())
        swarm.run()
        newcomer = swarm.lives[peer][0]
        assert list(newcomer.view) == ["new", "p00", "p01"]
        assert newcomer.log == [(5.0, Start())]
        assert swarm[0].events(ViewChanged)[0].joined == ("new",)

    def test_bad_calls_name_what_is_wrong(self) -> None:
        swarm = started(1)
        with pytest.raises(ConfigError, match="no peer 'p99'"):
            swarm.engine.crash(PeerId("p99"))
        with pytest.raises(ConfigError, match="'p00' is there already"):
            swarm.engine.add(swarm.peers[0], swarm.make, PeerInfo(swarm.peers[0]), Box())
        with pytest.raises(ConfigError, match="factor must be above 0, not 0"):
            swarm.engine.slow_down(swarm.peers[0], 0)
        with pytest.raises(ConfigError, match="seed must be 0 or more, not -1"):
            Swarm(1, seed=-1)
        swarm.do(0, Compute(JobId(0), LocalSteps(np.zeros(1), 1)))
        with pytest.raises(ConfigError, match="no backend"):
            swarm.run()


# Determinism

GOSSIP = Network.uniform(latency_s=0.02, jitter_s=0.05, loss=0.2, uplink_bytes_per_s=1e5)


def gossip(machine: Recorder, event: Event, now: float) -> Sequence[Effect]:
    """Trains and tells random others, as long as its view holds."""
    effects: list[Effect] = []
    if isinstance(event, ViewChanged):
        machine.view = event.view
    if isinstance(event, Start):
        effects.append(Compute(JobId(0), LocalSteps(machine.params, 2)))
    if isinstance(event, ComputeDone):
        machine.params = event.result.params
        effects.append(Report("round", {}))
        if event.job_id < 5:
            effects.append(Compute(JobId(event.job_id + 1), LocalSteps(machine.params, 2)))
        peers = list(machine.view)
        for number in range(3):
            dst = peers[machine.rng.integers(len(peers))]
            size = int(machine.rng.integers(64, 20_000))
            kind = (Letter, Postcard)[number % 2]
            effects.append(Send(dst, kind(int(event.job_id), size)))
    return effects


def gossip_run(seed: int = 3, workers: int = 0) -> tuple[str, Swarm]:
    trainer = QuadraticTrainer(6, num_examples=[5, 9, 7], noise=0.1, dtype="float32")
    trainer.prepare(8)
    swarm = Swarm(
        8,
        gossip,
        network=GOSSIP,
        params=trainer.initial_params(0),
        boxes=[Box(flops_per_s=1e9 * (1 + k)) for k in range(8)],
        seed=seed,
        backend=trainer_backend(trainer, workers),
        cost=trainer.cost(),
        batch_size=3,
    )
    engine = swarm.engine
    swarm.at(4.0, engine.crash, swarm.peers[2])
    swarm.at(5.0, engine.partition, [swarm.peers[:3]])
    swarm.at(9.0, engine.heal)
    swarm.at(9.5, engine.restart, swarm.peers[2])
    try:
        engine.run()
    finally:
        engine.close()
    return engine.digest, swarm


class TestDigest:
    def test_same_seed_same_digest_other_seed_other_digest(self) -> None:
        first, swarm = gossip_run()
        assert swarm.engine.delivered > 200
        assert gossip_run()[0] == first
        assert gossip_run(seed=4)[0] != first

    @pytest.mark.parametrize("hash_seed", ["1", "4242"])
    def test_other_processes_and_hash_seeds_change_nothing(self, hash_seed: str) -> None:
        code = "from tests.simulation.test_engine import gossip_run; print(gossip_run()[0])"
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == gossip_run()[0]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_number_of_workers_changes_nothing(self, workers: int) -> None:
        digest, swarm = gossip_run()
        again, other = gossip_run(workers=workers)
        assert again == digest
        for k in range(8):
            np.testing.assert_array_equal(swarm[k].params, other[k].params)

    def test_the_parameters_of_a_round_count(self) -> None:
        def digest(value: float) -> str:
            swarm = started(1)
            swarm[0].params = np.full(3, value)
            swarm.do(0, Report("round", {}))
            swarm.run()
            return swarm.engine.digest

        assert digest(1.0) == digest(1.0)
        assert digest(1.0) != digest(np.nextafter(1.0, 2.0))

    def test_reading_it_on_the_way_changes_nothing(self) -> None:
        def digest(pause: bool) -> str:
            swarm = started(2)
            swarm.send(0, 1, Letter(1))
            if pause:
                assert swarm.engine.digest != ""
            swarm.run()
            return swarm.engine.digest

        assert digest(True) == digest(False)


class TestInterrupt:
    def test_ctrl_c_finishes_the_event_and_the_run_can_go_on(self) -> None:
        def interrupt_once(machine: Recorder, event: Event, now: float) -> Sequence[Effect]:
            if isinstance(event, Received):
                os.kill(os.getpid(), signal.SIGINT)
                return [Send(event.src, Letter(2))]
            return []

        swarm = started(2)
        swarm[1].react = interrupt_once
        before = signal.getsignal(signal.SIGINT)
        swarm.send(0, 1, Letter(1))
        with pytest.raises(KeyboardInterrupt):
            swarm.run()
        assert signal.getsignal(signal.SIGINT) is before
        assert swarm[1].numbers() == [1]
        assert swarm[0].numbers() == []
        swarm.run()
        assert swarm[0].numbers() == [2]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_time_never_runs_back_and_streams_are_in_order_or_lost(data: st.DataObject) -> None:
    """A random schedule of letters and faults: each letter arrives once and in order, or its living
    sender is told after sending it that the link is lost."""
    num_peers = 4
    network = Network.uniform(
        latency_s=data.draw(st.sampled_from([0.0, 0.05])),
        uplink_bytes_per_s=1e5,
        jitter_s=data.draw(st.sampled_from([0.0, 0.1])),
        loss=data.draw(st.sampled_from([0.0, 0.3])),
    )
    swarm = started(num_peers, network=network, seed=data.draw(st.integers(0, 99)))
    engine = swarm.engine
    sent: dict[tuple[PeerId, PeerId], list[tuple[float, int, Recorder]]] = {}

    def send(src: int, dst: int, number: int, size: int) -> None:
        if engine.is_alive(swarm.peers[src]):
            pair = (swarm.peers[src], swarm.peers[dst])
            sent.setdefault(pair, []).append((engine.now, number, swarm[src]))
            swarm.send(src, dst, Letter(number, size))

    index = st.integers(0, num_peers - 1)
    time = st.integers(0, 80).map(lambda tick: tick / 10)
    for number in range(data.draw(st.integers(1, 25))):
        size = data.draw(st.sampled_from([64, 3_000, 50_000]))
        src, dst = data.draw(index), data.draw(index)
        if src != dst:
            swarm.at(data.draw(time), send, src, dst, number, size)
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["crash", "restart", "cut", "heal"]))
        at_s = data.draw(time)
        peer = swarm.peers[data.draw(index)]
        if kind == "cut":
            swarm.at(at_s, engine.partition, [[peer]])
        elif kind == "heal":
            swarm.at(at_s, engine.heal)
        else:
            swarm.at(at_s, getattr(engine, kind), peer)
    swarm.run()

    for machine in (machine for lives in swarm.lives.values() for machine in lives):
        times = [now for now, _ in machine.log]
        assert times == sorted(times)
    for (src, dst), letters in sent.items():
        for sender in dict.fromkeys(sender for *_, sender in letters):
            own = [(at_s, number) for at_s, number, who in letters if who is sender]
            numbers = {number for _, number in own}
            arrived = [
                number
                for machine in swarm.lives[dst]
                for number in machine.numbers(src)
                if number in numbers
            ]
            assert arrived == [number for _, number in own if number in arrived]
            lost_s = [now for now, event in sender.log if event == LinkLost(dst)]
            sender_died = sender is not swarm.lives[src][-1] or not engine.is_alive(src)
            for at_s, number in own:
                told = any(now >= at_s for now in lost_s)
                assert number in arrived or told or sender_died
