"""Links to all the peers that one peer talks to: dialled, accepted, lost, retired.

Two peers share one link, whoever dialled it. When both dial at once, the link of the one with the
lower id stays. Links on which nothing was said for a while are retired without loss, so a peer of a
large swarm keeps those that it uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.carrier import Carrier, Pipe
from flwr_moshpit.runtime.frames import Breach, pack
from flwr_moshpit.runtime.greeting import BUSY, Doorkeeper, Greeting
from flwr_moshpit.runtime.neighbour import (
    Neighbour,
    OnLine,
    OnLinkLost,
    OnMessage,
    Settings,
    Surroundings,
)
from flwr_moshpit.runtime.outbox import Outbox
from flwr_moshpit.runtime.wire import Limits

log = logging.getLogger(__name__)


class Mesh:
    """All of a transport but how bytes get across, which is the carrier's. See `Transport`."""

    def __init__(
        self,
        swarm: str,
        peer: PeerId,
        carrier: Carrier,
        limits: Limits,
        *,
        incarnation: int = 0,
        settings: Settings | None = None,
        dialable: bool = True,
        task: str = "",
    ) -> None:
        """`task`: what is trained, and how, in words: peers with another one are refused."""
        self.peer = peer
        self._carrier = carrier
        self._door = Doorkeeper(swarm, peer, incarnation, limits, task)
        self._settings = settings or Settings()
        self._around = Surroundings(
            me=peer,
            door=self._door,
            carrier=carrier,
            limits=limits,
            settings=self._settings,
            deliver=self._deliver,
            on_link_lost=lambda lost: self._on_link_lost(lost),
            on_line=lambda peer, is_busy: self._on_line(peer, is_busy),
            spawn=self._spawn,
            dialable=dialable,
        )
        self._outbox_bytes = self._settings.outbox_bytes or 4 * 8 * limits.dim + (1 << 24)
        self._neighbours: dict[PeerId, Neighbour] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._address = ""
        self._is_closing = False
        """Nothing is sent any more, but for what waits."""

    @property
    def address(self) -> str:
        return self._address

    @property
    def refusals(self) -> Counter[str]:
        return self._door.refusals

    @property
    def banned(self) -> Mapping[PeerId, str]:
        """Who is not let in any more, and why."""
        return self._door.banned

    @property
    def useless(self) -> Mapping[PeerId, str]:
        """Who refuses this peer for good, and why: see `Doorkeeper.useless`."""
        return self._door.useless

    @property
    def num_links(self) -> int:
        return len(self._around.links)

    @property
    def uplink_bytes_per_s(self) -> float | None:
        """As measured; None while there was never enough to send."""
        return self._around.uplink.bytes_per_s

    @property
    def sent_bytes(self) -> int:
        """All that was handed to the network, before encryption."""
        return self._around.sent_bytes + sum(link.sent_bytes for link in self._around.links)

    @property
    def received_bytes(self) -> int:
        links = self._around.links
        return self._around.received_bytes + sum(link.received_bytes for link in links)

    async def start(
        self,
        on_message: OnMessage,
        on_link_lost: OnLinkLost,
        on_line: OnLine = lambda peer, is_busy: None,
    ) -> None:
        self._on_message = on_message
        self._on_link_lost = on_link_lost
        self._on_line = on_line
        self._address = await self._carrier.start(self._accept)
        self._retiring = self._spawn(self._retire_idle_links())

    def send(self, dst: PeerId, message: Message) -> None:
        if self._is_closing:
            return
        if dst == self.peer:
            asyncio.get_running_loop().call_soon(self._deliver, self.peer, message)
        else:
            self._neighbour(dst).send(message)

    def set_address(self, peer: PeerId, address: str) -> None:
        if not self._is_closing:
            self._neighbour(peer).move(address)

    def drop_links(self) -> None:
        """This peer has another address: its connections are dead, though nobody says so."""
        for link in list(self._around.links):
            link.end("this peer has moved")

    async def call_back(self, peer: PeerId) -> bool:
        """Dial `peer`, who calls through a relay, if that can be; whether there is a link to it."""
        known = self._neighbours.get(peer)
        return known is not None and not self._is_closing and await known.call_back()

    def forget(self, peer: PeerId) -> None:
        self._door.forget(peer)
        if peer in self._neighbours:
            self._neighbours.pop(peer).forget()

    async def close(self, grace_s: float = 1.0) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        drains = [asyncio.create_task(each.drain()) for each in self._neighbours.values()]
        await _finish(drains, grace_s)
        self._around.is_closed = True
        for link in self._around.links:
            link.end("closed")
        for neighbour in self._neighbours.values():
            neighbour.hang_up()
        self._retiring.cancel()
        await _finish(list(self._tasks), self._settings.handshake_s)
        await self._carrier.close()

    async def _accept(self, pipe: Pipe, authenticated: PeerId | None) -> None:
        """Carry a connection that came in. `authenticated`: who it is, where the carrier knows."""
        try:
            neighbour, mine, theirs = await asyncio.wait_for(
                self._welcome(pipe, authenticated), self._settings.handshake_s
            )
        except asyncio.TimeoutError:
            self.refusals["handshake"] += 1
        except ConnectionError:
            log.debug("%s: a connection broke before it had begun", self.peer)
        except Breach as error:
            self._door.refuse(error, authenticated)
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                bye = pack(pb.Frame(bye=pb.Bye(reason=str(error))))
                await asyncio.wait_for(pipe.write(bye), self._settings.handshake_s)
        else:
            await neighbour.carry(neighbour.bind(pipe, mine, theirs, dialled=False))
            return
        await pipe.close()

    async def _welcome(
        self, pipe: Pipe, authenticated: PeerId | None
    ) -> tuple[Neighbour, Greeting, Greeting]:
        theirs = await self._door.listen(pipe, authenticated)
        neighbour = self._neighbour(theirs.src)
        if self._is_closing or neighbour.must_stand_back:
            raise Breach(BUSY)
        if neighbour.link is not None and neighbour.link.is_draining:
            # What is left on the old one must arrive before what comes on the new one.
            await neighbour.link.ended.wait()
        return neighbour, await self._door.answer(pipe, theirs), theirs

    def _deliver(self, src: PeerId, message: Message) -> asyncio.Future[None] | None:
        return None if self._around.is_closed else self._on_message(src, message)

    def _neighbour(self, peer: PeerId) -> Neighbour:
        neighbour = self._neighbours.get(peer)
        if neighbour is None:
            outbox = Outbox(self._outbox_bytes)
            neighbour = self._neighbours[peer] = Neighbour(peer, self._around, outbox)
        return neighbour

    async def _retire_idle_links(self) -> None:
        while True:
            await asyncio.sleep(self._settings.idle_s)
            for link, neighbour in list(self._around.links.items()):
                neighbour.retire(link)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            log.error("%s: a bug", self.peer, exc_info=task.exception())


async def _finish(tasks: list[asyncio.Task[None]], timeout_s: float) -> None:
    """Wait for `tasks`, then cancel those that are left."""
    if not tasks:
        return
    _, left = await asyncio.wait(tasks, timeout=timeout_s)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
