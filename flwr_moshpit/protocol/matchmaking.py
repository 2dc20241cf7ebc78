"""Matchmaking: the peers of one line of the grid become a Group, before a deadline.

A leader keeps a `Lobby` for each key (`lobby.py`): members announce when they expect to come and
then arrive, and it says when to stop waiting. Then the leader names the group: who averages with
whom, and who reduces what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flwr_moshpit.compression import agreed
from flwr_moshpit.protocol.grid import Grid
from flwr_moshpit.protocol.lobby import Arrival, Lobby
from flwr_moshpit.protocol.machine import (
    Effect,
    PeerId,
    Report,
    Round,
    Send,
    View,
    expired,
    refused,
)
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
from flwr_moshpit.protocol.partition import piece_elems, shares

STALL_S = 2.0
"""A group without any progress for less than this is not asked what it waits for."""

STALL_S_MAX = 3600.0
"""Whatever a peer says of its link, nobody waits longer than this without asking."""

UNKNOWN_BYTES_PER_S = 1.25e6
"""What a line is taken to carry of which nothing is known yet: asking again for what is still on
its way would fill it with copies."""

LOBBIES_MAX = 256
"""Lobbies that a leader keeps; before more are opened, those of past rounds are given up, then
those furthest ahead."""

TOO_FAR = "too far ahead"


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
        self._ahead: list[tuple[int, PeerId]] = []
        """The two peers that say they are in the highest rounds, the higher first."""
        self._incarnation = incarnation
        self._terms = terms
        self._lobbies: dict[GroupKey, Lobby] = {}
        self._closed: dict[tuple[int, int], int] = {}

    @property
    def deadline(self) -> float | None:
        wakes = [lobby.wake_at for lobby in self._lobbies.values() if lobby.wake_at is not None]
        return min(wakes, default=None)

    @property
    def latest_round(self) -> Round:
        """The highest round that two peers were heard to be in: one alone may say anything."""
        return Round(self._ahead[1][0]) if len(self._ahead) > 1 else Round(0)

    def heard_of(self, round: int, peer: PeerId) -> None:
        known = [(r, p) for r, p in self._ahead if p != peer or r > round]
        if all(p != peer for _, p in known):
            known.append((round, peer))
        self._ahead = sorted(known, reverse=True)[:2]

    def leads(self, key: GroupKey) -> bool:
        return key in self._lobbies

    def on_announce(
        self, src: PeerId, message: Announce, grid: Grid, view: View, now: float
    ) -> list[Effect]:
        times = (message.eta_s, message.local_s)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            return [refused(src, "announce", "impossible time")]
        if src not in grid.line(message.key):
            return [refused(src, "announce", "not in this line")]
        self.heard_of(message.key.round, src)
        lobby = self._lobby(message.key, grid, view)
        if lobby is None and not self._is_over(message.key):
            return [refused(src, "announce", TOO_FAR)]
        if lobby is None or lobby.closed:
            return [expired(src, message)]
        lobby.announce(src, message.eta_s, message.local_s, now)
        return self._settle(lobby, view, now)

    def on_arrive(
        self, src: PeerId, message: Arrive, grid: Grid, view: View, now: float
    ) -> list[Effect]:
        key = message.key
        if src not in grid.line(key):
            return [refused(src, "arrive", "not in this line")]
        reason = self._objection(message)
        if reason:
            return [refused(src, "arrive", reason), Send(src, Refused(key, reason))]
        lobby = self._lobby(key, grid, view)
        if lobby is None and not self._is_over(key):
            return [refused(src, "arrive", TOO_FAR), Send(src, Refused(key, TOO_FAR))]
        if lobby is None or lobby.closed:
            group = lobby.group if lobby else None
            lives = [] if group is None else [(m.peer, m.incarnation) for m in group.members]
            if group is not None and (src, message.incarnation) in lives:
                return [Send(src, group)]
            later = Round(max(key.round + 1, self.latest_round))
            return [expired(src, message), Send(src, Late(key, later))]
        known = lobby.arrivals.get(src)
        if known is not None and known.incarnation == message.incarnation:
            return [Send(src, Hold(key))]
        arrival = Arrival(now, message.weight, message.incarnation, message.compression)
        lobby.arrive(src, arrival, message.local_s, message.sweep)
        return self._settle(lobby, view, now)

    def on_late(self, src: PeerId, message: Late, view: View, now: float) -> list[Effect]:
        """A member that was called is past this round."""
        lobby = self._lobbies.get(message.key)
        if lobby is None or lobby.closed:
            return [expired(src, message)]
        if src in lobby.arrivals:
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
        if lobby is None and line and not self._is_over(key):
            if len(self._lobbies) >= LOBBIES_MAX:
                self.forget_before(self.latest_round - 1)
            if len(self._lobbies) >= LOBBIES_MAX:
                # Nobody gets that far ahead of me by honest means: the furthest goes first.
                furthest = max(self._lobbies, key=lambda each: each.round)
                if furthest.round <= key.round:
                    return None
                del self._lobbies[furthest]
            living = [peer for peer in line if peer in view]
            lobby = self._lobbies[key] = Lobby(key, line, living)
        return lobby

    def _is_over(self, key: GroupKey) -> bool:
        return self._closed.get((key.axis, key.line), -1) >= key.round

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
        effects: list[Effect] = [
            Send(peer, Call(lobby.key, lobby.sweep)) for peer in lobby.call(now)
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
            piece_elems(max(counts), uplinks, terms.itemsize, terms.part_elems),
            stall_s,
            lobby.sweep,
            agreed([lobby.arrivals[peer].compression for peer in present]),
        )
