"""A client that holds a valid certificate, or none, and keeps to no rule."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.certificates import tls_name
from flwr_moshpit.runtime.frames import pack, unpack
from flwr_moshpit.runtime.greeting import Greeting
from flwr_moshpit.runtime.grpc_transport import METHOD, SERVICE
from flwr_moshpit.runtime.wire import Limits

LIMITS = Limits(1 << 18)


class Intruder:
    """Talks to one peer's port, frame by frame."""

    def __init__(self, credentials: Any, address: str, swarm: str, target: PeerId) -> None:
        options = [
            ("grpc.ssl_target_name_override", tls_name(swarm, target)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        self._swarm, self._target = swarm, target
        self._credentials, self._address, self._options = credentials, address, options
        self._channel: Any = None
        self._call: Any = None

    async def call(self) -> None:
        """Begin a link, on a connection of its own, after the end of the one before."""
        await self.close()
        self._channel = (
            grpc.aio.secure_channel(self._address, self._credentials, self._options)
            if self._credentials is not None
            else grpc.aio.insecure_channel(self._address, self._options)
        )
        self._call = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")()

    async def greet(self, src: str, **changes: Any) -> Greeting:
        """Begin a link and say hello; returns the answer. Raises `Breach` for a refusal."""
        await self.call()
        greeting = {
            "swarm": self._swarm,
            "src": src,
            "dst": self._target,
            "incarnation": 0,
            "first_sequence": 1,
            "window_bytes": 1 << 20,
            **changes,
        }
        await self.write(pack(pb.Frame(hello=pb.Hello(**greeting))))
        return Greeting.unpack(await self.read(), LIMITS)

    async def write(self, raw: bytes) -> None:
        await self._call.write(raw)

    async def read(self) -> bytes:
        frame = await self._call.read()
        if frame is grpc.aio.EOF:
            raise ConnectionError("the end")
        raw: bytes = frame
        return raw

    async def until_thrown_out(self, frames: Iterable[bytes] = ()) -> None:
        """Write `frames`, then read, until the other side ends the link."""
        try:
            for raw in frames:
                await self.write(raw)
            while True:
                unpack(await self.read(), LIMITS)
        except (ConnectionError, grpc.RpcError, asyncio.InvalidStateError):
            return

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            await self._channel.close()
