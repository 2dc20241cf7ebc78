"""The grammar of faults: one line of text to the dataclasses of `faults.py`.

crash WHO WHEN [, back after BACK]     crash peer=3 at 60 s, back after 2 min
crash N% per TIME [, back after BACK]  crash 20% per hour, back after 120 s
churn N% per TIME, back after BACK     churn 10% per hour, back after 60 s
restart WHO WHEN                       restart peer=3,5 at round 5
slow Nx WHO [WHEN] [for TIME]          slow 10x peer=3 at 100 s for 60 s
partition WHO WHEN [for TIME]          partition 50% at 60 s for 30 s

WHO   peer=3 | peer=3,5 | 20%          a share is drawn by the seed
WHEN  at TIME | at round N
TIME  90 s | 2 min | 1.5 h
BACK  TIME | N rounds
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.simulation.faults import (
    AfterRounds,
    AfterTime,
    AtRate,
    AtRound,
    AtTime,
    Crash,
    Fault,
    Partition,
    SlowDown,
    Who,
)

_WORDS = "WHO is peer=3, peer=3,5 or 20%; WHEN is at 60 s or at round 5"
_EXAMPLE = "crash 20% per hour, back after 120 s"
_HELP = {
    "crash": f"crash WHO WHEN or crash N% per TIME, then perhaps ', back after TIME'; {_WORDS}",
    "churn": "churn N% per TIME, back after TIME, as in: churn 10% per hour, back after 60 s",
    "restart": f"restart WHO WHEN; {_WORDS}",
    "slow": f"slow Nx WHO, then perhaps WHEN, then perhaps 'for TIME'; {_WORDS}",
    "partition": f"partition WHO WHEN, then perhaps 'for TIME'; {_WORDS}",
}

_NUMBER = r"\d+(?:\.\d+)?"
_UNIT = r"(?:s|sec|seconds?|min|minutes?|h|hours?)"
_TIME = rf"{_NUMBER} ?{_UNIT}"
_WHO = rf"(?:peers?=(?P<peers>\d+(?:, ?\d+)*)|(?P<share>{_NUMBER}) ?%)"
_AT = rf"at (?:round (?P<round>\d+)|(?P<at>{_TIME}))"
_FOR = rf"(?: for (?P<for>{_TIME}))?"
_BACK = rf", ?back after (?:(?P<back_rounds>\d+) rounds?|(?P<back>{_TIME}))"
_RATE = rf"(?P<rate>{_NUMBER}) ?% per (?P<per>(?:{_NUMBER} ?)?{_UNIT})"

_FORMS = {
    "crash": re.compile(rf"(?:{_RATE}|{_WHO} {_AT})(?:{_BACK})?"),
    "churn": re.compile(rf"{_RATE}{_BACK}"),
    "restart": re.compile(rf"{_WHO} {_AT}"),
    "slow": re.compile(rf"(?P<factor>{_NUMBER}) ?x {_WHO}(?: {_AT})?{_FOR}"),
    "partition": re.compile(rf"{_WHO} {_AT}{_FOR}"),
}


def parse_duration(text: str, setting: str = "duration") -> float:
    """Seconds of "90 s", "2 min", "1.5 h"; a bare number is seconds. Raises ConfigError."""
    match = re.fullmatch(rf"({_NUMBER})? ?({_UNIT})?", text.strip().lower())
    if not match or not (match[1] or match[2]):
        raise ConfigError(f"{setting}: {text!r} is no duration, such as 90 s, 2 min or 1.5 h")
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}[(match[2] or "s")[0]]
    return float(match[1] or 1) * scale


def parse_faults(faults: str | Iterable[str | Fault]) -> tuple[Fault, ...]:
    """Faults from texts, each with one fault or several separated by ";".

    Raises ConfigError, which shows the form wanted, for what it cannot read.
    """
    parsed: list[Fault] = []
    for fault in [faults] if isinstance(faults, str) else faults:
        if isinstance(fault, str):
            parsed += [_parse(part.strip()) for part in fault.split(";") if part.strip()]
        else:
            parsed.append(fault)
    return tuple(parsed)


def _parse(text: str) -> Fault:
    verb, _, rest = " ".join(text.lower().split()).partition(" ")
    form = _FORMS.get(verb)
    match = form.fullmatch(rest) if form else None
    if match is None:
        wanted = _HELP.get(verb, f"faults are {', '.join(_HELP)}, as in: {_EXAMPLE}")
        raise ConfigError(f"fault {text!r} is not understood: {wanted}")
    parts = match.groupdict()
    if verb == "slow":
        factor = float(parts["factor"])
        if factor < 1:
            raise ConfigError(f"fault {text!r}: a peer is slowed 1x or more, not {factor:g}x")
        when = _when(parts) if parts["round"] or parts["at"] else AtTime(0.0)
        return SlowDown(_who(text, parts), factor, when, _seconds(parts["for"]))
    if verb == "partition":
        return Partition(_who(text, parts), _when(parts), _seconds(parts["for"]))
    if verb == "restart":
        return Crash(_who(text, parts), _when(parts), AfterTime(0.0))
    if parts["rate"]:
        rate = float(parts["rate"]) / 100 / parse_duration(parts["per"])
        if rate <= 0:
            raise ConfigError(f"fault {text!r}: a rate is above 0%")
        return Crash(Who(share=1.0), AtRate(rate), _back(parts))
    return Crash(_who(text, parts), _when(parts), _back(parts))


def _who(text: str, parts: dict[str, str]) -> Who:
    if parts["peers"]:
        return Who(tuple(sorted({int(index) for index in parts["peers"].split(",")})))
    share = float(parts["share"]) / 100
    if not 0 < share <= 1:
        raise ConfigError(f"fault {text!r}: a share of the peers is above 0% and at most 100%")
    return Who(share=share)


def _when(parts: dict[str, str]) -> AtTime | AtRound:
    if parts["round"]:
        return AtRound(int(parts["round"]))
    return AtTime(parse_duration(parts["at"]))


def _back(parts: dict[str, str]) -> AfterTime | AfterRounds | None:
    if parts["back_rounds"]:
        return AfterRounds(int(parts["back_rounds"]))
    return AfterTime(parse_duration(parts["back"])) if parts["back"] else None


def _seconds(text: str | None) -> float | None:
    return parse_duration(text) if text else None
