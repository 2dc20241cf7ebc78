"""Plans: which peer holds which cells of a mixed-radix grid, and the lines of that grid.

Ryabinin et al., "Moshpit SGD: Communication-Efficient Decentralized Training on Heterogeneous
Unreliable Devices", NeurIPS 2021, arXiv 2103.03239, section 3.1: peers sit in a d-dimensional grid
and average along one dimension after the other, which is exact after d rounds when every cell is
filled.

Departs from the paper: the side lengths may differ (mixed radix), and the fastest peers stand in
for the cells that stay empty, so that d rounds are exact for every number of peers. Keys follow
from the plan; the paper's next key, the index of one's chunk, needs a full grid.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

from flwr_moshpit.protocol.machine import PeerId, Round, View
from flwr_moshpit.protocol.messages import ROUND_MAX, GroupKey, Plan, PlanId

AXES_MAX = 32
"""Two to the 32 peers would be too many."""

BAND = 0.75
"""A grid keeps its shape while at least this share of its cells has a peer of its own: replanning
moves everybody's groups, a stand-in only costs its own bytes."""


@lru_cache(maxsize=256)
def radices_for(num_peers: int, size_max: int) -> tuple[int, ...]:
    """Side lengths m_1 >= ... >= m_d, each at most `size_max`, with at least `num_peers` cells.

    Smallest d first (each dimension costs a round), then fewest empty cells, then most even.
    """
    if num_peers < 1 or size_max < 2:
        raise ValueError(f"no grid for {num_peers} peers in groups of at most {size_max}")
    if num_peers <= size_max:
        return (num_peers,)
    num_axes = 2
    while size_max**num_axes < num_peers:
        num_axes += 1
    for num_cells in range(num_peers, size_max**num_axes + 1):
        shapes = list(_factorings(num_cells, num_axes, size_max))
        if shapes:
            return min(shapes, key=lambda shape: (shape[0] - shape[-1], shape))
    raise AssertionError("size_max**num_axes itself is a shape")


def _factorings(number: int, count: int, most: int) -> list[tuple[int, ...]]:
    """All ways to write `number` as a product of `count` factors in 2..most, falling."""
    if count == 1:
        return [(number,)] if 2 <= number <= most else []
    return [
        (factor, *rest)
        for factor in range(min(most, number // 2 ** (count - 1)), 1, -1)
        if number % factor == 0 and factor**count >= number
        for rest in _factorings(number // factor, count - 1, factor)
    ]


def objection(plan: Plan) -> str | None:
    """Why a plan cannot be, or None."""
    sides = plan.radices
    if not (0 < len(sides) <= AXES_MAX and min(sides) >= 1):
        return "impossible radices"
    if math.prod(sides) != len(plan.holders):
        return "the holders do not fill the grid"
    if not (0 <= plan.from_round < ROUND_MAX and 0 < plan.id.term < ROUND_MAX):
        return "impossible round or term"
    return None


def first_plan(plan_id: PlanId, view: View, size_max: int, from_round: Round) -> Plan:
    """A new grid for all peers in `view`, in the order of their ids."""
    radices = radices_for(len(view), size_max)
    return _filled(plan_id, radices, [None] * math.prod(radices), view, from_round)


def next_plan(plan_id: PlanId, old: Plan, view: View, size_max: int, round: Round) -> Plan:
    """`old` after peers came and went: living holders keep their cells, newcomers take stand-ins'.

    The shape changes when a newcomer finds no cell, or when fewer than `BAND` of the cells have a
    peer of their own and another shape fits better; a new shape rules from the next sweep on.
    """
    num_cells = len(old.holders)
    fits = len(view) <= num_cells
    if not fits or len(view) < BAND * num_cells:
        radices = radices_for(len(view), size_max)
        if not fits or radices != old.radices:
            num_axes = len(old.radices)
            next_sweep = Round(-(-round // num_axes) * num_axes)
            return first_plan(plan_id, view, size_max, next_sweep)
    own: dict[PeerId, int] = {}
    for cell, holder in enumerate(old.holders):
        if holder in view:
            own.setdefault(holder, cell)
    cells: list[PeerId | None] = [
        holder if own.get(holder) == cell else None for cell, holder in enumerate(old.holders)
    ]
    # A stand-in that stays one keeps its second cell: moving cells around moves mass around.
    spare = num_cells - len(view)
    for cell, holder in enumerate(old.holders):
        if spare and cells[cell] is None and holder in view:
            cells[cell] = holder
            spare -= 1
    return _filled(plan_id, old.radices, cells, view, Round(0))


def _filled(
    plan_id: PlanId,
    radices: tuple[int, ...],
    cells: list[PeerId | None],
    view: View,
    from_round: Round,
) -> Plan:
    """Peers without a cell get the free ones, then the fastest peers stand in for the rest."""
    counts = dict.fromkeys(view, 0)
    for holder in cells:
        if holder is not None:
            counts[holder] += 1
    homeless = [peer for peer, count in counts.items() if count == 0]
    free = [cell for cell, holder in enumerate(cells) if holder is None]
    for cell, peer in zip(free, homeless, strict=False):
        cells[cell] = peer
        counts[peer] += 1
    queue = [(count, -view.peers[peer].speed, peer) for peer, count in counts.items()]
    heapq.heapify(queue)
    for cell in free[len(homeless) :]:
        count, rate, peer = queue[0]
        cells[cell] = peer
        heapq.heapreplace(queue, (count + 1, rate, peer))
    return Plan(plan_id, radices, tuple(holder for holder in cells if holder), from_round)


class Grid:
    """A plan with its lines worked out: who meets whom in which round. Read-only."""

    __slots__ = ("_lines", "cells_of", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cells_of: dict[PeerId, list[int]] = {}
        for cell, holder in enumerate(plan.holders):
            self.cells_of.setdefault(holder, []).append(cell)
        self._lines: dict[tuple[int, int], dict[PeerId, int]] = {}

    @property
    def num_axes(self) -> int:
        return len(self.plan.radices)

    def key(self, round: Round, cell: int) -> GroupKey:
        """The group of `cell` in `round`: its line along the axis whose turn it is."""
        axis = round % self.num_axes
        stride = math.prod(self.plan.radices[axis + 1 :])
        block = stride * self.plan.radices[axis]
        return GroupKey(self.plan.id, round, axis, cell // block * stride + cell % stride)

    def line(self, key: GroupKey) -> dict[PeerId, int]:
        """The holders of the cells of a line, in the order of cells, with their numbers of cells.

        Empty for a line that the grid does not have.
        """
        found = self._lines.get((key.axis, key.line))
        if found is None:
            found = self._make_line(key.axis, key.line)
            if found:
                self._lines[key.axis, key.line] = found
        return found

    def _make_line(self, axis: int, line: int) -> dict[PeerId, int]:
        holders: dict[PeerId, int] = {}
        if not 0 <= axis < self.num_axes:
            return holders
        length = self.plan.radices[axis]
        if not 0 <= line < len(self.plan.holders) // length:
            return holders
        stride = math.prod(self.plan.radices[axis + 1 :])
        first = line // stride * stride * length + line % stride
        for cell in range(first, first + stride * length, stride):
            holder = self.plan.holders[cell]
            holders[holder] = holders.get(holder, 0) + 1
        return holders

    def leaders(self, key: GroupKey, view: View) -> list[PeerId]:
        """Living members of a line in the order in which they lead it in this round.

        The first one is the rendezvous peer: members announce themselves to it, and it names the
        group. The order turns from sweep to sweep, so that no peer leads always. A peer that
        cannot be dialled leads only where nobody else can.
        """
        members = [peer for peer in self.line(key) if peer in view]
        if len(members) > 1:
            turn = (key.round // self.num_axes + key.line) % len(members)
            members = members[turn:] + members[:turn]
        dialable = [peer for peer in members if view.peers[peer].dialable]
        return dialable or members


@lru_cache(maxsize=16)
def grid_of(plan: Plan) -> Grid:
    """The `Grid` of a plan; peers of one process share it."""
    return Grid(plan)
