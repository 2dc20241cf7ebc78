"""Ctrl-C that lets what is under way finish."""

from __future__ import annotations

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
