"""Transports of every kind, each with a record of what came: for tests of what all must hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime.grpc_transport import GrpcTransport
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.runtime.neighbour import Settings
from flwr_moshpit.runtime.transport import LocalNetwork, LocalTransport, Transport
from flwr_moshpit.runtime.wire import Limits
from flwr_moshpit.simulation.agenda import Agenda
from tests.runtime.simulated import SimulatedNetwork, SimulatedTransport

REAL = ("local", "grpc")
ALL = (*REAL, "simulated")
CAP_S = 50.0
"""No test waits longer for anything; all of them are done long before."""
QUICK = Settings(backoff_s=0.01, backoff_max_s=0.05)

Take = Callable[[PeerId, Message], "asyncio.Future[None] | None"]


class Station:
    """One peer: its transport, and what came. `agenda`: of its time, where that is virtual."""

    def __init__(
        self, transport: Any, take: Take | None = None, agenda: Agenda | None = None
    ) -> None:
        self.transport = transport
        self._agenda = agenda
        self.peer = transport.peer
        self.inbox: list[tuple[PeerId, Message]] = []
        self.lost: list[PeerId] = []
        self.lines: list[tuple[PeerId, bool]] = []
        self._take = take
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self.transport.start(self._on_message, self._on_link_lost, self._on_line)

    def send(self, dst: Station, message: Message) -> None:
        self.transport.send(dst.peer, message)

    def came_from(self, src: Station) -> list[Any]:
        return [message for peer, message in self.inbox if peer == src.peer]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds: looked at when something comes, and now and then."""
        if self._agenda is not None:
            while not condition():
                assert self._agenda.is_due(), "nothing happens any more"
                self._agenda.advance()
            return
        while not condition():
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.02)

    def _on_message(self, src: PeerId, message: Message) -> asyncio.Future[None] | None:
        self.inbox.append((src, message))
        self._changed.set()
        return None if self._take is None else self._take(src, message)

    def _on_line(self, peer: PeerId, is_busy: bool) -> None:
        self.lines.append((peer, is_busy))
        self._changed.set()

    def _on_link_lost(self, peer: PeerId) -> None:
        self.lost.append(peer)
        self._changed.set()


class Stations:
    """Stations on one network, all of one kind, which know each other's addresses."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._network = LocalNetwork()
        self._simulated = SimulatedNetwork()
        self._authority = Authority.create("swarm")
        self._all: list[Station] = []

    async def add(
        self,
        name: str,
        *,
        take: Take | None = None,
        dim: int = 1 << 18,
        incarnation: int = 0,
        settings: Settings = QUICK,
    ) -> Station:
        peer, limits = PeerId(name), Limits(dim)
        transport: Transport
        agenda = None
        if self._kind == "simulated":
            transport, agenda = SimulatedTransport(self._simulated, peer), self._simulated.agenda
        elif self._kind == "local":
            transport = LocalTransport(
                self._network,
                peer,
                limits,
                swarm="swarm",
                incarnation=incarnation,
                settings=settings,
            )
        else:
            transport = GrpcTransport(
                self._authority.issue(peer),
                "127.0.0.1:0",
                limits,
                incarnation=incarnation,
                settings=settings,
            )
        station = Station(transport, take, agenda)
        await station.start()
        for other in self._all:
            other.transport.set_address(peer, transport.address)
            transport.set_address(other.peer, other.transport.address)
        self._all.append(station)
        return station

    async def close(self) -> None:
        await asyncio.gather(*(each.transport.close(grace_s=0.0) for each in self._all))


def run(kind: str, scenario: Callable[[Stations], Awaitable[None]]) -> None:
    """Run a test's coroutine on a network of its own; nothing may be left behind."""

    async def main() -> None:
        stations = Stations(kind)
        try:
            await asyncio.wait_for(scenario(stations), CAP_S)
        finally:
            await asyncio.wait_for(stations.close(), CAP_S)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        names = [repr(task.get_coro()) for task in left]
        assert not [name for name in names if "flwr_moshpit" in name or "Mesh" in name], names

    asyncio.run(main())
