"""The same all-reduce without anything around it: what the bench's figures are compared with.

Every process sends each share of its vector to the process that averages it, in chunks of 1 MiB,
and gets the averages back. Once over `grpc.aio` with mutual TLS, once over plain sockets. Nobody
may die, nothing is checked, nothing is bounded; both are as fast as they are without further ado.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from flwr_moshpit.bench.bare_grpc import GrpcButterfly, peer_id
from flwr_moshpit.bench.bare_sockets import SocketButterfly
from flwr_moshpit.bench.split import Split
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.parent import follow_parent
from flwr_moshpit.protocol.machine import Vector
from flwr_moshpit.runtime.identity import Authority, Identity

HANG_S = 120.0
GRPC, SOCKETS = "grpc", "sockets"


class Butterfly(Protocol):
    """One of the processes."""

    async def listen(self) -> str:
        """Returns the address."""
        ...

    async def connect(self, addresses: Sequence[str]) -> None: ...

    async def average(self, vector: Vector) -> Vector:
        """(d,): the mean of what all bring, once all have been called."""
        ...


class Crew:
    """A context manager: processes that average when told to; none is left afterwards."""

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Crew:
        authority = Authority.create("bench", valid_s=86_400.0)
        identities = [authority.issue(peer_id(index)) for index in range(self._size)]
        context = multiprocessing.get_context("spawn")
        with ExitStack() as undo:
            undo.callback(self._end)
            for identity in identities:
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve, args=(there, self._kind, identity, self._size), daemon=True
                )
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
            self._all(self._answers())
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def average(self, dim: int) -> float:
        """Seconds from when the first begins to when the last has its mean of (dim,)."""
        self._all(dim)
        self._answers()
        self._all(None)
        times = self._answers()
        return float(max(ended for _, ended in times) - min(began for began, _ in times))

    def _all(self, what: Any) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _answers(self) -> list[Any]:
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(HANG_S):
                return pipe.recv()
        except EOFError as error:
            raise MoshpitError(f"a process of the bare {self._kind} butterfly died") from error
        raise MoshpitError(f"the bare {self._kind} butterfly stands still")

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


# The processes


def _serve(pipe: Connection, kind: str, identity: Identity, size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    index = int(identity.peer[1:])
    split = Split(index, size)
    asyncio.run(_work(pipe, split, _make(kind, identity, split)))


def _make(kind: str, identity: Identity, split: Split) -> Butterfly:
    return GrpcButterfly(identity, split) if kind == GRPC else SocketButterfly(split)


async def _work(pipe: Connection, split: Split, butterfly: Butterfly) -> None:
    pipe.send(await butterfly.listen())
    await butterfly.connect(await asyncio.to_thread(pipe.recv))
    while True:
        dim = await asyncio.to_thread(pipe.recv)
        vector = np.full(dim, split.index, np.float32)
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        began = time.monotonic()
        mean = await butterfly.average(vector)
        ended = time.monotonic()
        if not np.allclose(mean, (split.size - 1) / 2):
            raise MoshpitError("the bare butterfly's mean is wrong")
        pipe.send((began, ended))
