"""Who listens to a swarm: anything that takes (now, peer, report).

Drivers hand every `Report` of every machine to one `Observer`, and their own reports about the
whole swarm with `peer` None. An observer only looks: whatever it does, a run's results stay the
same.
"""

from __future__ import annotations

from typing import Protocol

from flwr_moshpit.protocol.machine import PeerId, Report


class Observer(Protocol):
    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        """Take in what `peer`, or the driver if that is None, reported at `now` seconds."""
        ...
