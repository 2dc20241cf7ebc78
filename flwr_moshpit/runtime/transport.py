"""How messages get to other peers: the seam between a driver and a network.

A transport belongs to one event loop and is called on it; it calls back on it too.

- `send` takes a message over and returns at once. Each type of message says how it travels, see
  `Delivery`: streams arrive in order, or `on_link_lost` follows at the sender.
- `on_message(src, message)` may return a future. Until that is done the message counts as not
  taken: the sender gets no new credit for it, and at some point waits. Datagrams that nobody takes
  are lost.
- `on_link_lost(peer)`: what was sent to, or expected from, this peer on a stream will not come.
- `on_line(peer, is_busy)`: see `LineBusy`. A link that is lost is free.

Peers are found by their addresses, which the membership knows: `set_address`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Protocol

from flwr_moshpit.errors import TransportError
from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime.carrier import Accept, Pipe
from flwr_moshpit.runtime.mesh import Mesh
from flwr_moshpit.runtime.neighbour import OnLine, OnLinkLost, OnMessage, Settings
from flwr_moshpit.runtime.wire import Limits

LOCAL_FRAMES_MAX = 4
"""What a pipe inside a process holds; like a network's, it is full at some time."""


class Transport(Protocol):
    """Carries one peer's messages."""

    peer: PeerId

    @property
    def refusals(self) -> Counter[str]:
        """What was refused from others, by reason."""
        ...

    @property
    def address(self) -> str:
        """Where others reach this peer, once it has started."""
        ...

    async def start(
        self,
        on_message: OnMessage,
        on_link_lost: OnLinkLost,
        on_line: OnLine = lambda peer, is_busy: None,
    ) -> None:
        """Raises `TransportError` when it cannot listen."""
        ...

    def send(self, dst: PeerId, message: Message) -> None:
        """Never blocks, never raises."""
        ...

    def set_address(self, peer: PeerId, address: str) -> None:
        """Where `peer` is from now on. A connection to where it was is given up."""
        ...

    def forget(self, peer: PeerId) -> None:
        """`peer` is gone: give up what waits for it, without `on_link_lost`."""
        ...

    async def close(self, grace_s: float = 1.0) -> None:
        """End. What was sent before gets `grace_s` to arrive."""
        ...


class LocalPipe:
    """One end of a pipe inside one process."""

    def __init__(self) -> None:
        self._far = self
        self._frames: deque[bytes] = deque()
        """What came and was not read."""
        self._closed = False
        self._changed = asyncio.Event()

    @classmethod
    def pair(cls) -> tuple[LocalPipe, LocalPipe]:
        near, far = cls(), cls()
        near._far, far._far = far, near
        return near, far

    async def write(self, frame: bytes) -> None:
        far = self._far
        while len(far._frames) >= LOCAL_FRAMES_MAX and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise ConnectionError("closed")
        far._frames.append(frame)
        far._changed.set()

    async def read(self) -> bytes | None:
        while not self._frames and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._frames:
            return None
        self._far._changed.set()
        return self._frames.popleft()

    async def close(self) -> None:
        for end in (self, self._far):
            end._closed = True
            end._changed.set()


class LocalNetwork:
    """Connects the transports of one process and one event loop."""

    def __init__(self) -> None:
        self._listening: dict[str, Accept] = {}

    def carrier(self, peer: PeerId) -> LocalCarrier:
        return LocalCarrier(self._listening, f"local:{peer}")


class LocalCarrier:
    """One peer's place in a `LocalNetwork`."""

    def __init__(self, listening: dict[str, Accept], address: str) -> None:
        self._listening = listening
        self._address = address
        self._accepted: dict[asyncio.Task[None], None] = {}

    async def start(self, accept: Accept) -> str:
        if self._address in self._listening:
            raise TransportError(f"{self._address} is taken")
        self._listening[self._address] = self._accept_with(accept)
        return self._address

    async def dial(self, peer: PeerId, address: str) -> Pipe:
        accept = self._listening.get(address)
        if accept is None:
            raise ConnectionError("nobody listens there")
        near, far = LocalPipe.pair()
        await accept(far, None)
        return near

    async def close(self) -> None:
        self._listening.pop(self._address, None)
        await asyncio.gather(*self._accepted, return_exceptions=True)

    def _accept_with(self, accept: Accept) -> Accept:
        async def spawn(pipe: Pipe, authenticated: PeerId | None) -> None:
            task = asyncio.ensure_future(accept(pipe, authenticated))
            self._accepted[task] = None
            task.add_done_callback(self._accepted.pop)

        return spawn


class LocalTransport(Mesh):
    """A `Transport` inside one process: frames and all, so aliasing and bounds show."""

    def __init__(
        self,
        network: LocalNetwork,
        peer: PeerId,
        limits: Limits,
        *,
        swarm: str = "local",
        incarnation: int = 0,
        settings: Settings | None = None,
    ) -> None:
        carrier = network.carrier(peer)
        super().__init__(swarm, peer, carrier, limits, incarnation=incarnation, settings=settings)
