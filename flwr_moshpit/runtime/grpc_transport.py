"""The transport of real peers: gRPC over mutual TLS. See `mesh.py` for everything above frames."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from flwr_moshpit.errors import RemoteProtocolError, TransportError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.carrier import Accept, Pipe, is_relayed
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.mesh import Mesh
from flwr_moshpit.runtime.neighbour import Settings
from flwr_moshpit.runtime.relay import BROKEN, Caller, Relayed, Tunnel, Waiting
from flwr_moshpit.runtime.relay_service import RelayService
from flwr_moshpit.runtime.wire import Limits

SERVICE = "flwr_moshpit.peer.Peer"
METHOD = "Link"

KEEPALIVE_S = 5.0
"""Silence after which a connection is probed. A death is known sooner, by the membership; this ends
what nobody watches."""
KEEPALIVE_TIMEOUT_S = 10.0
"""How long the answer may take. It waits behind data, so a slow line needs some time."""
UNUSED_S = 10.0
"""A connection that carries no link for this long is closed."""


class GrpcTransport(Mesh):
    """A `Transport` between processes. `bind`: "HOST:PORT" to listen on, port 0 for a free one.

    `advertised`: the address that others should dial, where it differs from the one bound.
    `services`: generic handlers of other services to offer on the same port. `relayed`: for a peer
    that others cannot dial; its address is "" until it has found a relay.
    """

    def __init__(
        self,
        identity: Identity,
        bind: str,
        limits: Limits,
        *,
        advertised: str | None = None,
        incarnation: int = 0,
        settings: Settings | None = None,
        services: Sequence[Any] = (),
        relayed: Relayed | None = None,
        task: str = "",
    ) -> None:
        settings = settings or Settings()
        carrier = GrpcCarrier(identity, bind, advertised, limits, settings.handshake_s, services)
        carrier.relayed = relayed
        carrier.call_back = self.call_back
        super().__init__(
            identity.swarm,
            identity.peer,
            carrier,
            limits,
            incarnation=incarnation,
            settings=settings,
            dialable=relayed is None,
            task=task,
        )
        carrier.refusals = self.refusals
        self.relay = carrier.relay


class GrpcCarrier:
    """Dials and listens. Both ends of every connection know who the other is, from TLS."""

    def __init__(
        self,
        identity: Identity,
        bind: str,
        advertised: str | None,
        limits: Limits,
        handshake_s: float,
        services: Sequence[Any] = (),
    ) -> None:
        self._identity = identity
        self._bind = bind
        self._advertised = advertised
        self._handshake_s = handshake_s
        self._services = services
        self.refusals: Counter[str] = Counter()
        self.relay = RelayService(identity, self._refuse, handshake_s)
        self.relayed: Relayed | None = None
        self.call_back: Callable[[PeerId], Awaitable[bool]]
        self._waiting: asyncio.Task[None] | None = None
        self._options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", limits.frame_bytes),
            ("grpc.max_send_message_length", limits.frame_bytes),
            ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_S)),
            ("grpc.keepalive_timeout_ms", int(1000 * KEEPALIVE_TIMEOUT_S)),
            # Newer releases of gRPC go by this one, which is a minute if it is not set.
            ("grpc.http2.ping_timeout_ms", int(1000 * KEEPALIVE_TIMEOUT_S)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.lookahead_bytes", 1 << 20),
        ]
        self._dial_options = [
            *self._options,
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
        ]
        self._caller = Caller(identity, self._dial_options, handshake_s)
        self._accept: Accept | None = None
        self._server: Any = None

    async def start(self, accept: Accept) -> str:
        self._accept = accept
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        options = [
            *self._options,
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", int(1000 * self._handshake_s)),
            ("grpc.max_connection_idle_ms", int(1000 * UNUSED_S)),
            ("grpc.max_concurrent_streams", 4),
            ("grpc.http2.min_ping_interval_without_data_ms", int(500 * KEEPALIVE_S)),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),
                self.relay.handler(),
                *self._services,
            ]
        )
        try:
            port = self._server.add_secure_port(self._bind, self._identity.server_credentials())
        except RuntimeError as error:
            raise TransportError(f"cannot listen on {self._bind}: is the port free?") from error
        await self._server.start()
        if self.relayed is not None:
            waiting = Waiting(self._caller, port, self.relayed, self.call_back)
            self._waiting = asyncio.ensure_future(waiting.run())
            return ""
        return self._advertised or f"{self._bind.rpartition(':')[0]}:{port}"

    async def dial(self, peer: PeerId, address: str) -> Pipe:
        tunnel = Tunnel(self._caller, peer, address) if is_relayed(address) else None
        channel = grpc.aio.secure_channel(
            address if tunnel is None else await tunnel.open(),
            self._identity.channel_credentials(),
            options=[*self._dial_options, *self._identity.channel_options(peer)],
        )
        return _Dialled(channel, channel.stream_stream(f"/{SERVICE}/{METHOD}")(), tunnel)

    async def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        if self._server is not None:
            await self._server.stop(0)

    def _refuse(self, reason: str) -> None:
        self.refusals[reason] += 1

    async def _serve(self, requests: Any, context: Any) -> None:
        if self._accept is None:
            return
        try:
            peer = self._identity.peer_of(context.auth_context())
        except RemoteProtocolError:
            self._refuse("certificate")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED)
        await self._accept(_Accepted(context), peer)


class _Dialled:
    """The pipe of a call that this side made, on a channel of its own."""

    def __init__(self, channel: Any, call: Any, tunnel: Tunnel | None) -> None:
        self._channel = channel
        self._call = call
        self._tunnel = tunnel

    async def write(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except BROKEN as error:
            raise _broken(error) from error

    async def read(self) -> bytes | None:
        try:
            frame = await self._call.read()
        except BROKEN as error:
            raise _broken(error) from error
        return None if frame is grpc.aio.EOF else frame

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()
        if self._tunnel is not None:
            await self._tunnel.close()


class _Accepted:
    """The pipe of a call that came in; it ends when its handler returns."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def write(self, frame: bytes) -> None:
        try:
            await self._context.write(frame)
        except BROKEN as error:
            raise _broken(error) from error

    async def read(self) -> bytes | None:
        try:
            frame = await self._context.read()
        except BROKEN as error:
            raise _broken(error) from error
        return None if frame is grpc.aio.EOF else frame

    async def close(self) -> None:
        return None


def _broken(error: BaseException) -> ConnectionError:
    text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return ConnectionError(text or type(error).__name__)
