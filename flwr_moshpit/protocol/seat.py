"""Where a peer stands with one line of the grid in one round: in a lobby, in a group, or done."""

from __future__ import annotations

from flwr_moshpit.protocol.allreduce import AllReduce, Outcome
from flwr_moshpit.protocol.grid import Grid
from flwr_moshpit.protocol.machine import Effect, PeerId, Round, Send, Vector, View
from flwr_moshpit.protocol.messages import Arrive, GroupKey

RETRY_S = 1.0
"""First wait for a leader's word before one asks again; it doubles, up to `RETRIES_MAX` times."""

RETRIES_MAX = 4


HOLDS_MAX = 7200
"""So often a leader may say that it waits for others, two hours long, before another is asked."""


class Seat:
    """vector: (d,), weight: what this peer brings; cells: which of its cells are on the line."""

    __slots__ = (
        "allreduce",
        "cells",
        "compression",
        "grouped_at",
        "holds",
        "key",
        "later_round",
        "leader",
        "outcome",
        "retries",
        "retry_at",
        "shunned",
        "vector",
        "weight",
    )

    def __init__(self, key: GroupKey, cells: list[int], vector: Vector, weight: float) -> None:
        self.key = key
        self.cells = cells
        self.vector = vector
        self.weight = weight
        self.compression = "none"
        """What I asked for when I came."""
        self.leader: PeerId | None = None
        self.shunned: dict[PeerId, None] = {}
        """Leaders that do not answer."""
        self.retries = self.holds = 0
        self.retry_at: float | None = None
        self.grouped_at: float | None = None
        self.allreduce: AllReduce | None = None
        self.outcome: Outcome | None = None
        self.later_round = Round(0)
        """The round that is open, if this one was found closed."""

    @property
    def waits(self) -> bool:
        return self.allreduce is None and self.outcome is None

    @property
    def num_cells(self) -> int:
        return len(self.cells)

    @property
    def deadline(self) -> float | None:
        return self.allreduce.deadline if self.allreduce else self.retry_at

    @property
    def averaged(self) -> bool:
        return self.outcome is not None and self.outcome.average is not None

    def end(self, reason: str, contributors: tuple[PeerId, ...] = ()) -> None:
        """Nothing is averaged on this line in this round."""
        self.outcome = Outcome(None, self.weight, len(self.cells), contributors, reason)
        self.retry_at = None

    def check(self) -> bool:
        """Whether this seat is done."""
        if self.outcome is None and self.allreduce is not None:
            self.outcome = self.allreduce.outcome
        return self.outcome is not None

    def go(self, me: PeerId, grid: Grid, view: View, arrival: Arrive, now: float) -> list[Effect]:
        """Tell the first leader that may answer, or end if nobody else can come."""
        if not any(peer != me and peer in view for peer in grid.line(self.key)):
            self.end("nobody else", (me,))
            return []
        leaders = [p for p in grid.leaders(self.key, view) if p not in self.shunned]
        if not leaders:
            self.end("no leader answers", (me,))
            return []
        if leaders[0] != self.leader:
            self.leader, self.retries, self.holds = leaders[0], 0, 0
        self.retry_at = None if self.leader == me else now + RETRY_S * 2**self.retries
        return [Send(leaders[0], arrival)]

    def held(self) -> None:
        """The leader knows that I am here, and waits for others."""
        self.holds += 1
        if self.holds <= HOLDS_MAX:
            self.retries = 0

    def unheard(self) -> None:
        """The leader has not answered in time."""
        self.retries += 1
        if self.retries > RETRIES_MAX and self.leader is not None:
            self.shunned[self.leader] = None

    def cut_off(self) -> None:
        """The link to the leader is lost: once may be a broken connection, twice is enough."""
        if self.retries and self.leader is not None:
            self.shunned[self.leader] = None
        self.retries += 1

    def waits_for(self) -> dict[str, object]:
        """For people: what this seat waits for."""
        if self.allreduce is not None and self.outcome is None:
            return {"group": self.key._asdict(), **self.allreduce.waits_for()}
        if self.outcome is None:
            return {"lobby": self.key._asdict(), "leader": self.leader}
        return {"done": self.outcome.reason}


def round_values(seats: list[Seat], now: float, met_at: float) -> dict[str, object]:
    """What the report on a round says of its groups. Coverage is the fraction of the vector that
    was averaged with anybody; over several cells, their mean."""
    num_cells = sum(len(seat.cells) for seat in seats)
    averaged = [seat for seat in seats if seat.averaged]
    outcomes = [seat.outcome for seat in seats if seat.outcome is not None]
    contributors = dict.fromkeys(peer for outcome in outcomes for peer in outcome.contributors)
    grouped = [seat.grouped_at for seat in seats if seat.grouped_at is not None]
    reduced = [seat.allreduce for seat in seats if seat.allreduce is not None]
    return {
        "coverage": sum(len(seat.cells) for seat in averaged) / num_cells,
        "contributors": len(contributors),
        "contributor_ids": tuple(contributors),
        "weight": max((seat.outcome.weight for seat in averaged if seat.outcome), default=0.0),
        "cells": num_cells,
        "leaders": tuple(seat.leader for seat in seats if seat.leader is not None),
        "late": any(seat.later_round for seat in seats),
        "reason": "; ".join(outcome.reason for outcome in outcomes if outcome.reason),
        "version": max((r.named.version.counter for r in reduced), default=0),
        "wait_s": (max(grouped) if grouped else now) - met_at,
        "allreduce_s": now - min(grouped) if grouped else 0.0,
        "bytes_sent": sum(r.bytes_sent for r in reduced),
    }
