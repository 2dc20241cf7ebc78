"""Matchmaking: the peers of one line of the grid become a Group, before a deadline.

A `Lobby` is the leader's side for one key. Members announce when they expect to come and then
arrive. The decision when to stop waiting is a pure function, `decide`:

- when nobody else is expected, the group starts at once;
- members that announced themselves are waited for as long as this raises the contributions per
  second, so a straggler is left out as soon as it is known to be one;
- members that say nothing are called, and waited for no longer than `patience` times the median
  local time beyond the median arrival. A death, or the answer that they are elsewhere, ends that;
- in a round without training (a sweep) everybody who announced is waited for.

Departs from the paper (section 3.1 and appendix): hivemind's leaders wait for a fixed window; here
no window exists that a user would have to set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.protocol.messages import GroupKey, GroupNamed

SWEEP_PATIENCE_S = 1.0
"""Least patience with silent members in a sweep: they may still hear of it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the leader knows of a member that is here."""

    at: float
    weight: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Close the lobby now, or look again at `wake_at` (None: when something happens)."""

    close: bool
    wake_at: float | None
    call: bool
    """Ask the silent members whether they come."""
    reason: str


class Lobby:
    """The leader's books on one key. Times are the leader's own seconds."""

    __slots__ = (
        "arrivals",
        "called",
        "etas",
        "expected",
        "group",
        "key",
        "later_round",
        "local_s",
        "refused",
        "sweep",
    )

    def __init__(self, key: GroupKey, expected: Iterable[PeerId]) -> None:
        self.key = key
        self.expected: dict[PeerId, None] = dict.fromkeys(expected)
        """Members that may still come or have come."""
        self.arrivals: dict[PeerId, Arrival] = {}
        self.etas: dict[PeerId, float] = {}
        self.local_s: dict[PeerId, float] = {}
        self.refused: dict[PeerId, str] = {}
        self.called = False
        self.sweep = False
        self.later_round = 0
        """The highest round that a member said it has reached."""
        self.group: GroupNamed | None = None
        """What was named; the lobby is closed then."""

    def announce(self, peer: PeerId, eta: float, local_s: float) -> None:
        if peer in self.expected and peer not in self.arrivals:
            self.etas[peer] = eta
            self.local_s[peer] = local_s

    def arrive(self, peer: PeerId, arrival: Arrival, local_s: float, sweep: bool) -> None:
        self.expected[peer] = None
        self.arrivals.setdefault(peer, arrival)
        self.etas.pop(peer, None)
        self.local_s[peer] = local_s
        self.sweep = self.sweep or sweep

    def drop(self, peer: PeerId) -> None:
        """`peer` is not coming: dead, elsewhere or refused."""
        self.expected.pop(peer, None)
        self.arrivals.pop(peer, None)
        self.etas.pop(peer, None)

    def silent(self, now: float) -> list[PeerId]:
        """Expected members of whom nothing is known, or who should have been here by now."""
        return [
            peer
            for peer in self.expected
            if peer not in self.arrivals and self.etas.get(peer, -1.0) < now
        ]

    def decide(self, now: float, patience: float, group_s: float) -> Decision:
        """Whether to start with who is here. `group_s`: how long a group's averaging takes."""
        if not self.arrivals:
            return Decision(False, None, False, "nobody is here")
        if len(self.arrivals) == len(self.expected):
            return Decision(True, None, False, "all are here")
        silent = self.silent(now)
        coming = [eta for eta in self.etas.values() if eta >= now]
        here = sorted(arrival.at for arrival in self.arrivals.values())
        local_s = median(self.local_s.values()) if self.local_s else 0.0
        if self.sweep:
            target = max([*coming, here[-1]])
            grace_s = max(patience * local_s, 4 * group_s, SWEEP_PATIENCE_S)
        else:
            target = best_close(here, coming, now, local_s + group_s)
            grace_s = patience * local_s if local_s > 0 else max(4 * group_s, SWEEP_PATIENCE_S)
        call_at = None
        if silent:
            middle = median(here + [eta for eta in coming if eta <= target])
            waited_from = max(middle, target) if self.sweep else middle
            call_at = waited_from + grace_s / 8
            target = max(target, waited_from + grace_s)
        if now >= target:
            return Decision(True, None, False, "waited long enough" if silent else "worth no wait")
        call = call_at is not None and now >= call_at and not self.called
        wakes = [target, *(eta for eta in coming if eta > now)]
        if call_at is not None and not self.called and not call:
            wakes.append(call_at)
        return Decision(False, min(wakes), call, "waiting")


def best_close(here: list[float], coming: list[float], now: float, cycle_s: float) -> float:
    """The time at which closing gives the most contributions per second.

    here: when the present members arrived, sorted. coming: when the announced ones will. cycle_s:
    how long it takes a member to be back after a round that closed at its arrival.
    """
    begin = here[0] - cycle_s
    best_time, best_rate = now, len(here) / max(max(now, here[-1]) - begin, 1e-9)
    for count, eta in enumerate(sorted(coming), start=len(here) + 1):
        rate = count / max(eta - begin, 1e-9)
        if rate >= best_rate:
            best_time, best_rate = eta, rate
    return best_time
