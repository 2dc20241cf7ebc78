"""A figure beside the bound that it must keep, and the table of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from flwr_moshpit.observe.text import scaled

Bound: TypeAlias = tuple[str, str, str, bool]
"""(what, measured, bound, kept)."""

WIDTH = 110


def at_most(what: str, measured: float, bound: float, unit: str) -> Bound:
    """A measurement that came to nothing, NaN, keeps no bound."""
    return (what, scaled(measured, unit), f"at most {scaled(bound, unit)}", measured <= bound)


def exactly(what: str, measured: int, bound: int) -> Bound:
    return (what, f"{measured}", f"{bound}", measured == bound)


def shown(what: str, measured: float, unit: str) -> Bound:
    """A figure to compare with, without a bound of its own."""
    return (what, scaled(measured, unit), "", math.isfinite(measured))


def show(console: Console, bounds: Sequence[Bound]) -> bool:
    """Print the table; whether all bounds are kept."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "measured", "bound", ""):
        table.add_column(column, no_wrap=True)
    for what, measured, bound, kept in bounds:
        verdict = ("kept" if bound else "") if kept else "[bold red]EXCEEDED"
        table.add_row(what, measured, bound, verdict)
    if not console.is_terminal:
        # In a file it is as wide as it needs to be.
        console = Console(file=console.file, width=max(console.width, WIDTH))
    console.print(table)
    return all(kept for *_, kept in bounds)
