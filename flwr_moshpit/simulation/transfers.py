"""Large transfers as fluid flows that share uplinks and downlinks, max-min fair.

Each direction of a link is a `Pipe` that advertises a level, the most that one flow may take of it,
such that its flows, each held to what the pipe at its other end advertises, fill it. A flow's rate
is the lower of its two levels, or its own limit where that is lower still. Recomputing the levels
from pipe to pipe until none moves leads to the max-min fair rates (Bertsekas and Gallager, Data
Networks, 6.5.2; Charny et al. 1995). A level that would move by less than `TOLERANCE` stays, which
keeps changes local.
"""

from __future__ import annotations

import math
from typing import Any

from flwr_moshpit.simulation.agenda import Action, Agenda, Ticket

TOLERANCE = 0.01
_PASSES = 12
_TICKS_PER_S = 2.0**20
"""Flows end on ticks of about a microsecond, so that equal ones end together."""
_CAPACITY_MAX = 1e15
"""Bytes per second; stands for unlimited and keeps the arithmetic finite."""


class Pipe:
    """One direction of one peer's link."""

    __slots__ = ("capacity", "flows", "level")

    def __init__(self, bytes_per_s: float) -> None:
        self.capacity = min(bytes_per_s, _CAPACITY_MAX)
        self.level = self.capacity
        self.flows: dict[Flow, None] = {}


class Flow:
    """One message under way: `left` bytes at `since_s`, which `rate` drains."""

    __slots__ = (
        "action",
        "args",
        "down",
        "due_s",
        "left",
        "limit",
        "rate",
        "since_s",
        "ticket",
        "up",
    )

    def __init__(
        self,
        up: Pipe,
        down: Pipe,
        left: float,
        limit: float,
        now: float,
        action: Action,
        args: tuple[Any, ...],
    ) -> None:
        self.up = up
        self.down = down
        self.limit = limit
        """The most that it takes, in bytes per second, whatever the pipes have."""
        self.left = left
        self.rate = 0.0
        self.since_s = now
        self.ticket: Ticket | None = None
        """For the agenda's next look at this flow at `due_s`, which is never after its end."""
        self.due_s = math.inf
        self.action = action
        self.args = args


class Transfers:
    """All flows of a network. What begins or ends at one instant is settled together."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._changed: dict[Pipe, None] = {}
        self._fresh: list[Flow] = []

    def start(
        self,
        up: Pipe,
        down: Pipe,
        size: float,
        action: Action,
        *args: Any,
        limit: float = math.inf,
    ) -> Flow:
        """Send `size` bytes, at most `limit` of them per second; `action(*args)` happens when the
        last one has left the sender."""
        flow = Flow(up, down, size, limit, self._agenda.now, action, args)
        up.flows[flow] = None
        down.flows[flow] = None
        self._fresh.append(flow)
        self._mark(flow)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Forget `flow`; harmless if it has ended."""
        if flow in flow.up.flows:
            del flow.up.flows[flow]
            del flow.down.flows[flow]
            self._look_away(flow)
            self._mark(flow)

    def _mark(self, flow: Flow) -> None:
        if not self._changed:
            self._agenda.at(self._agenda.now, self._settle)
        self._changed[flow.up] = None
        self._changed[flow.down] = None

    def _settle(self) -> None:
        wave = self._changed
        moved = dict.fromkeys(self._fresh)
        self._changed, self._fresh = {}, []
        for _ in range(_PASSES):
            following: dict[Pipe, None] = {}
            for pipe in wave:
                if _relevel(pipe, following):
                    moved.update(pipe.flows)
            if not following:
                break
            wave = following
        now = self._agenda.now
        for flow in moved:
            rate = min(flow.up.level, flow.down.level, flow.limit)
            if rate != flow.rate and flow in flow.up.flows:
                flow.left -= flow.rate * (now - flow.since_s)
                flow.rate = rate
                flow.since_s = now
                self._watch(flow)

    def _watch(self, flow: Flow) -> None:
        end_s = flow.since_s + max(flow.left, 0.0) / flow.rate
        end_s = math.ceil(end_s * _TICKS_PER_S) / _TICKS_PER_S
        if end_s < flow.due_s:
            self._look_away(flow)
            flow.due_s = end_s
            flow.ticket = self._agenda.at(end_s, self._look, flow)

    def _look_away(self, flow: Flow) -> None:
        if flow.ticket is not None:
            self._agenda.cancel(flow.ticket)
            flow.ticket = None
            flow.due_s = math.inf

    def _look(self, flow: Flow) -> None:
        flow.ticket = None
        flow.due_s = math.inf
        now = self._agenda.now
        # Half a tick's bytes are rounding: the end was rounded up to a tick.
        if flow.left - flow.rate * (now - flow.since_s) > flow.rate * 0.5 / _TICKS_PER_S:
            self._watch(flow)
            return
        del flow.up.flows[flow]
        del flow.down.flows[flow]
        self._mark(flow)
        flow.action(*flow.args)


def _relevel(pipe: Pipe, following: dict[Pipe, None]) -> bool:
    """Recompute what `pipe` advertises; add the pipes that this concerns to `following`."""
    flows = pipe.flows
    old = pipe.level
    others = [flow.down if flow.up is pipe else flow.up for flow in flows]
    offers = [min(other.level, flow.limit) for other, flow in zip(others, flows, strict=True)]
    level = fair_level(pipe.capacity, offers)
    if abs(level - old) <= TOLERANCE * old:
        return False
    pipe.level = level
    for other in others:
        # What lies above the other pipe's own level makes no difference to it.
        if level < other.level or old < other.level:
            following[other] = None
    return True


def fair_level(capacity: float, offers: list[float]) -> float:
    """The level l with sum(min(l, offer)) = capacity, or, if all offers fit, the most that one
    flow could take while the others keep theirs."""
    if not offers:
        return capacity
    offers.sort()
    left = capacity
    waiting = len(offers)
    for offer in offers:
        share = left / waiting
        if offer >= share:
            return share
        left -= offer
        waiting -= 1
    return left + offers[-1]
