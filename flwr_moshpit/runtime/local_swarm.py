"""A swarm of processes on this machine: started, commanded, listened to, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.peer import PeerSettings
from flwr_moshpit.runtime.worker import Go, Gone, Listening, Told, Wrap, serve, watch_nothing
from flwr_moshpit.signals import deaf_children


class LocalSwarm:
    """A context manager: peers start when it is entered, and none is left when it is left.

    The first peer is the others' contact, the next one if it dies before it listens. All load their
    trainers at the same time.
    """

    def __init__(self, peers: Sequence[PeerSettings], watch: Wrap = watch_nothing) -> None:
        self._settings = {settings.identity.peer: settings for settings in peers}
        self._watch = watch
        self._processes: dict[PeerId, BaseProcess] = {}
        self._pipes: dict[PeerId, Connection] = {}
        self._told: queue.SimpleQueue[tuple[PeerId, Told]] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self.contact = peers[0].identity.peer
        self.addresses: dict[PeerId, str] = {}
        self.living: dict[PeerId, None] = {}
        """Peers whose processes run, as far as `next` has told."""
        self.began_at = 0.0
        """On the clock `monotonic`."""

    def __enter__(self) -> LocalSwarm:
        self.began_at = time.monotonic()
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            for peer, settings in self._settings.items():
                self._start(peer, settings)
            self.tell(self.contact, Go({}))
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def next(self, ends_at: float | None = None) -> tuple[PeerId, Told] | None:
        """What some peer tells next, or None when it is `ends_at` on the clock `monotonic`."""
        try:
            wait_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
            peer, told = self._told.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(told, Gone):
            self.living.pop(peer, None)
            if peer == self.contact and not self.addresses and self.living:
                # It died before anybody could find the others through it.
                self.contact = next(iter(self.living))
                self.tell(self.contact, Go({}))
        elif isinstance(told, Listening):
            is_first = peer == self.contact and not self.addresses
            self.addresses[peer] = told.address
            for other in self.living if is_first else ():
                if other != peer:
                    self.tell(other, Go({peer: told.address}))
        return peer, told

    def tell(self, peer: PeerId, command: Any) -> None:
        with contextlib.suppress(OSError):
            # A pipe whose process has died: `next` will say so.
            self._pipes[peer].send(command)

    def kill(self, peer: PeerId) -> None:
        """SIGKILL."""
        pid = self._processes[peer].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def restart(self, peer: PeerId) -> None:
        """Start `peer`, which has died, anew: the living are its contacts."""
        self._processes[peer].join()
        self._pipes[peer].close()
        contacts = {other: self.addresses[other] for other in self.living if other != peer}
        self._start(peer, self._settings[peer])
        self.tell(peer, Go(contacts))

    def _start(self, peer: PeerId, settings: PeerSettings) -> None:
        # A forked child would inherit this process's threads in an unknown state.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, settings, self._watch), name=peer)
        with deaf_children():
            process.start()
        there.close()
        self._processes[peer], self._pipes[peer] = process, here
        self.living[peer] = None
        reader = threading.Thread(target=self._read, args=(peer, here), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, peer: PeerId, pipe: Connection) -> None:
        # In a thread, so that a peer never waits for this process while that is busy.
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._told.put((peer, pipe.recv()))
        self._told.put((peer, Gone()))

    def _end(self) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        for process in self._processes.values():
            process.join()
        for reader in self._readers:
            reader.join()
        for pipe in self._pipes.values():
            pipe.close()
