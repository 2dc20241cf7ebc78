"""The one loop that drives a peer in real time.

    event loop       transport, membership, observers, this driver
    one thread       the machine (`machine_thread.py`)
    one process      the trainer (`trainer_process.py`), or another thread
    other threads    what takes long and concerns nobody else: writing a checkpoint

Time is `time.monotonic()` everywhere, so the wall clock may jump.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol import machine as effects
from flwr_moshpit.protocol.machine import (
    Cancel,
    Effect,
    Event,
    Finish,
    Learned,
    LineBusy,
    LineFree,
    LinkLost,
    Machine,
    Message,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Record,
    Report,
    Send,
    Start,
    State,
    Stop,
    TimerFired,
    Vector,
    View,
    ViewChanged,
)
from flwr_moshpit.protocol.membership import (
    Membership,
    MembershipEffect,
    MembershipEvent,
    Renewed,
)
from flwr_moshpit.protocol.membership_messages import MembershipMessage
from flwr_moshpit.runtime.checkpoint import Checkpoints
from flwr_moshpit.runtime.compute import Compute
from flwr_moshpit.runtime.machine_thread import MachineThread, Taken
from flwr_moshpit.runtime.refusals import Refusals
from flwr_moshpit.runtime.trace import Recipe, Recorder
from flwr_moshpit.runtime.transport import Transport

log = logging.getLogger(__name__)


class Buildable(Protocol):
    """What makes a machine, such as a `Recipe`: only that can be recorded."""

    def build(self) -> Machine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When things happen, in seconds."""

    start: Start = field(default_factory=Start)
    """The machine's first event."""
    gather_peers: int = 1
    """It comes as soon as the view has so many peers, this one included,"""
    gather_s: float = 10.0
    """and after this time anyway."""
    linger_s: float | None = None
    """How long this peer goes on serving others when it has finished; None: until it is stopped."""
    stop_s: float = 5.0
    """How long winding down may take, in each of its steps."""
    checkpoint_s: float = 15.0
    """Between two checkpoints."""


class Driver:
    """Runs one peer from its start to its end: `await Driver(...).run()`."""

    def __init__(
        self,
        transport: Transport,
        join: Callable[[str], Membership],
        make: Callable[[PeerInfo, View], Buildable],
        compute: Compute,
        *,
        schedule: Schedule | None = None,
        observers: Sequence[Observer] = (),
        recorder: Recorder | None = None,
        checkpoints: Checkpoints | None = None,
        swarm: str = "",
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        """`join(address)` makes the membership when the transport knows this peer's address.
        `make(info, view)` makes the machine when the membership knows whether an earlier life of
        this peer was there (`info.incarnation`) and who else is. `compute` has been started.
        `on_record` is told of every record that the membership learns, as the machine is.
        """
        self.finished = asyncio.Event()
        self.result: Vector | None = None
        """What the machine has finished with."""
        self.last_model: tuple[Vector, float] | None = None
        """`model()` as it was when `run` ended, finished or not, unless the machine had failed."""
        self._transport = transport
        self._join = join
        self._make = make
        self._compute = compute
        self._schedule = schedule if schedule is not None else Schedule()
        self._observers = list(observers)
        self._refusals = Refusals(transport.peer)
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._swarm = swarm
        self._on_record = on_record
        self._membership: Membership | None = None
        self._machine: MachineThread | None = None
        self._early: list[tuple[Event, Taken]] = []
        """What came for the machine before there was one."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._began_at = time.monotonic()

    @property
    def membership(self) -> Membership:
        """There from the moment when the transport has started."""
        assert self._membership is not None
        return self._membership

    async def run(self, *, signals: bool = False) -> Vector | None:
        """Until `stop`, or `linger_s` after the machine has finished; returns its result if it has.

        With `signals`, SIGINT and SIGTERM stop it; a second one ends the process at once. Raises
        TransportError, what the machine raises, and what an observer raises.
        """
        self._loop = asyncio.get_running_loop()
        saving: asyncio.Task[None] | None = None
        with self._signals() if signals else contextlib.nullcontext():
            try:
                await self._start()
                await self._gather()
                if not self._stopping.is_set():
                    self._begin()
                    if self._checkpoints is not None:
                        saving = self._loop.create_task(self._save_repeatedly())
                        saving.add_done_callback(self._saving_ended)
                await self._stopping.wait()
            finally:
                await self._wind_down(saving)
        if self._error is not None:
            raise self._error
        return self.result

    def stop(self) -> None:
        """Wind down: the machine hands over what others need, the membership says goodbye."""
        self._stopping.set()
        self._changed.set()

    @property
    def refused(self) -> Counter[str]:
        """What was refused from others, connections and messages, by reason."""
        return self._transport.refusals + self._refusals.counts

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def tell(self, event: Event) -> None:
        """Hand the machine an event of the host's own, such as another `Start`."""
        self._put(event)

    def move(self, address: str) -> None:
        """From now others reach this peer at `address`, "host:port"."""
        self._tell_membership(Renewed(self.membership.claim.info, address))

    def set_uplink(self, bytes_per_s: float) -> None:
        """What others should reckon with when they divide work up."""
        mine = self.membership.claim
        info = replace(mine.info, uplink_bytes_per_s=bytes_per_s)
        self._tell_membership(Renewed(info, mine.address))

    def publish(self, record: Record) -> None:
        """Spread a record of the host's own. Raises ValueError for one that cannot be spread."""
        self._tell_membership(Publish(record))

    async def model(self) -> tuple[Vector, float] | None:
        """The machine's parameters, (d,), and its weight in the swarm's mean, both of this instant;
        None before it has begun."""
        if self._machine is None:
            return None
        found: tuple[Vector, float] = await self._machine.ask(
            lambda machine: (machine.params, machine.weight)
        )
        return found

    async def snapshot(self) -> State | None:
        """The machine's, of this instant; None before it has begun."""
        if self._machine is None:
            return None
        state: State = await self._machine.ask(lambda machine: machine.snapshot())
        return state

    # From start to end

    async def _start(self) -> None:
        await self._transport.start(self._on_message, self._on_link_lost, self._on_line)
        try:
            self._membership = self._join(self._transport.address)
        except BaseException:
            await self._transport.close(0.0)
            raise
        self._tell_membership(Start())

    async def _gather(self) -> None:
        """Wait for the others, within bounds."""
        ends_at = time.monotonic() + self._schedule.gather_s
        wanted = self._schedule.gather_peers
        while not self._stopping.is_set():
            membership = self.membership
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or (membership.settled and len(membership.view) >= wanted):
                return
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    def _begin(self) -> None:
        membership = self.membership
        recipe = self._make(membership.claim.info, membership.view)
        if self._recorder is not None:
            if not isinstance(recipe, Recipe):
                raise TypeError(f"a {type(recipe).__name__} cannot be recorded")
            self._recorder.recipe(recipe)
        self._machine = MachineThread(recipe.build, self._carry_out, self._fail, self._recorder)
        self._compute.connect(self._machine.put)
        self._machine.put(self._schedule.start)
        for event, taken in self._early:
            self._machine.put(event, taken)
        self._early.clear()
        self._machine.start()

    async def _wind_down(self, saving: asyncio.Task[None] | None) -> None:
        stop_s = self._schedule.stop_s
        if saving is not None:
            saving.cancel()
            await asyncio.wait([saving])
        if self._machine is not None:
            if self._checkpoints is not None and self._error is None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._save(), stop_s)
            if self._error is None:
                with contextlib.suppress(asyncio.TimeoutError):
                    self.last_model = await asyncio.wait_for(self.model(), stop_s)
            self._machine.put(Stop())
            await self._machine.close(stop_s)
        if self._membership is not None:
            self._tell_membership(Stop())
            await self._transport.close(min(1.0, stop_s))
        await asyncio.to_thread(self._compute.close)
        if self._recorder is not None:
            self._recorder.close()

    def _fail(self, error: Exception) -> None:
        """Nothing can be relied on any more: end, and let `run` raise it."""
        if self._error is None:
            self._error = error
        self.stop()

    @contextlib.contextmanager
    def _signals(self) -> Generator[None, None, None]:
        """SIGINT and SIGTERM wind down. Another one changes nothing: that has bounds, what it
        writes would be lost, and some of what starts processes passes each Ctrl-C on twice."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            self._loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                self._loop.remove_signal_handler(number)

    # Checkpoints

    async def _save_repeatedly(self) -> None:
        while True:
            await self._save()
            await asyncio.sleep(self._schedule.checkpoint_s)

    def _saving_ended(self, saving: asyncio.Task[None]) -> None:
        error = None if saving.cancelled() else saving.exception()
        if isinstance(error, Exception):
            self._fail(error)

    async def _save(self) -> None:
        assert self._checkpoints is not None
        membership = self.membership
        content = {
            "swarm": self._swarm,
            "peer": membership.me,
            "incarnation": membership.claim.info.incarnation,
            "addresses": membership.addresses,
            "machine": await self.snapshot(),
        }
        try:
            await asyncio.to_thread(self._checkpoints.save, content)
        except OSError as error:
            # A full disk is no reason to stop training; the observers are told.
            self._observe(Report("checkpoint_failed", {"error": str(error)}))

    # Membership

    def _tell_membership(self, event: MembershipEvent) -> None:
        membership = self.membership
        out = membership.handle(event, time.monotonic())
        for peer, address in membership.moved().items():
            self._transport.set_address(peer, address)
        try:
            for effect in out:
                self._carry_out_memberships(effect)
        except Exception as error:
            self._fail(error)
        self._changed.set()
        self._arm(membership.deadline)

    def _carry_out_memberships(self, effect: MembershipEffect) -> None:
        match effect:
            case Send():
                self._transport.send(effect.dst, effect.message)
            case ViewChanged():
                self._drop_lost([peer for peer in effect.lost if peer not in effect.joined])
                if self._machine is not None:
                    self._machine.put(effect)
            case Learned():
                self._put(effect)
                if self._on_record is not None:
                    self._on_record(effect.record)
            case Report():
                self._observe(effect)

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            wait_s = max(0.0, deadline - time.monotonic())
            self._timer = self._loop.call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._tell_membership(TimerFired())

    def _drop_lost(self, lost: Sequence[PeerId]) -> None:
        """What waits for the dead is given up; their addresses stay, because they are called."""
        addresses = self.membership.addresses if lost else {}
        for peer in lost:
            self._transport.forget(peer)
            if peer in addresses:
                self._transport.set_address(peer, addresses[peer])

    # Transport

    def _on_message(self, src: PeerId, message: Message) -> Taken:
        if isinstance(message, MembershipMessage):
            if self._membership is not None:
                self._tell_membership(Received(src, message))
            return None
        if self._membership is not None:
            self._membership.heard(src)
        taken: asyncio.Future[None] = self._loop.create_future()
        self._put(Received(src, message), taken)
        return taken

    def _on_link_lost(self, peer: PeerId) -> None:
        if self._membership is not None:
            self._tell_membership(LinkLost(peer))
        if self._machine is not None:
            self._machine.put(LinkLost(peer))

    def _on_line(self, peer: PeerId, is_busy: bool) -> None:
        self._put(LineBusy(peer) if is_busy else LineFree(peer))

    # The machine

    def _put(self, event: Event, taken: Taken = None) -> None:
        if self._machine is None:
            self._early.append((event, taken))
        else:
            self._machine.put(event, taken)

    def _carry_out(self, out: list[Effect]) -> None:
        try:
            for effect in out:
                self._carry_out_one(effect)
        except Exception as error:
            self._fail(error)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._transport.send(effect.dst, effect.message)
            case effects.Compute():
                self._compute.submit(effect.job_id, effect.job)
            case Cancel():
                self._compute.cancel(effect.job_id)
            case Publish():
                self._tell_membership(effect)
            case Report():
                self._observe(effect)
            case Finish():
                self.result = effect.params
                self.finished.set()
                if self._schedule.linger_s is not None:
                    self._loop.call_later(self._schedule.linger_s, self.stop)

    def _observe(self, report: Report) -> None:
        now = time.monotonic() - self._began_at
        told = self._refusals.told(report)
        if told is not None:
            for observer in self._observers:
                observer(now, self._transport.peer, told)
