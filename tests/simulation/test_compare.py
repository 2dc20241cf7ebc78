"""compare: the same conditions for everybody, fair targets, paired figures, files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.config import ADPSGD, DPSGD, FedAvg, Moshpit, RFast, Ring
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.band_plot import band_figure, spread_labels
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol import build
from flwr_moshpit.protocol.machine import Trained, Vector
from flwr_moshpit.simulation.compare import compare, run_task
from flwr_moshpit.simulation.comparison import CURVES, RESULTS, Comparison
from flwr_moshpit.simulation.contest import EVALUATIONS, Contest, Task
from flwr_moshpit.simulation.history import Point
from flwr_moshpit.simulation.intervals import mean_interval, ratio_interval
from flwr_moshpit.simulation.reach import Run, best_try, derived_target, reach
from tests.trainers import QuadraticTrainer

ROOT = Path(__file__).resolve().parents[2]


def quadratic(factor: float) -> QuadraticTrainer:
    return QuadraticTrainer(dim=8, lr=0.1 * factor, flops_per_example=1e11)


def contest(**given: Any) -> Contest:
    known: dict[str, Any] = {
        "algorithms": {"ring": Ring(local_steps=5), "fedavg": FedAvg(local_steps=4)},
        "make_trainer": quadratic,
        "peers": 4,
        "seeds": (3, 1),
    }
    ends = {} if "until_s" in given else {"steps": 20}
    return Contest(**{**known, **ends, **given})


def point(t: float, value: float | None, **more: Any) -> Point:
    """Accuracy `value`; 10 bytes and 2 joules a second."""
    known: dict[str, Any] = {
        "round": 0,
        "alive": 2,
        "loss": None,
        "consensus_distance": 0.0,
        "consensus_relative": 0.0,
        "bytes": round(10 * t),
        "joules": 2 * t,
    }
    return Point(t=t, accuracy=value, **{**known, **more})


def run(algorithm: str, seed: int, *curve: tuple[float, float], lr_factor: float = 1.0) -> Run:
    points = tuple(point(t, value) for t, value in curve)
    return Run(algorithm, seed, lr_factor, points, steps=10.0, digest="")


def comparison(*runs: Run, target: float | None = 0.5) -> Comparison:
    names = tuple(dict.fromkeys(each.algorithm for each in runs))
    return Comparison({}, names, "ends", target, runs, (), interrupted=False)


class Stopper:
    """Presses Ctrl-C when the run after `runs` others begins."""

    def __init__(self, runs: int) -> None:
        self.left = runs
        self.ended: list[Task] = []

    def on_start(self, task: Task) -> Observer | None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return None

    def on_end(self, task: Task, run: Run) -> None:
        self.ended.append(task)


# The runs.


def test_everybody_takes_the_same_number_of_steps() -> None:
    result = compare(contest())
    assert [(r.algorithm, r.seed) for r in result.runs] == [
        ("ring", 1), ("ring", 3), ("fedavg", 1), ("fedavg", 3),
    ]  # fmt: skip
    assert {r.steps for r in result.runs} == {20.0}
    assert result.ends == "each peer takes 20 local steps"


def test_steps_are_rounded_up_to_whole_rounds() -> None:
    result = compare(contest(algorithms={"ring": Ring(local_steps=7)}, seeds=(0,)))
    assert [r.steps for r in result.runs] == [21.0]


def test_runs_of_one_seed_begin_alike_and_other_seeds_differ() -> None:
    result = compare(contest())
    first = {(r.algorithm, r.seed): r.points[0].loss for r in result.runs}
    assert first["ring", 1] == first["fedavg", 1]
    assert first["ring", 3] == first["fedavg", 3]
    assert len({r.digest for r in result.runs}) == 4


def test_time_ends_all_runs_and_is_looked_at_at_the_same_instants() -> None:
    algorithms = {"ring": Ring(local_steps=5), "adpsgd": ADPSGD(local_steps=5)}
    slow = contest(algorithms=algorithms, until_s=30.0, seeds=(0,), faults=("slow 10x peer=1",))
    ring, adpsgd = compare(slow).runs
    times = [k * 30.0 / EVALUATIONS for k in range(EVALUATIONS + 1)]
    assert [p.t for p in ring.points] == pytest.approx(times)
    assert [p.t for p in adpsgd.points] == pytest.approx(times)
    # The fault is there for both: only one of them waits for the slow peer.
    assert adpsgd.steps > 2 * ring.steps


def test_rfast_is_compared_too() -> None:
    algorithms = {"moshpit": Moshpit(local_steps=5), "rfast": RFast(local_steps=5)}
    result = compare(contest(algorithms=algorithms, until_s=60.0, seeds=(0,)))
    assert all(r.points[-1].loss < r.points[0].loss for r in result.runs)  # type: ignore[operator]


def test_the_winning_rate_of_equally_many_tries_is_taken() -> None:
    tried: list[float] = []

    def make(factor: float) -> QuadraticTrainer:
        tried.append(factor)
        return QuadraticTrainer(dim=8, lr=0.02 * factor, flops_per_example=1e11)

    tuned = compare(contest(make_trainer=make, tries=3))
    assert sorted(tried[:6]) == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert {t.seed for t in tuned.tries} == {4}
    assert [r.lr_factor for r in tuned.rows()] == [4.0, 4.0]
    assert "every method tried 3 learning rates on seed 4: 1, 2, 4 times" in tuned.table()


def test_a_rate_of_the_algorithm_is_multiplied_as_well() -> None:
    made: list[RFast] = []

    class Spy:
        def __init__(self, algorithm: RFast, *args: Any, **kwargs: Any) -> None:
            made.append(algorithm)
            raise KeyboardInterrupt

    algorithms = {"rfast": RFast(learning_rate=0.1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "machine_type", lambda algorithm: Spy)
        with pytest.raises(KeyboardInterrupt):
            run_task(contest(algorithms=algorithms, until_s=1.0), Task("rfast", 0, 4.0))
    assert made[0].learning_rate == pytest.approx(0.4)


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    stopper = Stopper(3)
    result = compare(contest(), follower=stopper, out=tmp_path)
    assert result.interrupted
    assert [(t.algorithm, t.seed) for t in stopper.ended] == [
        ("ring", 3), ("fedavg", 3), ("ring", 1),
    ]  # fmt: skip
    assert len(result.runs) == 3
    assert "interrupted: rows hold the runs that were complete" in result.table()
    saved = json.loads((tmp_path / RESULTS).read_text())
    assert saved["interrupted"]
    assert len(saved["runs"]) == 3


def test_ctrl_c_before_anything_is_done() -> None:
    assert compare(contest(), follower=Stopper(0)).table() == "no run is complete"


def test_what_is_done_is_on_disk_while_the_rest_runs(tmp_path: Path) -> None:
    class Killer(Stopper):
        def on_start(self, task: Task) -> Observer | None:
            try:
                return super().on_start(task)
            except KeyboardInterrupt:
                raise SystemExit from None

    with pytest.raises(SystemExit):
        compare(contest(), follower=Killer(1), out=tmp_path)
    saved = json.loads((tmp_path / RESULTS).read_text())
    assert [r["algorithm"] for r in saved["runs"]] == ["ring"]


def lasting_threads() -> list[threading.Thread]:
    """Those that the end of the program waits for."""
    return [thread for thread in threading.enumerate() if not thread.daemon]


@pytest.mark.slow
def test_worker_processes_change_nothing_and_leave_nothing() -> None:
    here = compare(contest(seeds=(0,)))
    before = lasting_threads()
    there = compare(contest(seeds=(0,)), workers=2)
    assert there.runs == here.runs
    assert lasting_threads() == before


@pytest.mark.slow
def test_ctrl_c_leaves_no_worker() -> None:
    class Second(Stopper):
        def on_end(self, task: Task, run: Run) -> None:
            super().on_end(task, run)
            raise KeyboardInterrupt

    before = lasting_threads()
    stopper = Second(1)
    assert compare(contest(seeds=tuple(range(8))), workers=2, follower=stopper).interrupted
    assert len(stopper.ended) == 1
    assert lasting_threads() == before
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithms": {}}, "there is none to compare"),
        ({"algorithms": {"x": 5}}, "algorithm must be one of"),
        ({"seeds": ()}, "seeds must be different"),
        ({"seeds": (1, 1)}, "seeds must be different"),
        ({"seeds": (-1,)}, "seeds must be different"),
        ({"steps": None}, "set one"),
        ({"until_s": 5.0, "steps": 5}, "set one"),
        ({"until_s": 0.0}, "until must be above 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"target": math.nan}, "target must be a number"),
        ({"tries": 0}, "tune must be from 1"),
        ({"tries": 99}, "tune must be from 1"),
        ({"algorithms": {"m": Moshpit(local_s=1.0)}}, "end the comparison by time"),
    ],
)
def test_wrong_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        contest(**given)


class Endless(QuadraticTrainer):
    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        sys.stdout.write("training\n")
        sys.stdout.flush()
        threading.Event().wait()
        raise AssertionError


def endless(factor: float) -> Endless:
    return Endless(dim=8)


@pytest.mark.slow
def test_workers_end_with_a_comparison_that_is_killed() -> None:
    code = (
        "from tests.simulation import test_compare as t\n"
        "if __name__ == '__main__':\n"
        "    t.compare(t.contest(make_trainer=t.endless), workers=1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "training\n"
        command.kill()
        # The worker holds the other end of this pipe as well: it is read to its end when both are
        # gone. A worker that stays would hold it for ever.
        command.communicate(timeout=120)


def test_what_cannot_travel_to_workers_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        compare(contest(make_trainer=lambda factor: quadratic(factor)), workers=1)
    with pytest.raises(ConfigError, match="workers must be 0"):
        compare(contest(), workers=-1)


def test_an_algorithm_without_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build._MACHINES, "Ring", "baselines.triangle:TrianglePeer")
    with pytest.raises(ConfigError, match=r"Ring: this installation has no .*triangle"):
        contest()


def test_faults_at_a_round_are_noticed() -> None:
    assert contest(faults=("crash peer=1 at round 2",)).has_round_faults
    assert contest(faults=("crash peer=1 at 3 s, back after 2 rounds",)).has_round_faults
    assert not contest(faults=("slow 3x peer=1; crash 5% per hour",)).has_round_faults


# Figures.


def test_the_target_is_reached_between_two_evaluations() -> None:
    hit = reach(run("a", 0, (0, 0.1), (10, 0.3), (20, 0.7), (30, 0.2)).points, "accuracy", 0.5)
    assert hit is not None
    assert (hit.t, hit.bytes, hit.joules) == pytest.approx((15.0, 150.0, 30.0))
    assert reach(run("a", 0, (0, 0.1), (10, 0.3)).points, "accuracy", 0.5) is None
    first = reach(run("a", 0, (0, 0.6)).points, "accuracy", 0.5)
    assert first is not None
    assert first.t == 0.0


def test_a_loss_is_reached_from_above_and_nan_is_no_value() -> None:
    losses = [(0.0, 8.0), (1.0, math.nan), (2.0, 4.0)]
    points = [point(t, None, loss=loss) for t, loss in losses]
    hit = reach(points, "loss", 6.0)
    assert hit is not None
    assert hit.t == pytest.approx(1.0)


def test_the_derived_target_follows_the_median_method() -> None:
    finals = {"a": 0.8, "b": 0.6, "c": 0.1}
    runs = [run(name, seed, (0, 0.0), (1, v)) for name, v in finals.items() for seed in (0, 1)]
    assert derived_target(runs, "accuracy") == pytest.approx(0.95 * 0.6)
    # Of two, the one that both reach.
    assert derived_target(runs[:4], "accuracy") == pytest.approx(0.95 * 0.6)


def test_the_derived_loss_is_a_share_of_the_fall() -> None:
    def of(name: str, last: float) -> Run:
        curve = (point(0, None, loss=10.0), point(1, None, loss=last))
        return Run(name, 0, 1.0, curve, 1.0, "")

    runs = [of("a", 2.0), of("b", 4.0), of("c", math.nan)]
    assert derived_target(runs, "loss") == pytest.approx(10 - 0.95 * 6)
    with pytest.raises(ConfigError, match="set a target of your own"):
        derived_target([of("c", math.nan)], "loss")


def test_the_best_try_is_the_first_at_the_target() -> None:
    tries = [
        run("a", 9, (0, 0.0), (10, 0.9), lr_factor=1.0),
        run("a", 9, (0, 0.0), (4, 0.6), (10, 0.7), lr_factor=2.0),
        run("b", 9, (0, 0.0), (10, 0.3), lr_factor=1.0),
        run("b", 9, (0, 0.0), (10, 0.4), lr_factor=2.0),
    ]
    assert best_try(tries, "a", 0.5).lr_factor == 2.0
    assert best_try(tries, "a", 0.8).lr_factor == 1.0
    assert best_try(tries, "b", 0.5).lr_factor == 2.0
    # Derived: 95 % of 0.4, the lower of the two methods' best.
    assert best_try(tries, "a", None).lr_factor == 2.0


def test_ratios_are_paired_by_seed() -> None:
    result = comparison(
        run("fast", 0, (0, 0.0), (10, 1.0)),
        run("fast", 1, (0, 0.0), (100, 1.0)),
        run("slow", 0, (0, 0.0), (20, 1.0)),
        run("slow", 1, (0, 0.0), (200, 1.0)),
    )
    ratio = result.ratio("slow", "fast")
    assert ratio is not None
    assert not ratio.is_bound
    # Unpaired, the seeds' own spread would drown it.
    assert dataclasses.astuple(ratio.interval) == pytest.approx((2.0, 2.0, 2.0, 2))
    row = result.rows()[1]
    assert row.ratio == ratio
    assert row.time_s is not None
    assert row.time_s.mean == pytest.approx(55.0)
    assert result.rows()[0].ratio is None
    assert "2.00 [2.00, 2.00]" in result.table()


def test_who_never_arrives_is_a_bound_and_no_winner() -> None:
    result = comparison(
        run("fast", 0, (0, 0.0), (10, 1.0)),
        run("never", 0, (0, 0.0), (40, 0.1)),
    )
    ratio = result.ratio("never", "fast")
    assert ratio is not None
    assert ratio.is_bound
    assert ratio.interval.mean == pytest.approx(8.0)
    assert result.ratio("fast", "never") is None
    assert ">8.00" in result.table()
    # Its whole time is shorter, and says nothing.
    over = comparison(*result.runs[:1], run("never", 0, (0, 0.0), (1, 0.1)))
    assert over.ratio("never", "fast") is None
    assert result.rows()[1].reached == 0
    assert result.rows()[1].time_s is None


def test_a_method_that_was_over_at_once_is_remarked_on() -> None:
    result = comparison(
        *(run(name, 0, (0, 0.0), (t, 1.0)) for name, t in (("a", 100), ("b", 90), ("c", 0.5)))
    )
    assert "c waits for nobody and took its steps in 0.5 s" in result.table()


def test_intervals() -> None:
    # scipy.stats.t.interval(0.95, 2, 2, scale=1/sqrt(3)) = (-0.4841, 4.4841)
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.low, found.high) == pytest.approx((-0.4841, 4.4841), abs=1e-3)
    assert mean_interval([1.0]).high == math.inf
    there, back = ratio_interval([2.0, 4.0]), ratio_interval([0.5, 0.25])
    assert there.mean == pytest.approx(1 / back.mean)
    assert there.low == pytest.approx(1 / back.high)


# Files.


def test_everything_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = compare(contest(), out=tmp_path)
    saved = json.loads((tmp_path / RESULTS).read_text())
    assert (tmp_path / CURVES).read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([RESULTS, CURVES])
    assert saved["metric"] == "loss"
    assert saved["target"] == result.target
    assert saved["ends"] == "each peer takes 20 local steps"
    assert saved["algorithms"]["ring"]["local_steps"] == 5
    assert [row["algorithm"] for row in saved["rows"]] == ["ring", "fedavg"]
    for row, mine in zip(saved["rows"], result.rows(), strict=True):
        assert row["final"]["mean"] == pytest.approx(mine.final.mean)  # type: ignore[union-attr]
        assert row["steps"] == {"mean": 20.0, "std": 0.0}
    assert [len(r["points"]) for r in saved["runs"]] == [len(r.points) for r in result.runs]


def test_the_figure_names_each_line_once() -> None:
    pytest.importorskip("matplotlib")
    curves = {
        "a": [([0.0, 1.0, 2.0], [0.1, 0.5, 0.9]), ([0.0, 2.0], [0.1, 0.7])],
        "b": [([0.0, 1.0, 200.0], [0.1, 0.5, 0.8])],
    }
    panel = band_figure(curves, "accuracy", target=0.6).axes[0]
    texts = [text.get_text() for text in panel.texts]
    assert texts == ["target 0.6", "a 0.800", "b 0.800"]
    assert len(panel.lines) == 3
    assert "logarithmic" in panel.get_xlabel()
    assert panel.get_ylabel() == "Accuracy"


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    places = spread_labels(wanted, 0.05)
    order = sorted(range(len(wanted)), key=lambda k: (wanted[k], k))
    for lower, upper in itertools.pairwise(order):
        assert places[upper] - places[lower] >= 0.05 - 1e-9
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_labels_that_fit_stay_where_they_are() -> None:
    assert spread_labels([0.9, 0.1, 0.5], 0.05) == [0.9, 0.1, 0.5]


def test_same_contest_same_result() -> None:
    once: Callable[[], Comparison] = functools.partial(
        compare, contest(algorithms={"dpsgd": DPSGD(local_steps=5)}, seeds=(0,))
    )
    assert once().as_dict() == once().as_dict()
