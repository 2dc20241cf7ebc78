"""The host's duties towards machines, see `protocol.machine`: events in, effects carried out, one
timer a peer."""

from __future__ import annotations

import math
from collections.abc import Callable

from flwr_moshpit.errors import ConfigError, LocalProtocolError
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    Effect,
    Event,
    Finish,
    LineBusy,
    LineFree,
    LinkLost,
    Machine,
    Message,
    PeerId,
    Publish,
    Received,
    Report,
    Send,
    Start,
    TimerFired,
    Vector,
)
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.compute import JobPool
from flwr_moshpit.simulation.digest import Digest
from flwr_moshpit.simulation.membership import SimulatedMembership
from flwr_moshpit.simulation.peers import Peer
from flwr_moshpit.simulation.ports import Port
from flwr_moshpit.simulation.transport import Transport

_TIMERS_AT_ONCE_MAX = 1000
"""A machine whose timer fires this often at one instant will never let time go on."""


class Host:
    """Hosts the machines of all peers."""

    transport: Transport
    membership: SimulatedMembership
    jobs: JobPool | None = None

    def __init__(self, agenda: Agenda) -> None:
        """`transport`, `membership` and perhaps `jobs`, which call back, are set afterwards."""
        self.peers: list[Peer] = []
        self.observe: list[Observer] = []
        self.on_job: list[Callable[[PeerId], None]] = []
        self.finished: dict[PeerId, Vector] = {}
        self.delivered = 0
        self.digest = Digest()
        self._agenda = agenda

    def received(self, dst: Port, src: Port, message: Message) -> None:
        """`message` from `src` has arrived at `dst`."""
        self.digest.received(self._agenda.now, dst.index, src.index, message)
        self._deliver(self.peers[dst.index], Received(src.peer, message))

    def link_lost(self, port: Port, lost: PeerId) -> None:
        """What `port` sent to, or expected from, `lost` will not come."""
        self.tell(port.index, LinkLost(lost))

    def line_changed(self, port: Port, peer: PeerId, is_busy: bool) -> None:
        """Whether what `port` has for `peer` that is not ordered must wait."""
        self.tell(port.index, LineBusy(peer) if is_busy else LineFree(peer))

    def tell_incarnation(self, peer: Peer, incarnation: int, event: Event) -> None:
        """Hand `event` to `peer` if it is still the same process."""
        if peer.info.incarnation == incarnation:
            if type(event) is Start:
                self.finished.pop(peer.info.peer, None)
            self.tell(peer.index, event)

    def tell(self, index: int, event: Event) -> None:
        """Hand `event` to peer number `index` if it is alive."""
        peer = self.peers[index]
        if peer.machine is not None:
            self.digest.event(self._agenda.now, index, event)
            self._deliver(peer, event)

    def disarm(self, peer: Peer) -> None:
        """Take back the timer of `peer`."""
        if peer.ticket is not None:
            self._agenda.cancel(peer.ticket)
            peer.ticket = None
            peer.armed_s = math.inf

    def _deliver(self, peer: Peer, event: Event) -> None:
        machine = peer.machine
        assert machine is not None
        self.delivered += 1
        for effect in machine.handle(event, self._agenda.now):
            if type(effect) is Send:
                self.transport.send(peer.port, effect.dst, effect.message)
            else:
                self._carry_out(peer, machine, effect)
            if peer.machine is not machine:
                # An observer or interceptor has let it crash: the other effects never happen.
                return
        deadline = machine.deadline
        if deadline is None or deadline == math.inf:
            self.disarm(peer)
        elif deadline < peer.armed_s:
            self._arm(peer, deadline)

    def _arm(self, peer: Peer, deadline: float) -> None:
        self.disarm(peer)
        peer.armed_s = deadline
        peer.ticket = self._agenda.at(deadline, self._timer, peer)

    def _timer(self, peer: Peer) -> None:
        peer.ticket = None
        peer.armed_s = math.inf
        assert peer.machine is not None
        deadline = peer.machine.deadline
        now = self._agenda.now
        if deadline is None or deadline == math.inf:
            return
        if deadline > now:
            # It has been put off since; to see it when it comes to the front is early enough.
            self._arm(peer, deadline)
            return
        peer.timers = peer.timers + 1 if peer.timer_s == now else 0
        peer.timer_s = now
        if peer.timers > _TIMERS_AT_ONCE_MAX:
            raise LocalProtocolError(
                f"{peer.info.peer}'s deadline stays at {deadline} s however often its timer fires"
            )
        self.tell(peer.index, TimerFired())

    def _carry_out(self, peer: Peer, machine: Machine, effect: Effect) -> None:
        kind = type(effect)
        if isinstance(effect, Report):
            if effect.name == "round":
                self.digest.parameters(machine.params)
            for observer in self.observe:
                observer(self._agenda.now, peer.info.peer, effect)
        elif isinstance(effect, Compute | Cancel):
            if self.jobs is None:
                raise ConfigError("a machine wants to train, and the engine has no backend")
            if isinstance(effect, Compute):
                self.jobs.submit(peer.slot, effect.job_id, effect.job)
                for watch in self.on_job:
                    watch(peer.info.peer)
            else:
                self.jobs.cancel(peer.slot, effect.job_id)
        elif isinstance(effect, Publish):
            self.membership.publish(peer.info.peer, effect.record)
        elif isinstance(effect, Finish):
            self.finished[peer.info.peer] = effect.params
        else:
            raise LocalProtocolError(f"{peer.info.peer} returned {kind.__name__}, not an effect")
