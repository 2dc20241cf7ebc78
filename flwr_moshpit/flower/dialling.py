"""Whom others can dial: SuperNodes try it before a peer begins, since afterwards it cannot change.

Two of them try all newcomers at a time. A newcomer whom one reaches is dialled by all; one whom
neither reaches is relayed: it calls another peer, and is called through that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flwr_moshpit.protocol.machine import PeerId

LOOKERS = 2


class Newcomer(Protocol):
    """What is known of a peer that has joined."""

    peer: PeerId | None
    address: str


@dataclass(slots=True)
class Look:
    """One look of up to `LOOKERS` SuperNodes at some newcomers."""

    addresses: dict[PeerId, str]
    reached: dict[PeerId, None] = field(default_factory=dict)
    failures: dict[PeerId, list[str]] = field(default_factory=dict)
    num_lookers: int = 0
    """Who have not answered yet."""

    @classmethod
    def at(cls, newcomers: Sequence[Newcomer]) -> Look:
        return cls({m.peer: m.address for m in newcomers if m.peer is not None})

    def orders(self, looker: PeerId | None) -> dict[PeerId, str]:
        """Whom `looker` shall dial; nobody dials itself."""
        return {peer: at for peer, at in self.addresses.items() if peer != looker}

    def take(self, looker: str, failures: Mapping[str, str] | None) -> None:
        """`failures`: why, of each that `looker` did not reach; None if it did not answer."""
        self.num_lookers -= 1
        if failures is None:
            return
        for peer in self.orders(PeerId(looker)):
            if peer not in failures:
                self.reached[peer] = None
            else:
                self.failures.setdefault(peer, []).append(f"{looker}: {failures[peer]}")

    def can_dial(self, peer: PeerId) -> bool:
        """Whom nobody has tried is taken at its word."""
        return peer in self.reached or peer not in self.failures
