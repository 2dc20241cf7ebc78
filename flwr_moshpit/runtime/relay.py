"""How a peer is reached that nobody can dial: through another that everybody can.

    the peer     holds a call `Wait` to its relay, and answers each caller with a call `Accept`
    a caller     calls `Connect` at the relay, which its address names: "RELAY@HOST:PORT"
    the relay    carries bytes between the two, and understands none of them

What goes through are the bytes of a TLS connection from the caller to the peer, so both see each
other's certificate, and the relay sees neither what they say nor can it speak for either. A peer
that is called by one whom it can dial calls back instead, and the relay has nothing to carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.carrier import relayed_address
from flwr_moshpit.runtime.identity import Identity

log = logging.getLogger(__name__)

SERVICE = "flwr_moshpit.peer.Relay"
CHUNK_BYTES = 1 << 16
HERE = "127.0.0.1"
AGAIN_S = 1.0
"""Before relays that could not be reached are tried again."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """For a peer that cannot be dialled: all that it needs to be reached nevertheless."""

    relays: Callable[[], Mapping[PeerId, str]]
    """Who may relay, with their addresses, as of now."""
    on_address: Callable[[str], None]
    """Is told where this peer is reached from now on."""


class Caller:
    """Makes calls to relays, each over a connection of its own."""

    def __init__(
        self, identity: Identity, options: Sequence[tuple[str, Any]], handshake_s: float
    ) -> None:
        self.handshake_s = handshake_s
        self.me = identity.peer
        self._identity = identity
        self._options = options

    def call(self, relay: PeerId, address: str, method: str, **words: str) -> tuple[Any, Any]:
        """A channel, to be closed, and a call of `method` on it, with `words` as its metadata."""
        channel = grpc.aio.secure_channel(
            address,
            self._identity.channel_credentials(),
            options=[*self._options, *self._identity.channel_options(relay)],
        )
        metadata = tuple((key, word.encode().hex()) for key, word in words.items())
        call = channel.stream_stream(f"/{SERVICE}/{method}")(metadata=metadata)
        return channel, call


class Tunnel:
    """A port of this machine that leads to a peer at its relay: for one connection."""

    def __init__(self, caller: Caller, peer: PeerId, address: str) -> None:
        """address: the peer's, see `relayed_address`."""
        relay, _, at = address.rpartition("@")
        self._channel, self._call = caller.call(PeerId(relay), at, "Connect", target=peer)
        self._server: asyncio.Server | None = None
        self._carried: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """The address to dial."""
        self._server = await asyncio.start_server(self._on_connection, HERE, 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"{HERE}:{port}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._carried is not None:
            self._carried.cancel()
            await asyncio.wait([self._carried])
        self._call.cancel()
        await self._channel.close()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._carried is not None:
            writer.close()
            return
        self._carried = asyncio.ensure_future(_carry(reader, writer, self._call))


class Waiting:
    """Keeps one peer reachable: chooses a relay, waits there, and takes calls."""

    def __init__(
        self,
        caller: Caller,
        port: int,
        relayed: Relayed,
        call_back: Callable[[PeerId], Awaitable[bool]],
    ) -> None:
        """port: where this peer itself listens, on this machine. `call_back(peer)`: dial `peer`,
        if that can be; whether there is a link to it now."""
        self._caller = caller
        self._port = port
        self._relayed = relayed
        self._call_back = call_back
        self._taken: dict[asyncio.Task[None], None] = {}

    async def run(self) -> None:
        """Without end; to be cancelled."""
        try:
            while True:
                for relay, address in self._in_order():
                    await self._wait_at(relay, address)
                await asyncio.sleep(AGAIN_S)
        finally:
            for task in list(self._taken):
                task.cancel()
            await asyncio.gather(*self._taken, return_exceptions=True)

    def _in_order(self) -> list[tuple[PeerId, str]]:
        """Each peer prefers another relay, so that all have about equally much to carry."""

        def rank(item: tuple[PeerId, str]) -> bytes:
            return hashlib.sha256(f"{self._caller.me}\0{item[0]}".encode()).digest()

        return sorted(self._relayed.relays().items(), key=rank)

    async def _wait_at(self, relay: PeerId, address: str) -> None:
        """Return when that is over, or was not possible."""
        channel, call = self._caller.call(relay, address, "Wait")
        try:
            # Comes as soon as the relay has taken us in.
            await asyncio.wait_for(call.initial_metadata(), self._caller.handshake_s)
            log.info("%s is reached through %s", self._caller.me, relay)
            self._relayed.on_address(relayed_address(relay, address))
            while (word := await call.read()) is not grpc.aio.EOF:
                number, _, peer = bytes(word[:512]).decode("utf-8", "replace").partition(" ")
                self._spawn(self._take(relay, address, number, PeerId(peer)))
        except (*BROKEN, asyncio.TimeoutError) as error:
            log.info("%s is not reached through %s: %s", self._caller.me, relay, error)
        finally:
            call.cancel()
            await channel.close()

    async def _take(self, relay: PeerId, address: str, number: str, peer: PeerId) -> None:
        """Take the call of `peer`. The relay may lie about who calls: TLS will tell."""
        if await self._call_back(peer):
            return
        channel, call = self._caller.call(relay, address, "Accept", number=number)
        try:
            await _carry(*await asyncio.open_connection(HERE, self._port), call)
        except OSError as error:
            log.info("%s cannot take a call through %s: %s", self._caller.me, relay, error)
        finally:
            call.cancel()
            await channel.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._taken[task] = None
        task.add_done_callback(self._taken.pop)


BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What gRPC raises when a call is over, whoever ended it."""


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Any) -> None:
    """Bytes both ways, until either side ends."""

    async def there() -> None:
        while data := await reader.read(CHUNK_BYTES):
            await call.write(data)

    async def back() -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            writer.write(data)
            await writer.drain()

    try:
        await first_of(there(), back())
    finally:
        writer.close()
        call.cancel()


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; connections that break end them like others that are closed."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, (*BROKEN, OSError)):
                log.error("a relayed connection has failed", exc_info=outcome)


def word_of(context: Any, key: str) -> str:
    """A word of a call's metadata. Raises RemoteProtocolError if it is not there or cannot be."""
    words = [value for name, value in context.invocation_metadata() or () if name == key]
    with contextlib.suppress(ValueError, TypeError):
        if len(words) == 1 and len(words[0]) <= 512:
            return bytes.fromhex(words[0]).decode()
    raise RemoteProtocolError(f"no {key}")
