"""How messages get from peer to peer in virtual time: connections, outboxes, loss, partitions."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from flwr_moshpit.protocol.machine import Delivery, Message, PeerId
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.network import HEADER_BYTES, SMALL_BYTES, Link
from flwr_moshpit.simulation.transfers import Flow, Pipe, Transfers

_STREAM = Delivery.STREAM
_NEWEST = Delivery.NEWEST
_FLIGHT_BYTES = 1 << 16
"""What TCP sends at once; a loss in it costs one retransmission."""
_RTO_MIN_S = 0.2
_DUPLICATED = 0.01
"""Of datagrams on a link with jitter, the share that arrives twice."""


class Port:
    """One peer's place in the network: its link, what is open on it, and its counters."""

    __slots__ = (
        "alive",
        "backlog_at_s",
        "backlog_s",
        "channels",
        "down",
        "incarnation",
        "index",
        "jitter_s",
        "latency_s",
        "loss",
        "outboxes",
        "peer",
        "received_bytes",
        "sent_bytes",
        "side",
        "up",
        "up_free_s",
    )

    def __init__(self, peer: PeerId, index: int, link: Link) -> None:
        self.peer = peer
        self.index = index
        self.up = Pipe(link.uplink_bytes_per_s)
        self.down = Pipe(link.downlink_bytes_per_s)
        self.latency_s = link.latency_s
        self.jitter_s = link.jitter_s
        self.loss = link.loss
        self.alive = False
        self.incarnation = 0
        self.side = 0
        """Peers on different sides of a partition do not reach each other."""
        self.up_free_s = 0.0
        """When the small messages before the next one will have left."""
        self.backlog_s = 0.0
        """How long the small messages that come here kept the downlink busy, at `backlog_at_s`."""
        self.backlog_at_s = 0.0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.channels: dict[PeerId, Channel] = {}
        self.outboxes: dict[PeerId, Outbox] = {}


class Channel:
    """One direction of a connection: a stream, in order."""

    __slots__ = ("dead", "dst", "flow", "last_s", "queue", "src")

    def __init__(self, src: Port, dst: Port) -> None:
        self.src = src
        self.dst = dst
        self.flow: Flow | None = None
        self.queue: deque[tuple[Message, int, float]] | None = None
        self.last_s = 0.0
        """When the last message arrives that has left."""
        self.dead = False
        """Broken: what was sent on it is lost, and `LinkLost` is under way to the sender."""


class Outbox:
    """What waits to go to one peer as `Delivery.NEWEST`, at most one of each key."""

    __slots__ = ("dst", "flow", "incarnation", "src", "waiting")

    def __init__(self, src: Port, dst: Port) -> None:
        self.src = src
        self.dst = dst
        self.incarnation = dst.incarnation
        self.flow: Flow | None = None
        self.waiting: dict[object, tuple[Message, int, float]] = {}


class Transport:
    """Carries messages between ports, and hands over messages and lost links to the engine."""

    def __init__(
        self,
        agenda: Agenda,
        seed: int,
        array_scale: float,
        detection_s: tuple[float, float],
        received: Callable[[Port, Port, Message], None],
        link_lost: Callable[[Port, PeerId], None],
    ) -> None:
        self._agenda = agenda
        self._transfers = Transfers(agenda)
        self._random = random.Random(seed).random
        self._scale = array_scale
        self._detection_s = detection_s
        self._received = received
        self._link_lost = link_lost
        self._ports: dict[PeerId, Port] = {}

    def add(self, port: Port) -> None:
        self._ports[port.peer] = port

    def send(self, src: Port, dst_id: PeerId, message: Message, delay_s: float = 0.0) -> None:
        """Take `message` over; it arrives `delay_s` later than it otherwise would."""
        dst = self._ports.get(dst_id)
        if dst is src:
            # A letter to oneself needs no network.
            at_s = self._agenda.now + delay_s
            self._agenda.at(at_s, self._arrive, src, src, src.incarnation, message, 0, None)
            return
        size = HEADER_BYTES + int(message.array_bytes * self._scale)
        src.sent_bytes += size
        if message.delivery is _STREAM:
            self._send_stream(src, dst_id, dst, message, size, delay_s)
        elif dst is not None and dst.alive and dst.side == src.side:
            if message.delivery is _NEWEST:
                self._send_newest(src, dst, message, size, delay_s)
            else:
                self._send_datagram(src, dst, message, size, delay_s)

    # Streams

    def _send_stream(
        self,
        src: Port,
        dst_id: PeerId,
        dst: Port | None,
        message: Message,
        size: int,
        delay_s: float,
    ) -> None:
        channel = src.channels.get(dst_id)
        if channel is None:
            channel = self._connect(src, dst_id, dst)
        if channel.dead:
            return
        dst = channel.dst
        if not dst.alive:
            # The connection is refused, or reset, after the data and one round trip.
            spent_s = size / src.up.capacity + 2 * (src.latency_s + dst.latency_s)
            self._break(channel, spent_s)
        elif dst.side != src.side:
            self._break(channel, self._detection())
        elif channel.flow is not None:
            if channel.queue is None:
                channel.queue = deque()
            channel.queue.append((message, size, delay_s))
        elif size <= SMALL_BYTES:
            arrival_s = self._small(src, dst, size)
            self._deliver_stream(channel, message, size, arrival_s + delay_s)
        else:
            self._start_stream(channel, message, size, delay_s)

    def _connect(self, src: Port, dst_id: PeerId, dst: Port | None) -> Channel:
        if dst is None:
            # Nobody has this name (yet): as if it were down.
            dst = Port(dst_id, -1, Link(1.0, 1.0, src.latency_s))
        channel = src.channels[dst_id] = Channel(src, dst)
        if dst.alive and dst.side == src.side and src.peer not in dst.channels:
            # Each end must learn of the other's death, whoever spoke first.
            dst.channels[src.peer] = Channel(dst, src)
        return channel

    def _start_stream(self, channel: Channel, message: Message, size: int, delay_s: float) -> None:
        channel.flow = self._transfers.start(
            channel.src.up,
            channel.dst.down,
            size,
            self._stream_sent,
            channel,
            message,
            size,
            delay_s,
        )

    def _stream_sent(self, channel: Channel, message: Message, size: int, delay_s: float) -> None:
        src, dst = channel.src, channel.dst
        channel.flow = None
        arrival_s = self._agenda.now + src.latency_s + dst.latency_s + delay_s
        self._deliver_stream(channel, message, size, arrival_s)
        queue = channel.queue
        while queue and channel.flow is None:
            message, size, delay_s = queue.popleft()
            if size <= SMALL_BYTES:
                arrival_s = self._small(src, dst, size) + delay_s
                self._deliver_stream(channel, message, size, arrival_s)
            else:
                self._start_stream(channel, message, size, delay_s)

    def _deliver_stream(
        self, channel: Channel, message: Message, size: int, arrival_s: float
    ) -> None:
        src, dst = channel.src, channel.dst
        if src.jitter_s or dst.jitter_s:
            arrival_s += (src.jitter_s + dst.jitter_s) * self._random()
        if src.loss or dst.loss:
            arrival_s += self._retransmission_s(src, dst, size)
        if arrival_s < channel.last_s:
            arrival_s = channel.last_s
        channel.last_s = arrival_s
        self._agenda.at(arrival_s, self._arrive, src, dst, dst.incarnation, message, size, channel)

    def _retransmission_s(self, src: Port, dst: Port, size: int) -> float:
        loss = _loss(src, dst)
        flights = math.ceil(size / _FLIGHT_BYTES)
        if flights <= 16:
            losses = 0
            while flights:
                if self._random() < loss:
                    losses += 1
                else:
                    flights -= 1
        else:
            losses = int(flights * loss / (1 - loss) + self._random())
        return losses * max(_RTO_MIN_S, 4 * (src.latency_s + dst.latency_s))

    # Datagrams, and the newest of each key

    def _send_datagram(
        self, src: Port, dst: Port, message: Message, size: int, delay_s: float
    ) -> None:
        if size <= SMALL_BYTES:
            self._deliver_datagram(src, dst, message, size, self._small(src, dst, size) + delay_s)
        else:
            self._transfers.start(
                src.up,
                dst.down,
                size,
                self._datagram_sent,
                src,
                src.incarnation,
                dst,
                message,
                size,
                delay_s,
            )

    def _datagram_sent(
        self, src: Port, incarnation: int, dst: Port, message: Message, size: int, delay_s: float
    ) -> None:
        if src.alive and src.incarnation == incarnation:
            arrival_s = self._agenda.now + src.latency_s + dst.latency_s + delay_s
            self._deliver_datagram(src, dst, message, size, arrival_s)

    def _deliver_datagram(
        self, src: Port, dst: Port, message: Message, size: int, arrival_s: float
    ) -> None:
        if (src.loss or dst.loss) and self._random() < _loss(src, dst):
            return
        jitter_s = src.jitter_s + dst.jitter_s
        if jitter_s:
            draw = self._random()
            if draw > 1 - _DUPLICATED:
                again_s = arrival_s + jitter_s * self._random()
                self._agenda.at(
                    again_s, self._arrive, src, dst, dst.incarnation, message, size, None
                )
            arrival_s += jitter_s * draw
        self._agenda.at(arrival_s, self._arrive, src, dst, dst.incarnation, message, size, None)

    def _send_newest(
        self, src: Port, dst: Port, message: Message, size: int, delay_s: float
    ) -> None:
        now = self._agenda.now
        outbox = src.outboxes.get(dst.peer)
        if outbox is None or outbox.incarnation != dst.incarnation:
            if size <= SMALL_BYTES and src.up_free_s <= now:
                arrival_s = self._small(src, dst, size) + delay_s
                self._deliver_datagram(src, dst, message, size, arrival_s)
                return
            outbox = src.outboxes[dst.peer] = Outbox(src, dst)
            self._agenda.at(max(now, src.up_free_s), self._next_newest, outbox)
        key = message.newest_key
        replaced = outbox.waiting.get(key)
        if replaced is not None:
            src.sent_bytes -= replaced[1]
        outbox.waiting[key] = (message, size, delay_s)

    def _next_newest(self, outbox: Outbox) -> None:
        """The uplink has a moment for `outbox`: its oldest message begins to leave."""
        src, dst = outbox.src, outbox.dst
        if src.outboxes.get(dst.peer) is not outbox:
            return
        if not outbox.waiting:
            del src.outboxes[dst.peer]
            return
        message, size, delay_s = outbox.waiting.pop(next(iter(outbox.waiting)))
        if size <= SMALL_BYTES:
            arrival_s = self._small(src, dst, size) + delay_s
            self._deliver_datagram(src, dst, message, size, arrival_s)
            self._agenda.at(src.up_free_s, self._next_newest, outbox)
        else:
            outbox.flow = self._transfers.start(
                src.up, dst.down, size, self._newest_sent, outbox, message, size, delay_s
            )

    def _newest_sent(self, outbox: Outbox, message: Message, size: int, delay_s: float) -> None:
        outbox.flow = None
        src, dst = outbox.src, outbox.dst
        arrival_s = self._agenda.now + src.latency_s + dst.latency_s + delay_s
        self._deliver_datagram(src, dst, message, size, arrival_s)
        self._next_newest(outbox)

    # All

    def _small(self, src: Port, dst: Port, size: int) -> float:
        """When a small message that is sent now arrives; it takes its turn at both links."""
        now = self._agenda.now
        start_s = src.up_free_s
        left_s = (start_s if start_s > now else now) + size / src.up.capacity
        src.up_free_s = left_s
        backlog_s = dst.backlog_s - (now - dst.backlog_at_s)
        backlog_s = (backlog_s if backlog_s > 0.0 else 0.0) + size / dst.down.capacity
        dst.backlog_s = backlog_s
        dst.backlog_at_s = now
        through_s = now + backlog_s
        latency_s = src.latency_s + dst.latency_s
        return (left_s if left_s > through_s else through_s) + latency_s

    def _arrive(
        self,
        src: Port,
        dst: Port,
        incarnation: int,
        message: Message,
        size: int,
        channel: Channel | None,
    ) -> None:
        if not dst.alive or dst.incarnation != incarnation:
            return
        if channel is not None:
            if channel.dead:
                return
            if src.side != dst.side:
                self._break(channel, self._detection())
                return
        elif src.side != dst.side:
            return
        dst.received_bytes += size
        self._received(dst, src, message)

    # What breaks

    def crash(self, port: Port) -> None:
        """The process at `port` is gone; the engine has marked it so. The kernel of its device
        resets its connections; what had left its uplink still arrives."""
        for channel in port.channels.values():
            self._clear(channel)
            other = channel.dst
            back = other.channels.get(port.peer)
            if back is None or back.dst is not port:
                continue
            if other.side != port.side:
                if not back.dead:
                    self._break(back, self._detection())
                continue
            if not back.dead:
                self._clear(back)
                back.dead = True
                del other.channels[port.peer]
            reset_s = self._agenda.now + port.latency_s + other.latency_s
            self._agenda.at(
                max(reset_s, channel.last_s), self._tell, other, other.incarnation, port.peer
            )
        port.channels = {}
        for outbox in port.outboxes.values():
            if outbox.flow is not None:
                self._transfers.cancel(outbox.flow)
        port.outboxes = {}

    def cut(self) -> None:
        """The sides have changed: what is under way between two of them is lost."""
        for port in self._ports.values():
            for channel in list(port.channels.values()):
                under_way = channel.flow is not None and not channel.dead
                if under_way and channel.dst.side != port.side:
                    self._break(channel, self._detection())
            for dst, outbox in list(port.outboxes.items()):
                if outbox.dst.side != port.side:
                    if outbox.flow is not None:
                        self._transfers.cancel(outbox.flow)
                    del port.outboxes[dst]

    def _detection(self) -> float:
        low, high = self._detection_s
        return low + (high - low) * self._random()

    def _break(self, channel: Channel, after_s: float) -> None:
        channel.dead = True
        self._clear(channel)
        self._agenda.at(self._agenda.now + after_s, self._broken, channel, channel.src.incarnation)

    def _clear(self, channel: Channel) -> None:
        if channel.flow is not None:
            self._transfers.cancel(channel.flow)
            channel.flow = None
        channel.queue = None

    def _broken(self, channel: Channel, incarnation: int) -> None:
        src, dst = channel.src, channel.dst
        if src.channels.get(dst.peer) is channel:
            # The next message tries a new connection; as long as the other end has one open, its
            # death must reach this end.
            if src.peer in dst.channels:
                src.channels[dst.peer] = Channel(src, dst)
            else:
                del src.channels[dst.peer]
        self._tell(src, incarnation, dst.peer)

    def _tell(self, port: Port, incarnation: int, lost: PeerId) -> None:
        if port.alive and port.incarnation == incarnation:
            self._link_lost(port, lost)


def _loss(src: Port, dst: Port) -> float:
    return 1 - (1 - src.loss) * (1 - dst.loss)
