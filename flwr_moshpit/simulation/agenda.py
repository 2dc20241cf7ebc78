"""Virtual time: what is still to happen, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class Agenda:
    """A heap of actions. At one instant they happen in the order in which they were scheduled."""

    __slots__ = ("_heap", "_ticket", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._ticket = itertools.count().__next__

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_s: float, action: Action, *args: Any) -> None:
        """Let `action(*args)` happen at `at_s`, or now if that is past: time never runs back."""
        now = self.now
        heappush(self._heap, (at_s if at_s > now else now, self._ticket(), action, args))

    def is_due(self, until_s: float) -> bool:
        """Whether anything is left to happen up to and at `until_s`."""
        heap = self._heap
        return bool(heap) and heap[0][0] <= until_s

    def advance(self) -> None:
        """Let the next action happen. Raises IndexError if nothing is left."""
        self.now, _, action, args = heappop(self._heap)
        action(*args)

    def skip_to(self, at_s: float) -> None:
        """Nothing happens until `at_s`, which is now."""
        if at_s > self.now:
            self.now = at_s
