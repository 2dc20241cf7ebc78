"""`Delivery.DATAGRAM` and `Delivery.NEWEST`: may be lost, reordered and duplicated, silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.simulation.network import SMALL_BYTES
from flwr_moshpit.simulation.ports import Port, Wire, loss_between
from flwr_moshpit.simulation.transfers import Flow

_DUPLICATED = 0.01
"""On links with jitter, the share of datagrams that arrives twice."""


class _Waiting(NamedTuple):
    message: Message
    size: int
    delay_s: float


class Outbox:
    """What waits to go to one peer as `Delivery.NEWEST`, at most one of each key. It is there as
    long as something waits or a large one is leaving."""

    __slots__ = ("dst", "flow", "is_busy", "src", "waiting")

    def __init__(self, src: Port, dst: Port) -> None:
        self.src = src
        self.dst = dst
        self.flow: Flow | None = None
        self.waiting: dict[object, _Waiting] = {}
        self.is_busy = False
        """Whether the sender has been told, because of a large one."""


class Datagrams:
    """All messages under way that nobody will miss."""

    def __init__(self, wire: Wire, line_changed: Callable[[Port, PeerId, bool], None]) -> None:
        self._wire = wire
        self._agenda = wire.agenda
        self._line_changed = line_changed

    def send(self, src: Port, dst: Port, message: Message, size: int, delay_s: float) -> None:
        """At once, beside all others."""
        if size <= SMALL_BYTES:
            arrival_s = self._wire.small_arrival_s(src, dst, size) + delay_s
            self._deliver(src, dst, message, size, arrival_s)
        else:
            sent = (src, src.incarnation, dst, message, size, delay_s)
            self._wire.transfers.start(src.up, dst.down, size, self._sent, *sent)

    def send_newest(
        self, src: Port, dst: Port, message: Message, size: int, delay_s: float
    ) -> None:
        """When the uplink has a moment for it, if no newer one with its key comes first."""
        now = self._agenda.now
        outbox = src.outboxes.get(dst.peer)
        if outbox is None:
            if size <= SMALL_BYTES and src.up_free_s <= now:
                arrival_s = self._wire.small_arrival_s(src, dst, size) + delay_s
                self._deliver(src, dst, message, size, arrival_s)
                return
            outbox = src.outboxes[dst.peer] = Outbox(src, dst)
            self._agenda.at(src.up_free_s, self._next, outbox)
        replaced = outbox.waiting.get(message.newest_key)
        if replaced is not None:
            src.sent_bytes -= replaced.size
        outbox.waiting[message.newest_key] = _Waiting(message, size, delay_s)
        if size > SMALL_BYTES and not outbox.is_busy:
            self._tell(outbox, is_busy=True)

    def crash(self, port: Port) -> None:
        """What waits or is leaving is gone."""
        for outbox in port.outboxes.values():
            self._drop(outbox)
        port.outboxes = {}

    def cut(self, port: Port) -> None:
        """The sides have changed: what waits for another side is lost."""
        for dst_id, outbox in list(port.outboxes.items()):
            if outbox.dst.side != port.side:
                self._drop(outbox)
                del port.outboxes[dst_id]
                if outbox.is_busy:
                    self._tell(outbox, is_busy=False)

    def _drop(self, outbox: Outbox) -> None:
        if outbox.flow is not None:
            self._wire.transfers.cancel(outbox.flow)

    def _tell(self, outbox: Outbox, is_busy: bool) -> None:
        """Between two events of the sender's: what led to this may be one itself."""
        outbox.is_busy = is_busy
        src = outbox.src
        call = (src, src.incarnation, outbox.dst.peer, is_busy)
        self._agenda.at(self._agenda.now, self._line_is, *call)

    def _line_is(self, src: Port, incarnation: int, dst: PeerId, is_busy: bool) -> None:
        if src.alive and src.incarnation == incarnation:
            self._line_changed(src, dst, is_busy)

    def _sent(
        self, src: Port, incarnation: int, dst: Port, message: Message, size: int, delay_s: float
    ) -> None:
        if src.alive and src.incarnation == incarnation:
            arrival_s = self._agenda.now + src.latency_s + dst.latency_s + delay_s
            self._deliver(src, dst, message, size, arrival_s)

    def _next(self, outbox: Outbox) -> None:
        """The oldest that waits begins to leave."""
        src, dst = outbox.src, outbox.dst
        if src.outboxes.get(dst.peer) is not outbox:
            return
        if not outbox.waiting:
            del src.outboxes[dst.peer]
            if outbox.is_busy:
                self._tell(outbox, is_busy=False)
            return
        message, size, delay_s = outbox.waiting.pop(next(iter(outbox.waiting)))
        if size <= SMALL_BYTES:
            arrival_s = self._wire.small_arrival_s(src, dst, size) + delay_s
            self._deliver(src, dst, message, size, arrival_s)
            self._agenda.at(src.up_free_s, self._next, outbox)
        else:
            outbox.flow = self._wire.transfers.start(
                src.up, dst.down, size, self._newest_sent, outbox, message, size, delay_s
            )

    def _newest_sent(self, outbox: Outbox, message: Message, size: int, delay_s: float) -> None:
        outbox.flow = None
        src, dst = outbox.src, outbox.dst
        arrival_s = self._agenda.now + src.latency_s + dst.latency_s + delay_s
        self._deliver(src, dst, message, size, arrival_s)
        self._next(outbox)

    def _deliver(self, src: Port, dst: Port, message: Message, size: int, arrival_s: float) -> None:
        draw = self._wire.draw
        if (src.loss or dst.loss) and draw() < loss_between(src, dst):
            return
        arrival = (src, dst, dst.incarnation, message, size)
        jitter_s = src.jitter_s + dst.jitter_s
        if jitter_s:
            if draw() < _DUPLICATED:
                self._agenda.at(arrival_s + jitter_s * draw(), self._arrive, *arrival)
            arrival_s += jitter_s * draw()
        self._agenda.at(arrival_s, self._arrive, *arrival)

    def _arrive(self, src: Port, dst: Port, incarnation: int, message: Message, size: int) -> None:
        if dst.alive and dst.incarnation == incarnation and src.side == dst.side:
            dst.received_bytes += size
            self._wire.received(dst, src, message)
