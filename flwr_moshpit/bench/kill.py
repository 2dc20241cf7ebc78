"""`flwr-moshpit bench kill`: what deaths do to the living, beside what they may do.

Eight real peers on this machine train next to nothing and average all the time. One is killed with
SIGKILL at each stage of a round, then the root of R-FAST's tree; then many rounds without a death
show whether anything is lost, and many with deaths and restarts whether anything piles up.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from flwr_moshpit.bench.bounds import Bound, at_most, exactly, show
from flwr_moshpit.bench.gauge import Gauge, Measure, Usage
from flwr_moshpit.bench.trainers import DriftTrainer
from flwr_moshpit.commands.deaths import CALM_ROUNDS, Death, Rounds
from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.protocol.machine import PeerId, Report, Start
from flwr_moshpit.runtime import watched
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.identity import DAY_S, Authority
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.peer import PeerSettings
from flwr_moshpit.runtime.watched import Arm, Averaged, MachineWatcher
from flwr_moshpit.runtime.worker import Failed, Finished, Gone, Reported

PEERS = 8
STAGES = (
    watched.BEFORE,
    watched.MATCHING,
    watched.EARLY,
    watched.LATE,
    watched.LEADER,
    watched.REDUCER,
)
DIM = 100_000
TINY = 1_000
HANG_S = 120.0
CALM_ROUNDS_LOST = 1_000
CHURN_ROUNDS = 500
FAILURES = 0.3
DELAY_S = 3.0
"""A death is known to all within this."""

Say = Callable[[str], None]
OnRound = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class RootDeath:
    """The death of the root of R-FAST's tree."""

    root_s: float
    """Until a survivor was root."""
    pause_s: float
    """The longest that a survivor did without a step of its own."""
    coverage: float
    """Of the survivors, how many took a step under the new root."""


@dataclass(frozen=True, slots=True)
class Churn:
    """What peers that were never killed took up, early and at the end."""

    bytes_early: int
    bytes_late: int
    descriptors_early: int
    descriptors_late: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Figures:
    deaths: list[Death]
    root: RootDeath
    calm_rounds: int
    lost: int
    """Contributions of a peer to a round that its group went without, in `calm_rounds`."""
    churn_rounds: int
    churn: Churn


def bench(
    rounds: int = CALM_ROUNDS_LOST,
    churn_rounds: int = CHURN_ROUNDS,
    console: Console | None = None,
) -> bool:
    """Measure, print each figure beside its bound, and return whether all are kept. Raises
    MoshpitError when the swarm stands still."""
    console = console or Console(highlight=False, markup=False, soft_wrap=True)
    return show(console, judge(measure(rounds, churn_rounds, console)))


def measure(rounds: int, churn_rounds: int, console: Console) -> Figures:
    deaths = []
    with Progress(console=console, transient=True) as progress:
        for stage in STAGES:
            task = progress.add_task(f"a death {stage}", total=None)
            deaths.append(_death_at(stage))
            progress.remove_task(task)
            console.print(f"{stage}: {deaths[-1].told()}", style="dim")
        task = progress.add_task("the death of R-FAST's root", total=None)
        root = _death_of_root()
        progress.remove_task(task)
        task = progress.add_task("rounds without a death", total=rounds)
        lost = _lost_in(rounds, lambda done: progress.update(task, completed=done))
        progress.remove_task(task)
        task = progress.add_task("rounds with deaths", total=churn_rounds)
        churn = _churn(churn_rounds, lambda done: progress.update(task, completed=done))
    return Figures(deaths, root, rounds, lost, churn_rounds, churn)


def judge(figures: Figures) -> list[Bound]:
    """Each figure beside its bound."""
    bounds = []
    for death in figures.deaths:
        what = f"death {death.stage}"
        bounds += [
            at_most(f"{what}: delay", death.delay_s, DELAY_S, "s"),
            _all_of(f"{what}: survivors' coverage", death.coverage),
            exactly(f"{what}: survivors that came too late", death.late, 0),
            at_most(f"{what}: from the exact mean", death.difference, 1e-5, ""),
        ]
    root, churn = figures.root, figures.churn
    deaths_min = int(FAILURES * figures.churn_rounds * 0.8)
    return [
        *bounds,
        at_most("death of R-FAST's root: until there is another", root.root_s, DELAY_S, "s"),
        at_most("death of R-FAST's root: longest pause", root.pause_s, DELAY_S, "s"),
        _all_of("death of R-FAST's root: survivors under the new one", root.coverage),
        exactly(f"lost in {figures.calm_rounds:,} rounds without a death", figures.lost, 0),
        (
            f"deaths in {figures.churn_rounds:,} rounds",
            f"{churn.deaths}",
            f"at least {deaths_min}",
            churn.deaths >= deaths_min,
        ),
        at_most(
            "memory, end over beginning",
            churn.bytes_late / churn.bytes_early,
            1.1,
            "x",
        ),
        at_most(
            "descriptors, more at the end than at the beginning",
            churn.descriptors_late - churn.descriptors_early,
            8,
            "",
        ),
    ]


def _all_of(what: str, share: float) -> Bound:
    return (what, f"{100 * share:.4g} %", "100 %", share == 1.0)


@dataclass
class _Heard:
    """What the peers of one swarm have told."""

    swarm: LocalSwarm
    rounds: Rounds = field(default_factory=Rounds)
    usages: dict[PeerId, Usage] = field(default_factory=dict)
    reports: list[tuple[float, PeerId, Report]] = field(default_factory=list)
    finished: dict[PeerId, None] = field(default_factory=dict)
    done: dict[PeerId, int] = field(default_factory=dict)
    """The last round of each."""

    def until(self, condition: Callable[[], bool], what: str, within_s: float = HANG_S) -> None:
        ends_at = time.monotonic() + within_s
        while not condition():
            heard = self.swarm.next(ends_at)
            if heard is None:
                raise MoshpitError(f"{what} did not come in {within_s:g} s")
            self.take(*heard)

    def until_round(self, peer: PeerId, number: int) -> None:
        self.until(lambda: self.done[peer] >= number, f"round {number}")

    def kill(self, peer: PeerId) -> None:
        self.swarm.kill(peer)
        self.until(lambda: peer not in self.swarm.living, "a death")

    def take(self, peer: PeerId, told: Any) -> None:
        match told:
            case Averaged():
                self.rounds.add(peer, told)
            case Usage():
                self.usages[peer] = told
            case Reported():
                if told.report.name == "round":
                    self.done[peer] = int(told.report.values["round"])
                if told.report.name in ("round", "root"):
                    self.reports.append((told.at, peer, told.report))
            case Finished():
                self.finished[peer] = None
            case Failed():
                raise told.error()
            case Gone():
                self.done.pop(peer, None)


def _death_at(stage: str) -> Death:
    with (
        tempfile.TemporaryDirectory(prefix="flwr-moshpit-") as folder,
        LocalSwarm(_peers(Moshpit(local_steps=1), DIM, None), MachineWatcher) as swarm,
    ):
        heard = _Heard(swarm)
        heard.until(lambda: heard.rounds.latest > CALM_ROUNDS, "ten rounds")
        before, token = dict(swarm.living), Path(folder) / "dead"
        for peer in before:
            swarm.tell(peer, Arm(stage, token))
        heard.until(lambda: len(swarm.living) < len(before), f"a death {stage}")
        (victim,) = (peer for peer in before if peer not in swarm.living)
        at = float(token.read_text())
        found = functools.partial(heard.rounds.without, victim, at, swarm.living)
        heard.until(lambda: found() is not None, "a round without the dead")
        number = found()
        assert number is not None
        return heard.rounds.death(stage, victim, at, number, swarm.living)


def _death_of_root() -> RootDeath:
    with LocalSwarm(_peers(RFast(), TINY, None)) as swarm:
        heard = _Heard(swarm)
        heard.until(lambda: _has_stepped(heard, 20), "twenty steps of all")
        victim = _root(heard)
        at = time.monotonic()
        swarm.kill(victim)
        survivors = [peer for peer in swarm.living if peer != victim]
        heard.until(lambda: _new_root_at(heard, victim, at) < math.inf, "a new root")
        root_at = _new_root_at(heard, victim, at)
        settled_at = time.monotonic() + DELAY_S
        with_steps: dict[PeerId, None] = {}
        while (told := swarm.next(settled_at)) is not None:
            heard.take(*told)
        for when, peer, report in heard.reports:
            if report.name == "round" and when > root_at and peer in survivors:
                with_steps[peer] = None
        pauses = [_longest_pause(heard, peer, at) for peer in survivors]
        return RootDeath(root_at - at, max(pauses), len(with_steps) / len(survivors))


def _has_stepped(heard: _Heard, steps: int) -> bool:
    return len(heard.done) == PEERS and min(heard.done.values()) >= steps


def _root(heard: _Heard) -> PeerId:
    """The last that said that it was."""
    claims = [each for each in heard.reports if each[2].name == "root"]
    return max(claims, key=lambda claim: int(claim[2].values["term"]))[1]


def _new_root_at(heard: _Heard, victim: PeerId, at: float) -> float:
    return min(
        (
            when
            for when, peer, report in heard.reports
            if report.name == "root" and when > at and peer != victim
        ),
        default=math.inf,
    )


def _longest_pause(heard: _Heard, peer: PeerId, at: float) -> float:
    """Of the steps of `peer` around and after `at`."""
    times = [when for when, who, report in heard.reports if who == peer and report.name == "round"]
    last = max((when for when in times if when <= at), default=at)
    after = [last, *(when for when in times if when > at)]
    return max((late - early for early, late in pairwise(after)), default=math.inf)


def _lost_in(rounds: int, on_round: OnRound) -> int:
    with LocalSwarm(_peers(Moshpit(local_steps=1), TINY, rounds)) as swarm:
        heard = _Heard(swarm)
        lost = shown = 0
        ends_at = time.monotonic() + HANG_S
        while len(heard.finished) < PEERS:
            told = swarm.next(ends_at)
            if told is None:
                raise MoshpitError(f"nothing more is heard of {rounds} rounds")
            heard.take(*told)
            for _, _, report in heard.reports:
                if report.name == "round" and report.values["trained"]:
                    lost += PEERS - int(report.values["contributors"])
            heard.reports.clear()
            slowest = min(heard.done.values(), default=0)
            if slowest > shown:
                shown, ends_at = slowest, time.monotonic() + HANG_S
                on_round(shown)
        return lost


def _churn(rounds: int, on_round: OnRound) -> Churn:
    """In every so many rounds somebody dies, and is started again at once; the first two never."""
    period = round(1 / FAILURES)
    with LocalSwarm(_peers(Moshpit(local_steps=1), TINY, None), Gauge) as swarm:
        heard = _Heard(swarm)
        stayed = list(swarm.living)[:2]
        others = list(swarm.living)[2:]
        heard.until(lambda: len(heard.done) == PEERS, "the first round of all")
        taken: list[list[Usage]] = []
        deaths = 0
        # Early is after a tenth: until then caches fill.
        for number in range(1, rounds + 1):
            heard.until_round(stayed[0], number)
            heard.reports.clear()
            on_round(number)
            victim = others[deaths % len(others)]
            if number % period == 0 and victim in heard.done:
                deaths += 1
                heard.kill(victim)
                swarm.restart(victim)
            if number in (max(1, rounds // 10), rounds):
                taken.append(_usages(heard, stayed))
        early, late = taken[0], taken[-1]
        return Churn(
            max(usage.bytes for usage in early),
            max(usage.bytes for usage in late),
            max(usage.descriptors for usage in early),
            max(usage.descriptors for usage in late),
            deaths,
        )


def _usages(heard: _Heard, peers: list[PeerId]) -> list[Usage]:
    heard.usages.clear()
    for peer in peers:
        heard.swarm.tell(peer, Measure())
    heard.until(lambda: all(peer in heard.usages for peer in peers), "what they take up")
    return [heard.usages[peer] for peer in peers]


def _peers(algorithm: Any, dim: int, rounds: int | None) -> list[PeerSettings]:
    authority = Authority.create("bench", valid_s=DAY_S)
    make_trainer = functools.partial(DriftTrainer, dim)
    schedule = Schedule(start=Start(until_round=rounds), gather_peers=PEERS, gather_s=HANG_S)
    return [
        PeerSettings(
            identity=authority.issue(PeerId(f"p{index}")),
            algorithm=algorithm,
            task=Task(make_trainer, index, PEERS, seed=(0, index)),
            schedule=schedule,
        )
        for index in range(PEERS)
    ]
