"""When the coordinator makes a new plan."""

import pytest

from flwr_moshpit.config import Moshpit
from flwr_moshpit.protocol.machine import PeerId, PeerInfo, Round, View
from flwr_moshpit.protocol.planning import REPLAN_S, REPLAN_S_MAX, Planner


def view_of(names: str) -> View:
    return View({PeerId(name): PeerInfo(PeerId(name)) for name in names})


def planner(name: str, names: str) -> Planner:
    made = Planner(PeerId(name), Moshpit(group_size=2))
    made.on_view(view_of(names), 0.0)
    return made


def test_the_lowest_living_peer_plans_and_gathers_changes_first():
    low, other = planner("a", "abc"), planner("b", "abc")
    assert (low.replan_at, other.replan_at) == (0.0, None)
    plan, _ = low.replan(view_of("abc"), Round(0), 0.0)
    low.learn(plan, True)
    low.on_view(view_of("abc"), 1.0)
    assert low.replan_at is None
    low.on_view(view_of("abcd"), 100.0)
    assert low.replan_at == pytest.approx(100 + REPLAN_S)


def test_changes_that_go_on_do_not_put_a_plan_off():
    low = planner("a", "abc")
    low.learn(low.replan(view_of("abc"), Round(0), 0.0)[0], True)
    for step in range(20):
        low.on_view(view_of("abcd" if step % 2 else "abce"), 100 + step * REPLAN_S / 4)
    assert low.replan_at == pytest.approx(100 + REPLAN_S)


def test_two_that_never_see_the_same_peers_plan_more_and_more_rarely():
    """a sees b, b does not see a, and each learns the other's plans at once."""
    views = {"a": view_of("abc"), "b": view_of("bc")}
    planners = {name: planner(name, "".join(view.peers)) for name, view in views.items()}
    now, plans = 0.0, 0
    while now < 100:
        due = {name: each for name, each in planners.items() if each.replan_at is not None}
        if not due:
            break
        name = min(due, key=lambda each: due[each].replan_at)
        now = due[name].replan_at
        plan, _ = due[name].replan(views[name], Round(plans), now)
        plans += 1
        for each, other in planners.items():
            other.learn(plan, True)
            other.on_view(views[each], now)
    assert 100 / REPLAN_S_MAX < plans < 100 / REPLAN_S_MAX + 12
