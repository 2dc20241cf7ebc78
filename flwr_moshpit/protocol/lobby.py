"""The leader's books on one key: who is here, who is coming, and when to stop waiting for them.

Members announce when they expect to come and then arrive. `Lobby.decide` looks at nothing but its
books:

- when nobody else is expected, the group starts at once;
- the group goes at the pace of its median member: nobody starts before half of those who live are
  here, so that a few fast devices do not run away with the rounds;
- after that, members that announced themselves are waited for as long as this raises the
  contributions per second, so a straggler is left out as soon as it is known to be one;
- members that say nothing are called, and waited for no longer than `patience` times the median
  member's local time. A death, or the answer that they are elsewhere, ends that;
- in a round without training (a sweep) everybody who announced is waited for, within reason.

Departs from the paper (section 3.1 and appendix): hivemind's leaders wait for a fixed window; here
no window exists that a user would have to set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.protocol.messages import GroupKey, GroupNamed

SLACK = 0.06
"""A member counts as overdue this fraction of its local time after it had announced to come."""

PATIENCE_S = 0.25
"""Least patience with silent members: a call and its answer need a round trip, or two."""

SWEEP_PATIENCE_S = 2.0
"""Least patience with silent members in a sweep: they may still hear of it."""

SWEEP_WAIT_S_MAX = 60.0
"""Most seconds that a sweep waits for what was announced, or four times what groups take."""

ASKED_AGAIN_S = 0.03
"""Soonest after an answer that its promise counts as broken: one that comes in no time, as it says
of a step of nanoseconds, would be asked and answer millions of times a second."""
ETA_S_MAX = 3600.0
"""A member that means to come later than this is asked again by then."""

CALLS_MAX = 8
MODEL_WAIT_S_MAX = 600.0
"""Members that have come to be given a model call the others so often, and wait so long at most for
those who say that they are coming, then go without."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the leader knows of a member that is here."""

    at: float
    weight: float
    incarnation: int
    compression: str = "none"


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
        "called_at",
        "closed",
        "etas",
        "expected",
        "group",
        "guesses",
        "key",
        "later_round",
        "line",
        "local_s",
        "num_calls",
        "sweep",
        "wake_at",
    )

    def __init__(self, key: GroupKey, line: Mapping[PeerId, int], expected: list[PeerId]) -> None:
        self.key = key
        self.line = line
        """All members in group order, with their numbers of cells."""
        self.expected: dict[PeerId, None] = dict.fromkeys(expected)
        """Members that may still come or have come."""
        self.arrivals: dict[PeerId, Arrival] = {}
        self.etas: dict[PeerId, float] = {}
        self.guesses: dict[PeerId, float] = {}
        """Etas of members that have never done such a job before."""
        self.local_s: dict[PeerId, float] = {}
        self.called: dict[PeerId, None] = {}
        """Silent members that were asked whether they come, and have promised nothing since."""
        self.called_at: float | None = None
        self.num_calls = 0
        self.sweep = False
        self.later_round = 0
        """The highest round that a member said it has reached."""
        self.closed = False
        self.group: GroupNamed | None = None
        """What was named when it closed; None if nobody was left to average."""
        self.wake_at: float | None = None

    def announce(self, peer: PeerId, eta_s: float, local_s: float, now: float) -> None:
        if peer not in self.expected or peer in self.arrivals:
            return
        if local_s <= 0:
            self.guesses[peer] = now + min(eta_s, ETA_S_MAX)
            return
        # Nobody knows his own pace to the last percent, and messages take time.
        least_s = ASKED_AGAIN_S if peer in self.called else 0.0
        self.etas[peer] = now + max(least_s, min(eta_s + SLACK * local_s, ETA_S_MAX))
        self.called.pop(peer, None)
        self.local_s[peer] = local_s

    def arrive(self, peer: PeerId, arrival: Arrival, local_s: float, sweep: bool) -> None:
        self.expected[peer] = None
        self.arrivals[peer] = arrival
        self.etas.pop(peer, None)
        self.guesses.pop(peer, None)
        self.local_s[peer] = min(local_s, ETA_S_MAX)
        self.sweep = self.sweep or sweep

    def drop(self, peer: PeerId) -> None:
        """`peer` is not coming: dead, elsewhere or refused."""
        self.expected.pop(peer, None)
        self.arrivals.pop(peer, None)
        self.etas.pop(peer, None)
        self.guesses.pop(peer, None)

    def silent(self, now: float) -> list[PeerId]:
        """Expected members of whom nothing sure is known, or who should have been here by now."""
        return [
            peer
            for peer in self.expected
            if peer not in self.arrivals and self.etas.get(peer, -math.inf) <= now
        ]

    def call(self, now: float) -> list[PeerId]:
        """Whom to ask now whether they come."""
        repeats = not any(arrival.weight > 0 for arrival in self.arrivals.values())
        asked = [peer for peer in self.silent(now) if repeats or peer not in self.called]
        self.called.update(dict.fromkeys(asked))
        self.called_at, self.num_calls = now, self.num_calls + 1
        return asked

    def decide(self, now: float, patience: float, group_s: float) -> Decision:
        """Whether to start with who is here. `group_s`: how long a group's averaging takes."""
        if not self.arrivals:
            return Decision(False, None, False, "nobody is here")
        if len(self.arrivals) == len(self.expected):
            return Decision(True, None, False, "all are here")
        silent = self.silent(now)
        if not any(arrival.weight > 0 for arrival in self.arrivals.values()):
            first_at = min(arrival.at for arrival in self.arrivals.values())
            if self.num_calls >= CALLS_MAX or now >= first_at + MODEL_WAIT_S_MAX:
                return Decision(True, None, False, "nobody has a model")
            # They have come to be given the swarm's model: without the others this is no group.
            again_at = now if self.called_at is None else self.called_at + SWEEP_PATIENCE_S
            call = any(self.guesses.get(peer, now) <= now for peer in silent) and again_at <= now
            wakes = [first_at + MODEL_WAIT_S_MAX, *self.etas.values(), *self.guesses.values()]
            wakes.append(again_at if not call else now + SWEEP_PATIENCE_S)
            coming = min((at for at in wakes if at > now), default=now + SWEEP_PATIENCE_S)
            return Decision(False, coming, call, "nobody has a model yet")
        target, wait_from, grace_s = self._target(now, patience, group_s)
        call_at = None
        if silent:
            target = max(target, wait_from + grace_s)
            # One that was to be here by now is asked anew: it may have gone on without this round.
            unasked = any(peer not in self.called for peer in silent)
            call_at = wait_from + grace_s / 8 if unasked else None
        if now >= target:
            return Decision(True, None, False, "waited long enough" if silent else "worth no wait")
        call = call_at is not None and now >= call_at
        wakes = [target, *(eta for eta in self.etas.values() if eta > now)]
        if call_at is not None and not call:
            wakes.append(call_at)
        return Decision(False, min(wakes), call, "waiting")

    def _target(self, now: float, patience: float, group_s: float) -> tuple[float, float, float]:
        """(until when to wait for those who announced, from when and how long for the silent)."""
        with_model = {peer: a for peer, a in self.arrivals.items() if a.weight > 0}
        here = sorted((arrival.at, self.local_s[peer]) for peer, arrival in with_model.items())
        coming = [(eta, self.local_s[peer]) for peer, eta in self.etas.items() if eta > now]
        last = here[-1][0]
        times = sorted(here + coming)
        half = (len(self.expected) - len(self.arrivals) + len(with_model) + 1) // 2
        local_s = times[min(half, len(times)) - 1][1]
        long_s = max(4 * patience * local_s, 4 * group_s, SWEEP_PATIENCE_S)
        if self.sweep:
            # Nothing is worth more than being whole here, but some peers say anything.
            most_s = max(4 * long_s, SWEEP_WAIT_S_MAX)
            end = max(last, min(times[-1][0], last + most_s))
            return end, end, long_s
        guesses = [eta for eta in self.guesses.values() if eta > now]
        known = sorted([time for time, _ in times] + guesses)
        if len(known) < half:
            # Most say nothing: they may all be in a slower group still, or cut off from me.
            return last, last, long_s
        middle = known[half - 1]
        grace_s = max(patience * max(local_s, group_s), PATIENCE_S)
        begin = middle - max(local_s + group_s, 1e-9)
        # A group of one brings nobody anything, so each counts half a member less than it has.
        best, best_rate = middle, 0.0
        for count, (time, _) in enumerate(times, start=1):
            rate = (count - 0.5) / max(max(time, middle) - begin, 1e-9)
            if time <= middle + grace_s or rate >= best_rate:
                best, best_rate = max(time, middle), rate
        return best, middle, grace_s
