"""Plans: exact for every number of peers, and stable when peers come and go."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.protocol.grid import Grid, first_plan, next_plan, radices_for
from flwr_moshpit.protocol.machine import PeerId, PeerInfo, Round, View
from flwr_moshpit.protocol.messages import Plan, PlanId


def view_of(numbers, speed=lambda number: 1.0):
    infos = [PeerInfo(PeerId(f"p{number:05}"), speed=speed(number)) for number in sorted(numbers)]
    return View({info.peer: info for info in infos})


def plan_of(num_peers: int, size_max: int) -> Plan:
    return first_plan(PlanId(1, PeerId("p00000")), view_of(range(num_peers)), size_max, Round(0))


def sweep(plan: Plan, values: dict[PeerId, tuple[float, float]]) -> dict[PeerId, float]:
    """Average (value, weight) of each peer over the plan's cells, by numpy, axis by axis."""
    count = Counter(plan.holders)
    weight = np.array([values[p][1] / count[p] for p in plan.holders]).reshape(plan.radices)
    mass = np.array([values[p][0] * values[p][1] / count[p] for p in plan.holders])
    mass = mass.reshape(plan.radices)
    for axis in range(len(plan.radices)):
        mass = np.broadcast_to(mass.mean(axis, keepdims=True), plan.radices)
        weight = np.broadcast_to(weight.mean(axis, keepdims=True), plan.radices)
    value = (mass / weight).ravel()
    return {peer: value[cell] for cell, peer in enumerate(plan.holders)}


@pytest.mark.parametrize(
    ("num_peers", "size_max", "radices"),
    [
        (1, 8, (1,)),
        (2, 2, (2,)),
        (7, 8, (7,)),
        (9, 8, (3, 3)),
        (11, 8, (4, 3)),
        (100, 10, (10, 10)),
        (512, 32, (32, 16)),
        (768, 32, (32, 24)),
        (900, 32, (30, 30)),
        (1024, 32, (32, 32)),
        (1100, 32, (11, 10, 10)),
    ],
)
def test_radices_are_few_then_full_then_even(num_peers, size_max, radices):
    assert radices_for(num_peers, size_max) == radices


@pytest.mark.parametrize(("size_max", "most"), [(32, 1100), (8, 300)])
def test_one_sweep_is_exact_for_every_number_of_peers(size_max, most):
    rng = np.random.default_rng(0)
    for num_peers in range(2, most + 1):
        plan = plan_of(num_peers, size_max)
        assert max(plan.radices) <= size_max
        assert set(plan.holders) == set(view_of(range(num_peers)))
        drawn = zip(rng.normal(1, 1, num_peers), rng.uniform(1, 100, num_peers), strict=True)
        values = dict(zip(view_of(range(num_peers)), drawn, strict=True))
        mean = sum(v * w for v, w in values.values()) / sum(w for _, w in values.values())
        out = np.array(list(sweep(plan, values).values()))
        assert np.linalg.norm(out - mean) <= 1e-12 * np.linalg.norm(np.full(num_peers, mean))


def test_the_fastest_stand_in():
    view = view_of(range(11), speed=lambda number: float(number == 7))
    plan = first_plan(PlanId(1, PeerId("p00000")), view, 8, Round(0))
    assert plan.radices == (4, 3)
    assert [peer for peer in view if plan.holders.count(peer) == 2] == ["p00007"]


@given(num_peers=st.integers(1, 200), size_max=st.integers(2, 12))
@settings(deadline=None, max_examples=60)
def test_lines_are_where_keys_say(num_peers, size_max):
    grid = Grid(plan_of(num_peers, size_max))
    for round in range(grid.num_axes):
        met: dict[object, int] = {}
        for cell, holder in enumerate(grid.plan.holders):
            key = grid.key(Round(round), cell)
            assert holder in grid.line(key)
            met[key] = met.get(key, 0) + 1
        for key, count in met.items():
            assert count == sum(grid.line(key).values()) == grid.plan.radices[round]


def test_lines_that_do_not_exist_are_empty():
    grid = Grid(plan_of(9, 3))
    key = grid.key(Round(0), 0)
    assert grid.line(key._replace(axis=2)) == {}
    assert grid.line(key._replace(line=-1)) == grid.line(key._replace(line=99)) == {}


def test_leading_takes_turns_and_needs_a_door():
    plan = plan_of(9, 3)
    view = view_of(range(9))
    grid = Grid(plan)
    key = grid.key(Round(0), 0)
    firsts = {grid.leaders(key._replace(round=Round(2 * n)), view)[0] for n in range(3)}
    assert firsts == set(grid.line(key))
    hidden = View({p: PeerInfo(p, dialable=p == "p00006") for p in view})
    assert grid.leaders(key, hidden) == ["p00006"]


@given(
    start=st.integers(2, 60),
    changes=st.lists(st.integers(0, 70), max_size=30),
    size_max=st.integers(2, 9),
)
@settings(deadline=None, max_examples=80)
def test_replanning_keeps_everybody_in_and_moves_few(start, changes, size_max):
    present = set(range(start))
    plan = plan_of(start, size_max)
    for term, number in enumerate(changes, start=2):
        present ^= {number}
        if not present:
            present = {number}
        view = view_of(present)
        old, plan = plan, next_plan(PlanId(term, PeerId("c")), plan, view, size_max, Round(7))
        assert set(plan.holders) == set(view)
        assert len(plan.holders) == math.prod(plan.radices)
        assert max(plan.radices) <= max(size_max, 1)
        if plan.radices == old.radices and plan.from_round == 0:
            moved = sum(a != b for a, b in zip(old.holders, plan.holders, strict=True))
            assert moved <= max(1, old.holders.count(old.holders[0]), 4)
        else:
            assert plan.from_round % len(old.radices) == 0
            assert plan.from_round >= 7
