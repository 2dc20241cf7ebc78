"""What people ask of a running peer: how it is doing, and that the swarm shall stop.

A service of its own on the peer's port, under the same mutual TLS: whoever asks holds a certificate
of the swarm. Anybody in the swarm may see a peer's status. To stop the swarm takes the authority's
key: `Stop` is text that it has signed, and travels as a record to all peers, which each check it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from flwr_moshpit.errors import ConfigError, RemoteProtocolError, TransportError
from flwr_moshpit.protocol.machine import PeerId, Record
from flwr_moshpit.runtime.certificates import is_signed, load_certificate, named_by, sign
from flwr_moshpit.runtime.identity import DAY_S, Authority, Identity
from flwr_moshpit.runtime.whereabouts import host_and_port

SERVICE = "flwr_moshpit.control.Control"
STOP_KEY = "stop"
ANSWER_S = 10.0
"""How long a peer may take to answer."""

_PREFIX = "moshpit-stop-1"


@dataclass(frozen=True, slots=True)
class Stop:
    """The authority's word that its swarm shall stop."""

    text: str

    @classmethod
    def signed(cls, authority: Authority, at: float) -> Stop:
        """`at`: seconds since 1970, now."""
        signature = sign(authority.key_pem, _content(authority.swarm, int(at)))
        return cls(f"{_PREFIX}:{int(at)}:{base64.b64encode(signature).decode()}")

    def flaw(self, swarm: str, authority_pem: bytes, now: float) -> str | None:
        """Why it is none for `swarm` at `now`, seconds since 1970; None if it is one.

        It is valid for a day, as far as clocks agree: a later run of the same swarm cannot be
        stopped with it.
        """
        prefix, _, rest = self.text.partition(":")
        at, _, encoded = rest.partition(":")
        if prefix != _PREFIX or not at.isascii() or not at.isdigit() or len(at) > 12:
            return "it is no signed stop"
        try:
            signature = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return "it is no signed stop"
        if abs(now - int(at)) > DAY_S:
            return "it is too old, or the clock is wrong"
        if not is_signed(authority_pem, _content(swarm, int(at)), signature):
            return "the authority has not signed it"
        return None

    def record(self) -> Record:
        """Under a key of its own: a forged one with a higher rank must not take its place."""
        return Record((STOP_KEY, hashlib.sha256(self.text.encode()).hexdigest()), (0,), self.text)


def _content(swarm: str, at: int) -> bytes:
    return f"{_PREFIX}\0{swarm}\0{at}".encode()


class Control:
    """The service's side of a peer. `status()` gives what JSON can hold; `stop(text)` raises
    ConfigError for text that is no stop."""

    def __init__(
        self,
        identity: Identity,
        status: Callable[[], Awaitable[dict[str, Any]]],
        stop: Callable[[str], None],
    ) -> None:
        self._identity = identity
        self._status = status
        self._stop = stop

    def handler(self) -> Any:
        """For the gRPC server."""
        methods = {
            "Status": grpc.unary_unary_rpc_method_handler(self._on_status),
            "Stop": grpc.unary_unary_rpc_method_handler(self._on_stop),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _on_status(self, request: bytes, context: Any) -> bytes:
        await self._check(context)
        return json.dumps(await self._status(), allow_nan=False).encode()

    async def _on_stop(self, request: bytes, context: Any) -> bytes:
        await self._check(context)
        try:
            self._stop(request[:1024].decode("ascii", "replace"))
        except ConfigError as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return b""

    async def _check(self, context: Any) -> None:
        try:
            self._identity.peer_of(context.auth_context())
        except RemoteProtocolError:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no certificate of this swarm")


async def ask(identity: Identity, address: str, method: str, request: bytes = b"") -> bytes:
    """The answer of the peer at `address` to `method`, "Status" or "Stop".

    Raises TransportError when there is no answer, and ConfigError when the peer refuses.
    """
    peer = await asyncio.to_thread(_who_is_at, identity.swarm, address)
    channel = grpc.aio.secure_channel(
        address,
        identity.channel_credentials(),
        options=[*identity.channel_options(peer), ("grpc.enable_http_proxy", 0)],
    )
    try:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        answer: bytes = await call(request, timeout=ANSWER_S)
        return answer
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.PERMISSION_DENIED:
            raise ConfigError(f"{peer} at {address} refuses: {error.details()}") from error
        raise TransportError(f"{peer} at {address} does not answer: {error.details()}") from None
    finally:
        await channel.close()


def _who_is_at(swarm: str, address: str) -> PeerId:
    """Whom the certificate there names. It is believed only when TLS has checked it, in `ask`."""
    there_at = host_and_port(address, "address")
    try:
        pem = ssl.get_server_certificate(there_at, timeout=ANSWER_S)
    except (OSError, ValueError) as error:
        raise TransportError(f"no peer answers at {address}: {error}") from None
    there, peer = named_by(load_certificate(pem.encode()))
    if there != swarm:
        raise ConfigError(f"the peer at {address} is of swarm {there!r}, not of {swarm!r}")
    return peer
