"""Drivers in one process, over a local network: the simulator's machines in real time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import ConfigError, TransportError
from flwr_moshpit.protocol.machine import (
    Effect,
    Event,
    Finish,
    Learned,
    PeerId,
    PeerInfo,
    Publish,
    Record,
    Report,
    Start,
    State,
    Stop,
    TimerFired,
    Vector,
    View,
    refused,
)
from flwr_moshpit.protocol.membership import Membership
from flwr_moshpit.runtime.checkpoint import Checkpoints
from flwr_moshpit.runtime.compute import Offer, Task, ThreadCompute
from flwr_moshpit.runtime.driver import Driver, Schedule
from flwr_moshpit.runtime.plain import read_block, write_block
from flwr_moshpit.runtime.trace import Recipe, Recorder, replay
from flwr_moshpit.runtime.transport import LocalNetwork, LocalTransport
from flwr_moshpit.runtime.wire import Limits
from tests.trainers import QuadraticTrainer

DIM = 6
HANG_S = 60.0
"""Nothing here takes a tenth of this; a test that does hangs."""


def in_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test, and let it fail where it would hang."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), HANG_S))

    return run


def peer_id(index: int) -> PeerId:
    return PeerId(f"p{index}")


def trainer() -> QuadraticTrainer:
    return QuadraticTrainer(DIM, num_examples=[10, 20, 30])


class Swarm:
    """Peers of one local network that can be awaited by what they report."""

    def __init__(self, num_peers: int, algorithm: Any = None) -> None:
        self.num_peers = num_peers
        self.algorithm = algorithm if algorithm is not None else Moshpit(local_steps=3)
        self.network = LocalNetwork()
        self.drivers: dict[PeerId, Driver] = {}
        self.transports: dict[PeerId, LocalTransport] = {}
        self.tasks: dict[PeerId, asyncio.Task[Vector | None]] = {}
        self.rounds: dict[PeerId, list[dict[str, Any]]] = {}
        self.reports: list[tuple[PeerId | None, Report]] = []
        self.changed = asyncio.Event()

    def start(self, index: int, start: Start, **more: Any) -> Driver:
        peer = peer_id(index)
        task = Task(trainer, index, more.pop("num_peers", self.num_peers), seed=(index,))
        compute = ThreadCompute(task)
        offer = compute.start()
        transport = LocalTransport(self.network, peer, Limits(DIM))
        driver = Driver(
            transport,
            functools.partial(self._join, peer, index),
            functools.partial(self._make, offer, index, more.pop("state", None)),
            compute,
            schedule=Schedule(
                start=start, gather_peers=more.pop("gather", self.num_peers), gather_s=HANG_S
            ),
            observers=[self._observe],
            **more,
        )
        self.rounds[peer] = []
        self.drivers[peer], self.transports[peer] = driver, transport
        self.tasks[peer] = asyncio.ensure_future(driver.run())
        return driver

    def start_all(self, start: Start) -> None:
        for index in range(self.num_peers):
            self.start(index, start)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for task in self.tasks.values():
                if task.done():
                    task.result()
            self.changed.clear()
            await self.changed.wait()

    async def stop(self) -> None:
        for driver in self.drivers.values():
            driver.stop()
        await asyncio.gather(*self.tasks.values())

    def _join(self, peer: PeerId, index: int, address: str) -> Membership:
        contacts = {peer_id(0): "local:p0"}
        return Membership(PeerInfo(peer), address, contacts, np.random.default_rng(index))

    def _make(
        self, offer: Offer, index: int, state: State | None, info: PeerInfo, view: View
    ) -> Recipe:
        seed = (1, index, info.incarnation)
        return Recipe(self.algorithm, info, offer.params, view, seed, offer.schema, state)

    def _observe(self, now: float, peer: PeerId | None, report: Report) -> None:
        assert now >= 0
        self.reports.append((peer, report))
        if report.name == "round" and peer is not None:
            self.rounds[peer].append(dict(report.values))
        self.changed.set()


def mean_after_one_round(clients: Sequence[int], num_peers: int, num_steps: int) -> Vector:
    """What FedAvg makes of the common initial model in one round with these clients."""
    model = trainer()
    model.prepare(num_peers)
    start = model.initial_params(0)
    results = [model.train(client, start, num_steps, 0).params for client in clients]
    weights = [float(model.num_examples(client)) for client in clients]
    return np.average(results, axis=0, weights=weights)


@in_time
async def test_six_peers_average_exactly() -> None:
    swarm = Swarm(6, Moshpit(group_size=3, local_steps=3))
    swarm.start_all(Start(until_round=1))
    for driver in swarm.drivers.values():
        await driver.finished.wait()
    await swarm.stop()
    # Who is not through with training when the others have stopped is called in without it.
    trained = [k for k in range(6) if any(r["examples"] for r in swarm.rounds[peer_id(k)])]
    assert len(trained) > 1
    wanted = mean_after_one_round(trained, 6, 3)
    for task in swarm.tasks.values():
        result = task.result()
        assert result is not None
        np.testing.assert_allclose(result, wanted, rtol=1e-12, atol=1e-14)


@in_time
async def test_the_others_go_on_when_one_dies() -> None:
    swarm = Swarm(6, Moshpit(group_size=3, local_steps=3))
    swarm.start_all(Start())
    await swarm.until(lambda: all(len(rounds) >= 3 for rounds in swarm.rounds.values()))
    dead = peer_id(0)
    await swarm.transports[dead].close(0.0)
    others = [peer for peer in swarm.drivers if peer != dead]

    def is_over() -> bool:
        return all(
            dead not in swarm.drivers[peer].membership.view
            and len(swarm.rounds[peer]) > 3
            and dead not in swarm.rounds[peer][-1]["contributor_ids"]
            and swarm.rounds[peer][-1]["contributors"] > 1
            for peer in others
        )

    await swarm.until(is_over)
    assert all(len(swarm.drivers[peer].membership.view) == 5 for peer in others)
    states = [await swarm.drivers[peer].snapshot() for peer in others]
    assert all(state is not None and state["round"] > 3 for state in states)
    await swarm.stop()


@in_time
async def test_a_late_peer_joins_and_one_that_leaves_is_missed_at_once() -> None:
    swarm = Swarm(3)
    swarm.start_all(Start())
    await swarm.until(lambda: all(swarm.rounds.values()))
    swarm.num_peers = 4
    late = swarm.start(3, Start(), gather=2)
    await swarm.until(lambda: all(len(d.membership.view) == 4 for d in swarm.drivers.values()))
    await swarm.until(lambda: any(r["contributors"] > 1 for r in swarm.rounds[peer_id(3)]))
    late.stop()
    await swarm.tasks.pop(peer_id(3))
    del swarm.drivers[peer_id(3)]
    await swarm.until(lambda: all(len(d.membership.view) == 3 for d in swarm.drivers.values()))
    left = [
        report.values["status"]
        for _, report in swarm.reports
        if report.name == "peer" and report.values["peer"] == peer_id(3)
    ]
    assert "left" in left
    assert "dead" not in left
    await swarm.stop()


@in_time
@pytest.mark.parametrize("algorithm", [Moshpit(local_steps=3), RFast()])
async def test_a_peer_that_comes_after_the_end_has_the_result(algorithm: Any) -> None:
    swarm = Swarm(3, algorithm)
    swarm.start_all(Start(until_round=4))
    for driver in swarm.drivers.values():
        await driver.finished.wait()
    late = swarm.start(3, Start(until_round=4), num_peers=4, gather=2)
    await late.finished.wait()
    # An R-FAST peer may finish a little before the root has stepped for the last time.
    models = [model for d in swarm.drivers.values() if (model := await d.model()) is not None]
    assert len(models) == 4
    assert all(np.allclose(params, models[0][0], rtol=1e-12) for params, _ in models)
    assert late.result is not None
    assert np.allclose(late.result, models[0][0], rtol=1e-12)
    await swarm.stop()


@in_time
async def test_a_peer_that_moves_is_followed() -> None:
    swarm = Swarm(3)
    swarm.start_all(Start())
    await swarm.until(lambda: all(swarm.rounds.values()))
    listening = swarm.network._listening
    listening["local:new"] = listening.pop("local:p1")
    swarm.drivers[peer_id(1)].move("local:new")

    def is_known() -> bool:
        memberships = [driver.membership for driver in swarm.drivers.values()]
        return all(each.addresses.get(peer_id(1)) == "local:new" for each in memberships)

    await swarm.until(is_known)
    so_far = {peer: len(rounds) for peer, rounds in swarm.rounds.items()}

    def go_on() -> bool:
        later = [rounds[so_far[peer] :] for peer, rounds in swarm.rounds.items()]
        return all(any(r["contributors"] == 3 for r in rounds) for rounds in later)

    await swarm.until(go_on)
    listening.pop("local:new")
    await swarm.stop()


@in_time
async def test_a_trace_replays_bit_for_bit(tmp_path: Path) -> None:
    swarm = Swarm(3)
    path = tmp_path / "deep" / "p1.trace"
    for index in range(3):
        more = {"recorder": Recorder(path)} if index == 1 else {}
        swarm.start(index, Start(until_round=3), **more)
    for driver in swarm.drivers.values():
        await driver.finished.wait()
    await swarm.stop()
    done = replay(path)
    assert done.difference is None
    assert done.error is None
    assert not done.is_torn
    assert done.num_events > 10
    assert np.array_equal(done.machine.params, swarm.tasks[peer_id(1)].result())
    check_damage(path, done.num_events)


def blocks_of(path: Path) -> Iterator[Any]:
    with path.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            yield read_block(file)


def check_damage(path: Path, num_events: int) -> None:
    """A trace from which an event is missing is noticed; one that was cut off is told as far as it
    goes."""
    blocks = list(blocks_of(path))
    starts = [i for i, b in enumerate(blocks) if b[0] == "event" and isinstance(b[2], Start)]
    other = path.with_name("other.trace")
    with other.open("wb") as file:
        for i, block in enumerate(blocks):
            if i not in (starts[0], starts[0] + 1):
                write_block(file, block)
    assert replay(other).difference is not None
    other.write_bytes(path.read_bytes()[:-10])
    torn = replay(other)
    assert torn.is_torn
    assert torn.difference is None
    assert torn.num_events >= num_events - 1


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "none")
    for content in (b"", b"text", b'{"value": 3, "arrays": 0}\n', b'{"value": [1, 2]}\n'):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigError, match="no trace"):
            replay(tmp_path / "file")


@in_time
async def test_a_peer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    swarm = Swarm(2)
    for index in range(2):
        checkpoints = Checkpoints(tmp_path / str(index))
        swarm.start(index, Start(until_round=2), checkpoints=checkpoints, swarm="ours")
    for driver in swarm.drivers.values():
        await driver.finished.wait()
    await swarm.stop()
    loaded = Checkpoints(tmp_path / "0").load()
    assert loaded is not None
    content = loaded.content
    assert (content["swarm"], content["peer"]) == ("ours", "p0")
    assert content["incarnation"] == 0
    assert content["addresses"] == {"p0": "local:p0", "p1": "local:p1"}
    again = Swarm(2)
    driver = again.start(0, Start(until_round=2), gather=1, state=content["machine"])
    await driver.finished.wait()
    await again.stop()
    result = again.tasks[peer_id(0)].result()
    assert result is not None
    assert np.array_equal(result, swarm.tasks[peer_id(0)].result())


@in_time
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    driver = make_alone(LocalNetwork(), Silent())
    task = asyncio.ensure_future(driver.run(signals=True))
    await driver.finished.wait()
    os.kill(os.getpid(), number)
    await driver._stopping.wait()
    # Wrappers of all kinds pass a signal on twice: the end is no less orderly for that.
    os.kill(os.getpid(), number)
    result = await task
    assert result is not None
    assert driver.last_model is not None
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


# Machines of the tests' own


class Silent:
    """Keeps what it is told; finishes at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.deadline: float | None = None
        self.params = np.zeros(DIM)
        self.weight = 1.0

    def build(self) -> Silent:
        return self

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        self.events.append(event)
        return [Finish(self.params)] if isinstance(event, Start) else []

    def snapshot(self) -> State:
        return {"events": len(self.events)}


class Publisher(Silent):
    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        super().handle(event, now)
        if isinstance(event, Start):
            return [Publish(Record(("stop",), (1,), "why"))]
        return [Finish(self.params)] if isinstance(event, Learned) else []


class Beset(Silent):
    """Somebody sends it rubbish and nothing else."""

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        rubbish = [refused(PeerId("liar"), "part", "NaN")] * 50
        return [*(rubbish if isinstance(event, Start) else []), *super().handle(event, now)]


class Clock(Silent):
    """Its timer is due at once, again and again, a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        super().handle(event, now)
        self.times.append(now)
        self.deadline = now - 1.0
        fired = sum(isinstance(event, TimerFired) for event in self.events)
        return [Finish(self.params)] if fired == 50 else []


class Broken(Silent):
    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        raise RuntimeError("a bug")


def make_alone(network: LocalNetwork, machine: Silent, **more: Any) -> Driver:
    peer = PeerId("alone")
    compute = ThreadCompute(Task(trainer, 0, 1, seed=(0,)))
    compute.start()
    return Driver(
        LocalTransport(network, peer, Limits(DIM)),
        lambda address: Membership(PeerInfo(peer), address, {}, np.random.default_rng(0)),
        lambda info, view: machine,
        compute,
        **more,
    )


@in_time
async def test_a_machine_learns_its_own_record_and_is_stopped_last() -> None:
    machine = Publisher()
    driver = make_alone(LocalNetwork(), machine, schedule=Schedule(linger_s=0.0))
    assert await driver.run() is machine.params
    assert machine.events == [Start(), Learned(Record(("stop",), (1,), "why")), Stop()]


@in_time
async def test_what_is_refused_is_counted_and_told_now_and_then() -> None:
    told: list[Report] = []
    schedule = Schedule(linger_s=0.0)
    observers = [lambda now, peer, report: told.append(report)]
    driver = make_alone(LocalNetwork(), Beset(), schedule=schedule, observers=observers)
    await driver.run()
    assert driver.refused == {"NaN": 50}
    assert [r.values["times"] for r in told if r.name == "refused"] == [1, 10]


@in_time
async def test_a_timer_that_is_always_due_stops_nothing() -> None:
    machine = Clock()
    driver = make_alone(LocalNetwork(), machine)
    task = asyncio.ensure_future(driver.run())
    await driver.finished.wait()
    assert (await driver.snapshot())["events"] >= 50
    driver.stop()
    await task
    assert Stop() in machine.events
    assert machine.times == sorted(machine.times)


@in_time
async def test_what_a_machine_raises_ends_the_run() -> None:
    driver = make_alone(LocalNetwork(), Broken())
    with pytest.raises(RuntimeError, match="a bug"):
        await driver.run()


@in_time
async def test_what_an_observer_raises_ends_the_run() -> None:
    def observer(now: float, peer: PeerId | None, report: Report) -> None:
        raise OSError("disk full")

    class Reporter(Silent):
        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            return [Report("x", {})] if isinstance(event, Start) else []

    driver = make_alone(LocalNetwork(), Reporter(), observers=[observer])
    with pytest.raises(OSError, match="disk full"):
        await driver.run()


@in_time
async def test_what_an_observer_raises_about_another_peer_ends_the_run() -> None:
    swarm = Swarm(2)
    driver = swarm.start(0, Start())

    def observer(now: float, peer: PeerId | None, report: Report) -> None:
        if report.name == "peer":
            raise OSError("disk full")

    driver._observers.append(observer)
    other = swarm.start(1, Start())
    with pytest.raises(OSError, match="disk full"):
        await swarm.tasks[peer_id(0)]
    other.stop()
    await swarm.tasks[peer_id(1)]


@in_time
async def test_an_address_that_is_taken_is_said() -> None:
    network = LocalNetwork()
    first = make_alone(network, Silent())
    task = asyncio.ensure_future(first.run())
    await first.finished.wait()
    with pytest.raises(TransportError, match="taken"):
        await make_alone(network, Silent()).run()
    first.stop()
    await task


@in_time
async def test_a_driver_that_is_stopped_before_it_has_begun_ends() -> None:
    machine = Silent()
    driver = make_alone(LocalNetwork(), machine, schedule=Schedule(gather_peers=2, gather_s=HANG_S))
    task = asyncio.ensure_future(driver.run())
    await asyncio.sleep(0)
    driver.stop()
    assert await task is None
    assert machine.events == []


@in_time
async def test_a_full_disk_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def full(content: dict[str, Any]) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    seen: list[str] = []
    driver = make_alone(
        LocalNetwork(),
        Silent(),
        schedule=Schedule(linger_s=0.0),
        checkpoints=checkpoints,
        observers=[lambda now, peer, report: seen.append(report.name)],
    )
    assert await driver.run() is not None
    assert "checkpoint_failed" in seen
