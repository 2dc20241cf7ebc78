"""One other peer, as a mesh sees it: what waits for it, the link to it, and how a link is made."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime.carrier import Carrier, Pipe, is_relayed
from flwr_moshpit.runtime.frames import Breach
from flwr_moshpit.runtime.greeting import BUSY, Doorkeeper, Greeting
from flwr_moshpit.runtime.link import Link
from flwr_moshpit.runtime.outbox import Outbox
from flwr_moshpit.runtime.uplink import UplinkMeter
from flwr_moshpit.runtime.wire import Limits

log = logging.getLogger(__name__)

BUSY_MAX = 8
"""How often to try again with a peer that says that it is dialling itself."""

OnMessage: TypeAlias = Callable[[PeerId, Message], "asyncio.Future[None] | None"]
OnLinkLost: TypeAlias = Callable[[PeerId], None]
OnLine: TypeAlias = Callable[[PeerId, bool], None]


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


@dataclass(slots=True)
class Surroundings:
    """What all neighbours of one peer share."""

    me: PeerId
    door: Doorkeeper
    carrier: Carrier
    limits: Limits
    settings: Settings
    deliver: OnMessage
    on_link_lost: OnLinkLost
    on_line: OnLine
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    dialable: bool
    """Whether others can dial this peer."""
    uplink: UplinkMeter = field(default_factory=UplinkMeter)
    links: dict[Link, Neighbour] = field(default_factory=dict)
    """All that run, also those that are retired or replaced."""
    is_closed: bool = False
    sent_bytes: int = 0
    """On links that have ended."""
    received_bytes: int = 0


class Neighbour:
    """One other peer. At most one link to it takes messages from its outbox.

    A link that breaks takes with it what was under way and what waited in order; `on_link_lost`
    says so, once. The next message dials again, after a pause that grows with every failure.
    """

    def __init__(self, peer: PeerId, around: Surroundings, outbox: Outbox) -> None:
        self.peer = peer
        self.outbox = outbox
        self.link: Link | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.is_forgotten = False
        self._around = around
        self._address: str | None = None
        self._is_connecting = False
        """Whether `dialling` is past its pause."""
        self._failures = 0

    def send(self, message: Message) -> None:
        if not self.outbox.put(message):
            log.warning("%s: too much waits for %s", self._around.me, self.peer)
            self.outbox.clear()
            if self.link is not None:
                self.link.end("too much waited")
            else:
                asyncio.get_running_loop().call_soon(self._around.on_link_lost, self.peer)
        elif self.link is not None:
            self.link.wake()
        else:
            self._need_link()

    def move(self, address: str) -> None:
        """It is at `address` from now on."""
        if address == self._address:
            return
        self._address = address
        self._failures = 0
        if self.link is not None and self.link.dialled:
            self.link.end("the peer has moved")

    def forget(self) -> None:
        self.is_forgotten = True
        self.outbox.clear()
        self.hang_up()
        if self.link is not None:
            self.link.end("the peer is forgotten")

    def hang_up(self) -> None:
        """Stop dialling."""
        if self.dialling is not None:
            self.dialling.cancel()
            self.dialling = None

    async def drain(self) -> None:
        """Return when everything that waits has arrived, or cannot."""
        if self.dialling is not None and self.outbox:
            await asyncio.wait([self.dialling])
        if self.link is not None:
            self.link.flush()
            await self.link.flushed.wait()

    # Dialling

    async def call_back(self) -> bool:
        """It calls through a relay: dial it instead, if that can be; whether there is a link."""
        if self.link is not None or not self._address or is_relayed(self._address):
            return False
        self._need_link()
        if self.dialling is not None:
            await asyncio.wait([self.dialling], timeout=self._around.settings.handshake_s / 2)
        return self.link is not None

    def _need_link(self) -> None:
        if self.link is None and self.dialling is None:
            self.dialling = self._around.spawn(self._dial())

    async def _dial(self) -> None:
        """Try until there is a link, or a reason to give up what waits for it."""
        try:
            for _ in range(BUSY_MAX):
                await self._pause()
                if self._is_superseded() or await self._connect():
                    return
                self._failures += 1
            raise ConnectionError("says that it is dialling itself, and does not come")
        except (ConnectionError, Breach) as error:
            if self._is_superseded():
                return
            if isinstance(error, Breach):
                self._around.door.refuse(error, self.peer)
            log.info("%s: no link to %s (%s): %s", self._around.me, self.peer, self._address, error)
            self._failures += 1
            self.dialling = None
            if self.outbox.clear():
                self._around.on_link_lost(self.peer)

    def _is_superseded(self) -> bool:
        """Whether a link that came in has taken the place of this task, or the peer was forgotten:
        then it was cancelled.

        That alone would not do: before Python 3.12 a cancelled `wait_for` that has a result, here
        a connection or the news that the other side is busy, goes on with it.
        """
        return self.dialling is not asyncio.current_task()

    async def _pause(self) -> None:
        if self._failures:
            settings = self._around.settings
            pause_s = settings.backoff_s * 2.0 ** min(self._failures - 1, 16)
            await asyncio.sleep(min(pause_s, settings.backoff_max_s) * random.uniform(0.5, 1.0))

    async def _connect(self) -> bool:
        """Whether there is a link now, or none is wanted any more. False: the other side says that
        it is dialling itself."""
        if not self._address:
            raise ConnectionError("its address is not known")
        # Who has to be called through a relay calls back, if it can: its call is welcome then.
        self._is_connecting = not (self._around.dialable and is_relayed(self._address))
        try:
            pipe, mine, theirs = await asyncio.wait_for(
                self._call(self._address), self._around.settings.handshake_s
            )
        except asyncio.TimeoutError as error:
            raise ConnectionError("no answer") from error
        except Breach as error:
            if error.reason != BUSY:
                raise
            return False
        finally:
            self._is_connecting = False
        if self._is_superseded():
            await pipe.close()
            return True
        self.dialling = None
        self._around.spawn(self.carry(self.bind(pipe, mine, theirs, dialled=True)))
        return True

    async def _call(self, address: str) -> tuple[Pipe, Greeting, Greeting]:
        pipe = await self._around.carrier.dial(self.peer, address)
        try:
            return pipe, *await self._around.door.call(pipe, self.peer)
        except BaseException:
            await pipe.close()
            raise

    # Links

    @property
    def must_stand_back(self) -> bool:
        """Whether a link that it dials gives way: both dial at once, and this side goes first."""
        link = self.link
        is_new = (
            link is not None
            and link.dialled
            and not link.is_retiring
            and link.age_s < self._around.settings.handshake_s
        )
        return self._around.me < self.peer and (self._is_connecting or is_new)

    def bind(self, pipe: Pipe, mine: Greeting, theirs: Greeting, *, dialled: bool) -> Link:
        """A link that takes the outbox over, from one that there may be."""
        around = self._around
        self.hang_up()
        if self.link is not None:
            # The peer would not have dialled if it still had this one.
            log.info("%s: %s has begun a new link", around.me, self.peer)
            self.link.end("replaced")
            self.link = None
            self._lose()
        deliver = functools.partial(around.deliver, self.peer)
        link = Link(
            pipe,
            mine,
            theirs,
            self.outbox,
            around.limits,
            deliver,
            around.door,
            around.uplink,
            functools.partial(around.on_line, self.peer),
            dialled=dialled,
        )
        self.link = link
        around.links[link] = self
        if around.is_closed:
            link.end("closed")
        return link

    async def carry(self, link: Link) -> None:
        """Run `link` to its end."""
        try:
            await link.run()
        finally:
            del self._around.links[link]
            self._around.sent_bytes += link.sent_bytes
            self._around.received_bytes += link.received_bytes
            self._ended(link)

    def retire(self, link: Link) -> None:
        """Let go of `link` if nobody uses it."""
        if link.retire_if_idle() and self.link is link:
            self.link = None

    def _ended(self, link: Link) -> None:
        if self.link is link:
            self.link = None
        elif not link.is_retiring:
            return
        if self._around.is_closed or self.is_forgotten:
            return
        if not link.ended_well:
            log.info("%s has lost its link to %s: %s", self._around.me, self.peer, link.reason)
            # One that breaks as soon as it is there is no better than none.
            is_flapping = link.age_s < self._around.settings.handshake_s
            self._failures = self._failures + 1 if is_flapping else 0
            self._lose()
        if self.outbox:
            self._need_link()

    def _lose(self) -> None:
        if self.link is None:
            self.outbox.drop_streams()
        self._around.on_link_lost(self.peer)
