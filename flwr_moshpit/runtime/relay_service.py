"""The relay's side of `relay.py`, which every peer offers to every other of its swarm."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.relay import SERVICE, first_of, word_of

WAITING_MAX = 256
"""Peers that wait at one relay, connections that it carries at a time, and callers that one peer
may have waiting."""

PAIR_MAX = 8
"""Of these connections, those from one peer to one other: two must not use up what all need."""


@dataclass(slots=True)
class _Call:
    """A caller that waits for the peer that it wants to take its call."""

    caller: PeerId
    target: PeerId
    taken: asyncio.Future[Any]
    ended: asyncio.Event


class RelayService:
    """Connects peers that cannot be dialled with those who call them."""

    def __init__(
        self, identity: Identity, refuse: Callable[[str], None], handshake_s: float
    ) -> None:
        """`refuse(reason)` counts what is refused."""
        self.carried_bytes = 0
        self._identity = identity
        self._refuse = refuse
        self._handshake_s = handshake_s
        self._waiting: dict[PeerId, asyncio.Queue[bytes | None]] = {}
        self._calls: dict[str, _Call] = {}
        """Those that wait to be taken, and those that are carried."""

    def handler(self) -> Any:
        """For the gRPC server."""
        methods = {
            "Wait": grpc.stream_stream_rpc_method_handler(self._wait),
            "Connect": grpc.stream_stream_rpc_method_handler(self._connect),
            "Accept": grpc.stream_stream_rpc_method_handler(self._accept),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _wait(self, requests: Any, context: Any) -> None:
        peer = await self._who(context)
        if peer not in self._waiting and len(self._waiting) >= WAITING_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many wait here")
        callers: asyncio.Queue[bytes | None] = asyncio.Queue()
        if peer in self._waiting:
            self._waiting[peer].put_nowait(None)
        self._waiting[peer] = callers
        try:
            await context.send_initial_metadata(())
            while (word := await callers.get()) is not None:
                await context.write(word)
        finally:
            if self._waiting.get(peer) is callers:
                del self._waiting[peer]

    async def _connect(self, requests: Any, context: Any) -> None:
        peer = await self._who(context)
        target = PeerId(await self._word(context, "target"))
        callers = self._waiting.get(target)
        if callers is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{target} does not wait here")
        alike = sum((call.caller, call.target) == (peer, target) for call in self._calls.values())
        if len(self._calls) >= WAITING_MAX or alike >= PAIR_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much to carry")
        assert callers is not None
        if callers.qsize() >= WAITING_MAX:
            # It reads nothing, and those who have called it may long have given up.
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{target} does not take calls")
        number = secrets.token_hex(8)
        taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = self._calls[number] = _Call(peer, target, taken, asyncio.Event())
        try:
            callers.put_nowait(f"{number} {peer}".encode())
            far = await asyncio.wait_for(taken, self._handshake_s)
            await first_of(self._pump(context, far), self._pump(far, context))
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{target} does not take the call")
        finally:
            self._calls.pop(number, None)
            call.ended.set()

    async def _accept(self, requests: Any, context: Any) -> None:
        peer = await self._who(context)
        number = await self._word(context, "number")
        call = self._calls.get(number)
        if call is None or call.target != peer or call.taken.done():
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such call")
        assert call is not None
        call.taken.set_result(context)
        await call.ended.wait()

    async def _pump(self, source: Any, sink: Any) -> None:
        while (data := await source.read()) is not grpc.aio.EOF:
            self.carried_bytes += len(data)
            await sink.write(data)

    async def _who(self, context: Any) -> PeerId:
        try:
            return self._identity.peer_of(context.auth_context())
        except RemoteProtocolError:
            self._refuse("certificate")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED)
            raise

    async def _word(self, context: Any, key: str) -> str:
        try:
            return word_of(context, key)
        except RemoteProtocolError as error:
            self._refuse("malformed")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
