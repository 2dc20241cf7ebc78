"""How this process takes memory from the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_ARENA_MAX = -8
"""From glibc's malloc.h."""


def share_one_heap() -> None:
    """Let all threads take memory from one heap; call it before there are any.

    A frame is made by one thread, encrypted by a second and freed by a third. glibc gives each
    thread a heap of its own, none of which can use what has become free in another: with several
    links they end up holding a model's worth of nothing. Where libc is another one, this does
    nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def waited_s() -> float:
    """For how long the main thread was ready to run while the processor was another's, in all.
    0.0 where the system does not tell (Linux does)."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
