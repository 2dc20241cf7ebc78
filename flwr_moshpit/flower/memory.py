"""A client's state in Flower's simulation, where its last call can be taken back.

Calls are made ahead of virtual time, and some are cancelled before their time comes: by then the
device has crashed. So what the app's state was before the last call stays beside it; the app sees
none of it, and an app without state costs nothing.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict

from flwr_moshpit.flower.messages import scratch

_BEFORE = "moshpit-before/"
_MARK = "moshpit-before"


class Memory:
    """What is in `context.state`, with the last call or, with `undo`, without it."""

    def __init__(self, context: Context, *, undo: bool) -> None:
        self._outer = context
        now = {k: v for k, v in context.state.items() if not k.startswith(_MARK)}
        before = {
            k.removeprefix(_BEFORE): v for k, v in context.state.items() if k.startswith(_BEFORE)
        }
        # Without a mark nothing was there before the last call, nor after it.
        self._begin: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = (
            before if undo and _MARK in context.state else now
        )
        self.context = scratch(context)
        """What the app gets: it may change it in place."""
        self.context.state = RecordDict({k: v.copy() for k, v in self._begin.items()})

    def keep(self) -> None:
        """What the app has stored is there at its next call."""
        kept = dict(self.context.state)
        if kept or self._begin:
            kept |= {_BEFORE + name: record for name, record in self._begin.items()}
            kept[_MARK] = ConfigRecord()
        self._outer.state = RecordDict(kept)
