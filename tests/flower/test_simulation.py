"""`flwr run` in simulation: the same run as `flwr-moshpit simulate`, wherever clients train."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.flower import App, bootstrap_app, load_app
from flwr_moshpit.flower.grid import GridCarrier
from flwr_moshpit.flower.messages import array_record
from flwr_moshpit.flower.settings import flower_settings
from flwr_moshpit.flower.simulation import simulate_on_grid
from flwr_moshpit.settings import gather
from flwr_moshpit.simulation.history import History
from flwr_moshpit.simulation.plan import Plan
from tests.flower.grid import LocalGrid

APP = """
    [project]
    name = "{name}"
    version = "1.0.0"
    [tool.flwr.app]
    publisher = "me"
    [tool.flwr.app.components]
    serverapp = "server_app:app"
    clientapp = "client_app:app"
    [tool.flwr.app.config]
    algorithm = "moshpit"
    rounds = 4
    local-steps = 3
    group-size = 3
    lr = 0.1
    seed = 5
    faults = ""
    initial-model = "client_app:model"
    exclude = "count"
    {config}
"""
CLIENT = """
    import random
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr_moshpit.flower import serverless

    app = ClientApp()

    def model():
        return {"x": np.zeros(5, "float32"), "count": np.zeros(1, "float32")}

    def target(context):
        return np.arange(5) + context.node_config["partition-id"]

    def answer(msg, arrays, **metrics):
        named = {name.replace("_", "-"): value for name, value in metrics.items()}
        arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
        content = {"arrays": arrays, "metrics": MetricRecord(named)}
        return Message(RecordDict(content), reply_to=msg)

    def read(msg):
        return {name: array.numpy() for name, array in msg.content["arrays"].items()}

    @app.train()
    def train(msg, context):
        # What it does depends on all that a client keeps, and on random numbers.
        stored = context.state.config_records.get("calls", ConfigRecord({"calls": 0}))
        calls = stored["calls"] + 1
        context.state["calls"] = ConfigRecord({"calls": calls})
        config = msg.content["config"]
        assert set(msg.content) == {"arrays", "config"}
        assert config["server-round"] == calls, (config["server-round"], calls)
        arrays = read(msg)
        x = arrays["x"].astype("float64")
        for _ in range(config["local-steps"]):
            x -= config["lr"] * (x - target(context) + random.random() + np.random.rand(5))
        arrays["count"] = arrays["count"] + 1
        arrays["x"] = (x + 0.01 * calls + 0.01 * arrays["count"]).astype("float32")
        return answer(msg, arrays, num_examples=4 * config["local-steps"])

    @app.train("gradient")
    def gradient(msg, context):
        arrays = read(msg)
        noise = np.random.rand(5) + msg.content["config"]["server-round"]
        gradient = (arrays["x"] - target(context) + 0.1 * noise).astype("float32")
        return answer(msg, {"x": gradient, "count": arrays["count"] + 1}, num_examples=4)

    @app.evaluate()
    def evaluate(msg, context):
        context.state["calls"] = ConfigRecord({"calls": 100})
        loss = float(np.square(read(msg)["x"] - target(context)).sum())
        return answer(msg, {}, num_examples=1, eval_loss=loss)
"""


def write_app(folder: Path, config: str = "", tail: str = "serverless(app)\n") -> App:
    # Once imported, an app's modules stay, so each has a folder of its own.
    path = folder / "app"
    path.mkdir()
    (path / "pyproject.toml").write_text(textwrap.dedent(APP.format(name="app", config=config)))
    (path / "client_app.py").write_text(textwrap.dedent(CLIENT) + "\n" + textwrap.dedent(tail))
    (path / "server_app.py").write_text(
        "from flwr_moshpit.flower import bootstrap_app\napp = bootstrap_app()\n"
    )
    return load_app(path)


def simulated(app: App, peers: int, **config: Any) -> History:
    """As `flwr-moshpit simulate` does it."""
    settings = gather(app.config, {}, {**kebab(config), "peers": peers})
    plan = Plan.of(settings)
    simulation = plan.simulation(app.trainer(settings.app))
    return simulation.run(until=plan.until_s, rounds=settings.rounds)


def on_grid(app: App, peers: int, out: Path, **config: Any) -> tuple[History, LocalGrid]:
    run_config = {**app.config, **kebab(config), "out": str(out)}
    grid = LocalGrid(app, peers, run_config)
    return simulate_on_grid(app, grid, run_config), grid


def kebab(config: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in config.items()}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"faults": "crash peer=2,4 at 0.05 s, back after 0.2 s; slow 5x peer=3"},
        {"algorithm": "rfast", "local_steps": 1},
        {"algorithm": "rfast", "local_steps": 4},
        {"algorithm": "rfast", "local_steps": 1, "topology": "ring"},
        *({"algorithm": name} for name in ("fedavg", "ring", "random-groups", "dpsgd")),
        *({"algorithm": name} for name in ("adpsgd", "sgp", "osgp", "local")),
        {"dtype": "float64", "until": "0.2 s", "rounds": ""},
    ],
)
def test_the_digest_is_that_of_simulate(tmp_path: Path, config: dict[str, Any]) -> None:
    app = write_app(tmp_path, "examples-per-step = 4\nflops-per-example = 2e9")
    run, grid = on_grid(app, 7, tmp_path / "out", **config)
    here = simulated(app, 7, **{k: v for k, v in config.items() if v != ""})
    assert run.digest == here.digest
    assert run.loss == here.loss
    # Jobs are on their way together, not one after the other.
    assert max(grid.sizes) == 7
    np.testing.assert_array_equal(run.params["x"], here.params["x"])


def test_what_a_crash_overtakes_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the app's state, though the call was made ahead of its time."""
    given_up: list[bool] = []
    give_up = GridCarrier.give_up

    def noted(carrier: GridCarrier, work: Any) -> None:
        given_up.append(work.is_done)
        give_up(carrier, work)

    monkeypatch.setattr(GridCarrier, "give_up", noted)
    app = write_app(tmp_path, "examples-per-step = 4\nflops-per-example = 2e9")
    crashes = "; ".join(
        f"crash peer={k} at {0.031 * k:.3f} s, back after 0.04 s" for k in range(1, 7)
    )
    for algorithm in ("moshpit", "adpsgd"):
        config = {"faults": crashes, "rounds": 6, "algorithm": algorithm}
        run, _ = on_grid(app, 7, tmp_path / algorithm, **config)
        assert run.digest == simulated(app, 7, **config).digest
    # Some before their reply was there, some after.
    assert set(given_up) == {False, True}


def test_examples_that_only_training_tells(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    run, grid = on_grid(app, 5, tmp_path / "out")
    assert run.digest == simulated(app, 5).digest
    assert max(grid.sizes) == 5


def test_an_epoch_of_rfast_is_one_call(tmp_path: Path) -> None:
    app = write_app(tmp_path, "examples-per-step = 4")
    _, few = on_grid(app, 5, tmp_path / "1", algorithm="rfast", local_steps=1)
    _, many = on_grid(app, 5, tmp_path / "2", algorithm="rfast", local_steps=6)
    assert few.calls.count("train.gradient") >= 5 * 4
    assert many.calls.count("train.gradient") <= few.calls.count("train.gradient") * 1.5


def test_everything_is_written_where_simulate_writes_it(tmp_path: Path) -> None:
    app = write_app(tmp_path, "examples-per-step = 4")
    out = tmp_path / "out"
    run, _ = on_grid(app, 4, out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["digest"] == run.digest
    assert summary["peers"] == 4
    assert np.load(out / "model.npz")["x"].shape == (5,)
    assert (out / "events.jsonl").stat().st_size > 0


def run_server(app: App, grid: LocalGrid, run_config: dict[str, Any]) -> None:
    server = app.load(str(app.server_ref))
    server(grid, Context(1, 1, {}, RecordDict(), run_config))


def test_the_server_app_runs_it_and_points_out_flowers_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = write_app(tmp_path, "examples-per-step = 4")
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level("INFO", "flwr"):
        run_server(app, LocalGrid(app, 2), {**app.config, "out": str(tmp_path / "out")})
    assert 'flwr run . --federation-config "num-supernodes=100"' in caplog.text
    assert simulated(app, 2).digest in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"grop-size": 3}, "'grop-size' is unknown; did you mean 'group-size'?"),
        ({"algorithm": "mosh"}, "algorithm 'mosh' is unknown"),
        ({"group-size": 1}, "group-size must be at least 2"),
        ({"peers": 5}, 'num-supernodes=5"'),
        ({"workers": 2}, "init-args-num-cpus"),
        ({"fleet": "abacus"}, "abacus"),
        ({"faults": "nonsense"}, "nonsense"),
    ],
)
def test_wrong_settings_are_told_in_the_log_in_one_line(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    message: str,
) -> None:
    app = write_app(tmp_path)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    grid = LocalGrid(app, 3)
    with pytest.raises(ConfigError), caplog.at_level("ERROR", "flwr"):
        run_server(app, grid, {**app.config, **config})
    [record] = caplog.records
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not any(call.startswith("train") for call in grid.calls)


def test_an_apps_own_keys_and_empty_texts_are_left_alone() -> None:
    config = {"num-server-rounds": 3, "batch-size": 4, "local-epochs": 1, "fraction-train": 0.5}
    settings = flower_settings({**config, "topology": "", "rounds": ""}, 3)
    assert (settings.peers, settings.rounds) == (3, 3)
    assert dict(settings.app) == {**config, "topology": "", "rounds": ""}


def test_rfast_has_local_epochs_unless_told() -> None:
    rfast = {"algorithm": "rfast"}
    assert flower_settings(rfast, 3).algorithm.local_steps == 10
    assert flower_settings({**rfast, "topology": "ring"}, 3).algorithm.local_steps == 1
    assert flower_settings({**rfast, "local-steps": 1}, 3).algorithm.local_steps == 1


def test_a_client_app_that_is_not_serverless_is_told_what_to_add(tmp_path: Path) -> None:
    app = write_app(tmp_path, tail="")
    with pytest.raises(ConfigError, match=r"serverless\(app\)"):
        on_grid(app, 3, tmp_path / "out")


def test_serverless_changes_nothing_for_other_servers(tmp_path: Path) -> None:
    """Messages that are not ours reach the app as they are, and twice is as good as once."""
    tail = """
    def double(msg, context, call_next):
        reply = call_next(msg, context)
        reply.content["metrics"]["num-examples"] *= 2
        return reply

    other = ClientApp(mods=[double])
    other.train()(gradient)
    serverless(serverless(other))
    other.train("late")(gradient)
    serverless(app)
    """
    app = write_app(tmp_path, tail=tail)
    other = app.load("client_app:other")
    arrays = array_record(app.load("client_app:model")())
    for kind in ("train", "train.late"):
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
        context = Context(1, 1, {"partition-id": 1}, RecordDict(), {})
        reply = other(Message(content, 1, kind), context)
        assert set(reply.content) == {"arrays", "metrics"}
        assert reply.content["metrics"]["num-examples"] == 8


def test_what_a_client_raises_ends_the_run_with_its_name(tmp_path: Path) -> None:
    tail = """
    app2 = ClientApp()
    @app2.train()
    def broken(msg, context):
        if context.node_config["partition-id"] == 2 and msg.content["config"]["server-round"] == 2:
            return 1 / 0
        return train(msg, context)
    app = serverless(app2)
    """
    app = write_app(tmp_path, "examples-per-step = 4", tail)
    with pytest.raises(TrainerError) as caught:
        on_grid(app, 3, tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert lines[0] == "client 2, step 4: ZeroDivisionError: division by zero"
    assert any("client_app.py" in line for line in lines)


def test_an_app_without_a_model_of_its_own_is_told_so(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    config = {key: value for key, value in app.config.items() if key != "initial-model"}
    with pytest.raises(ConfigError, match="set initial-model"):
        simulate_on_grid(
            App(app.name, app.path, config, app.client_ref, app.server_ref),
            LocalGrid(app, 2),
            config,
        )


def test_bootstrap_outside_of_an_app_asks_for_its_folder() -> None:
    namespace: dict[str, Any] = {"bootstrap_app": bootstrap_app}
    with pytest.raises(ConfigError, match="give it the folder"):
        exec("bootstrap_app()", namespace)
