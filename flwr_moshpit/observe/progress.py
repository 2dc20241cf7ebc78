"""Progress of a run: a live display on a terminal, elsewhere a line after some seconds, for every
tenth of the run and whenever a minute has passed.

Reads the driver's `swarm` reports (see `SWARM_REPORT`); every other report only moves the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flwr_moshpit.observe.text import duration
from flwr_moshpit.protocol.machine import PeerId, Report

SWARM_REPORT = "swarm"
"""The driver's report about the whole swarm, with whatever of these it knows: `round` (completed by
all living peers), `accuracy`, `loss`, `consensus_distance`, `alive` (number of living peers)."""

_MEASURED = ("accuracy", "loss", "consensus_distance")


class Pace:
    """When lines are due where no display is live: `due` says so, and counts on that it is said."""

    FIRST_S = 3.0
    """A run that says nothing for longer looks as if it hung."""
    AGAIN_S = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenths = 0
        self._next_at = clock() + self.FIRST_S

    def due(self, fraction: float, *, is_measured: bool) -> bool:
        """`is_measured`: whether what is to be said was measured just now."""
        tenths = int(10 * fraction + 1e-9)
        is_last = tenths >= 10
        if tenths <= self._tenths and (is_last or self._clock() < self._next_at):
            return False
        # The last line waits for the last measurement: an older one beside 100 % would mislead.
        if is_last and not is_measured:
            return False
        self._tenths = tenths
        self._next_at = self._clock() + self.AGAIN_S
        return True


def measured_at(text: str, measured: float, now: float) -> str:
    """`text` about round `measured`, which it names if the swarm is at another."""
    return text if measured == now else f"{text} at round {measured:g}"


class Progress:
    """An observer and a context manager; shows something only while it is entered."""

    def __init__(
        self,
        *,
        num_peers: int,
        rounds: int | None = None,
        until_s: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rounds` and `until_s`: where the run ends, whichever comes first. `clock`: in real
        seconds, for the time left."""
        self._num_peers = num_peers
        self._rounds = rounds
        self._until_s = until_s
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._started = clock()
        self._now = 0.0
        self._values: dict[str, float] = {"round": 0, "alive": num_peers}
        self._measured_round = 0.0
        self._pace = Pace(clock)
        self._live: Live | None = None

    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        self._now = now
        is_measured = False
        if report.name == SWARM_REPORT:
            self._values.update(report.values)
            is_measured = any(name in report.values for name in _MEASURED)
            if is_measured:
                self._measured_round = self._values["round"]
        if self._live is None and self._pace.due(self.fraction, is_measured=is_measured):
            self._print()

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0 to 1."""
        parts = [0.0]
        if self._rounds:
            parts.append(self._values["round"] / self._rounds)
        if self._until_s:
            parts.append(self._now / self._until_s)
        return min(1.0, max(parts))

    @property
    def left_s(self) -> float | None:
        """Real seconds that the rest will take at the pace so far, None before anything is done."""
        fraction = self.fraction
        if fraction <= 0:
            return None
        return (self._clock() - self._started) * (1 - fraction) / fraction

    def line(self) -> str:
        """The state of the moment in one line."""
        parts = [f"virtual time {duration(self._now)}", *self._state()]
        left_s = self.left_s
        if left_s is not None and self.fraction < 1:
            parts.append(f"ETA {duration(left_s)}")
        return f"{100 * self.fraction:3.0f} %  " + "  ".join(parts)

    def __enter__(self) -> Progress:
        self._started = self._clock()
        self._pace = Pace(self._clock)
        if self._console.is_terminal:
            # The display is drawn from `__rich__` by Live's own timer, so that reports stay cheap.
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
        grid = Table.grid(padding=(0, 2))
        left_s = self.left_s
        grid.add_row(
            ProgressBar(total=1.0, completed=self.fraction, width=40),
            f"{100 * self.fraction:.0f} %",
            f"virtual time {duration(self._now)}",
            f"ETA {duration(left_s)}" if left_s is not None else "",
        )
        return Group(grid, Text("   ".join(self._state()), style="dim"))

    def _state(self) -> list[str]:
        values = self._values
        rounds = f"/{self._rounds}" if self._rounds else ""
        parts = [f"round {values['round']:g}{rounds}"]
        measured, now = self._measured_round, values["round"]
        if "accuracy" in values:
            parts.append(measured_at(f"accuracy {values['accuracy']:.3f}", measured, now))
        elif "loss" in values:
            parts.append(measured_at(f"loss {values['loss']:.4g}", measured, now))
        if "consensus_distance" in values and measured == now:
            parts.append(f"consensus distance {values['consensus_distance']:.2e}")
        parts.append(f"peers {values['alive']:g}/{self._num_peers}")
        return parts

    def _print(self) -> None:
        if not self._console.is_terminal:
            self._console.print(self.line(), highlight=False, soft_wrap=True)
