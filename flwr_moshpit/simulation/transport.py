"""How messages get from peer to peer in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from flwr_moshpit.protocol.machine import Delivery, Message, PeerId
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.datagrams import Datagrams
from flwr_moshpit.simulation.network import HEADER_BYTES, Delay, Drop, Duplicate, Replace, Verdict
from flwr_moshpit.simulation.ports import Port, Wire
from flwr_moshpit.simulation.streams import Streams

Interceptor: TypeAlias = Callable[[float, PeerId, PeerId, Message], Verdict | None]
"""(now, src, dst, message) -> what happens to it; None: nothing special."""

_STREAM = Delivery.STREAM
_NEWEST = Delivery.NEWEST


class Transport:
    """Carries messages between ports, each as its type declares."""

    def __init__(
        self,
        agenda: Agenda,
        seed: int,
        array_scale: float,
        detection_s: tuple[float, float],
        received: Callable[[Port, Port, Message], None],
        link_lost: Callable[[Port, PeerId], None],
        line_changed: Callable[[Port, PeerId, bool], None] = lambda port, peer, is_busy: None,
    ) -> None:
        """`array_scale` multiplies the bytes of arrays; `detection_s` bounds the time that it takes
        to notice that a peer cannot be reached. Calls `received(dst, src, message)`, and
        `line_changed(src, dst, is_busy)` about large messages of `Delivery.NEWEST`."""
        self.interceptors: list[Interceptor] = []
        self._agenda = agenda
        self._scale = array_scale
        self._received = received
        self._ports: dict[PeerId, Port] = {}
        wire = Wire(agenda, random.Random(seed).random, received)
        self._streams = Streams(wire, detection_s, link_lost)
        self._datagrams = Datagrams(wire, line_changed)

    def add(self, port: Port) -> None:
        self._ports[port.peer] = port

    def send(self, src: Port, dst_id: PeerId, message: Message) -> None:
        """Take `message` over, as the interceptors leave it."""
        if not self.interceptors:
            self._carry(src, dst_id, message, 0.0)
            return
        delay_s, copies = 0.0, 1
        for interceptor in self.interceptors:
            verdict = interceptor(self._agenda.now, src.peer, dst_id, message)
            if isinstance(verdict, Drop):
                return
            if isinstance(verdict, Delay):
                delay_s += verdict.seconds
            elif isinstance(verdict, Duplicate):
                copies += 1
            elif isinstance(verdict, Replace):
                message = verdict.message
        # An interceptor may have let the sender crash.
        for _ in range(copies if src.alive else 0):
            self._carry(src, dst_id, message, delay_s)

    def crash(self, port: Port) -> None:
        """The process at `port` is dead; the caller has marked it so."""
        self._streams.crash(port)
        self._datagrams.crash(port)

    def cut(self) -> None:
        """The sides of ports have changed."""
        for port in self._ports.values():
            self._streams.cut(port)
            self._datagrams.cut(port)

    def _carry(self, src: Port, dst_id: PeerId, message: Message, delay_s: float) -> None:
        dst = self._ports.get(dst_id)
        if dst is src:
            # A letter to oneself needs no network.
            at_s = self._agenda.now + delay_s
            self._agenda.at(at_s, self._return, src, src.incarnation, message)
            return
        size = HEADER_BYTES + int(message.array_bytes * self._scale)
        src.sent_bytes += size
        if message.delivery is _STREAM:
            self._streams.send(src, dst_id, dst, message, size, delay_s)
        elif dst is not None and dst.alive and dst.side == src.side:
            if message.delivery is _NEWEST:
                self._datagrams.send_newest(src, dst, message, size, delay_s)
            else:
                self._datagrams.send(src, dst, message, size, delay_s)

    def _return(self, port: Port, incarnation: int, message: Message) -> None:
        if port.alive and port.incarnation == incarnation:
            self._received(port, port, message)
