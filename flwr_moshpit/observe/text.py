"""What people read: quantities, of three digits at most and a unit, and short notices."""

from __future__ import annotations

import math
import sys


def notice(*lines: str) -> None:
    """Tell whoever waits, on stderr and at once."""
    for line in lines:
        sys.stderr.write(f"flwr-moshpit: {line}\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """`0.25 s`, `42 s`, `12 min 40 s`, `3 h 05 min`, `2 d 04 h`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def scaled(value: float, unit: str) -> str:
    """`value` with a decimal prefix: `scaled(1.23e9, "B")` is `1.23 GB`."""
    if not math.isfinite(value):
        return f"? {unit}"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.7 k would print as "1e+03 k": what rounds up to 1000 takes the next prefix.
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
