"""The driver of virtual time: it delivers events to machines one at a time and carries out what
they return. Same seed, same run: `Engine.digest` tells.

    agenda.py      what happens next
    network.py     links, and what a test may do to a message
    transport.py   streams, datagrams, lost links; transfers.py shares the bandwidth
    membership.py  views and records
    compute.py     jobs and their virtual cost; backend.py runs them
    digest.py      the hash over everything that happened
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal, Protocol, TypeAlias

import numpy as np

from flwr_moshpit.errors import ConfigError, LocalProtocolError
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    Effect,
    Event,
    Finish,
    LinkLost,
    Machine,
    Message,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Report,
    Send,
    Start,
    TimerFired,
    Vector,
    View,
)
from flwr_moshpit.simulation import compute
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.backend import ComputeBackend
from flwr_moshpit.simulation.compute import JobPool, Slot
from flwr_moshpit.simulation.digest import Digest
from flwr_moshpit.simulation.membership import Delays, SimulatedMembership
from flwr_moshpit.simulation.network import (
    Delay,
    Drop,
    Duplicate,
    Linked,
    Network,
    Replace,
    Verdict,
)
from flwr_moshpit.simulation.transport import Port, Transport
from flwr_moshpit.trainer import Cost

_TIMERS_AT_ONCE_MAX = 1000
"""A machine whose timer fires this often at one instant will never let time go on."""


class Device(compute.Device, Linked, Protocol):
    """What the engine needs to know of a device; `DeviceProfile` has it."""


MachineFactory: TypeAlias = Callable[[PeerInfo, View, np.random.Generator, int], Machine]
"""(info, view, rng, incarnation) -> a peer's machine, before its `Start`."""

Interceptor: TypeAlias = Callable[[float, PeerId, PeerId, Message], Verdict | None]
"""(now, src, dst, message) -> what happens to it; None: nothing special."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one peer has used since the beginning, all its incarnations together."""

    sent_bytes: int
    received_bytes: int
    busy_s: float
    """Training."""
    up_s: float
    """Alive."""
    joules: float
    """The device's power while it trains, its idle power for the rest of the time it is up."""


class _Peer:
    """All that the engine keeps of one peer."""

    __slots__ = (
        "armed_s",
        "device",
        "factory",
        "index",
        "info",
        "machine",
        "port",
        "since_s",
        "slot",
        "timer_s",
        "timers",
        "up_s",
    )

    def __init__(
        self,
        info: PeerInfo,
        factory: MachineFactory,
        device: Device,
        port: Port,
        slot: Slot,
    ) -> None:
        self.index = port.index
        self.info = info
        self.factory = factory
        self.device = device
        self.port = port
        self.slot = slot
        self.machine: Machine | None = None
        self.armed_s = math.inf
        """When the timer that is in the agenda goes off: at the machine's deadline or before."""
        self.timer_s = -1.0
        self.timers = 0
        """How often the timer has fired at `timer_s`."""
        self.since_s = 0.0
        self.up_s = 0.0


class Engine:
    """Drives any number of machines through virtual time.

    Add peers, change what tests and faults need through the methods, and `run`. `observe`,
    `interceptors` and `start_event` may be changed at any time. Close it when done: the backend may
    hold processes.
    """

    def __init__(
        self,
        *,
        seed: int,
        network: Network,
        backend: ComputeBackend | None = None,
        cost: Cost | None = None,
        array_scale: float = 1.0,
        start: Start | None = None,
        delays: Delays | None = None,
        on_trainer_error: Literal["raise", "report"] = "raise",
        batch_size: int = 256,
    ) -> None:
        """`cost` and `array_scale` set what a job and an array in a message cost in virtual time;
        `backend` is needed as soon as a machine computes. With on_trainer_error="report" machines
        get a `ComputeFailed` for what the user's code raises; otherwise `run` raises it.
        """
        if seed < 0:
            raise ConfigError(f"seed must be 0 or more, not {seed}")
        self.observe: list[Observer] = []
        self.interceptors: list[Interceptor] = []
        self.start_event = start if start is not None else Start()
        self.finished: dict[PeerId, Vector] = {}
        """What living peers returned with `Finish`."""
        self.delivered = 0
        """Events handed to machines so far."""
        self.num_alive = 0
        self._seed = seed
        self._network = network
        self._digest = Digest()
        self._agenda = Agenda()
        self._peers: list[_Peer] = []
        self._by_id: dict[PeerId, _Peer] = {}
        self._begun = False
        self._interrupted = False
        delays = delays if delays is not None else Delays()
        self._membership = SimulatedMembership(
            self._agenda, np.random.default_rng([seed, 1]), delays, self._tell
        )
        self._transport = Transport(
            self._agenda, seed, array_scale, delays.loss_s, self._received, self._link_lost
        )
        self._jobs: JobPool | None = None
        self._backend = backend
        if backend is not None:
            if cost is None:
                raise ConfigError("an engine with a backend needs the cost of its jobs")
            self._jobs = JobPool(
                self._agenda,
                backend,
                cost,
                seed,
                self._tell,
                lambda: self._interrupted,
                on_trainer_error == "report",
                batch_size,
            )

    # What there is

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._agenda.now

    @property
    def digest(self) -> str:
        """Of every event delivered so far and of the parameters after each round, in hex."""
        return self._digest.hexdigest()

    @property
    def machines(self) -> dict[PeerId, Machine]:
        """Those of the living peers, in the order in which peers were added."""
        return {peer.info.peer: peer.machine for peer in self._peers if peer.machine is not None}

    @property
    def all_finished(self) -> bool:
        """Whether every living peer has finished, and there are any."""
        return 0 < self.num_alive == len(self.finished)

    def is_alive(self, peer: PeerId) -> bool:
        return self._peer(peer).port.alive

    def usage(self, peer: PeerId) -> Usage:
        found = self._peer(peer)
        busy_s = self._jobs.busy_s(found.slot) if self._jobs is not None else 0.0
        up_s = found.up_s + (self.now - found.since_s if found.port.alive else 0.0)
        device = found.device
        joules = device.power_w * busy_s + device.idle_w * (up_s - busy_s)
        port = found.port
        return Usage(port.sent_bytes, port.received_bytes, busy_s, up_s, joules)

    # What a run consists of

    def add(
        self,
        peer: PeerId,
        factory: MachineFactory,
        info: PeerInfo,
        device: Device,
        client: int | None = None,
    ) -> None:
        """Let `peer` in: at the beginning, or as a newcomer now. `client` is whose data it trains
        on, by default its number in the order of addition. Raises ConfigError for a second peer of
        one name."""
        if peer in self._by_id or info.peer != peer:
            raise ConfigError(f"peer {peer!r} is there already, or its info is another's")
        index = len(self._peers)
        port = Port(peer, index, self._network.link_of(device))
        slot = Slot(index, index if client is None else client, device)
        added = _Peer(info, factory, device, port, slot)
        self._peers.append(added)
        self._by_id[peer] = added
        self._transport.add(port)
        if self._begun:
            self._bring_up([added])

    def run(self, until_s: float | None = None, stop: Callable[[], bool] | None = None) -> None:
        """Go on until nothing is left to happen, `until_s` is reached, or `stop()` is true after
        an event. Ctrl-C raises KeyboardInterrupt when the event under way is finished, a second
        one at once; after the first the engine can go on.

        Raises what a machine raises, and TrainerError.
        """
        self._begin()
        agenda = self._agenda
        limit_s = math.inf if until_s is None else until_s
        with self._interrupts_wait():
            while agenda.is_due(limit_s):
                agenda.advance()
                if self._interrupted:
                    raise KeyboardInterrupt
                if stop is not None and stop():
                    return
        if until_s is not None:
            agenda.skip_to(until_s)

    def step(self) -> bool:
        """Deliver one event; False if there is none."""
        self._begin()
        before = self.delivered
        while len(self._agenda):
            self._agenda.advance()
            if self.delivered != before:
                return True
        return False

    def close(self) -> None:
        """Give back what the backend holds. Harmless twice."""
        if self._backend is not None:
            self._backend.close()

    def interrupt(self) -> None:
        """Let `run` end with KeyboardInterrupt after the event under way."""
        self._interrupted = True

    def schedule(self, at_s: float, call: Callable[[], None]) -> None:
        """Let `call()` happen between two events at `at_s`, or now if that is past."""
        self._agenda.at(at_s, call)

    def tell(self, peer: PeerId, event: Event) -> None:
        """Hand `event` to `peer` at this instant, if it is alive then: a test's or a command's
        `Start`, `Stop`, or a timer that fires too early."""
        found = self._peer(peer)
        self._agenda.at(self.now, self._tell_incarnation, found, found.info.incarnation, event)

    # Faults

    def crash(self, peer: PeerId) -> None:
        """`peer` is gone, with its machine, its job and what had not left its uplink. Harmless if
        it is down."""
        found = self._peer(peer)
        if not found.port.alive:
            return
        found.port.alive = False
        found.machine = None
        found.armed_s = math.inf
        found.up_s += self.now - found.since_s
        self.num_alive -= 1
        self.finished.pop(peer, None)
        if self._jobs is not None:
            self._jobs.clear(found.slot)
        self._transport.crash(found.port)
        self._membership.leave(peer)

    def restart(self, peer: PeerId) -> None:
        """`peer` comes back, its incarnation one higher, with a new machine that remembers
        nothing. Harmless if it is up."""
        found = self._peer(peer)
        if self._begun and not found.port.alive:
            found.info = replace(found.info, incarnation=found.info.incarnation + 1)
            self._bring_up([found])

    def slow_down(self, peer: PeerId, factor: float) -> None:
        """From now `peer` trains `factor` times slower than its device, 1 is normal; what it is
        training is slowed down too."""
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigError(f"a slow-down factor must be above 0, not {factor}")
        slot = self._peer(peer).slot
        if self._jobs is None:
            slot.factor = factor
        else:
            self._jobs.slow_down(slot, factor)

    def partition(self, sides: Sequence[Sequence[PeerId]]) -> None:
        """From now peers reach only those on their own side; peers on none of `sides` are a side
        of their own. Replaces an earlier partition."""
        numbers = {peer: number for number, side in enumerate(sides, 1) for peer in side}
        for peer in self._peers:
            peer.port.side = numbers.get(peer.info.peer, 0)
        self._transport.cut()
        self._membership.divide(numbers)

    def heal(self) -> None:
        """From now all peers reach each other."""
        self.partition([])

    # Delivery

    def _begin(self) -> None:
        self._interrupted = False
        if not self._begun:
            self._begun = True
            self._bring_up(self._peers)

    def _bring_up(self, peers: Sequence[_Peer]) -> None:
        now = self._agenda.now
        for peer in peers:
            peer.port.alive = True
            peer.port.incarnation = peer.slot.incarnation = peer.info.incarnation
            peer.slot.started = 0
            peer.since_s = now
        self.num_alive += len(peers)
        by_side: dict[int, list[_Peer]] = {}
        for peer in peers:
            by_side.setdefault(peer.port.side, []).append(peer)
        for side, members in by_side.items():
            infos = [(peer.index, peer.info) for peer in members]
            view = self._membership.join(infos, side)
            for peer in members:
                incarnation = peer.info.incarnation
                rng = np.random.default_rng([self._seed, 2, peer.index, incarnation])
                peer.machine = peer.factory(peer.info, view, rng, incarnation)
        for peer in peers:
            self.tell(peer.info.peer, self.start_event)
            self._membership.welcome(peer.info.peer)

    def _received(self, dst: Port, src: Port, message: Message) -> None:
        self._digest.received(self._agenda.now, dst.index, src.index, message)
        self._deliver(self._peers[dst.index], Received(src.peer, message))

    def _link_lost(self, port: Port, lost: PeerId) -> None:
        self._tell(port.index, LinkLost(lost))

    def _tell_incarnation(self, peer: _Peer, incarnation: int, event: Event) -> None:
        if peer.info.incarnation == incarnation:
            if type(event) is Start:
                self.finished.pop(peer.info.peer, None)
            self._tell(peer.index, event)

    def _tell(self, index: int, event: Event) -> None:
        peer = self._peers[index]
        if peer.machine is not None:
            self._digest.event(self._agenda.now, index, event)
            self._deliver(peer, event)

    def _deliver(self, peer: _Peer, event: Event) -> None:
        machine = peer.machine
        assert machine is not None
        self.delivered += 1
        for effect in machine.handle(event, self._agenda.now):
            if type(effect) is Send:
                if self.interceptors:
                    self._intercept(peer.port, effect.dst, effect.message)
                else:
                    self._transport.send(peer.port, effect.dst, effect.message)
            else:
                self._carry_out(peer, machine, effect)
            if peer.machine is not machine:
                # An observer or interceptor has let it crash: the other effects never happen.
                return
        deadline = machine.deadline
        if deadline is not None and deadline < peer.armed_s:
            self._arm(peer, deadline)

    def _arm(self, peer: _Peer, deadline: float) -> None:
        peer.armed_s = max(deadline, self._agenda.now)
        self._agenda.at(peer.armed_s, self._timer, peer, peer.armed_s)

    def _timer(self, peer: _Peer, armed_s: float) -> None:
        if peer.armed_s != armed_s or peer.machine is None:
            return
        peer.armed_s = math.inf
        deadline = peer.machine.deadline
        if deadline is None:
            return
        if deadline > armed_s:
            # It has been put off since; once it comes to the front is early enough to see.
            self._arm(peer, deadline)
            return
        peer.timers = peer.timers + 1 if peer.timer_s == armed_s else 0
        peer.timer_s = armed_s
        if peer.timers > _TIMERS_AT_ONCE_MAX:
            raise LocalProtocolError(
                f"{peer.info.peer}'s deadline stays at {deadline} s however often its timer fires"
            )
        self._tell(peer.index, TimerFired())

    def _carry_out(self, peer: _Peer, machine: Machine, effect: Effect) -> None:
        kind = type(effect)
        if isinstance(effect, Report):
            if effect.name == "round":
                self._digest.parameters(machine.params)
            for observer in self.observe:
                observer(self._agenda.now, peer.info.peer, effect)
        elif isinstance(effect, Compute | Cancel):
            if self._jobs is None:
                raise ConfigError("a machine wants to train, and the engine has no backend")
            if isinstance(effect, Compute):
                self._jobs.submit(peer.slot, effect.job_id, effect.job)
            else:
                self._jobs.cancel(peer.slot, effect.job_id)
        elif isinstance(effect, Publish):
            self._membership.publish(peer.info.peer, effect.record)
        elif isinstance(effect, Finish):
            self.finished[peer.info.peer] = effect.params
        else:
            raise LocalProtocolError(f"{peer.info.peer} returned {kind.__name__}, not an effect")

    def _intercept(self, src: Port, dst: PeerId, message: Message) -> None:
        delay_s = 0.0
        copies = 1
        for interceptor in self.interceptors:
            verdict = interceptor(self._agenda.now, src.peer, dst, message)
            if isinstance(verdict, Drop):
                return
            if isinstance(verdict, Delay):
                delay_s += verdict.seconds
            elif isinstance(verdict, Duplicate):
                copies += 1
            elif isinstance(verdict, Replace):
                message = verdict.message
        for _ in range(copies):
            if src.alive:
                self._transport.send(src, dst, message, delay_s)

    def _peer(self, peer: PeerId) -> _Peer:
        found = self._by_id.get(peer)
        if found is None:
            raise ConfigError(f"there is no peer {peer!r}; there are {len(self._by_id)} others")
        return found

    @contextmanager
    def _interrupts_wait(self) -> Generator[None, None, None]:
        """Ctrl-C lets the event under way finish; a second one does what it did before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.getsignal(signal.SIGINT)
        if before is None:
            # Installed outside Python: not ours to replace.
            yield
            return
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
