from __future__ import annotations

import importlib
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.flower import App, FlowerTrainer, load_app
from flwr_moshpit.flower.messages import common_names
from flwr_moshpit.simulation.run import Simulation
from flwr_moshpit.testing import Swarm
from flwr_moshpit.trainer import Trainer

SIZE = 4


def targets(client: int) -> np.ndarray[Any, Any]:
    return np.arange(3, dtype="float32") + client


def initial() -> list[np.ndarray[Any, Any]]:
    return [np.zeros(3, "float32"), np.ones((), "float32")]


def reply(msg: Message, arrays: Any, **metrics: Any) -> Message:
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.asarray(array) for array in arrays]),
            "metrics": MetricRecord({name.replace("_", "-"): v for name, v in metrics.items()}),
        }
    )
    return Message(content, reply_to=msg)


def quadratic_app(with_gradient: bool = True) -> ClientApp:
    """Client k pulls the first array towards `targets(k)` by SGD with a learning rate of 0.25."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        x, scale = msg.content["arrays"].to_numpy_ndarrays()
        num_steps = msg.content["config"]["local-steps"]
        for _ in range(num_steps):
            x = x - 0.25 * (x - targets(context.node_config["partition-id"]))
        return reply(msg, [x, scale], num_examples=num_steps * SIZE, train_loss=1.5)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, _ = msg.content["arrays"].to_numpy_ndarrays()
        client = context.node_config["partition-id"]
        loss = float(np.sum((x - targets(client)) ** 2))
        return reply(msg, [], num_examples=client + 1, eval_loss=loss)

    if with_gradient:

        @app.train("gradient")
        def gradient(msg: Message, context: Context) -> Message:
            x, _ = msg.content["arrays"].to_numpy_ndarrays()
            return reply(msg, [x - targets(context.node_config["partition-id"])], num_examples=SIZE)

    return app


def trainer(app: Any, num_clients: int = 3, **options: Any) -> FlowerTrainer:
    made = FlowerTrainer(app, **{"initial": initial, **options})
    made.prepare(num_clients)
    return made


def test_it_is_a_trainer_and_calls_the_client() -> None:
    made = trainer(quadratic_app())
    assert isinstance(made, Trainer)
    params = made.initial_params(1)
    np.testing.assert_array_equal(params, [0, 0, 0, 1])
    trained = made.train(2, params, 2, seed=1)
    np.testing.assert_allclose(trained.params[:3], targets(2) * (1 - 0.75**2))
    assert trained.num_examples == 2 * SIZE
    assert trained.metrics == {"loss": 1.5}
    assert made.train(2, params, 0, seed=1).num_examples == 0
    assert made.examples(2, 2) is None


def test_every_client_has_a_context_that_persists() -> None:
    seen: list[tuple[Any, ...]] = []
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        calls = context.state.config_records.get("calls", ConfigRecord({"count": 0}))
        count = calls["count"] + 1
        context.state["calls"] = ConfigRecord({"count": count})
        config = msg.content["config"]
        seen.append(
            (
                dict(context.node_config),
                count,
                config["server-round"],
                config["local-steps"],
                config["lr"],
                context.run_config["lr"],
            )
        )
        arrays = msg.content["arrays"].to_numpy_ndarrays()
        return reply(msg, arrays, num_examples=config["local-steps"])

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        context.state["calls"] = ConfigRecord({"count": 100})
        context.state.config_records["calls"]["count"] = 200
        return reply(msg, [], num_examples=1)

    made = trainer(app, run_config={"lr": 0.5})
    params = made.initial_params(1)
    made.cost()
    seen.clear()
    for client, num_steps in [(0, 1), (2, 2), (0, 3)]:
        made.train(client, params, num_steps, seed=1)
        made.evaluate(params, client)
    here = {"num-partitions": 3}
    assert seen == [
        ({"partition-id": 0, **here}, 1, 1, 1, 0.5, 0.5),
        ({"partition-id": 2, **here}, 1, 1, 2, 0.5, 0.5),
        ({"partition-id": 0, **here}, 2, 2, 3, 0.5, 0.5),
    ]
    made.prepare(3)
    made.train(0, params, 1, seed=1)
    assert seen[-1][1] == 1


def test_an_app_that_ignores_local_steps_gets_one_warning() -> None:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        config = dict.fromkeys(msg.content["config"])
        assert "local-steps" in config
        return reply(msg, msg.content["arrays"].to_numpy_ndarrays(), num_examples=7)

    made = trainer(app)
    params = made.initial_params(1)
    with pytest.warns(UserWarning, match="does not look at local-steps"):
        assert made.train(0, params, 5, seed=1).num_examples == 7
    # Another warning would be an error, here as in all tests.
    assert made.train(1, params, 5, seed=1).num_examples == 7
    trainer(quadratic_app()).train(0, params, 5, seed=1)


def test_examples_that_do_not_grow_with_steps_are_pointed_out() -> None:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        assert msg.content["config"].get("local-steps")
        return reply(msg, msg.content["arrays"].to_numpy_ndarrays(), num_examples=7)

    with pytest.warns(UserWarning, match="same num-examples for 1 and 2"):
        assert trainer(app).cost().examples_per_step == 7


def test_seed_pins_what_the_app_draws() -> None:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        assert msg.content["config"]["local-steps"]
        x, scale = msg.content["arrays"].to_numpy_ndarrays()
        return reply(msg, [x + np.random.rand(3), scale], num_examples=1)  # noqa: NPY002

    made = trainer(app)
    params = made.initial_params(1)
    one, two, three = (made.train(0, params, 1, seed=seed).params for seed in (1, 1, 2))
    assert one.tobytes() == two.tobytes() != three.tobytes()


def broken(kind: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Any:
        assert msg.content["config"]["local-steps"]
        x, scale = msg.content["arrays"].to_numpy_ndarrays()
        if kind == "raises" and context.node_config["partition-id"] == 2:
            raise ZeroDivisionError("no data")
        if kind == "no message":
            return None
        if kind == "no arrays":
            return Message(RecordDict({"m": MetricRecord({"num-examples": 1})}), reply_to=msg)
        if kind == "two arrays":
            both = {"a": ArrayRecord([x]), "b": ArrayRecord([x]), "m": MetricRecord()}
            return Message(RecordDict(both), reply_to=msg)
        if kind == "no examples":
            return reply(msg, [x, scale])
        if kind == "nan examples":
            return reply(msg, [x, scale], num_examples=float("nan"))
        arrays = {
            "shape": [x[:2], scale],
            "missing": [x],
            "unknown": [x, scale, x],
            "kind": [x.astype("int64"), scale],
        }.get(kind, [x, scale])
        return reply(msg, arrays, num_examples=1)

    return app


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no message", "client 1, step 1: .*NoneType"),
        ("no arrays", 'client 1, step 1: .*"arrays"'),
        ("two arrays", 'several ArrayRecords, none named "arrays": a, b'),
        ("no examples", 'client 1, step 1: .*"num-examples"'),
        ("nan examples", "num-examples = nan"),
        ("shape", r"'0' with shape \(2,\) instead of \(3,\)"),
        ("missing", "returned no array '1'"),
        ("unknown", "'2' that is unknown; there are: 0, 1"),
        ("kind", "'0'.*int64"),
    ],
)
def test_impossible_replies_are_named(kind: str, message: str) -> None:
    made = trainer(broken(kind))
    with pytest.raises(TrainerError, match=message):
        made.train(1, made.initial_params(1), 1, seed=1)


def test_an_app_that_raises_is_named_with_client_and_step() -> None:
    made = trainer(broken("raises"))
    params = made.initial_params(1)
    made.train(1, params, 3, seed=1)
    with pytest.raises(TrainerError) as caught:
        made.train(2, params, 3, seed=1)
    first, *trace = str(caught.value).splitlines()
    assert first == "client 2, step 1: ZeroDivisionError: no data"
    assert any("test_flower_trainer.py" in line for line in trace)


def test_apps_that_cannot_train_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no train function: .*@app\.train\(\)"):
        _ = trainer(ClientApp()).layout
    with pytest.raises(ConfigError, match="client_fn"):
        _ = trainer(ClientApp(client_fn=lambda context: None)).layout  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="does not tell its initial model"):
        _ = trainer(quadratic_app(), initial=None).layout
    made = trainer(quadratic_app())
    with pytest.raises(ConfigError, match="client 3 is not one of the 3"):
        made.train(3, made.initial_params(1), 1, seed=1)
    with pytest.raises(ConfigError, match="evaluate-fn"):
        trainer(quadratic_app(), run_config={"evaluate-fn": "a:b"}).evaluate(made.initial_params(1))


def test_gradient_action_and_corrected_steps() -> None:
    made = trainer(quadratic_app())
    params = made.initial_params(1)
    found = made.gradient(1, params, seed=1)
    # What the reply leaves out, here the second array, has no gradient.
    np.testing.assert_array_equal(found.gradient, [*-targets(1), 0])
    assert found.num_examples == SIZE

    correction = np.array([1, 0, -1, 0.5], "float32")
    mean = made.corrected_steps(1, params, correction, 3, 0.1, seed=1)
    y, gradients = params, []
    for _ in range(3):
        gradients.append(np.append(y[:3] - targets(1), 0).astype("float32"))
        y = y - 0.1 * (gradients[-1] + correction)
    np.testing.assert_allclose(mean.gradient, np.mean(gradients, axis=0), rtol=1e-5)
    assert mean.num_examples == 3 * SIZE


def test_one_step_serves_as_gradient_where_the_learning_rate_is_known() -> None:
    made = trainer(quadratic_app(with_gradient=False), run_config={"lr": 0.25})
    found = made.gradient(1, made.initial_params(1), seed=1)
    np.testing.assert_allclose(found.gradient, [*-targets(1), 0], rtol=1e-5)
    silent = trainer(quadratic_app(with_gradient=False))
    with pytest.raises(ConfigError, match=r'@app\.train\("gradient"\)'):
        silent.gradient(1, silent.initial_params(1), seed=1)


def test_evaluation_of_a_client_and_of_the_whole_task() -> None:
    made = trainer(quadratic_app())
    params = made.initial_params(1)
    losses = [float(np.sum(targets(client) ** 2)) for client in range(3)]
    assert made.evaluate(params, 2).metrics == {"loss": losses[2]}
    whole = made.evaluate(params)
    assert whole.num_examples == 1 + 2 + 3
    assert whole.metrics["loss"] == pytest.approx(np.average(losses, weights=[1, 2, 3]))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": float(arrays["1"].numpy()), "num-examples": 9})

    central = trainer(quadratic_app(), evaluate=evaluate).evaluate(params)
    assert (central.num_examples, central.metrics) == (9, {"accuracy": 1.0})
    assert trainer(broken("")).evaluate(params).metrics == {}


def test_metrics_have_common_names() -> None:
    metrics = {"train_loss": 1, "eval-acc": 0.5, "f1": 2.0, "num-examples": 3, "list": [1, 2]}
    assert common_names(metrics.items()) == {"loss": 1.0, "accuracy": 0.5, "f1": 2.0}


def test_cost_from_the_config_and_without_torch_operations() -> None:
    made = trainer(quadratic_app())
    cost = made.cost()
    assert cost.flops_per_example == 6 * 4
    assert cost.examples_per_step == SIZE
    assert cost.memory_bytes == 3 * 4 * 4
    given = {"flops-per-example": 1e6, "examples-per-step": SIZE}
    made = trainer(quadratic_app(), run_config=given)
    assert made.cost().flops_per_example == 1e6
    assert made.examples(0, 5) == 5 * SIZE
    made.train(0, made.initial_params(1), 5, seed=1)
    wrong = trainer(quadratic_app(), run_config={"examples-per-step": 3})
    with pytest.raises(ConfigError, match=r"15 examples in 5 steps, but client 0 reports .*20"):
        wrong.train(0, wrong.initial_params(1), 5, seed=1)


def test_kept_arrays_stay_with_their_client() -> None:
    app = ClientApp()
    counts: list[int] = []

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        assert msg.content["config"]["local-steps"]
        arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        counts.append(int(arrays["count"]))
        assert arrays["count"].dtype == np.int64
        content = {
            "arrays": ArrayRecord(
                {
                    name: type(array)(np.asarray(array.numpy() + 1))
                    for name, array in msg.content["arrays"].items()
                }
            ),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=msg)

    def model() -> dict[str, Any]:
        return {"w": np.zeros(2, "float32"), "count": np.array(10), "head": np.zeros(1)}

    made = trainer(app, initial=model, run_config={"exclude": "head*"})
    assert made.layout.kept_names == ("count", "head")
    params = made.initial_params(1)
    for client in (0, 0, 1):
        params = made.train(client, params, 1, seed=1).params
    assert counts == [10, 11, 10]
    np.testing.assert_array_equal(params, [3, 3])


def test_torch_model_and_its_flops() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = torch.nn.Linear(3, 2)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        num_steps = msg.content["config"]["local-steps"]
        for _ in range(num_steps):
            loss = model(torch.ones(5, 3)).square().mean()
            loss.backward()
        metrics = MetricRecord({"num-examples": 5 * num_steps})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=msg)

    def make_model() -> Any:
        return torch.nn.Linear(3, 2)

    made = trainer(app, initial=make_model)
    assert made.initial_params(1).tobytes() != made.initial_params(2).tobytes()
    assert made.initial_params(1).tobytes() == made.initial_params(1).tobytes()
    cost = made.cost()
    assert cost.flops_per_example == 2 * (2 * 3 * 2)
    assert cost.memory_bytes > 3 * made.initial_params(1).nbytes
    half = trainer(app, initial=lambda: make_model().bfloat16())
    with pytest.raises(ConfigError, match="bfloat16"):
        _ = half.layout


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
    lr = 0.5
    deep.key = 3
    {config}
"""
CLIENT = """
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from task import NAME

    app = ClientApp()

    @app.train()
    def train(msg, context):
        from late import LATE
        rate = msg.content["config"]["rate"] * msg.content["config"]["local-steps"]
        arrays = [array + rate for array in msg.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 1, "name": NAME, "late": LATE})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=msg)
"""
SERVER = """
    import numpy as np
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid, context):
        try:
            FedAvg(min_available_nodes=50).start(
                grid=grid,
                initial_arrays=ArrayRecord([np.random.rand(2)]),
                train_config=ConfigRecord({"rate": context.run_config["lr"] / 2}),
            )
        except Exception:
            raise AssertionError("not meant for the app") from None
"""


def write_app(folder: Path, name: str, number: int, config: str = "", **files: str) -> Path:
    path = folder / name
    path.mkdir()
    texts = {
        "pyproject.toml": APP.format(name=name, config=config),
        "client_app.py": CLIENT,
        "server_app.py": SERVER,
        "task.py": f"NAME = {number}\n",
        "late.py": f"LATE = {number}\n",
        **{file.replace("_py", ".py"): text for file, text in files.items()},
    }
    for file, text in texts.items():
        (path / file).write_text(textwrap.dedent(text))
    return path


def test_an_ordinary_app_needs_nothing_of_ours(tmp_path: Path) -> None:
    """Its model and its learning rate are what its own server would send."""
    app = load_app(write_app(tmp_path, "plain", 1))
    assert (app.name, app.config) == ("plain", {"lr": 0.5, "deep.key": 3})
    made = app.trainer({"lr": 1.0})
    made.prepare(2)
    params = made.initial_params(3)
    assert params.dtype == np.float64
    assert params.tobytes() == made.initial_params(3).tobytes() != made.initial_params(4).tobytes()
    np.testing.assert_allclose(made.train(1, params, 3, seed=1).params, params + 1.5)


def test_modules_of_two_apps_do_not_clash(tmp_path: Path) -> None:
    one, two = (load_app(write_app(tmp_path, name, k)) for k, name in enumerate(("one", "two")))
    first, second = one.trainer(), two.trainer()
    for made in (first, second):
        made.prepare(1)
    for _ in range(2):
        for number, made in enumerate((first, second)):
            metrics = made.train(0, made.initial_params(1), 1, seed=1).metrics
            assert metrics == {"name": number, "late": number}


def test_only_an_app_in_a_folder_travels_to_a_worker(tmp_path: Path) -> None:
    made = load_app(write_app(tmp_path, "plain", 1)).trainer()
    made.prepare(2)
    params = made.initial_params(3)
    expected = made.train(0, params, 1, seed=1).params
    there = pickle.loads(pickle.dumps(made))
    assert there.train(0, params, 1, seed=1).params.tobytes() == expected.tobytes()
    with pytest.raises(ConfigError, match="workers = 0"):
        pickle.dumps(trainer(quadratic_app()))


@pytest.fixture
def imported_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClientApp]:
    """The ClientApp of an app in a folder, imported as a test of that app imports it."""
    config = 'initial-model = "tiny_of_a_test.task:model"'
    path = write_app(tmp_path, "tiny", 1, config=config)
    text = (path / "pyproject.toml").read_text().replace("client_app:app", "tiny_of_a_test.app:app")
    (path / "pyproject.toml").write_text(text)
    package = path / "tiny_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    client = CLIENT.replace("from task", "from .task").replace("from late", "from .late")
    client = client.replace(
        '"num-examples": 1', '"num-examples": msg.content["config"]["local-steps"]'
    )
    (package / "app.py").write_text(textwrap.dedent(client).replace('["rate"]', '["lr"]'))
    (package / "late.py").write_text("LATE = 1\n")
    (package / "task.py").write_text(
        "import numpy as np\nNAME = 1\ndef model(config):\n    return [np.full(2, config['lr'])]\n"
    )
    monkeypatch.syspath_prepend(str(path))
    yield importlib.import_module("tiny_of_a_test.app").app
    for name in [name for name in sys.modules if name.startswith("tiny_of_a_test")]:
        del sys.modules[name]


def test_an_imported_client_app_brings_the_settings_of_its_folder(
    imported_app: ClientApp, swarm: Callable[..., Swarm]
) -> None:
    made = FlowerTrainer(imported_app)
    assert made.initial_params(1).tolist() == [0.5, 0.5]
    assert made.learning_rate == 0.5
    assert FlowerTrainer(imported_app, {"lr": 2.0}).initial_params(1).tolist() == [2, 2]
    assert pickle.loads(pickle.dumps(made)).initial_params(1).tolist() == [0.5, 0.5]
    net = swarm(imported_app, peers=3, algorithm=Moshpit())
    assert len(net.run(rounds=2).rounds) == 6


def test_a_client_app_of_no_folder_is_told_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"give FlowerTrainer\(app, initial=\.\.\., run_config"):
        _ = FlowerTrainer(quadratic_app()).layout
    with pytest.raises(ConfigError, match=r"FlowerTrainer\(app\), not a ClientApp"):
        Simulation(Moshpit(), quadratic_app(), peers=3)  # type: ignore[arg-type]


def test_order_of_the_ways_to_tell_the_initial_model(tmp_path: Path) -> None:
    task = (
        "import numpy as np\nNAME = 1\ndef model(config):\n    return [np.full(2, config['lr'])]\n"
    )
    query = """
    @app.query("initial")
    def initial(msg, context):
        import numpy as np
        return Message(RecordDict({"arrays": ArrayRecord([np.full(2, 7.0)])}), reply_to=msg)
    """
    client = textwrap.dedent(CLIENT) + textwrap.dedent(query)
    app = load_app(write_app(tmp_path, "told", 1, task_py=task, client_app_py=client))
    assert app.trainer().initial_params(1).tolist() == [7, 7]
    by_key = {"initial-model": "task:model"}
    assert app.trainer(by_key).initial_params(1).tolist() == [0.5, 0.5]
    given = FlowerTrainer(app, by_key, initial=lambda: [np.zeros(2)])
    assert given.initial_params(1).tolist() == [0, 0]
    with pytest.raises(ConfigError, match="no 'nothing'"):
        app.trainer({"initial-model": "task:nothing"}).initial_params(1)
    with pytest.raises(ConfigError, match="torch module, arrays by name or a list"):
        app.trainer({"initial-model": "task:NAME.__str__"}).initial_params(1)


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("grid.pull_messages([])", "waits for replies"),
        ("pass", "does not tell its initial model"),
        (
            "grid.push_messages([Message(RecordDict(), n, 'query') for n in grid.get_node_ids()])",
            "begin with a model but with a query message",
        ),
    ],
)
def test_a_server_that_sends_no_model(tmp_path: Path, main: str, message: str) -> None:
    server = f"""
    from flwr.app import Message, RecordDict
    from flwr.serverapp import ServerApp
    app = ServerApp()
    @app.main()
    def main(grid, context):
        {main}
    """
    path = write_app(tmp_path, "silent", 1, server_app_py=server)
    with pytest.raises(ConfigError, match=message):
        load_app(path).trainer().initial_params(1)


def test_apps_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nonsense' does not exist: .*digits, watch"):
        load_app("nonsense")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="without a pyproject"):
        load_app(tmp_path / "empty")
    (tmp_path / "empty" / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ConfigError, match="is no Flower app"):
        load_app(tmp_path / "empty")
    (tmp_path / "empty" / "pyproject.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_app(tmp_path / "empty")
    missing = load_app(write_app(tmp_path, "missing", 1, client_app_py="import does_not_exist"))
    with pytest.raises(ConfigError, match=r"'client_app' .* cannot be imported: .*does_not_exist"):
        _ = missing.trainer().layout
    raising = load_app(write_app(tmp_path, "raising", 1, client_app_py="1 / 0"))
    with pytest.raises(TrainerError, match=r"importing 'client_app' .* raised ZeroDivisionError"):
        _ = raising.trainer().layout
    other = load_app(write_app(tmp_path, "other", 1, client_app_py="app = 3"))
    with pytest.raises(ConfigError, match="is no ClientApp but 3"):
        _ = other.trainer().layout
    assert isinstance(other, App)
