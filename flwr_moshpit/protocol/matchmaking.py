"""Matchmaking: the peers of one line of the grid become a Group, before a deadline.

A `Lobby` is the leader's side for one key. Members announce when they expect to come and then
arrive. When to stop waiting is decided by `Lobby.decide`, which looks at nothing but its books:

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

from flwr_moshpit.compression import agreed
from flwr_moshpit.protocol.grid import Grid
from flwr_moshpit.protocol.machine import Effect, PeerId, Report, Round, Send, View
from flwr_moshpit.protocol.messages import (
    Announce,
    Arrive,
    Call,
    GroupId,
    GroupKey,
    GroupNamed,
    Hold,
    Late,
    Member,
    NewerPlan,
    Refused,
    Share,
    Version,
)
from flwr_moshpit.protocol.partition import shares

STALL_S = 2.0
"""A group without any progress for less than this is not asked what it waits for."""

STALL_S_MAX = 3600.0
"""Whatever a peer says of its link, nobody waits longer than this without asking."""

UNKNOWN_BYTES_PER_S = 1.25e6
"""What a line is taken to carry of which nothing is known yet: asking again for what is still on
its way would fill it with copies."""

LOBBIES_MAX = 256
"""Lobbies that a leader keeps; before more are opened, those of past rounds are given up."""

SLACK = 0.06
"""A member counts as overdue this fraction of its local time after it had announced to come."""

PATIENCE_S = 0.25
"""Least patience with silent members: a call and its answer need a round trip, or two."""

SWEEP_PATIENCE_S = 2.0
"""Least patience with silent members in a sweep: they may still hear of it."""

SWEEP_WAIT_S_MAX = 60.0
"""Most seconds that a sweep waits for what was announced, or four times what groups take."""

ETA_S_MAX = 3600.0
"""A member that means to come later than this is asked again by then."""

CALLS_MAX = 8
"""Members that have come to be given a model call the others so often, then go without."""


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
        self.etas[peer] = now + min(eta_s + SLACK * local_s, ETA_S_MAX)
        self.local_s[peer] = local_s

    def arrive(self, peer: PeerId, arrival: Arrival, local_s: float, sweep: bool) -> None:
        self.expected[peer] = None
        self.arrivals[peer] = arrival
        self.etas.pop(peer, None)
        self.guesses.pop(peer, None)
        self.local_s[peer] = local_s
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

    def decide(self, now: float, patience: float, group_s: float) -> Decision:
        """Whether to start with who is here. `group_s`: how long a group's averaging takes."""
        if not self.arrivals:
            return Decision(False, None, False, "nobody is here")
        if len(self.arrivals) == len(self.expected):
            return Decision(True, None, False, "all are here")
        silent = self.silent(now)
        if not any(arrival.weight > 0 for arrival in self.arrivals.values()):
            if self.num_calls >= CALLS_MAX:
                return Decision(True, None, False, "nobody has a model")
            # They have come to be given the swarm's model: without the others this is no group.
            again_at = now if self.called_at is None else self.called_at + SWEEP_PATIENCE_S
            call = any(self.guesses.get(peer, now) <= now for peer in silent) and again_at <= now
            wake_at = now + SWEEP_PATIENCE_S if call else max(again_at, now + PATIENCE_S)
            return Decision(False, wake_at, call, "nobody has a model yet")
        target, wait_from, grace_s = self._target(now, patience, group_s)
        call_at = None
        if silent:
            target = max(target, wait_from + grace_s)
            call_at = wait_from + grace_s / 8 if self.called_at is None else None
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


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """What a leader needs to know of the vector and of the user's settings."""

    dim: int
    itemsize: int
    schema: bytes
    patience: float
    share_bytes_min: int
    weight_max: float
    part_elems: int


class Rendezvous:
    """All the lobbies that one peer leads, by key. It leads without taking part itself, too."""

    def __init__(self, me: PeerId, incarnation: int, terms: GroupTerms) -> None:
        self.me = me
        self.group_s = 0.0
        """How long a group's averaging takes, as this peer has seen it."""
        self.latest_round = Round(0)
        """The highest round that anybody was heard to be in."""
        self._incarnation = incarnation
        self._terms = terms
        self._lobbies: dict[GroupKey, Lobby] = {}
        self._closed: dict[tuple[int, int], int] = {}

    @property
    def deadline(self) -> float | None:
        wakes = [lobby.wake_at for lobby in self._lobbies.values() if lobby.wake_at is not None]
        return min(wakes, default=None)

    def leads(self, key: GroupKey) -> bool:
        return key in self._lobbies

    def on_announce(
        self, src: PeerId, message: Announce, grid: Grid, view: View, now: float
    ) -> list[Effect]:
        times = (message.eta_s, message.local_s)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            return [_refusal(src, "announce", "impossible time")]
        if src not in grid.line(message.key):
            return [_refusal(src, "announce", "not in this line")]
        self.latest_round = max(self.latest_round, message.key.round)
        lobby = self._lobby(message.key, grid, view)
        if lobby is None or lobby.closed:
            return []
        lobby.announce(src, message.eta_s, message.local_s, now)
        return self._settle(lobby, view, now)

    def on_arrive(
        self, src: PeerId, message: Arrive, grid: Grid, view: View, now: float
    ) -> list[Effect]:
        key = message.key
        if src not in grid.line(key):
            return [_refusal(src, "arrive", "not in this line")]
        reason = self._objection(message)
        if reason:
            return [_refusal(src, "arrive", reason), Send(src, Refused(key, reason))]
        lobby = self._lobby(key, grid, view)
        if lobby is None or lobby.closed:
            group = lobby.group if lobby else None
            lives = [] if group is None else [(m.peer, m.incarnation) for m in group.members]
            if group is not None and (src, message.incarnation) in lives:
                return [Send(src, group)]
            later = Round(max(key.round + 1, self.latest_round))
            return [Send(src, Late(key, later))]
        known = lobby.arrivals.get(src)
        if known is not None and known.incarnation == message.incarnation:
            return [Send(src, Hold(key))]
        arrival = Arrival(now, message.weight, message.incarnation, message.compression)
        lobby.arrive(src, arrival, message.local_s, message.sweep)
        return self._settle(lobby, view, now)

    def on_late(self, src: PeerId, message: Late, view: View, now: float) -> list[Effect]:
        """A member that was called is past this round."""
        lobby = self._lobbies.get(message.key)
        if lobby is None or lobby.closed or src in lobby.arrivals:
            return []
        lobby.later_round = max(lobby.later_round, message.round)
        lobby.drop(src)
        return self._settle(lobby, view, now)

    def on_lost(self, peer: PeerId, view: View, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for lobby in list(self._lobbies.values()):
            if not lobby.closed and peer in lobby.expected:
                lobby.drop(peer)
                effects += self._settle(lobby, view, now)
        return effects

    def on_timer(self, view: View, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for lobby in list(self._lobbies.values()):
            if lobby.wake_at is not None and lobby.wake_at <= now:
                effects += self._settle(lobby, view, now)
        return effects

    def on_new_plan(self, grid: Grid) -> list[Effect]:
        """Whoever waits here under an older plan is sent on to the new one."""
        effects: list[Effect] = []
        for key, lobby in list(self._lobbies.items()):
            if key.plan < grid.plan.id and key.round >= grid.plan.from_round and not lobby.closed:
                effects += [Send(peer, NewerPlan(grid.plan)) for peer in lobby.arrivals]
                del self._lobbies[key]
        return effects

    def forget_before(self, round: int) -> None:
        """Drop the lobbies of rounds that are over; only that they are closed is remembered."""
        for key in [key for key in self._lobbies if key.round < round]:
            del self._lobbies[key]
            line = (key.axis, key.line)
            self._closed[line] = max(self._closed.get(line, -1), key.round)

    def _lobby(self, key: GroupKey, grid: Grid, view: View) -> Lobby | None:
        lobby = self._lobbies.get(key)
        line = grid.line(key)
        if lobby is None and line and self._closed.get((key.axis, key.line), -1) < key.round:
            if len(self._lobbies) >= LOBBIES_MAX:
                self.forget_before(self.latest_round - 1)
            living = [peer for peer in line if peer in view]
            lobby = self._lobbies[key] = Lobby(key, line, living)
        return lobby

    def _objection(self, message: Arrive) -> str | None:
        if not (math.isfinite(message.weight) and 0 <= message.weight <= self._terms.weight_max):
            return f"bad weight {message.weight}"
        if message.dim != self._terms.dim:
            return f"{message.dim} elements instead of {self._terms.dim}"
        if message.schema != self._terms.schema:
            return "another schema"
        if not (math.isfinite(message.local_s) and message.local_s >= 0):
            return "impossible time"
        return None

    def _settle(self, lobby: Lobby, view: View, now: float) -> list[Effect]:
        decision = lobby.decide(now, self._terms.patience, self.group_s)
        lobby.wake_at = decision.wake_at
        if decision.close:
            return self._close(lobby, decision.reason, view, now)
        if not decision.call:
            return []
        lobby.called_at, lobby.num_calls = now, lobby.num_calls + 1
        effects: list[Effect] = [
            Send(peer, Call(lobby.key, lobby.sweep)) for peer in lobby.silent(now)
        ]
        again = lobby.decide(now, self._terms.patience, self.group_s)
        lobby.wake_at = again.wake_at
        return effects

    def _close(self, lobby: Lobby, reason: str, view: View, now: float) -> list[Effect]:
        lobby.closed, lobby.wake_at = True, None
        present = list(lobby.arrivals)
        if len(present) == 1 and lobby.later_round > lobby.key.round:
            return [Send(present[0], Late(lobby.key, Round(lobby.later_round)))]
        lobby.group = named = self._name(lobby, view)
        first = min(arrival.at for arrival in lobby.arrivals.values())
        report = Report(
            "group",
            {
                "round": lobby.key.round,
                "axis": lobby.key.axis,
                "line": lobby.key.line,
                "leader": self.me,
                "members": named.ranks,
                "missing": len(lobby.expected) - len(present),
                "wait_s": now - first,
                "reason": reason,
            },
        )
        return [report, *(Send(peer, named) for peer in named.ranks)]

    def _name(self, lobby: Lobby, view: View) -> GroupNamed:
        key, terms = lobby.key, self._terms
        present = [peer for peer in lobby.line if peer in lobby.arrivals]
        infos = [view.peers.get(peer) for peer in present]
        uplinks = [info.uplink_bytes_per_s if info else None for info in infos]
        weights = [lobby.arrivals[peer].weight for peer in present]
        counts = [0] * len(present)
        if len(present) > 1 and sum(weights) > 0:
            share_min = -(-terms.share_bytes_min // terms.itemsize)
            dialable = [info is not None and info.dialable for info in infos]
            counts = shares(terms.dim, uplinks, dialable, share_min, key.round + key.line)
        named_shares, begin = [], 0
        for peer, count in zip(present, counts, strict=True):
            if count:
                named_shares.append(Share(begin, begin + count, peer))
                begin += count
        slowest = min([rate or UNKNOWN_BYTES_PER_S for rate in uplinks])
        stall_s = min(max(STALL_S, 8 * terms.dim * terms.itemsize / slowest), STALL_S_MAX)
        return GroupNamed(
            GroupId(key, self.me, self._incarnation),
            Version(0, 0),
            tuple(
                Member(peer, weight, lobby.line[peer], lobby.arrivals[peer].incarnation)
                for peer, weight in zip(present, weights, strict=True)
            ),
            tuple(named_shares),
            tuple(present),
            terms.dim,
            terms.part_elems,
            stall_s,
            lobby.sweep,
            agreed([lobby.arrivals[peer].compression for peer in present]),
        )


def _refusal(src: PeerId, what: str, reason: str) -> Report:
    return Report("refused", {"peer": src, "reason": reason, "what": what})
