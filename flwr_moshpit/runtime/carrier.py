"""The seam between links and what carries their frames: gRPC, or one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from flwr_moshpit.protocol.machine import PeerId


def relayed_address(relay: PeerId, address: str) -> str:
    """Of a peer that waits at `relay`, which is at `address`, "host:port"; see `relay.py`."""
    return f"{relay}@{address}"


def is_relayed(address: str) -> bool:
    return "@" in address


class Pipe(Protocol):
    """What a link runs over: frames there and back, in order, until it breaks or ends.

    `read` and `write` raise `ConnectionError` once it is broken.
    """

    async def write(self, frame: bytes) -> None: ...

    async def read(self) -> bytes | None:
        """The next frame, or None when the other end is done."""
        ...

    async def close(self) -> None: ...


Accept: TypeAlias = Callable[[Pipe, "PeerId | None"], Awaitable[None]]
"""Carries a connection that came in until it ends; the peer as authenticated, if it was."""


class Carrier(Protocol):
    """Dials and listens for one peer."""

    async def start(self, accept: Accept) -> str:
        """Listen; returns the address. Raises `TransportError`."""
        ...

    async def dial(self, peer: PeerId, address: str) -> Pipe:
        """Raises `ConnectionError`, here or at the first use of the pipe."""
        ...

    async def close(self) -> None: ...
