"""Virtual time: what is still to happen, in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NewType

Action = Callable[..., None]
Ticket = NewType("Ticket", int)


class Agenda:
    """A heap of actions. At one instant they happen in the order in which they were scheduled."""

    __slots__ = ("_cancelled", "_heap", "_ticket", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, Ticket, Action, tuple[Any, ...]]] = []
        self._ticket: Callable[[], Any] = itertools.count().__next__
        self._cancelled: set[Ticket] = set()

    def at(self, at_s: float, action: Action, *args: Any) -> Ticket:
        """Let `action(*args)` happen at `at_s`, or now if that is past: time never runs back."""
        now = self.now
        ticket: Ticket = self._ticket()
        heappush(self._heap, (at_s if at_s > now else now, ticket, action, args))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let the action of `ticket`, which has not happened, never happen: time does not even
        pass until then."""
        self._cancelled.add(ticket)

    def is_due(self, until_s: float = math.inf) -> bool:
        """Whether anything is left to happen up to and at `until_s`."""
        heap = self._heap
        if self._cancelled:
            while heap and heap[0][1] in self._cancelled:
                self._cancelled.remove(heappop(heap)[1])
        return bool(heap) and heap[0][0] <= until_s

    def advance(self) -> None:
        """Let the next action happen, which `is_due` has promised."""
        self.now, _, action, args = heappop(self._heap)
        action(*args)

    def skip_to(self, at_s: float) -> None:
        """Nothing happens until `at_s`, which is now."""
        if at_s > self.now:
            self.now = at_s
