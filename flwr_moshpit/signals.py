"""Signals of whoever starts processes: what ends it, and what shall not reach its children."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

WINDING_UP_S = 45.0
"""More than winding up takes at most."""


@contextlib.contextmanager
def ends_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP become KeyboardInterrupt, as SIGINT does: what a service manager or a
    closed terminal ends is wound up like what Ctrl-C ends, with its results written. For
    `WINDING_UP_S` after one of them the next change nothing: hands and wrappers send them twice,
    and the results would be lost.

    Nothing changes outside the main thread, which alone may, and for what is ignored (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deaf_until = 0.0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal deaf_until
        now = time.monotonic()
        if now >= deaf_until:
            deaf_until = now + WINDING_UP_S
            raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in _ENDS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started within never hear SIGINT: Ctrl-C goes to all processes of a terminal, and
    one that is still importing would print a traceback. Their parent ends them.

    The caller hears what came meanwhile at the end.
    """
    # It takes the block away again when it starts its own process.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
