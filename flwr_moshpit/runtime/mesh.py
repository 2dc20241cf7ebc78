"""Links to all the peers that one peer talks to: dialled, accepted, lost, retired.

Two peers share one link, whoever dialled it. When both dial at once, the link of the one with the
lower id stays. A link that breaks takes with it what was under way and what waited in order:
`on_link_lost` says so, once. The next message dials again, after a pause that grows with every
failure. Links on which nothing was said for a while are retired without loss, so a peer of a large
swarm keeps those that it uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.carrier import Carrier, Pipe
from flwr_moshpit.runtime.frames import Breach, pack
from flwr_moshpit.runtime.greeting import BUSY, Doorkeeper, Greeting
from flwr_moshpit.runtime.link import Link
from flwr_moshpit.runtime.outbox import Outbox
from flwr_moshpit.runtime.wire import Limits

log = logging.getLogger(__name__)

BUSY_MAX = 8
"""How often to try again with a peer that says that it is dialling itself."""

OnMessage: TypeAlias = Callable[[PeerId, Message], "asyncio.Future[None] | None"]
OnLinkLost: TypeAlias = Callable[[PeerId], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times and bounds of a mesh. The defaults serve edge devices and data centres alike."""

    handshake_s: float = 5.0
    """How long a connection may take until both sides have greeted."""
    idle_s: float = 30.0
    """A link on which nothing was said for this long, or twice this long, is retired."""
    backoff_s: float = 0.1
    """The first pause before dialling again; it doubles up to `backoff_max_s`."""
    backoff_max_s: float = 2.0
    outbox_bytes: int | None = None
    """Most bytes that wait for one peer in order. Derived: four models and 16 MiB."""


class _Neighbour:
    """What is known of one other peer."""

    def __init__(self, peer: PeerId, outbox: Outbox) -> None:
        self.peer = peer
        self.outbox = outbox
        self.address: str | None = None
        self.link: Link | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.is_connecting = False
        """Whether `dialling` is past its pause."""
        self.failures = 0


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
    ) -> None:
        self.peer = peer
        self._door = Doorkeeper(swarm, peer, incarnation, limits)
        self._carrier = carrier
        self._limits = limits
        self._settings = settings or Settings()
        self._outbox_bytes = self._settings.outbox_bytes or 4 * 8 * limits.dim + (1 << 24)
        self._neighbours: dict[PeerId, _Neighbour] = {}
        self._links: dict[Link, _Neighbour] = {}
        self._sent_bytes = self._received_bytes = 0
        """On links that have ended."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._address = ""
        self._closing = False
        """Nothing is sent any more, but for what waits."""
        self._closed = False

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
    def num_links(self) -> int:
        return len(self._links)

    @property
    def sent_bytes(self) -> int:
        """All that was handed to the network, before encryption."""
        return self._sent_bytes + sum(link.sent_bytes for link in self._links)

    @property
    def received_bytes(self) -> int:
        return self._received_bytes + sum(link.received_bytes for link in self._links)

    async def start(self, on_message: OnMessage, on_link_lost: OnLinkLost) -> None:
        self._on_message = on_message
        self._on_link_lost = on_link_lost
        self._loop = asyncio.get_running_loop()
        self._address = await self._carrier.start(self._accept)
        self._retiring = self._spawn(self._retire_idle_links())

    def send(self, dst: PeerId, message: Message) -> None:
        if self._closing:
            return
        if dst == self.peer:
            self._loop.call_soon(self._deliver, self.peer, message)
            return
        neighbour = self._neighbour(dst)
        if not neighbour.outbox.put(message):
            log.warning("%s: too much waits for %s", self.peer, dst)
            self._give_up(neighbour, "too much waits")
            return
        if neighbour.link is not None:
            neighbour.link.wake()
        else:
            self._need_link(neighbour)

    def set_address(self, peer: PeerId, address: str) -> None:
        neighbour = self._neighbour(peer)
        if self._closed or address == neighbour.address:
            return
        neighbour.address = address
        neighbour.failures = 0
        if neighbour.link is not None and neighbour.link.dialled:
            neighbour.link.end("the peer has moved")

    def forget(self, peer: PeerId) -> None:
        neighbour = self._neighbours.pop(peer, None)
        if neighbour is None:
            return
        neighbour.outbox.clear()
        if neighbour.dialling is not None:
            neighbour.dialling.cancel()
        if neighbour.link is not None:
            neighbour.link.end("the peer is forgotten")

    async def close(self, grace_s: float = 1.0) -> None:
        if self._closing:
            return
        self._closing = True
        drains = [asyncio.create_task(self._drain(each)) for each in self._neighbours.values()]
        await _finish(drains, grace_s)
        self._closed = True
        for link in self._links:
            link.end("closed")
        for neighbour in self._neighbours.values():
            if neighbour.dialling is not None:
                neighbour.dialling.cancel()
        self._retiring.cancel()
        await _finish(list(self._tasks), self._settings.handshake_s)
        await self._carrier.close()

    async def _drain(self, neighbour: _Neighbour) -> None:
        if neighbour.dialling is not None and neighbour.outbox:
            await asyncio.wait([neighbour.dialling])
        if neighbour.link is not None:
            neighbour.link.flush()
            await neighbour.link.flushed.wait()

    # Dialling

    def _need_link(self, neighbour: _Neighbour) -> None:
        if neighbour.link is None and neighbour.dialling is None:
            neighbour.dialling = self._spawn(self._dial(neighbour))

    async def _dial(self, neighbour: _Neighbour) -> None:
        """Try until there is a link, or a reason to give up what waits for it."""
        try:
            for _ in range(BUSY_MAX):
                await self._pause(neighbour)
                if self._is_superseded(neighbour) or await self._connect(neighbour):
                    return
                neighbour.failures += 1
            raise ConnectionError("says that it is dialling itself, and does not come")
        except (ConnectionError, Breach) as error:
            if self._is_superseded(neighbour):
                return
            if isinstance(error, Breach):
                self._door.refuse(error, neighbour.peer)
            log.info(
                "%s cannot reach %s at %s: %s", self.peer, neighbour.peer, neighbour.address, error
            )
            neighbour.failures += 1
            neighbour.dialling = None
            if neighbour.outbox.clear():
                self._on_link_lost(neighbour.peer)

    def _is_superseded(self, neighbour: _Neighbour) -> bool:
        """Whether a link that came in has taken the place of this task, which was cancelled then.

        That alone would not do: before Python 3.12 a cancelled `wait_for` that has a result, here
        the news that the other side is busy, goes on with it.
        """
        return neighbour.dialling is not asyncio.current_task()

    async def _pause(self, neighbour: _Neighbour) -> None:
        if neighbour.failures:
            settings = self._settings
            pause_s = settings.backoff_s * 2.0 ** min(neighbour.failures - 1, 16)
            await asyncio.sleep(min(pause_s, settings.backoff_max_s) * random.uniform(0.5, 1.0))

    async def _connect(self, neighbour: _Neighbour) -> bool:
        """Whether there is a link now. False: the other side says that it is dialling itself."""
        if neighbour.address is None:
            raise ConnectionError("its address is not known")
        neighbour.is_connecting = True
        try:
            pipe, mine, theirs = await asyncio.wait_for(
                self._greet(neighbour.peer, neighbour.address), self._settings.handshake_s
            )
        except asyncio.TimeoutError as error:
            raise ConnectionError("no answer") from error
        except Breach as error:
            if error.reason != BUSY:
                raise
            return False
        finally:
            neighbour.is_connecting = False
        neighbour.dialling = None
        link = self._bind(neighbour, pipe, mine, theirs, dialled=True)
        self._spawn(self._carry(neighbour, link))
        return True

    async def _greet(self, peer: PeerId, address: str) -> tuple[Pipe, Greeting, Greeting]:
        pipe = await self._carrier.dial(peer, address)
        try:
            return pipe, *await self._door.call(pipe, peer)
        except BaseException:
            await pipe.close()
            raise

    # Accepting

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
                bye = pack(pb.Frame(bye=pb.Bye(reason=error.reason)))
                await asyncio.wait_for(pipe.write(bye), self._settings.handshake_s)
        else:
            await self._carry(neighbour, self._bind(neighbour, pipe, mine, theirs, dialled=False))
            return
        await pipe.close()

    async def _welcome(
        self, pipe: Pipe, authenticated: PeerId | None
    ) -> tuple[_Neighbour, Greeting, Greeting]:
        theirs = await self._door.listen(pipe, authenticated)
        neighbour = self._neighbour(theirs.src)
        if self._closed or self._goes_first(neighbour):
            raise Breach(BUSY)
        if neighbour.link is not None and neighbour.link.is_draining:
            # What is left on the old one must arrive before what comes on the new one.
            await neighbour.link.ended.wait()
        return neighbour, await self._door.answer(pipe, theirs), theirs

    def _goes_first(self, neighbour: _Neighbour) -> bool:
        """Whether this side's own link, there or about to be, stays when both dial at once."""
        link = neighbour.link
        is_new = (
            link is not None
            and link.dialled
            and not link.is_retiring
            and self._loop.time() - link.began_at < self._settings.handshake_s
        )
        return self.peer < neighbour.peer and (neighbour.is_connecting or is_new)

    # Links

    def _bind(
        self, neighbour: _Neighbour, pipe: Pipe, mine: Greeting, theirs: Greeting, *, dialled: bool
    ) -> Link:
        if neighbour.dialling is not None:
            neighbour.dialling.cancel()
            neighbour.dialling = None
        if neighbour.link is not None:
            # The peer would not have dialled if it still had this one.
            log.info("%s: %s has begun a new link", self.peer, neighbour.peer)
            neighbour.link.end("replaced")
            neighbour.link = None
            self._lose(neighbour)
        peer, outbox = neighbour.peer, neighbour.outbox
        link = Link(
            pipe,
            mine,
            theirs,
            outbox,
            self._limits,
            functools.partial(self._deliver, peer),
            self._door,
            dialled=dialled,
        )
        neighbour.link = link
        self._links[link] = neighbour
        if self._closed:
            link.end("closed")
        return link

    async def _carry(self, neighbour: _Neighbour, link: Link) -> None:
        try:
            await link.run()
        finally:
            del self._links[link]
            self._sent_bytes += link.sent_bytes
            self._received_bytes += link.received_bytes
            self._ended(neighbour, link)

    def _ended(self, neighbour: _Neighbour, link: Link) -> None:
        if neighbour.link is link:
            neighbour.link = None
        elif not link.is_retiring:
            return
        if self._closed or self._neighbours.get(neighbour.peer) is not neighbour:
            return
        if not link.ended_well:
            log.info("%s has lost its link to %s: %s", self.peer, neighbour.peer, link.reason)
            # One that breaks as soon as it is there is no better than none.
            lived_s = self._loop.time() - link.began_at
            is_flapping = lived_s < self._settings.handshake_s
            neighbour.failures = neighbour.failures + 1 if is_flapping else 0
            self._lose(neighbour)
        if neighbour.outbox:
            self._need_link(neighbour)

    def _lose(self, neighbour: _Neighbour) -> None:
        if neighbour.link is None:
            neighbour.outbox.drop_streams()
        self._on_link_lost(neighbour.peer)

    def _give_up(self, neighbour: _Neighbour, reason: str) -> None:
        neighbour.outbox.clear()
        if neighbour.link is not None:
            neighbour.link.end(reason)
        else:
            self._loop.call_soon(self._on_link_lost, neighbour.peer)

    async def _retire_idle_links(self) -> None:
        while True:
            await asyncio.sleep(self._settings.idle_s)
            for link, neighbour in list(self._links.items()):
                if link.retire_if_idle() and neighbour.link is link:
                    neighbour.link = None

    def _deliver(self, src: PeerId, message: Message) -> asyncio.Future[None] | None:
        return None if self._closed else self._on_message(src, message)

    def _neighbour(self, peer: PeerId) -> _Neighbour:
        neighbour = self._neighbours.get(peer)
        if neighbour is None:
            neighbour = self._neighbours[peer] = _Neighbour(peer, Outbox(self._outbox_bytes))
        return neighbour

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
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
