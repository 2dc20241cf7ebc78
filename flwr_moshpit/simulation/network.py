"""The simulated network: what each device's link can do, and what a test may do to a message.

Model
-----
Each peer has one link with an uplink, a downlink and a way to the network's core, which itself is
never the bottleneck. Two peers are the sum of their latencies apart.

- Large messages are fluid flows: all that leave by one uplink or come in by one downlink share it,
  max-min fair by connection, as long-lived TCP streams nearly do (`transfers.py`). A connection,
  that is an ordered pair of peers, carries one message after the other. Equal shares without the
  redistribution that max-min makes would let ten slow phones that upload to one fast server take
  ten elevenths of its downlink from a fast peer; first come first served would let one whole model
  block all others. Cost: each beginning and each end of a flow looks at the flows that meet it, so
  it grows with the number of groupmates or neighbours, not with the message or the swarm.
- Where packets are lost, TCP's window limits a stream (`tcp.py`).
- Messages of at most `SMALL_BYTES`, of which there are far more, cost O(1): they pass the sender's
  uplink one after the other, and a backlog that drains at the downlink's rate stands for all others
  that go to the same receiver. They see bandwidth that the flows leave them, and the other way
  round, only through this bound on their size.

Slow start where nothing is lost, cross traffic and the headers of TCP, IP and TLS (3 to 5 % of the
bytes) are left out: give links their goodput.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import Message

HEADER_BYTES = 64
"""What a message weighs beside its arrays."""

SMALL_BYTES = 4096
"""Up to this size, header included, a message does not become a flow of its own."""


@dataclass(frozen=True, slots=True)
class Link:
    """How one device is connected."""

    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    latency_s: float = 0.0
    """One way, from the device to the network's core: half of what a ping to a near server says."""
    jitter_s: float = 0.0
    """Each message is late by up to this much more, uniformly."""
    loss: float = 0.0
    """Probability that a datagram, or one packet of a stream, is lost on this link."""

    def __post_init__(self) -> None:
        for name in ("uplink_bytes_per_s", "downlink_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"a link's {name} must be above 0, not {value}")
        for name in ("latency_s", "jitter_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"a link's {name} must be 0 or more, not {value}")
        if not 0 <= self.loss < 1:
            raise ConfigError(f"a link's loss must be in [0, 1), not {self.loss}")


class Linked(Protocol):
    """Any device that has a link."""

    @property
    def link(self) -> Link: ...


@dataclass(frozen=True, slots=True)
class Network:
    """Which link each device has: its own, or one for all. Make it with one of the two methods."""

    link: Link | None = None

    @classmethod
    def from_profiles(cls) -> Network:
        """Each device has the link of its profile."""
        return cls(None)

    @classmethod
    def uniform(
        cls,
        *,
        latency_s: float = 0.01,
        uplink_bytes_per_s: float = 12.5e6,
        downlink_bytes_per_s: float | None = None,
        jitter_s: float = 0.0,
        loss: float = 0.0,
    ) -> Network:
        """All devices are connected alike; 100 Mbit/s and 10 ms where nothing is said.

        `latency_s`, `jitter_s` and `loss` are between two peers, one way; the downlink is as fast
        as the uplink where it is not given. Raises ConfigError if a value is out of range.
        """
        if not 0 <= loss < 1:
            raise ConfigError(f"a network's loss must be in [0, 1), not {loss}")
        down = uplink_bytes_per_s if downlink_bytes_per_s is None else downlink_bytes_per_s
        half = 1 - math.sqrt(1 - loss)
        return cls(Link(uplink_bytes_per_s, down, latency_s / 2, jitter_s / 2, half))

    def link_of(self, device: Linked) -> Link:
        return device.link if self.link is None else self.link


# What an interceptor may do to a message.


@dataclass(frozen=True, slots=True)
class Drop:
    """It is gone, and nobody is told, even if it was on a stream."""


@dataclass(frozen=True, slots=True)
class Delay:
    """It takes this much longer; on a stream, what comes behind waits too."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Duplicate:
    """It arrives twice."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Another message travels instead."""

    message: Message


Verdict = Drop | Delay | Duplicate | Replace
