"""The bare butterfly over plain TCP sockets, a thread for each direction of each."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

import numpy as np

from flwr_moshpit.bench.split import CHUNK_ELEMS, Split
from flwr_moshpit.protocol.machine import Vector


class SocketButterfly:
    """One socket for each pair: parts in both directions, then averages in both."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: dict[int, socket.socket] = {}

    async def listen(self) -> str:
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    async def connect(self, addresses: Sequence[str]) -> None:
        await asyncio.to_thread(self._connect, addresses)

    async def average(self, vector: Vector) -> Vector:
        return await asyncio.to_thread(_Round(vector, self._split, self._sockets).run)

    def close(self) -> None:
        for sock in (self._listening, *self._sockets.values()):
            sock.close()

    def _connect(self, addresses: Sequence[str]) -> None:
        """Dial those before me, and be dialled by those after me; the first byte says by whom."""
        me = self._split.index
        for index, address in enumerate(addresses[:me]):
            host, _, port = address.rpartition(":")
            sock = socket.create_connection((host, int(port)))
            sock.sendall(bytes([me]))
            self._sockets[index] = sock
        for _ in addresses[me + 1 :]:
            sock, _ = self._listening.accept()
            self._sockets[sock.recv(1)[0]] = sock
        for sock in self._sockets.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Round:
    """What one process does in one average."""

    def __init__(self, vector: Vector, split: Split, sockets: dict[int, socket.socket]) -> None:
        self._vector = vector
        self._split = split
        self._sockets = sockets
        self._mean = np.empty_like(vector)
        self._chunks = split.chunks(split.index, len(vector))
        self._missing = [split.size - 1] * len(self._chunks)
        self._changed = threading.Condition()
        for begin, end in self._chunks:
            self._mean[begin:end] = vector[begin:end]

    def run(self) -> Vector:
        threads = [
            threading.Thread(target=work, args=(index, sock), daemon=True)
            for index, sock in self._sockets.items()
            for work in (self._send, self._receive)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._mean

    def _send(self, index: int, sock: socket.socket) -> None:
        for begin, end in self._split.chunks(index, len(self._vector)):
            sock.sendall(_bytes_of(self._vector[begin:end]))
        for number, (begin, end) in enumerate(self._chunks):
            with self._changed:
                while self._missing[number]:
                    self._changed.wait()
            sock.sendall(_bytes_of(self._mean[begin:end]))

    def _receive(self, index: int, sock: socket.socket) -> None:
        part = np.empty(CHUNK_ELEMS, np.float32)
        for number, (begin, end) in enumerate(self._chunks):
            _fill(sock, _bytes_of(part[: end - begin]))
            with self._changed:
                self._mean[begin:end] += part[: end - begin]
                self._missing[number] -= 1
                if not self._missing[number]:
                    self._mean[begin:end] /= self._split.size
                    self._changed.notify_all()
        for begin, end in self._split.chunks(index, len(self._vector)):
            _fill(sock, _bytes_of(self._mean[begin:end]))


def _bytes_of(array: Vector) -> memoryview:
    return array.view(np.uint8).data


def _fill(sock: socket.socket, buffer: memoryview) -> None:
    while buffer:
        received = sock.recv_into(buffer)
        if not received:
            raise ConnectionError("the other end is gone")
        buffer = buffer[received:]
