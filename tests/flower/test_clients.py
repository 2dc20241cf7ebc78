from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flwr")
if not all(find_spec(name) for name in ("sklearn", "seglearn")):
    pytest.skip("the data are in the packages of the extra `examples`", allow_module_level=True)

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from flwr_moshpit.flower import App, FlowerTrainer, load_app  # noqa: E402
from flwr_moshpit.flower.compat import ensure_identity, quiet_flower  # noqa: E402
from flwr_moshpit.torch_trainer import TorchTrainer  # noqa: E402
from flwr_moshpit.user_code import pinned  # noqa: E402

PARTITIONS = (1, 2, 5, 16, 17, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["watch", "digits"])
def app(request: pytest.FixtureRequest) -> App:
    return load_app(request.param)


def rows(x: Any) -> list[bytes]:
    return [row.numpy().tobytes() for row in x]


def shares(app: App, num_partitions: int, *options: Any) -> list[tuple[Any, Any]]:
    load = app.load(f"{app.name}.task:load_partition")
    return [load(partition, num_partitions, *options) for partition in range(num_partitions)]


@pytest.mark.parametrize("num_partitions", PARTITIONS)
def test_partitions_cover_the_data_once(app: App, num_partitions: int) -> None:
    kinds: list[tuple[Any, ...]] = [()]
    if app.name == "digits":
        kinds = [("iid",), ("dirichlet", 0.1, 3)]
    (whole, _), *_ = shares(app, 1)
    for options in kinds:
        parts = shares(app, num_partitions, *options)
        assert all(len(y) == len(x) >= 1 for x, y in parts)
        assert sorted(row for x, _ in parts for row in rows(x)) == sorted(rows(whole))


def test_test_data_are_in_no_partition(app: App) -> None:
    x, y = app.load(f"{app.name}.task:load_test")()
    (whole, classes), *_ = shares(app, 1)
    assert not set(rows(x)) & set(rows(whole))
    assert sorted(set(y.tolist())) == sorted(set(classes.tolist()))


def test_watch_is_divided_by_person_and_arm() -> None:
    app = load_app("watch")
    recordings = app.load("watch.task:_recordings")()
    test_people = app.load("watch.task:TEST_PEOPLE")
    assert len(recordings) == 20
    trained = [r for r in recordings if r["person"] not in test_people]
    windows = [sum((len(s) - 100) // 50 + 1 for s in r["X"]) for r in trained]
    assert [len(y) for _, y in shares(app, 16)] == windows
    # Two arms of one person, when there are eight clients.
    pairs = [a + b for a, b in zip(windows[::2], windows[1::2], strict=True)]
    assert [len(y) for _, y in shares(app, 8)] == pairs


def test_watch_pieces_are_even_and_hold_all_movements() -> None:
    app = load_app("watch")
    pieces = shares(app, 32)
    for (x, y), half, other in zip(shares(app, 16), pieces[::2], pieces[1::2], strict=True):
        assert rows(x) == rows(half[0]) + rows(other[0])
        assert abs(len(half[1]) - len(other[1])) <= 1
        assert set(y.tolist()) == set(half[1].tolist()) == set(other[1].tolist()) == set(range(7))
    with pytest.raises(ValueError, match="do not suffice for 100000 clients"):
        shares(app, 100_000)


def spread(app: App, num_partitions: int, *options: Any) -> float:
    """How far the clients' class frequencies are from the whole's, on average."""
    parts = [np.bincount(y.numpy(), minlength=10) for _, y in shares(app, num_partitions, *options)]
    whole = np.sum(parts, axis=0) / np.sum(parts)
    return float(np.mean([np.abs(part / part.sum() - whole).sum() for part in parts]))


def test_digits_differ_between_clients_as_alpha_says() -> None:
    app = load_app("digits")
    iid = spread(app, 20, "iid")
    assert iid < spread(app, 20, "dirichlet", 1.0) < spread(app, 20, "dirichlet", 0.1)
    assert spread(app, 20, "dirichlet", 0.1) > 1
    one, two, three = (shares(app, 5, "dirichlet", 0.5, seed) for seed in (1, 1, 2))
    assert [rows(x) for x, _ in one] == [rows(x) for x, _ in two] != [rows(x) for x, _ in three]
    with pytest.raises(ValueError, match='"iid" or "dirichlet"'):
        shares(app, 5, "other")
    with pytest.raises(ValueError, match="alpha must be above 0"):
        shares(app, 5, "dirichlet", 0.0)


def prepared(app: App, num_clients: int, **config: Any) -> FlowerTrainer:
    trainer = app.trainer({key.replace("_", "-"): value for key, value in config.items()})
    trainer.prepare(num_clients)
    return trainer


def test_centralised_training_learns(app: App) -> None:
    trainer = prepared(app, 1, lr=0.2)
    params = trainer.initial_params(1)
    before = trainer.evaluate(params).metrics["accuracy"]
    params = trainer.train(0, params, 250, seed=1).params
    after = trainer.evaluate(params)
    assert before < 0.3
    assert after.metrics["accuracy"] > {"watch": 0.5, "digits": 0.9}[app.name]
    assert after == trainer.evaluate(params, client=0)


def test_the_actions_agree(app: App) -> None:
    """One step of training follows the gradient of the same batch."""
    trainer = prepared(app, 20, lr=0.5)
    params = trainer.initial_params(1)
    gradient = trainer.gradient(3, params, seed=7)
    trained = trainer.train(3, params, 1, seed=7)
    np.testing.assert_allclose(trained.params, params - 0.5 * gradient.gradient, atol=1e-6)
    assert gradient.num_examples == trained.num_examples == trainer.examples(3, 1) == 16
    assert gradient.metrics["loss"] == pytest.approx(trained.metrics["loss"])


def test_same_seed_same_result_and_cost_leaves_no_trace(app: App) -> None:
    one, two = prepared(app, 100), prepared(app, 100)
    params = one.initial_params(1)
    cost = two.cost()
    results = [trainer.train(42, params, 3, seed=5).params.tobytes() for trainer in (one, two)]
    assert results[0] == results[1] != one.train(42, params, 3, seed=6).params.tobytes()
    assert cost.examples_per_step == 16
    # At least a multiplication and an addition for each parameter, forward and twice backward.
    assert 1e9 > cost.flops_per_example >= 4 * len(params)
    assert cost.memory_bytes > 3 * params.nbytes


class InProcessGrid(Grid):
    """Flower's side of a run: nodes that answer each message at once."""

    def __init__(self, app: App, num_nodes: int) -> None:
        self._client_app = app.load(app.client_ref)
        self._contexts = [
            Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(app.config),
            )
            for node in range(num_nodes)
        ]
        self.rounds: list[tuple[ArrayRecord, list[ArrayRecord]]] = []
        """What was sent to all, and what each sent back."""

    def get_node_ids(self) -> list[int]:
        return [context.node_id for context in self._contexts]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        replies = [self._client_app(m, self._contexts[m.metadata.dst_node_id]) for m in messages]
        if messages:
            sent = messages[0].content["arrays"]
            self.rounds.append((sent, [reply.content["arrays"] for reply in replies]))
        return replies

    def _not_used(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the apps' strategy does not do this")

    create_message = push_messages = pull_messages = set_run = _not_used
    run = property(_not_used)


def test_flowers_own_strategies_train_it_too(app: App) -> None:
    ensure_identity()
    grid = InProcessGrid(app, 3)
    trainer = prepared(app, 3)
    model = app.load(str(app.config["initial-model"]))()
    with quiet_flower(), pinned(1):
        FedAvg(fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=2,
            train_config=ConfigRecord({"local-steps": 5}),
        )
    (first, replies), (second, _) = (
        (trainer.layout.flatten(sent), [trainer.layout.flatten(reply) for reply in replies])
        for sent, replies in grid.rounds
    )
    np.testing.assert_allclose(second, np.mean(replies, axis=0), atol=1e-6)
    losses = [trainer.evaluate(params).metrics["loss"] for params in (first, second)]
    assert losses[1] < losses[0]


def test_tasks_need_no_flower(app: App) -> None:
    names = ("make_model", "make_loader", "make_test_loader")
    make_model, make_loader, make_test_loader = (
        app.load(f"{app.name}.task:{name}") for name in names
    )
    trainer = TorchTrainer(make_model, make_loader, lr=0.1, make_test_loader=make_test_loader)
    trainer.prepare(4)
    params = trainer.initial_params(1)
    # The same arrays as through Flower, so peers of either kind can average.
    trainer.layout.check(prepared(app, 4).layout)
    trained = trainer.train(0, params, 30, seed=1)
    assert trained.num_examples == 30 * 16
    assert (
        trainer.evaluate(trained.params).metrics["loss"] < trainer.evaluate(params).metrics["loss"]
    )


def test_data_are_read_without_importing_their_packages() -> None:
    code = """
import sys
from flwr_moshpit.flower import load_app
for name in ("watch", "digits"):
    load_app(name).load(f"{name}.task:load_partition")(0, 2)
heavy = [name for name in ("sklearn", "seglearn", "scipy", "pandas") if name in sys.modules]
sys.exit(str(heavy) if heavy or "flwr" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named_with_its_cure(app: App) -> None:
    find = app.load(f"{app.name}.task:_package_file")
    with pytest.raises(ModuleNotFoundError, match=r"'flwr-moshpit\[examples\]'"):
        find("no-such-package", "data.npy")


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [16, 100])
def test_fedavg_on_watch_reaches_unseen_people(num_clients: int) -> None:
    trainer = prepared(load_app("watch"), num_clients)
    params = trainer.initial_params(1)
    for round_number in range(10):
        results = [
            trainer.train(client, params, 20, seed=1000 * round_number + client)
            for client in range(num_clients)
        ]
        params = np.mean([result.params for result in results], axis=0)
    assert trainer.evaluate(params).metrics["accuracy"] > 0.6
