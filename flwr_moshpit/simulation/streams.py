"""`Delivery.STREAM`: ordered per pair of peers, and delivered or followed by `LinkLost`.

One channel per ordered pair carries one message after the other, as a TCP connection does. Loss is
lateness: it keeps TCP's window small, which limits a large message's rate (`tcp.py`), and costs a
small one a retransmission timeout, for which what comes behind waits.
A channel that breaks tells its sender after what the kernel needs to notice: a round trip where
the other process is dead, the detection delay where it cannot be reached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.simulation.network import SMALL_BYTES, Link
from flwr_moshpit.simulation.ports import Port, Wire, loss_between
from flwr_moshpit.simulation.tcp import Window
from flwr_moshpit.simulation.transfers import Flow

_RTO_MIN_S = 0.2


class _Waiting(NamedTuple):
    message: Message
    size: int
    delay_s: float


class Channel:
    """One direction of a connection."""

    __slots__ = ("dead", "dst", "flow", "last_s", "queue", "src", "window")

    def __init__(self, src: Port, dst: Port) -> None:
        self.src = src
        self.dst = dst
        self.flow: Flow | None = None
        """The large message that is leaving; `queue` holds what comes behind it."""
        self.queue: deque[_Waiting] | None = None
        self.last_s = 0.0
        """When the last message that has left arrives."""
        self.window: Window | None = None
        """Where packets are lost, once a large message was sent."""
        self.dead = False
        """Broken: what is on it is lost, and `LinkLost` is on its way to the sender."""


class Streams:
    """All channels of a network."""

    def __init__(
        self,
        wire: Wire,
        detection_s: tuple[float, float],
        link_lost: Callable[[Port, PeerId], None],
    ) -> None:
        self._wire = wire
        self._agenda = wire.agenda
        self._detection_s = detection_s
        self._link_lost = link_lost

    def send(
        self,
        src: Port,
        dst_id: PeerId,
        dst: Port | None,
        message: Message,
        size: int,
        delay_s: float,
    ) -> None:
        """Send `size` bytes to `dst_id`, whose port is `dst` if there is such a peer."""
        channel = src.channels.get(dst_id)
        if channel is None:
            channel = _connect(src, dst_id, dst)
        if channel.dead:
            return
        dst = channel.dst
        if not dst.alive:
            # The connection is refused or reset, after the data and one round trip.
            self._break(channel, size / src.up.capacity + 2 * (src.latency_s + dst.latency_s))
        elif dst.side != src.side:
            self._break(channel, self._detection())
        elif channel.flow is not None:
            if channel.queue is None:
                channel.queue = deque()
            channel.queue.append(_Waiting(message, size, delay_s))
        else:
            self._begin(channel, message, size, delay_s)

    def crash(self, port: Port) -> None:
        """The process at `port` is dead, and its kernel resets its connections. What had left its
        uplink still arrives, before the reset."""
        for channel in port.channels.values():
            self._clear(channel)
            other = channel.dst
            back = other.channels.get(port.peer)
            if back is None or back.dst is not port:
                continue
            if other.side != port.side:
                # No reset gets through; who has something to send finds out by itself.
                if not back.dead:
                    self._break(back, self._detection())
                continue
            if not back.dead:
                self._clear(back)
                back.dead = True
                del other.channels[port.peer]
            reset_s = self._agenda.now + port.latency_s + other.latency_s
            told_s = max(reset_s, channel.last_s)
            self._agenda.at(told_s, self._tell, other, other.incarnation, port.peer)
        port.channels = {}

    def cut(self, port: Port) -> None:
        """The sides have changed: what is leaving `port` for another side is lost."""
        for channel in port.channels.values():
            if channel.flow is not None and channel.dst.side != port.side:
                self._break(channel, self._detection())

    def _begin(self, channel: Channel, message: Message, size: int, delay_s: float) -> None:
        src, dst = channel.src, channel.dst
        if size <= SMALL_BYTES:
            arrival_s = self._wire.small_arrival_s(src, dst, size) + delay_s
            if src.loss or dst.loss:
                arrival_s += self._timeouts_s(src, dst)
            self._deliver(channel, message, size, arrival_s)
            return
        limit = math.inf
        if src.loss or dst.loss:
            window = _window(channel)
            limit, late_s = window.send(size, self._agenda.now, self._wire.draw)
            delay_s += late_s
        sent = (channel, message, size, delay_s)
        channel.flow = self._wire.transfers.start(
            src.up, dst.down, size, self._sent, *sent, limit=limit
        )

    def _sent(self, channel: Channel, message: Message, size: int, delay_s: float) -> None:
        """The last byte has left."""
        channel.flow = None
        if channel.window is not None:
            channel.window.paused(self._agenda.now)
        latency_s = channel.src.latency_s + channel.dst.latency_s
        self._deliver(channel, message, size, self._agenda.now + latency_s + delay_s)
        while channel.queue and channel.flow is None:
            self._begin(channel, *channel.queue.popleft())

    def _deliver(self, channel: Channel, message: Message, size: int, arrival_s: float) -> None:
        src, dst = channel.src, channel.dst
        if src.jitter_s or dst.jitter_s:
            arrival_s += (src.jitter_s + dst.jitter_s) * self._wire.draw()
        if arrival_s < channel.last_s:
            arrival_s = channel.last_s
        channel.last_s = arrival_s
        self._agenda.at(arrival_s, self._arrive, channel, dst.incarnation, message, size)

    def _timeouts_s(self, src: Port, dst: Port) -> float:
        """How late a message of one packet is."""
        losses, loss = 0, loss_between(src, dst)
        while self._wire.draw() < loss:
            losses += 1
        return losses * max(_RTO_MIN_S, 4 * (src.latency_s + dst.latency_s))

    def _arrive(self, channel: Channel, incarnation: int, message: Message, size: int) -> None:
        dst = channel.dst
        if channel.dead or not dst.alive or dst.incarnation != incarnation:
            # Its sender is told by what broke the channel.
            return
        if channel.src.side != dst.side:
            self._break(channel, self._detection())
            return
        dst.received_bytes += size
        self._wire.received(dst, channel.src, message)

    def _detection(self) -> float:
        low, high = self._detection_s
        return low + (high - low) * self._wire.draw()

    def _break(self, channel: Channel, after_s: float) -> None:
        channel.dead = True
        self._clear(channel)
        at_s = self._agenda.now + after_s
        self._agenda.at(at_s, self._broken, channel, channel.src.incarnation)

    def _clear(self, channel: Channel) -> None:
        if channel.flow is not None:
            self._wire.transfers.cancel(channel.flow)
            channel.flow = None
        channel.queue = None

    def _broken(self, channel: Channel, incarnation: int) -> None:
        src, dst = channel.src, channel.dst
        if src.channels.get(dst.peer) is channel:
            # The next message tries a new connection. As long as the other end has one open, this
            # end must learn of its death.
            if src.peer in dst.channels:
                src.channels[dst.peer] = Channel(src, dst)
            else:
                del src.channels[dst.peer]
        self._tell(src, incarnation, dst.peer)

    def _tell(self, port: Port, incarnation: int, lost: PeerId) -> None:
        if port.alive and port.incarnation == incarnation:
            self._link_lost(port, lost)


def _connect(src: Port, dst_id: PeerId, dst: Port | None) -> Channel:
    if dst is None:
        # Nobody has this name (yet): as if it were down.
        dst = Port(dst_id, -1, Link(1.0, 1.0, src.latency_s))
    channel = src.channels[dst_id] = Channel(src, dst)
    if dst.alive and dst.side == src.side and src.peer not in dst.channels:
        # Each end must learn of the other's death, whoever spoke first.
        dst.channels[src.peer] = Channel(dst, src)
    return channel


def _window(channel: Channel) -> Window:
    if channel.window is None:
        src, dst = channel.src, channel.dst
        line_bytes_per_s = min(src.up.capacity, dst.down.capacity)
        round_trip_s = 2 * (src.latency_s + dst.latency_s)
        channel.window = Window(round_trip_s, loss_between(src, dst), line_bytes_per_s)
    return channel.window
