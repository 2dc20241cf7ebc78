"""What a long run asks of the interpreter: Ctrl-C that waits, and fewer garbage collections."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts(note: Callable[[], None]) -> Generator[None, None, None]:
    """Within, the first Ctrl-C calls `note` only; a second one does what it did before.

    Changes nothing outside the main thread, where Python handles no signals.
    """
    before = signal.getsignal(signal.SIGINT)
    # None: the handler was not installed from Python, so it could not be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        note()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_YOUNG_MAX = 20_000


@contextmanager
def rare_collections() -> Generator[None, None, None]:
    """Within, Python looks for unreachable cycles less often.

    A swarm of thousands is a million objects that all live on, and hardly any cycle: looking at
    them again and again took 45 % of a run with 10,000 peers.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _YOUNG_MAX:
        gc.set_threshold(_YOUNG_MAX, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
