"""A peer in a process of its own, started by another process of the same machine.

Both talk over a pipe, in objects of this module: the parent commands (`Go`, `TellModel`, `End`),
the child tells (`Loaded`, `Listening`, `Reported`, `Finished`, `Model`, `Failed`, `Ended`). When
the parent dies, however it dies, the child ends, and its trainer with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from flwr_moshpit.errors import ConfigError, MoshpitError, TrainerError
from flwr_moshpit.parent import follow_parent
from flwr_moshpit.protocol.machine import PeerId, Report, Start, Vector
from flwr_moshpit.runtime.driver import Buildable
from flwr_moshpit.runtime.memory import share_one_heap
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.trace import Recipe
from flwr_moshpit.runtime.trainer_process import ProcessCompute

# Commands


@dataclass(frozen=True, slots=True)
class Go:
    """Listen, and look for the others at these addresses."""

    contacts: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True)
class TellModel:
    """Answered by a `Model`, if there is one already."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Another `Start` for the machine, which has finished."""

    start: Start


@dataclass(frozen=True, slots=True)
class End:
    """Answered by `Ended`."""


# What a child tells


@dataclass(frozen=True, slots=True)
class Loaded:
    """The trainer is ready."""


@dataclass(frozen=True, slots=True)
class Listening:
    address: str


@dataclass(frozen=True, slots=True)
class Reported:
    at: float
    """On the clock `time.monotonic`, which all processes of a machine share."""
    report: Report


@dataclass(frozen=True, slots=True)
class Finished:
    """The machine has done its own work, for the first time or after a `Proceed`; the peer goes on
    serving others."""


@dataclass(frozen=True, slots=True)
class Model:
    params: Vector
    """(d,)."""
    weight: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer cannot go on; the texts of an exception, which itself may not travel."""

    is_config: bool
    text: str

    def error(self) -> MoshpitError:
        return ConfigError(self.text) if self.is_config else TrainerError(self.text)


@dataclass(frozen=True, slots=True)
class Ended:
    """By `End`, or because the swarm's authority has stopped the swarm."""

    sent_bytes: int
    """In frames, over all connections."""
    model: Model | None
    """The last; None before there was one."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing more comes: the process is dead. Told by the parent's side."""


class Noticed:
    """Base of what a `Watcher` tells."""

    __slots__ = ()


Told: TypeAlias = Loaded | Listening | Reported | Finished | Model | Failed | Ended | Gone | Noticed

Tell: TypeAlias = Callable[[Any], None]
Wrap: TypeAlias = Callable[[Tell], "Watcher"]
"""Makes what watches a peer's machine, in the peer's process; has to be picklable."""


class Watcher:
    """Puts something around the machine and takes the commands that are not the worker's own."""

    def wrap(self, recipe: Recipe) -> Buildable:
        return recipe

    def command(self, command: Any) -> None:
        """From the event loop's thread."""


def watch_nothing(tell: Tell) -> Watcher:
    return Watcher()


# The child


def serve(pipe: Connection, settings: PeerSettings, watch: Wrap) -> None:
    """The main function of the process."""
    share_one_heap()
    # Ctrl-C reaches the whole group of processes; the parent tells this one when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    # There are as many processes as peers: each library's threads would get in the others' way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker = _Worker(pipe, settings, watch)
    try:
        asyncio.run(worker.run())
    except ConfigError as error:
        worker.tell(Failed(True, str(error)))
    except MoshpitError as error:
        worker.tell(Failed(False, str(error)))


class _Worker:
    def __init__(self, pipe: Connection, settings: PeerSettings, watch: Wrap) -> None:
        self._pipe = pipe
        self._settings = settings
        self._told = threading.Lock()
        self._watcher = watch(self.tell)
        self._going = asyncio.Event()
        self._ending = False
        self._contacts: Mapping[PeerId, str] = {}
        self._peer: Peer | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    def tell(self, what: Any) -> None:
        """From any thread."""
        with self._told:
            try:
                self._pipe.send(what)
            except OSError:
                # The parent is dying; this process ends with it.
                return

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._on_command)
        compute = ProcessCompute(self._settings.task)
        try:
            offer = await asyncio.to_thread(compute.start)
            self.tell(Loaded())
            await self._going.wait()
            if self._ending:
                return
            peer = self._peer = Peer(
                replace(self._settings, contacts=self._contacts),
                compute,
                offer,
                observers=[self._observe],
                on_address=lambda address: self.tell(Listening(address)),
                wrap=self._watcher.wrap,
            )
            del offer  # It holds a model, which the machine moves on from.
            self._spawn(self._tell_finished(peer))
            try:
                await peer.run()
            finally:
                for task in self._tasks:
                    task.cancel()
            last = peer.driver.last_model
            self.tell(Ended(peer.transport.sent_bytes, None if last is None else Model(*last)))
        finally:
            loop.remove_reader(self._pipe.fileno())
            await asyncio.to_thread(compute.close)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def _on_command(self) -> None:
        try:
            command = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            return
        match command:
            case Go():
                self._contacts = command.contacts
                self._going.set()
            case TellModel():
                self._spawn(self._tell_model())
            case Proceed():
                if self._peer is not None:
                    self._peer.driver.finished.clear()
                    self._peer.driver.tell(command.start)
                    self._spawn(self._tell_finished(self._peer))
            case End():
                self._ending = True
                self._going.set()
                if self._peer is not None:
                    self._peer.driver.stop()
            case _:
                self._watcher.command(command)

    async def _tell_model(self) -> None:
        model = None if self._peer is None else await self._peer.driver.model()
        if model is not None:
            self.tell(Model(*model))

    async def _tell_finished(self, peer: Peer) -> None:
        await peer.driver.finished.wait()
        self.tell(Finished())

    def _observe(self, now: float, peer: PeerId | None, report: Report) -> None:
        self.tell(Reported(time.monotonic(), report))
