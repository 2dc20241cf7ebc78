"""The verdicts of `bench kill`, and what it says that a death has done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flwr_moshpit.bench import kill
from flwr_moshpit.bench.kill import Churn, Figures, RootDeath, judge
from flwr_moshpit.cli import main
from flwr_moshpit.commands.deaths import Death, Rounds
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.watched import Averaged

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
DEATH = Death("early", A, 12, 0.4, 1.0, 0, 1e-8, 7)
GOOD = Figures(
    deaths=[DEATH],
    root=RootDeath(0.7, 0.2, 1.0),
    calm_rounds=1_000,
    lost=0,
    churn_rounds=500,
    churn=Churn(70_000_000, 71_000_000, 40, 41, 150),
)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"deaths": [replace(DEATH, delay_s=3.1)]}, "death early: delay"),
        ({"deaths": [replace(DEATH, coverage=0.99)]}, "death early: survivors' coverage"),
        ({"deaths": [replace(DEATH, difference=1e-4)]}, "death early: from the exact mean"),
        (
            {"deaths": [replace(DEATH, difference=float("nan"))]},
            "death early: from the exact mean",
        ),
        ({"root": RootDeath(3.1, 0.2, 1.0)}, "death of R-FAST's root: until there is another"),
        ({"root": RootDeath(0.7, 3.1, 1.0)}, "death of R-FAST's root: longest pause"),
        (
            {"root": RootDeath(0.7, 0.2, 6 / 7)},
            "death of R-FAST's root: survivors under the new one",
        ),
        ({"deaths": [replace(DEATH, late=1)]}, "death early: survivors that came too late"),
        ({"churn": replace(GOOD.churn, deaths=119)}, "deaths in 500 rounds"),
        ({"lost": 1}, "lost in 1,000 rounds without a death"),
        (
            {"churn": replace(GOOD.churn, bytes_late=78_000_000)},
            "memory, end over beginning",
        ),
        (
            {"churn": replace(GOOD.churn, descriptors_late=49)},
            "descriptors, more at the end than at the beginning",
        ),
    ],
)
def test_each_bound_can_be_exceeded(change: dict[str, object], what: str) -> None:
    assert all(kept for *_, kept in judge(GOOD))
    bounds = judge(replace(GOOD, **change))  # type: ignore[arg-type]
    assert [name for name, _, _, kept in bounds if not kept] == [what]


def test_a_figure_that_falls_short_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kill, "measure", lambda rounds, churn, console: GOOD)
    assert main(["bench", "kill"]) == 0
    monkeypatch.setattr(kill, "measure", lambda rounds, churn, console: replace(GOOD, lost=rounds))
    assert main(["bench", "kill", "--rounds", "3"]) == 1
    assert capsys.readouterr().out.count("EXCEEDED") == 1
    assert main(["bench", "kill", "--rounds", "0"]) == 2
    assert "rounds must be at least 1, not 0" in capsys.readouterr().err


def averaged(number: int, at: float, *contributors: PeerId, late: bool = False) -> Averaged:
    ones = np.ones(2, np.float32)
    coverage = 0.0 if late else 1.0
    return Averaged(at, number, contributors, coverage, late, ones, 1.0, ones)


def test_the_delay_is_that_of_the_slowest_round_since_the_death() -> None:
    rounds = Rounds()
    for number in range(4):
        for peer in (A, B, C):
            rounds.add(peer, averaged(number, 10.0 + number, A, B, C))
    # A dies at 13.2 in round 4, which still has what it had brought; round 5 waits for it.
    for peer, at in ((B, 14.1), (C, 14.2)):
        rounds.add(peer, averaged(4, at, A, B, C))
    assert rounds.without(A, 13.2, [B, C]) is None
    rounds.add(B, averaged(5, 17.0, B, C))
    assert rounds.without(A, 13.2, [B, C]) is None
    rounds.add(C, averaged(5, 17.2, B, C))
    number = rounds.without(A, 13.2, [B, C])
    assert number == 5
    death = rounds.death("late", A, 13.2, number, [B, C])
    assert death.delay_s == pytest.approx(3.0 - 1.0)
    assert (death.coverage, death.late, death.survivors) == (1.0, 0, 2)
    assert death.difference == 0


def test_who_came_too_late_was_not_hurt_by_the_death() -> None:
    rounds = Rounds()
    for number in (1, 2):
        rounds.add(B, averaged(number, float(number), B))
        rounds.add(C, averaged(number, float(number), late=True))
    death = rounds.death("early", A, 1.5, 2, [B, C])
    assert (death.coverage, death.late, death.survivors) == (1.0, 1, 2)
    assert "(1 came too late for it)" in death.told()


@pytest.mark.slow
def test_deaths_and_restarts_of_real_peers() -> None:
    death = kill._death_at("early")
    assert death.survivors == 7
    assert death.coverage == 1.0
    assert death.difference < 1e-5
    churn = kill._churn(10, lambda number: None)
    assert churn.deaths == 3
    assert churn.descriptors_late > 0


@pytest.mark.slow
def test_the_root_of_real_peers() -> None:
    assert kill._death_of_root().coverage == 1.0
