"""The driver of virtual time: it delivers events to machines one at a time and carries out what
they return. Same seed, same run: `Engine.digest` tells.

    agenda.py      what happens next
    host.py        machines: events in, effects carried out; peers.py: what there is of each
    network.py     links, and what a test may do to a message
    transport.py   messages on their way: streams.py, datagrams.py; transfers.py shares bandwidth
    membership.py  views and records
    compute.py     jobs and their virtual cost; backend.py runs them
    digest.py      the hash over everything that happened
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol.machine import Event, Machine, PeerId, PeerInfo, Start, Vector
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.backend import ComputeBackend
from flwr_moshpit.simulation.compute import JobPool, Slot
from flwr_moshpit.simulation.host import Host
from flwr_moshpit.simulation.interpreter import deferred_interrupts, rare_collections
from flwr_moshpit.simulation.membership import Delays, SimulatedMembership
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.simulation.peers import Device, MachineFactory, Peer, Usage
from flwr_moshpit.simulation.ports import Port
from flwr_moshpit.simulation.transport import Interceptor, Transport
from flwr_moshpit.trainer import Cost


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
        self.start_event = start if start is not None else Start()
        self.num_alive = 0
        self._seed = seed
        self._network = network
        self._agenda = Agenda()
        self._host = host = Host(self._agenda)
        self._peers = host.peers
        self._by_id: dict[PeerId, Peer] = {}
        self._begun = False
        self._interrupted = False
        delays = delays if delays is not None else Delays()
        self._membership = host.membership = SimulatedMembership(
            self._agenda, np.random.default_rng([seed, 1]), delays, host.tell
        )
        self._transport = host.transport = Transport(
            self._agenda,
            seed,
            array_scale,
            delays.loss_s,
            host.received,
            host.link_lost,
            host.line_changed,
        )
        self._backend = backend
        self._jobs: JobPool | None = None
        if backend is not None:
            if cost is None:
                raise ConfigError("an engine with a backend needs the cost of its jobs")
            self._jobs = host.jobs = JobPool(
                self._agenda,
                backend,
                cost,
                seed,
                host.tell,
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
    def delivered(self) -> int:
        """Events handed to machines so far."""
        return self._host.delivered

    @property
    def observe(self) -> list[Observer]:
        """Who is told of every `Report`."""
        return self._host.observe

    @property
    def on_job(self) -> list[Callable[[PeerId], None]]:
        """Who is told which peer has just begun a job."""
        return self._host.on_job

    @property
    def finished(self) -> dict[PeerId, Vector]:
        """What living peers returned with `Finish`, since their last `Start`."""
        return self._host.finished

    @property
    def interceptors(self) -> list[Interceptor]:
        """What sees each message before it travels, and may change its fate."""
        return self._transport.interceptors

    @property
    def digest(self) -> str:
        """Of every event delivered so far and of the parameters after each round, in hex."""
        return self._host.digest.hexdigest()

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
        return found.usage(self.now, busy_s)

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
        added = Peer(info, factory, device, port, slot)
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
        with deferred_interrupts(self.interrupt), rare_collections():
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
        while self._agenda.is_due():
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
        incarnation = found.info.incarnation
        self._agenda.at(self.now, self._host.tell_incarnation, found, incarnation, event)

    # Faults

    def crash(self, peer: PeerId) -> None:
        """`peer` is gone, with its machine, its job and what had not left its uplink. Harmless if
        it is down."""
        found = self._peer(peer)
        if not found.port.alive:
            return
        found.go_down(self.now)
        self._host.disarm(found)
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

    def _begin(self) -> None:
        self._interrupted = False
        if not self._begun:
            self._begun = True
            self._bring_up(self._peers)

    def _bring_up(self, peers: Sequence[Peer]) -> None:
        now = self._agenda.now
        for peer in peers:
            peer.come_up(now)
        self.num_alive += len(peers)
        by_side: dict[int, list[Peer]] = {}
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

    def _peer(self, peer: PeerId) -> Peer:
        found = self._by_id.get(peer)
        if found is None:
            raise ConfigError(f"there is no peer {peer!r}; there are {len(self._by_id)} others")
        return found
