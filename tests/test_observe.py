"""What observers make of reports: progress, JSON lines, curves."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.observe.json_lines import JsonLines
from flwr_moshpit.observe.progress import SWARM_REPORT, Progress
from flwr_moshpit.observe.swarm_results import whole
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.protocol.machine import PeerId, Report


class Clock:
    """Real seconds for `Progress`, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def swarm(**values: float) -> Report:
    return Report(SWARM_REPORT, values)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestProgress:
    def test_without_a_terminal_a_run_prints_one_line_per_tenth(self) -> None:
        screen = console(terminal=False)
        with Progress(num_peers=5, rounds=100, console=screen, clock=Clock()) as progress:
            for done in range(1, 101):
                progress(float(done), PeerId("p1"), Report("round", {"round": done}))
                progress(float(done), None, swarm(round=done, accuracy=done / 100))
        lines = printed(screen).splitlines()
        assert len(lines) == 10
        assert lines[0].startswith(" 10 %")
        assert lines[-1].startswith("100 %")

    def test_line_tells_time_round_accuracy_distance_and_living_peers(self) -> None:
        clock = Clock()
        progress = Progress(num_peers=8, rounds=4, console=console(terminal=False), clock=clock)
        clock.now = 30.0
        progress(
            90.0, None, swarm(round=1, accuracy=0.75, consensus_distance=0.0123, alive=7, loss=0.5)
        )
        line = progress.line()
        assert line.startswith(" 25 %")
        for part in (
            "virtual time 1 min 30 s",
            "round 1/4",
            "accuracy 0.750",
            "consensus distance 1.23e-02",
            "peers 7/8",
            "ETA 1 min 30 s",
        ):
            assert part in line

    def test_an_older_measurement_names_its_round(self) -> None:
        progress = Progress(num_peers=2, rounds=4, console=console(terminal=False), clock=Clock())
        progress(0.0, None, swarm(round=0, accuracy=0.428, consensus_distance=0.5))
        assert "accuracy 0.428  consensus distance 5.00e-01" in progress.line()
        progress(1.0, None, swarm(round=1, alive=2))
        assert "round 1/4  accuracy 0.428 at round 0  peers 2/2" in progress.line()
        progress(2.0, None, swarm(round=2, accuracy=0.5))
        assert "round 2/4  accuracy 0.500  " in progress.line()

    def test_a_long_run_says_something_early_and_every_minute(self) -> None:
        screen, clock = console(terminal=False), Clock()
        spoke_at = []
        with Progress(num_peers=5, rounds=1000, console=screen, clock=clock) as progress:
            for second in range(200):
                clock.now = float(second)
                before = printed(screen)
                progress(0.01 * second, PeerId("p1"), Report("round", {"round": 0}))
                if printed(screen) != before:
                    spoke_at.append(second)
        assert spoke_at == [3, 63, 123, 183]

    def test_time_runs_between_evaluations(self) -> None:
        progress = Progress(num_peers=1, until_s=100.0, console=console(terminal=False))
        progress(40.0, PeerId("p0"), Report("round", {}))
        assert progress.fraction == pytest.approx(0.4)

    def test_whichever_end_comes_first_rules(self) -> None:
        progress = Progress(num_peers=1, rounds=10, until_s=100.0, console=console(terminal=False))
        progress(90.0, None, swarm(round=2))
        assert progress.fraction == pytest.approx(0.9)

    def test_no_eta_before_anything_is_done(self) -> None:
        progress = Progress(num_peers=1, rounds=10, console=console(terminal=False))
        assert progress.left_s is None
        assert "ETA" not in progress.line()

    def test_on_a_terminal_the_display_is_live_and_goes_away(self) -> None:
        screen = console(terminal=True)
        with Progress(num_peers=3, rounds=2, console=screen) as progress:
            progress(5.0, None, swarm(round=1, accuracy=0.5))
        # Stopping draws the last state, then erases it: the results come in its place.
        assert "accuracy 0.500" in printed(screen)
        assert "\x1b[2K" in printed(screen)


class TestJsonLines:
    def test_each_report_is_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "runs" / "events.jsonl"
        with JsonLines(path) as events:
            events(1.5, PeerId("p1"), Report("round", {"round": 3, "members": ("p1", "p2")}))
            events(2.0, None, swarm(accuracy=0.5))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines == [
            {"t": 1.5, "peer": "p1", "name": "round", "round": 3, "members": ["p1", "p2"]},
            {"t": 2.0, "peer": None, "name": "swarm", "accuracy": 0.5},
        ]

    def test_values_that_json_does_not_have(self, tmp_path: Path) -> None:
        values = {
            "nan": float("nan"),
            "infinite": np.float64("inf"),
            "single": np.float32(0.5),
            "count": np.int64(3),
            "array": np.arange(2),
            "nested": {"key": (np.float32("nan"), None, True)},
        }
        with JsonLines(tmp_path / "events.jsonl") as events:
            events(0.0, None, Report("odd", values))
        assert json.loads((tmp_path / "events.jsonl").read_text()) == {
            "t": 0.0,
            "peer": None,
            "name": "odd",
            "nan": None,
            "infinite": None,
            "single": 0.5,
            "count": 3,
            "array": [0, 1],
            "nested": {"key": [None, None, True]},
        }

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel has no full disk")
    def test_a_full_disk_is_told_once_and_ends_nothing(self) -> None:
        lost: list[OSError] = []
        with JsonLines(Path("/dev/full"), on_loss=lost.append) as events:
            for now in range(1000):
                events(now, None, Report("odd", {"text": "x" * 100}))
        assert [error.errno for error in lost] == [errno.ENOSPC]
        with pytest.raises(OSError, match="No space"), JsonLines(Path("/dev/full")) as events:
            events(0.0, None, Report("odd", {}))

    def test_a_run_that_resumes_keeps_what_was_reported(self, tmp_path: Path) -> None:
        for now in range(3):
            with JsonLines(tmp_path / "events.jsonl", resumes=now > 0) as events:
                events(now, None, swarm())
        lines = (tmp_path / "events.jsonl").read_text().splitlines()
        assert [json.loads(line)["t"] for line in lines] == [0, 1, 2]

    def test_nothing_reported_leaves_nothing_behind(self, tmp_path: Path) -> None:
        with JsonLines(tmp_path / "runs" / "events.jsonl"):
            pass
        assert list(tmp_path.iterdir()) == []


def test_a_file_of_results_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    with whole(path) as scratch:
        scratch.write_text("first")

    def tear() -> None:
        with whole(path) as scratch:
            scratch.write_text("torn")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(MoshpitError, match=r"model\.npz cannot be written: full"):
        tear()
    assert path.read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["model.npz"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.25, "0.25 s"),
        (9.99, "10 s"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (760, "12 min 40 s"),
        (3599.6, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (86_399, "1 d 00 h"),
        (187_200, "2 d 04 h"),
        (float("inf"), "?"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (1_234_000_000, "1.23 GB"), (5e15, "5e+03 TB")],
)
def test_quantities_take_a_prefix(value: float, text: str) -> None:
    assert scaled(value, "B") == text


def drawn(panel: Any) -> list[list[float]]:
    """The points of the first curve in `panel`."""
    points: list[list[float]] = np.asarray(panel.lines[0].get_xydata()).tolist()
    return points


class TestPlots:
    @pytest.fixture(autouse=True)
    def matplotlib(self) -> None:
        pytest.importorskip("matplotlib")

    def test_png_has_a_panel_per_curve(self, tmp_path: Path) -> None:
        from flwr_moshpit.observe.plots import figure, save_png

        times_s = [0.0, 3600.0, 7200.0]
        curves: dict[str, list[float | None]] = {
            "accuracy": [0.1, None, 0.8],
            "consensus_distance": [0.0, 0.5, float("nan")],
        }
        made = figure(times_s, curves, title="digits, 6 peers")
        labels = [panel.get_ylabel() for panel in made.axes]
        assert labels == ["Accuracy", "Consensus distance"]
        assert made.axes[-1].get_xlabel() == "Virtual time (h)"
        assert drawn(made.axes[0]) == [[0.0, 0.1], [2.0, 0.8]]
        assert drawn(made.axes[1]) == [[1.0, 0.5]]

        path = tmp_path / "curves.png"
        save_png(path, times_s, curves)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_a_curve_without_values_says_so(self) -> None:
        from flwr_moshpit.observe.plots import figure

        made = figure([0.0, 1.0], {"accuracy": [None, None]})
        assert [text.get_text() for text in made.axes[0].texts] == ["not measured"]
