"""`flwr-moshpit replay`: tell a machine again what it was told in the field."""

from __future__ import annotations

import traceback
from pathlib import Path

from rich.console import Console

from flwr_moshpit.observe.text import duration
from flwr_moshpit.runtime.trace import replay as replay_trace


def replay(path: Path) -> bool:
    """Replay the trace at `path` and print what came out; whether it was the same, bit for bit, to
    its end. Raises ConfigError when it is no trace."""
    done = replay_trace(path)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    machine = type(done.machine).__name__
    length = duration(done.ended_at - done.began_at)
    console.print(f"{machine}, {done.num_events} events over {length}")
    if done.is_torn:
        console.print("the last block is torn: its writer was killed")
    if done.error is not None:
        console.print("".join(traceback.format_exception(done.error)).rstrip())
        console.print("the machine raised this at the last event")
    if done.difference is not None:
        console.print(f"it did something else {done.difference}")
        return False
    console.print("the same effects and deadlines after every event, bit for bit")
    return True
