"""The bare butterfly over `grpc.aio` and mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np

from flwr_moshpit.bench.split import CHUNK_BYTES, Split
from flwr_moshpit.protocol.machine import PeerId, Vector
from flwr_moshpit.runtime.identity import Identity

_OPTIONS = [
    ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
    ("grpc.max_send_message_length", 2 * CHUNK_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
]


def peer_id(index: int) -> PeerId:
    return PeerId(f"b{index}")


class GrpcButterfly:
    """One stream to each other process: my parts there, its averages back."""

    def __init__(self, identity: Identity, split: Split) -> None:
        self._identity = identity
        self._split = split
        self._round: asyncio.Future[_Round] | None = None
        self._server: Any = None
        self._channels: list[Any] = []

    async def listen(self) -> str:
        handler = grpc.stream_stream_rpc_method_handler(self._reduce)
        server = self._server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("bare", {"Average": handler})]
        )
        port = server.add_secure_port("127.0.0.1:0", self._identity.server_credentials())
        await server.start()
        self._round = asyncio.get_running_loop().create_future()
        return f"127.0.0.1:{port}"

    async def connect(self, addresses: Sequence[str]) -> None:
        for index, address in enumerate(addresses):
            options = [*_OPTIONS, *self._identity.channel_options(peer_id(index))]
            channel = grpc.aio.secure_channel(
                address, self._identity.channel_credentials(), options=options
            )
            await channel.channel_ready()
            self._channels.append(channel)

    async def average(self, vector: Vector) -> Vector:
        assert self._round is not None
        mine = _Round(vector, self._split)
        self._round.set_result(mine)
        others = [index for index in range(self._split.size) if index != self._split.index]
        await asyncio.gather(*[self._exchange(index, mine) for index in others])
        await mine.served.wait()
        self._round = asyncio.get_running_loop().create_future()
        return mine.mean

    async def _exchange(self, index: int, mine: _Round) -> None:
        """My parts of a share to the process that averages it, and its averages back."""
        chunks = self._split.chunks(index, len(mine.mean))

        async def parts() -> AsyncIterator[bytes]:
            for begin, end in chunks:
                yield mine.vector[begin:end].tobytes()

        call = self._channels[index].stream_stream("/bare/Average")(parts())
        for begin, end in chunks:
            mine.mean[begin:end] = np.frombuffer(await call.read(), np.float32)

    async def _reduce(self, requests: AsyncIterator[bytes], context: Any) -> None:
        assert self._round is not None
        mine = await self._round
        sending = asyncio.ensure_future(self._send_averages(mine, context))
        number = 0
        async for raw in requests:
            mine.add(number, np.frombuffer(raw, np.float32))
            number += 1
        await sending
        mine.leave()

    async def _send_averages(self, mine: _Round, context: Any) -> None:
        for number, (begin, end) in enumerate(mine.chunks):
            await mine.complete[number].wait()
            await context.write(mine.mean[begin:end].tobytes())


class _Round:
    """What one process adds up in one average."""

    def __init__(self, vector: Vector, split: Split) -> None:
        self.vector = vector
        self.mean = np.empty_like(vector)
        self.chunks = split.chunks(split.index, len(vector))
        self.complete = [asyncio.Event() for _ in self.chunks]
        self.served = asyncio.Event()
        self._size = split.size
        self._missing = [split.size - 1] * len(self.chunks)
        self._unserved = split.size - 1
        for begin, end in self.chunks:
            self.mean[begin:end] = vector[begin:end]

    def add(self, number: int, part: Vector) -> None:
        begin, end = self.chunks[number]
        self.mean[begin:end] += part
        self._missing[number] -= 1
        if not self._missing[number]:
            self.mean[begin:end] /= self._size
            self.complete[number].set()

    def leave(self) -> None:
        self._unserved -= 1
        if not self._unserved:
            self.served.set()
