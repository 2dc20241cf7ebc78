"""`flwr-moshpit compare`: settings for several algorithms, what is said and what is written."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from flwr_moshpit.cli import main

pytest.importorskip("flwr")

CLIENT_APP = """
    import numpy as np
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def target(partition):
        return np.full(4, partition, np.float32)

    def reply(msg, x, steps):
        metrics = MetricRecord({"num-examples": 10 * steps, "loss": float(np.sum(x * x))})
        content = RecordDict({"arrays": ArrayRecord([x]), "metrics": metrics})
        return Message(content, reply_to=msg)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        steps, rate = msg.content["config"]["local-steps"], context.run_config["lr"]
        x = msg.content["arrays"].to_numpy_ndarrays()[0]
        goal = target(context.node_config["partition-id"])
        for _ in range(steps):
            x = x + rate * (goal - x)
        return reply(msg, x, steps)

    @app.train("gradient")
    def gradient(msg: Message, context: Context) -> Message:
        x = msg.content["arrays"].to_numpy_ndarrays()[0]
        return reply(msg, x - target(context.node_config["partition-id"]), 1)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x = msg.content["arrays"].to_numpy_ndarrays()[0]
        goal = target(context.node_config["partition-id"])
        loss = float(np.sum((x - goal) ** 2))
        metrics = MetricRecord({"num-examples": 10, "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    def initial_arrays():
        return ArrayRecord([np.full(4, 9, np.float32)])
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
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
        rounds = 4
        local-steps = 5
        group-size = 2
        lr = 0.05
        flops-per-example = 1e10
        examples-per-step = 10
        initial-model = "client_app:initial_arrays"
        """)
    )
    (folder / "client_app.py").write_text(textwrap.dedent(CLIENT_APP))
    monkeypatch.chdir(tmp_path)
    return str(folder)


def test_algorithms_take_the_settings_that_they_have(
    app: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--algorithms", "moshpit,rfast,ring", "--peers", "4", "--seeds", "2"]
    assert main(["compare", app, *arguments, "--seed", "7", "--out", str(out)]) == 0
    saved = json.loads((out / "compare.json").read_text())
    of = saved["algorithms"]
    assert (of["moshpit"]["group_size"], of["moshpit"]["local_steps"]) == (2, 5)
    assert of["ring"]["local_steps"] == 5
    assert (of["rfast"]["local_steps"], of["rfast"]["learning_rate"]) == (5, 0.05)
    assert saved["seeds"] == [7, 8]
    assert saved["ends"] == "each peer takes 20 local steps"
    said = capsys.readouterr()
    for text in ("moshpit, rfast, ring", "seeds 7, 8", "6 runs", "target loss", str(out)):
        assert text in said.out
    assert "6/6  ring, seed 8:" in said.err
    assert "close to this target" not in said.out


@pytest.mark.filterwarnings("ignore:the app does not look at local-steps")
def test_steps_that_the_app_does_not_take_are_not_promised(
    app: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(app) / "client_app.py"
    asked = 'steps, rate = msg.content["config"]["local-steps"],'
    assert asked in file.read_text()
    file.write_text(file.read_text().replace(asked, "steps, rate = 3,"))
    project = Path(app) / "pyproject.toml"
    project.write_text(project.read_text().replace("examples-per-step = 10", ""))
    arguments = ["--algorithms", "moshpit,ring", "--peers", "2", "--seeds", "1"]
    assert main(["compare", app, *arguments, "--out", str(tmp_path / "out")]) == 0
    own = "each peer trains 4 times, for the app's own number of local steps"
    said = capsys.readouterr().out
    assert f"{own}; 2 runs" in said
    assert "each peer takes" not in said
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["ends"] == own


def test_a_target_that_the_start_has_is_remarked_upon(
    app: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(app) / "pyproject.toml"
    file.write_text(file.read_text().replace("lr = 0.05", "lr = 1e-6"))
    arguments = ["--algorithms", "ring", "--peers", "2", "--seeds", "1", "--quiet"]
    assert main(["compare", app, *arguments, "--out", str(tmp_path / "out")]) == 0
    assert "at the start the loss was 290, close to this target" in capsys.readouterr().out


def test_every_method_may_try_and_time_may_end_it(
    app: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--algorithms", "fedavg,rfast", "--peers", "2", "--seeds", "3,", "--tune", "2"]
    more = ["--until", "3 s", "--faults", "slow 3x peer=1", "--target", "20", "--quiet"]
    assert main(["compare", app, *arguments, *more, "--out", str(tmp_path / "out")]) == 2
    assert "seeds: '3,' is neither" in capsys.readouterr().err
    arguments[5] = "3,9"
    assert main(["compare", app, *arguments, *more, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for text in (
        "all runs end at 3 s of virtual time; 8 runs",
        "faults: slow 3x peer=1",
        "each method first tries 2 learning rates, 1, 2 times the app's, on seed 10",
        "target loss 20, as given",
    ):
        assert text in said.out
    saved = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert {run["points"][-1]["t"] for run in saved["runs"]} == {3.0}
    assert [run["lr_factor"] for run in saved["tries"]] == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithms", "moshpit,rafast"], "algorithms: 'rafast' is unknown"),
        (["--algorithms", "ring,ring"], "algorithms: ring is named twice"),
        (["--algorithms", ","], "there is none to compare"),
        (["--algorithms", "ring", "--group-size", "3"], "ring has no setting 'group-size'"),
        (["--seeds", "few"], "seeds: 'few' is neither"),
        (["--seeds", "0"], "seeds: there must be at least 1"),
        (["--seeds", "2,2"], "seeds must be different numbers"),
        (["--tune", "0"], "tune must be from 1"),
        (["--until", "soon"], "until: 'soon' is no duration"),
        (["--fleet", "jetson-nona"], "device 'jetson-nona' is unknown"),
        (["--target", "high"], "argument --target: invalid float value"),
        (["--target", "nan"], "target must be a number, not nan"),
        (["--out", "an-app/pyproject.toml/x"], "out 'an-app/pyproject.toml/x' cannot be made"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    app: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", app, *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not Path("runs").exists()


def test_an_app_without_a_learning_rate_cannot_be_tuned(
    app: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(app) / "pyproject.toml"
    file.write_text(file.read_text().replace("lr = 0.05", ""))
    assert main(["compare", app, "--algorithms", "ring", "--tune", "2", "--quiet"]) == 2
    assert "has no learning rate to try others of" in capsys.readouterr().err
    assert not Path("runs").exists()
