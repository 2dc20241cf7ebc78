"""`flwr-moshpit bench allreduce`: what an average costs real peers, beside its bounds.

Eight peers, a process each, over gRPC and mutual TLS on this machine, take turns with eight
processes that do the same without anything around it (`butterfly.py`), so that whatever else the
machine does falls upon all alike. Times are medians; a peer's time runs from when the first is in
its group to when the last has the average.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from flwr_moshpit.bench.bounds import Bound, at_most, exactly, show, shown
from flwr_moshpit.bench.butterfly import GRPC, SOCKETS, Crew
from flwr_moshpit.bench.idle_swarm import IdleSwarm
from flwr_moshpit.observe.text import scaled

PEERS = 8
REPEATS = 5
SMALL, LARGE = 1_000_000, 10_000_000
TINY = 1_000
HUGE = 150_000_000
"""Elements of one tensor of 600 MB."""


@dataclass(frozen=True, slots=True)
class Times:
    """Medians, in seconds, of one size of vector."""

    sockets_s: float
    bare_s: float
    reduce_s: float
    match_s: float
    peak: float
    """The most memory that a peer had while averaging, above that of one with a tiny model, in
    vectors."""


@dataclass(frozen=True, slots=True)
class Figures:
    start_s: float
    idle_bytes: int
    small: Times
    large: Times
    unfilled_match_s: float
    huge_s: float
    huge_alarms: int


def bench(console: Console | None = None) -> bool:
    """Measure, print each figure beside its bound, and return whether all are kept. Raises
    MoshpitError when the swarm stands still."""
    console = console or Console()
    return show(console, judge(measure(lambda what: console.print(f"{what} ...", style="dim"))))


def measure(say: Callable[[str], None]) -> Figures:
    say("one peer starts")
    with IdleSwarm(1, TINY) as one:
        start_s = one.start_s
    say("six peers in groups of at most four")
    with IdleSwarm(6, TINY, group_size=4) as six:
        six.train()
        rounds = [each for _ in range(REPEATS) for each in six.average()]
        unfilled_s = statistics.median(each.match_s for each in rounds)
    say("eight peers that do nothing")
    with IdleSwarm(PEERS, TINY) as idle:
        idle.train()
        idle.average()
        taken = idle.usage()
        idle_bytes = max(usage.bytes + usage.trainer_bytes for usage in taken)
        base_bytes = max(usage.bytes for usage in taken)
    times = {}
    for dim in (SMALL, LARGE):
        say(f"eight peers average {scaled(dim, 'float32')}, {REPEATS} times each way")
        times[dim] = _times(dim, base_bytes)
    say("three peers average one tensor of 600 MB")
    with IdleSwarm(3, HUGE) as three:
        three.train()
        alarms = three.alarms
        (huge,) = three.average()
        huge_alarms = three.alarms - alarms
    return Figures(
        start_s,
        idle_bytes,
        times[SMALL],
        times[LARGE],
        unfilled_s,
        huge.reduce_s,
        huge_alarms,
    )


def _times(dim: int, base_bytes: int) -> Times:
    sockets_s, bare_s, ours = [], [], []
    with Crew(SOCKETS, PEERS) as sockets, Crew(GRPC, PEERS) as bare, IdleSwarm(PEERS, dim) as swarm:
        swarm.train()
        # Connections, buffers and windows are as they are in a swarm that has been at it for long.
        for average in (lambda: sockets.average(dim), lambda: bare.average(dim), swarm.average):
            average()
        swarm.usage()
        for _ in range(REPEATS):
            sockets_s.append(sockets.average(dim))
            bare_s.append(bare.average(dim))
            ours += swarm.average()
        peak_bytes = max(usage.peak_bytes for usage in swarm.usage())
    return Times(
        statistics.median(sockets_s),
        statistics.median(bare_s),
        statistics.median(each.reduce_s for each in ours),
        statistics.median(each.match_s for each in ours),
        (peak_bytes - base_bytes) / (4 * dim),
    )


def judge(figures: Figures) -> list[Bound]:
    """Each figure beside its bound."""
    small, large = figures.small, figures.large
    return [
        shown("10M float32, plain sockets", large.sockets_s, "s"),
        shown("10M float32, bare gRPC and TLS", large.bare_s, "s"),
        shown("10M float32, a swarm's group", large.reduce_s, "s"),
        at_most("  of the bare one's time", large.reduce_s / large.bare_s, 1.3, "x"),
        shown("1M float32, plain sockets", small.sockets_s, "s"),
        shown("1M float32, bare gRPC and TLS", small.bare_s, "s"),
        shown("1M float32, a swarm's group", small.reduce_s, "s"),
        at_most("  of the bare one's time", small.reduce_s / small.bare_s, 1.5, "x"),
        at_most("matchmaking, all ready, 10M", large.match_s, 0.1, "s"),
        at_most("matchmaking, all ready, 1M", small.match_s, 0.1, "s"),
        at_most("matchmaking, 6 peers in groups of 4", figures.unfilled_match_s, 0.1, "s"),
        at_most("start of a peer", figures.start_s, 2.0, "s"),
        at_most("idle peer with its trainer, memory", figures.idle_bytes, 150e6, "B"),
        at_most("a round's peak, 10M", large.peak, 3.0, "vectors"),
        shown("one tensor of 600 MB, 3 peers", figures.huge_s, "s"),
        exactly("suspected meanwhile", figures.huge_alarms, 0),
    ]
