"""Who makes the plan of the grid, and which plan a peer follows.

The living peer with the lowest id is the coordinator. It numbers its plans upwards from the highest
term it knows, so that of two coordinators, which exist while views differ, the later one wins
everywhere. A peer follows one plan through a round and takes the newest up in the next.
"""

from __future__ import annotations

import math

from flwr_moshpit.config import Moshpit
from flwr_moshpit.protocol.grid import Grid, first_plan, grid_of, next_plan
from flwr_moshpit.protocol.machine import Effect, PeerId, Publish, Record, Report, Round, View
from flwr_moshpit.protocol.messages import Plan, PlanId

PLAN_KEY = ("plan",)

REPLAN_S = 0.3
"""The coordinator gathers changes of its view for this long before it makes a new plan."""

REPLAN_S_MAX = 5.0
"""It takes twice as long each time that changes go on, up to this: of two coordinators that never
come to see the same peers, each would answer every plan of the other's with one of its own."""


class Planner:
    """`grid` is the plan in force for this peer, None before the first one is known."""

    def __init__(self, me: PeerId, config: Moshpit) -> None:
        self.grid: Grid | None = None
        self.replan_at: float | None = None
        self._me = me
        self._config = config
        self._next: Plan | None = None
        self._spacing_s = REPLAN_S
        self._replanned_at = -math.inf

    @property
    def newest(self) -> Plan | None:
        return self._next or (self.grid.plan if self.grid else None)

    @property
    def num_axes(self) -> int:
        return self.grid.num_axes if self.grid else 1

    def grid_of(self, plan: PlanId) -> Grid | None:
        """The grid of a plan that I follow or shall follow: I may lead its lobbies already."""
        if self.grid is not None and plan == self.grid.plan.id:
            return self.grid
        return grid_of(self._next) if self._next and plan == self._next.id else None

    def learn(self, plan: Plan, gossiped: bool) -> bool:
        """Whether `plan` is newer than all that I know, or what gossip says of one that I was told
        otherwise by one peer: that one may have made something up."""
        newest = self.newest
        if newest is not None and (
            plan.id < newest.id or (plan.id == newest.id and (plan == newest or not gossiped))
        ):
            return False
        self._next = plan
        return True

    def adopt(self, round: Round) -> Round:
        """Follow the newest plan from now on, unless it rules only later rounds. Returns the round
        to go on with: a peer without a cell has nothing to do before its first plan with one."""
        plan = self._next
        if plan is None:
            return round
        homeless = self.grid is None or self._me not in self.grid.cells_of
        if homeless and self._me in plan.holders:
            round = max(round, plan.from_round)
        if self.grid is None or plan.from_round <= round:
            self.grid, self._next = grid_of(plan), None
        return round

    def on_view(self, view: View, now: float) -> None:
        """Replan if that is mine to do and somebody has no cell or a cell has nobody."""
        due_at, self.replan_at = self.replan_at, None
        if not view or next(iter(view)) != self._me:
            return
        plan = self.newest
        if plan is None:
            self.replan_at = now
        elif {*plan.holders} != {*view}:
            # Changes that go on all the time must not put it off for ever.
            self.replan_at = now + self._spacing_s if due_at is None else due_at

    def replan(self, view: View, next_round: Round, now: float) -> tuple[Plan, list[Effect]]:
        """A new plan for `view`, and what spreads it."""
        again = now - self._replanned_at < 3 * self._spacing_s
        self._spacing_s = min(2 * self._spacing_s, REPLAN_S_MAX) if again else REPLAN_S
        self.replan_at, self._replanned_at = None, now
        old = self.newest
        plan_id = PlanId(old.id.term + 1 if old else 1, self._me)
        size_max = self._config.group_size_for(len(view))
        if old is None:
            plan = first_plan(plan_id, view, size_max, Round(0))
        else:
            plan = next_plan(plan_id, old, view, size_max, next_round)
        values = {
            "term": plan_id.term,
            "radices": plan.radices,
            "peers": len(view),
            "from_round": plan.from_round,
        }
        return plan, [Publish(Record(PLAN_KEY, tuple(plan_id), plan)), Report("plan", values)]
