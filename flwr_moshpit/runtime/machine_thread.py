"""The one thread in which a machine lives: one event at a time, one timer.

`handle` may take as long as it takes to add up a part of a large vector; meanwhile the event loop,
with the transport and the membership, goes on. Effects are handed back to the loop, in order.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    JobId,
    Machine,
    TimerFired,
)
from flwr_moshpit.runtime.trace import Recorder

WAIT_MAX_S = 3600.0
"""Longest wait in one piece: what a lock can be asked to wait has a limit."""
BREATH_S = 0.001
"""A machine whose timer is always due leaves room for other events for this long."""

Taken: TypeAlias = "asyncio.Future[None] | None"


@dataclass(frozen=True, slots=True)
class _Told:
    event: Event
    taken: Taken = None


@dataclass(frozen=True, slots=True)
class _Asked:
    question: Callable[[Machine], Any]
    answer: asyncio.Future[Any]


_TIMER = _Told(TimerFired())


class MachineThread:
    """Hands events to one machine and its effects to `carry_out(effects)`, on the loop.

    `fail(error)` is called, on the loop, when the machine raises; it is told nothing after that.
    """

    def __init__(
        self,
        build: Callable[[], Machine],
        carry_out: Callable[[list[Effect]], None],
        fail: Callable[[Exception], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._build: Callable[[], Machine] | None = build
        self._carry_out = carry_out
        self._fail = fail
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._items: queue.SimpleQueue[_Told | _Asked | None] = queue.SimpleQueue()
        self._jobs: dict[JobId, None] = {}
        """Those that the machine waits for."""
        self._now = 0.0
        self._took_breath = True
        self._thread = threading.Thread(target=self._run, name="machine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event, taken: Taken = None) -> None:
        """Hand over `event` when all before it have been. From any thread. `taken`, a future of the
        loop, is done when the machine has it."""
        self._items.put(_Told(event, taken))

    async def ask(self, question: Callable[[Machine], Any]) -> Any:
        """What `question(machine)` returns, between two events. Raises what it raises."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._items.put(_Asked(question, answer))
        return await answer

    async def close(self, timeout_s: float) -> None:
        """Wait, so long at most, until all that was put before has been handed over, and end."""
        self._items.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    # In the thread

    def _run(self) -> None:
        assert self._build is not None
        try:
            machine = self._build()
            # It holds a model that the machine will have moved on from.
            self._build = None
            while (item := self._next(machine)) is not None:
                if isinstance(item, _Told):
                    self._hand_over(machine, item)
                else:
                    self._answer(machine, item)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)
            self._turn_away(error)

    def _turn_away(self, error: Exception) -> None:
        """The machine has failed: nobody shall wait for it."""
        while (item := self._items.get()) is not None:
            if isinstance(item, _Asked):
                self._loop.call_soon_threadsafe(_settle, item.answer, None, error)
            elif item.taken is not None:
                self._loop.call_soon_threadsafe(_settle, item.taken, None)

    def _next(self, machine: Machine) -> _Told | _Asked | None:
        deadline = machine.deadline
        if deadline is None:
            return self._items.get()
        wait_s = deadline - time.monotonic()
        if wait_s <= 0 and self._took_breath:
            self._took_breath = False
            return _TIMER
        self._took_breath = True
        try:
            return self._items.get(timeout=min(max(wait_s, BREATH_S), WAIT_MAX_S))
        except queue.Empty:
            return _TIMER

    def _hand_over(self, machine: Machine, told: _Told) -> None:
        event = told.event
        if isinstance(event, ComputeDone | ComputeFailed) and event.job_id not in self._jobs:
            # Cancelled while the answer was on its way.
            return
        self._now = max(self._now, time.monotonic())
        if self._recorder is not None:
            self._recorder.event(self._now, event)
        effects = machine.handle(event, self._now)
        if self._recorder is not None:
            self._recorder.effects(effects, machine.deadline)
        if isinstance(event, ComputeDone | ComputeFailed):
            del self._jobs[event.job_id]
        for effect in effects:
            if isinstance(effect, Compute):
                self._jobs[effect.job_id] = None
            elif isinstance(effect, Cancel):
                self._jobs.pop(effect.job_id, None)
        if effects or told.taken is not None:
            # One call for both: each wakes the loop up.
            self._loop.call_soon_threadsafe(self._hand_back, effects, told.taken)

    def _hand_back(self, effects: list[Effect], taken: Taken) -> None:
        """On the loop."""
        if effects:
            self._carry_out(effects)
        if taken is not None:
            _settle(taken, None)

    def _answer(self, machine: Machine, asked: _Asked) -> None:
        try:
            answer = asked.question(machine)
        except Exception as error:
            self._loop.call_soon_threadsafe(_settle, asked.answer, None, error)
        else:
            self._loop.call_soon_threadsafe(_settle, asked.answer, answer)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
