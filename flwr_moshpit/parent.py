"""Child processes that end with the process that has started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Wait for the end of the process that has started this one, and end it too, at once.

    For a thread of its own in every child: one that waits for work does not notice otherwise that
    its parent was killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # Not sys.exit: the main thread may be in a job that takes minutes, whose result nobody wants.
    os._exit(1)


def follow_parent() -> None:
    """What every child does first: `end_with_parent`, in a thread."""
    threading.Thread(target=end_with_parent, daemon=True).start()
