"""The simulator's network behind the interface of real transports, for what all must hold."""

from __future__ import annotations

from collections import Counter

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime.neighbour import OnLine, OnLinkLost, OnMessage
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.network import Link
from flwr_moshpit.simulation.ports import Port
from flwr_moshpit.simulation.transport import Transport

LINK = Link(uplink_bytes_per_s=1e7, downlink_bytes_per_s=1e7, latency_s=0.005)


class SimulatedNetwork:
    """Ports and a clock of their own."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.ports: dict[PeerId, Port] = {}
        self.transports: dict[PeerId, SimulatedTransport] = {}
        self.network = Transport(
            self.agenda, 1, 1.0, (0.5, 1.5), self._received, self._link_lost, self._line
        )

    def _received(self, dst: Port, src: Port, message: Message) -> None:
        self.transports[dst.peer].on_message(src.peer, message)

    def _link_lost(self, port: Port, peer: PeerId) -> None:
        self.transports[port.peer].on_link_lost(peer)

    def _line(self, port: Port, peer: PeerId, is_busy: bool) -> None:
        self.transports[port.peer].on_line(peer, is_busy)


class SimulatedTransport:
    """A `runtime.transport.Transport` in virtual time."""

    def __init__(self, net: SimulatedNetwork, peer: PeerId) -> None:
        self.peer = peer
        self.address = f"simulated:{peer}"
        self.refusals: Counter[str] = Counter()
        self._net = net

    async def start(
        self,
        on_message: OnMessage,
        on_link_lost: OnLinkLost,
        on_line: OnLine = lambda peer, is_busy: None,
    ) -> None:
        self.on_message, self.on_link_lost, self.on_line = on_message, on_link_lost, on_line
        net = self._net
        port = net.ports.get(self.peer)
        if port is None:
            port = net.ports[self.peer] = Port(self.peer, len(net.ports), LINK)
            net.network.add(port)
        port.alive = True
        port.incarnation += 1
        net.transports[self.peer] = self

    def send(self, dst: PeerId, message: Message) -> None:
        port = self._net.ports[self.peer]
        if port.alive:
            self._net.network.send(port, dst, message)

    def set_address(self, peer: PeerId, address: str) -> None:
        """Everybody finds everybody."""

    def forget(self, peer: PeerId) -> None:
        """Nothing is kept of anybody."""

    async def close(self, grace_s: float = 1.0) -> None:
        port = self._net.ports[self.peer]
        if port.alive and self._net.transports[self.peer] is self:
            port.alive = False
            self._net.network.crash(port)
