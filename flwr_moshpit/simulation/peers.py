"""What the engine keeps of each peer, and what it tells of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from flwr_moshpit.protocol.machine import Machine, PeerInfo, View
from flwr_moshpit.simulation import compute
from flwr_moshpit.simulation.agenda import Ticket
from flwr_moshpit.simulation.compute import Slot
from flwr_moshpit.simulation.network import Linked
from flwr_moshpit.simulation.ports import Port


class Device(compute.Device, Linked, Protocol):
    """What the engine needs to know of a device; `DeviceProfile` has it."""


MachineFactory: TypeAlias = Callable[[PeerInfo, View, np.random.Generator, int], Machine]
"""(info, view, rng, incarnation) -> a peer's machine, before its `Start`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one peer has used since the beginning, all its incarnations together."""

    sent_bytes: int
    received_bytes: int
    busy_s: float
    """Training."""
    up_s: float
    """Alive."""
    joules: float
    """The device's power while it trains, its idle power for the rest of the time it is up."""


class Peer:
    """One peer, alive or not."""

    __slots__ = (
        "armed_s",
        "device",
        "factory",
        "index",
        "info",
        "machine",
        "port",
        "since_s",
        "slot",
        "ticket",
        "timer_s",
        "timers",
        "up_s",
    )

    def __init__(
        self,
        info: PeerInfo,
        factory: MachineFactory,
        device: Device,
        port: Port,
        slot: Slot,
    ) -> None:
        self.index = port.index
        self.info = info
        self.factory = factory
        self.device = device
        self.port = port
        self.slot = slot
        self.machine: Machine | None = None
        self.ticket: Ticket | None = None
        """For the timer in the agenda, which goes off at `armed_s`: at the machine's deadline, or
        before that was put off."""
        self.armed_s = math.inf
        self.timer_s = -1.0
        self.timers = 0
        """How often the timer has fired at `timer_s`."""
        self.since_s = 0.0
        self.up_s = 0.0

    def come_up(self, now: float) -> None:
        """It lives again, in the incarnation of its info, and has no machine yet."""
        self.port.alive = True
        self.port.incarnation = self.slot.incarnation = self.info.incarnation
        self.slot.started = 0
        self.since_s = now

    def go_down(self, now: float) -> None:
        """Its process is dead."""
        self.port.alive = False
        self.machine = None
        self.up_s += now - self.since_s

    def usage(self, now: float, busy_s: float) -> Usage:
        """Up to now, of which it trained for `busy_s`."""
        up_s = self.up_s + (now - self.since_s if self.port.alive else 0.0)
        device = self.device
        joules = device.power_w * busy_s + device.idle_w * (up_s - busy_s)
        return Usage(self.port.sent_bytes, self.port.received_bytes, busy_s, up_s, joules)
