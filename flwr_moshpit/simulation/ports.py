"""The peers' places in the network, and what streams and datagrams have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.network import Link
from flwr_moshpit.simulation.transfers import Pipe, Transfers

if TYPE_CHECKING:
    from flwr_moshpit.simulation.datagrams import Outbox
    from flwr_moshpit.simulation.streams import Channel


class Port:
    """One peer's link, what is open on it, and its counters."""

    __slots__ = (
        "alive",
        "backlog_at_s",
        "backlog_s",
        "channels",
        "down",
        "incarnation",
        "index",
        "jitter_s",
        "latency_s",
        "loss",
        "outboxes",
        "peer",
        "received_bytes",
        "sent_bytes",
        "side",
        "up",
        "up_free_s",
    )

    def __init__(self, peer: PeerId, index: int, link: Link) -> None:
        self.peer = peer
        self.index = index
        self.up = Pipe(link.uplink_bytes_per_s)
        self.down = Pipe(link.downlink_bytes_per_s)
        self.latency_s = link.latency_s
        self.jitter_s = link.jitter_s
        self.loss = link.loss
        self.alive = False
        self.incarnation = 0
        self.side = 0
        """Peers on different sides of a partition do not reach each other."""
        self.up_free_s = 0.0
        """When the small messages sent so far will have left."""
        self.backlog_s = 0.0
        """How long the small messages sent here by `backlog_at_s` keep the downlink busy."""
        self.backlog_at_s = 0.0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.channels: dict[PeerId, Channel] = {}
        """Open streams to others, by peer. While both live, each has the other's or neither."""
        self.outboxes: dict[PeerId, Outbox] = {}
        """What waits to go out as `Delivery.NEWEST`, by peer."""


class Wire:
    """Time, bandwidth and chance, and the way to the engine."""

    __slots__ = ("agenda", "draw", "received", "transfers")

    def __init__(
        self,
        agenda: Agenda,
        draw: Callable[[], float],
        received: Callable[[Port, Port, Message], None],
    ) -> None:
        self.agenda = agenda
        self.draw = draw
        """Uniform in [0, 1)."""
        self.received = received
        """(dst, src, message): it has arrived."""
        self.transfers = Transfers(agenda)

    def small_arrival_s(self, src: Port, dst: Port, size: int) -> float:
        """When a small message that is sent now arrives, which takes its turn at both links."""
        now = self.agenda.now
        start_s = src.up_free_s
        left_s = (start_s if start_s > now else now) + size / src.up.capacity
        src.up_free_s = left_s
        backlog_s = dst.backlog_s - (now - dst.backlog_at_s)
        backlog_s = (backlog_s if backlog_s > 0.0 else 0.0) + size / dst.down.capacity
        dst.backlog_s = backlog_s
        dst.backlog_at_s = now
        through_s = now + backlog_s
        latency_s = src.latency_s + dst.latency_s
        return (left_s if left_s > through_s else through_s) + latency_s


def loss_between(src: Port, dst: Port) -> float:
    """Probability that a packet does not make it over both links."""
    return 1 - (1 - src.loss) * (1 - dst.loss)
