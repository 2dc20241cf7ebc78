"""The command line: exit codes, what is said, what is written."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flwr_moshpit
from flwr_moshpit.cli import main

TRAINING_APP = """
    import numpy as np
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()
    calls = 0

    def before_training():
        pass

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        global calls
        calls += 1
        before_training()
        client = context.node_config["partition-id"]
        steps = msg.content["config"]["local-steps"]
        x = msg.content["arrays"].to_numpy_ndarrays()[0]
        content = RecordDict(
            {
                "arrays": ArrayRecord([x + 0.5 * (client - x)]),
                "metrics": MetricRecord({"num-examples": 10 * steps, "loss": float(np.sum(x * x))}),
            }
        )
        return Message(content, reply_to=msg)

    def initial_arrays():
        return ArrayRecord([np.zeros(4, np.float32)])
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, empty but for what a test makes."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def make_app(tmp_path: Path) -> Callable[[str], str]:
    """Writes a Flower app whose client is the given code, and returns its path."""

    def make(client_app: str) -> str:
        folder = tmp_path / "an-app"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(
            textwrap.dedent("""
            [project]
            name = "an-app"
            version = "1.0.0"
            [tool.flwr.app]
            publisher = "tests"
            [tool.flwr.app.components]
            clientapp = "client_app:app"
            [tool.flwr.app.config]
            rounds = 3
            initial-model = "client_app:initial_arrays"
            """)
        )
        (folder / "client_app.py").write_text(textwrap.dedent(client_app))
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate"], "the following arguments are required: APP"),
        (["simulate", "nothing"], "app 'nothing' does not exist"),
        (["simulate", "digits", "--bogus"], "unrecognized arguments: --bogus"),
        (["simulate", "digits", "--peers", "many"], "argument --peers: invalid int value: 'many'"),
        (["simulate", "digits", "--peers", "0"], "peers must be at least 1, not 0"),
        (["simulate", "digits", "--rounds", "-1"], "rounds must be at least 1, not -1"),
        (["simulate", "digits", "--group-size", "1"], "group-size must be at least 2, not 1"),
        (["simulate", "digits", "--fleet", "jetson-nona"], "device 'jetson-nona' is unknown"),
        (
            ["simulate", "digits", "--fleet", "jetson-nano:0.6,cloud-t4:0.6"],
            "fleet: the shares must sum to 1",
        ),
        (["simulate", "digits", "--until", "soon"], "until: 'soon' is no duration"),
        (["simulate", "digits", "--algorithm", "x"], "algorithm 'x' is unknown"),
        (["simulate", "digits", "--config", "no.toml"], "config 'no.toml' cannot be read"),
        (["simulate", "digits", "--catalogue", "no.toml"], "cannot read the catalogue no.toml"),
        (["simulate", "digits", "--faults", "flood"], "fault"),
        (["simulate", "digits", "--cost-as", "none"], "cost-as: 'none' is neither"),
        (["devices", "--catalogue", "no.toml"], "cannot read the catalogue no.toml"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("torch")
    assert main(arguments) == 2
    said = capsys.readouterr()
    *before, error = said.err.splitlines()
    assert before in ([], ["flwr-moshpit: loading digits ..."])
    assert error.startswith(f"flwr-moshpit: {message}")
    assert said.out == ""
    assert list(elsewhere.iterdir()) == []


def test_nothing_to_do_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(command in said.err for command in ("simulate", "swarm", "doctor"))


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flwr-moshpit {flwr_moshpit.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+.*|unknown", flwr_moshpit.__version__)


def test_a_setting_without_a_flag_is_told_where_it_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "digits", "--compression", "int8"]) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: --compression int8" in said
    assert "`compression = ...` into a file for --config FILE.toml" in said
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert '\n  compression = "int8"\n' in capsys.readouterr().out


def test_a_key_of_nobody_in_the_config_is_refused(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    (elsewhere / "run.toml").write_text("group-sise = 4\n")
    assert main(["simulate", "digits", "--config", "run.toml"]) == 2
    assert "'group-sise' is unknown; did you mean 'group-size'?" in capsys.readouterr().err


def test_an_app_without_train_is_refused(
    make_app: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    app = make_app("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    assert main(["simulate", app]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert "no train function" in said


def test_an_app_that_raises_is_named_with_client_step_and_traceback(
    make_app: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    app = make_app(
        TRAINING_APP.replace(
            "    pass", '    if calls == 5:\n            raise ValueError("no data")'
        )
    )
    assert main(["simulate", app, "--peers", "3", "--quiet"]) == 1
    said = capsys.readouterr().err
    first, *rest = said.splitlines()
    assert re.match(r"flwr-moshpit: client \d, step \d+: ValueError: no data$", first)
    assert "Traceback (most recent call last):" in rest
    assert "client_app.py" in said


def test_ctrl_c_ends_with_everything_written(
    make_app: Callable[[str], str], elsewhere: Path
) -> None:
    pytest.importorskip("flwr")
    app = make_app(
        TRAINING_APP.replace(
            "    pass",
            "    import signal\n        if calls == 5: signal.raise_signal(signal.SIGINT)",
        )
    )
    assert main(["simulate", app, "--peers", "3", "--quiet", "--out", "results"]) == 130
    summary = json.loads((elsewhere / "results" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["rounds"] < 3
    assert (elsewhere / "results" / "model.npz").exists()
    assert (elsewhere / "results" / "events.jsonl").exists()


def test_a_run_writes_all_of_itself(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("sklearn")
    command = ["simulate", "digits", "--peers", "6", "--rounds", "2", "--group-size", "3"]
    assert main([*command, "--explain"]) == 0
    said = capsys.readouterr()
    folder = next((elsewhere / "runs").iterdir())
    assert folder.name.endswith("-1")

    summary = json.loads((folder / "summary.json").read_text())
    assert {"digest", "accuracy", "virtual_s", "bytes", "joules"} <= summary.keys()
    assert summary["accuracy"] > 0.3
    with np.load(folder / "model.npz") as model:
        assert all(np.isfinite(array).all() for array in model.values())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum(event["name"] == "round" for event in events) >= 12
    assert "group-size" in said.out
    assert summary["digest"] in said.out
    assert str(Path("runs") / folder.name / "summary.json") in said.out
    assert "100 %" in said.err

    assert main([*command, "--quiet", "--out", "again"]) == 0
    assert (
        json.loads((elsewhere / "again" / "summary.json").read_text())["digest"]
        == (summary["digest"])
    )
    assert capsys.readouterr().err == ""


def test_what_an_app_is_warned_of_is_one_line(
    make_app: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    app = make_app(TRAINING_APP.replace('msg.content["config"]["local-steps"]', "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        more = ["--quiet", "--explain", "--out", "results"]
        assert main(["simulate", app, "--peers", "2", *more]) == 0
    told = capsys.readouterr()
    assert "the app's own epochs" in told.out
    assert "20 steps" not in told.out
    said = told.err
    assert said.startswith("flwr-moshpit: warning: the app does not look at local-steps")
    assert said.count("\n") == 1


def test_devices_lists_the_catalogue(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    own = elsewhere / "own.toml"
    own.write_text("[device.jetson-nano]\nmemory_gb = 2\n")
    assert main(["devices", "--sources", "--catalogue", str(own)]) == 0
    lines = capsys.readouterr().out.splitlines()
    nano = next(line for line in lines if line.startswith("jetson-nano "))
    assert "236 GFLOP/s" in nano
    assert " 2 GB " in nano
    assert "H, U, C" in nano
    assert any(line.startswith("lte ") and "6.3 Mbit/s" in line for line in lines)


def test_closed_outputs_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        patched.setattr(sys, "stderr", None)
        assert main(["devices"]) == 0
        assert main(["simulate", "no-such-app"]) == 2
        sys.stdout.close()
        sys.stderr.close()
