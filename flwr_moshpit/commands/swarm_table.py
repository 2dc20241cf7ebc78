"""What a swarm of processes looks like while it runs: a row for each peer on a terminal, elsewhere
lines as of a simulation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flwr_moshpit.observe.progress import Pace, measured_at
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.protocol.machine import PeerId


@dataclass(slots=True)
class PeerRow:
    """What is known of one peer."""

    state: str = "starting"
    completed: int = 0
    """Rounds."""
    coverage: float | None = None
    """Of its last round."""
    contributors: int = 0
    wait_s: float | None = None
    """From the end of its training to the beginning of the exchange, in its last round."""
    allreduce_s: float | None = None
    bytes_sent: int = 0
    address: str = ""


class SwarmTable:
    """Shows `rows` while it is entered."""

    def __init__(
        self, num_peers: int, rounds: int | None, *, quiet: bool, console: Console | None = None
    ) -> None:
        self.rows: dict[PeerId, PeerRow] = {}
        self.accuracy: float | None = None
        """Of the swarm's mean, when it was last measured."""
        self.loss: float | None = None
        self.measured_round = 0
        self.alive = num_peers
        self.round = 0
        """Completed by the median living peer."""
        self._num_peers = num_peers
        self._rounds = rounds
        self._quiet = quiet
        self._console = console or Console(stderr=True)
        self._began_at = time.monotonic()
        self._pace = Pace()
        self._live: Live | None = None

    def line(self) -> str:
        """The state of the moment in one line."""
        rounds = f"/{self._rounds}" if self._rounds else ""
        parts = [duration(time.monotonic() - self._began_at), f"round {self.round}{rounds}"]
        if self.accuracy is not None:
            text = f"accuracy {self.accuracy:.3f}"
            parts.append(measured_at(text, self.measured_round, self.round))
        elif self.loss is not None:
            parts.append(measured_at(f"loss {self.loss:.4g}", self.measured_round, self.round))
        known = [row for row in self.rows.values() if row.coverage is not None]
        if known:
            coverage = sum(row.coverage or 0.0 for row in known) / len(known)
            wait_s = sum(row.wait_s or 0.0 for row in known) / len(known)
            parts += [f"coverage {100 * coverage:.0f} %", f"wait {duration(wait_s)}"]
        return "   ".join([*parts, f"peers {self.alive}/{self._num_peers}"])

    def update(self) -> None:
        """Something has changed. On a terminal nothing is to be done: `rows` are looked at."""
        if self._quiet or self._console.is_terminal or not self._rounds:
            return
        # The last measurement comes with the results.
        if self._pace.due(min(1.0, self.round / self._rounds), is_measured=True):
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line of its own, above the table."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> SwarmTable:
        self._began_at = time.monotonic()
        self._pace = Pace()
        if self._console.is_terminal and not self._quiet:
            self._live = Live(self, console=self._console, refresh_per_second=5, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich__(self) -> RenderableType:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("peer", no_wrap=True)
        for name in ("round", "coverage", "with", "wait", "exchange", "sent"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("listens on", no_wrap=True)
        for peer, row in self.rows.items():
            cells = [
                peer,
                str(row.completed),
                "" if row.coverage is None else f"{100 * row.coverage:.0f} %",
                str(row.contributors or ""),
                "" if row.wait_s is None else duration(row.wait_s),
                "" if row.allreduce_s is None else duration(row.allreduce_s),
                scaled(row.bytes_sent, "B"),
                row.state,
                row.address,
            ]
            table.add_row(*map(Text, cells))
        return Group(table, Text(self.line(), style="dim"))
