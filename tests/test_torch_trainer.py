from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from flwr_moshpit.errors import ConfigError, TrainerError  # noqa: E402
from flwr_moshpit.torch_trainer import TorchTrainer  # noqa: E402
from flwr_moshpit.trainer import Trainer  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def data(partition: int, size: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(partition)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def make_loader(partition: int, num_partitions: int) -> DataLoader[Any]:
    return DataLoader(data(partition), batch_size=5, shuffle=True)


def make_batches(partition: int, num_partitions: int) -> list[Any]:
    return list(DataLoader(data(partition), batch_size=5))


def make_test_loader() -> DataLoader[Any]:
    return DataLoader(data(1000, 200), batch_size=64)


def trainer(model: Any = make_model, loader: Any = make_loader, **options: Any) -> TorchTrainer:
    dtype, num_clients = options.pop("dtype", None), options.pop("num_clients", 4)
    made = TorchTrainer(model, loader, make_test_loader=make_test_loader, **options)
    made.prepare(num_clients, dtype)
    return made


def test_it_is_a_trainer_and_learns() -> None:
    made = trainer(lr=0.3)
    assert isinstance(made, Trainer)
    params = made.initial_params(1)
    before = made.evaluate(params)
    assert before.num_examples == 200
    for call in range(10):
        params = made.train(0, params, 20, seed=call).params
    after = made.evaluate(params)
    assert after.metrics["accuracy"] > 0.9 > before.metrics["accuracy"]
    assert after.metrics["loss"] < before.metrics["loss"]


def test_equals_a_plain_training_loop_bit_for_bit() -> None:
    made = trainer(loader=make_batches, lr=0.1, momentum=0.9, weight_decay=1e-3)
    params = made.initial_params(7)
    for call in range(3):
        params = made.train(2, params, 4, seed=call).params

    torch.manual_seed(7)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    batches = make_batches(2, 4)
    for step in range(12):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert made.layout.flatten(model.state_dict()).tobytes() == params.tobytes()


@pytest.mark.parametrize("loader", [make_loader, make_batches])
def test_examples_are_foreseen(loader: Any) -> None:
    made = trainer(loader=loader)
    params = made.initial_params(1)
    for num_steps in (1, 3, 1, 0, 12, 5):
        foreseen = made.examples(1, num_steps)
        assert foreseen == made.train(1, params, num_steps, seed=num_steps).num_examples
    made.gradient(1, params, seed=1)
    assert made.examples(1, 4) == made.train(1, params, 4, seed=1).num_examples


def test_examples_are_unknown_for_a_bare_iterable() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return iter(make_batches(0, 1))

    made = trainer(loader=lambda partition, num_partitions: Loader())
    assert made.examples(0, 3) is None
    assert made.train(0, made.initial_params(1), 6, seed=1).num_examples == 27


def test_clients_do_not_disturb_each_other() -> None:
    """Same arguments and same earlier calls of that client, same result."""

    def train(made: TorchTrainer, others: bool) -> list[bytes]:
        params, found = made.initial_params(3), []
        for call in range(4):
            if others:
                made.train(1, params, 2, seed=99)
                made.gradient(3, params, seed=call)
                made.evaluate(params, 1)
                made.cost()
                torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
            params = made.train(0, params, 3, seed=call).params
            found.append(params.tobytes())
        return found

    alone, among = trainer(make_norm_model, momentum=0.9), trainer(make_norm_model, momentum=0.9)
    assert train(alone, others=False) == train(among, others=True)


def test_seed_decides_and_global_state_is_left_alone() -> None:
    made = trainer(make_norm_model)
    params = made.initial_params(1)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    expected = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    one = made.train(0, params, 5, seed=1).params
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected  # noqa: NPY002
    made.prepare(4)
    assert one.tobytes() == made.train(0, params, 5, seed=1).params.tobytes()
    made.prepare(4)
    assert one.tobytes() != made.train(0, params, 5, seed=2).params.tobytes()


def test_params_are_not_changed_and_results_are_read_only() -> None:
    made = trainer()
    params = made.initial_params(1)
    copy = params.copy()
    trained = made.train(0, params, 3, seed=1).params
    made.train(1, params, 3, seed=1)
    assert params.tobytes() == copy.tobytes() != trained.tobytes()
    assert not trained.flags.writeable
    assert not made.gradient(0, params, seed=1).gradient.flags.writeable


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_is_autograd_s(dtype: str) -> None:
    made = trainer(loader=make_batches, dtype=dtype)
    params = made.initial_params(2)
    found = made.gradient(1, params, seed=1)
    assert found.num_examples == 5
    assert found.gradient.dtype == params.dtype == dtype
    torch.manual_seed(2)
    model = make_model().to(getattr(torch, dtype))
    x, y = make_batches(1, 4)[0]
    nn.functional.cross_entropy(model(x.to(getattr(torch, dtype))), y).backward()
    expected = made.layout.flatten({name: p.grad for name, p in model.named_parameters()})
    np.testing.assert_array_equal(found.gradient, expected)


def test_corrected_steps_follow_the_formula() -> None:
    made = trainer(loader=make_batches, dtype="float64")
    y = made.initial_params(2)
    correction = np.linspace(-1, 1, y.size)
    found = made.corrected_steps(1, y, correction, 3, 0.2, seed=1)
    made.prepare(4, "float64")
    gradients = []
    for _ in range(3):
        gradients.append(made.gradient(1, y, seed=1).gradient)
        y = y - 0.2 * (gradients[-1] + correction)
    np.testing.assert_allclose(found.gradient, np.mean(gradients, axis=0), rtol=1e-12, atol=1e-15)
    assert found.num_examples == 15


def test_a_gradient_step_moves_averaged_buffers_as_training_does() -> None:
    made = trainer(make_norm_model, loader=make_batches, dtype="float64", lr=0.05)
    params = made.initial_params(1)
    gradient = made.gradient(0, params, seed=4).gradient
    made.prepare(4, "float64")
    trained = made.train(0, params, 1, seed=4).params
    moved = made.layout.unflatten(params - 0.05 * gradient, {"1.num_batches_tracked": 0})
    expected = made.layout.unflatten(trained, {"1.num_batches_tracked": 0})
    assert np.abs(expected["1.running_mean"]).max() > 0
    for name in made.layout.slices:
        np.testing.assert_allclose(moved[name], expected[name], rtol=1e-9, atol=1e-12)


def test_integer_buffers_and_excluded_arrays_stay_with_their_client() -> None:
    made = trainer(make_norm_model, loader=make_batches, exclude=["3.*", "1.running_*"], lr=0.2)
    assert made.layout.kept_names == (
        "1.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
        "3.bias",
        "3.weight",
    )
    params = made.initial_params(1)
    losses = [made.evaluate(params, client).metrics["loss"] for client in (0, 1)]
    assert losses[0] == losses[1] == made.evaluate(params).metrics["loss"]
    made.train(0, params, 10, seed=1)
    # Its head has moved, and only its own.
    assert made.evaluate(params, 0).metrics["loss"] != losses[0]
    assert made.evaluate(params, 1).metrics["loss"] == losses[1]
    assert made.evaluate(params).metrics["loss"] == losses[1]
    made.gradient(1, params, seed=1)
    assert made.evaluate(params, 1).metrics["loss"] != losses[1]


class Tied(nn.Module):
    """Two names for one parameter, a frozen one, and one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.count = self.count + 1  # replaced, not changed in place
        return self.second(torch.tanh(self.first(x))) * self.scale.float() + self.frozen


def test_unusual_models() -> None:
    made = trainer(Tied, loader=make_batches, lr=0.1)
    params = made.initial_params(1)
    trained = made.train(0, params, 3, seed=1).params
    arrays = made.layout.unflatten(trained)
    np.testing.assert_array_equal(arrays["first.weight"], arrays["second.weight"])
    assert arrays["count"] == 3
    assert arrays["scale"].dtype == torch.bfloat16
    assert not torch.equal(arrays["scale"], torch.ones(4, dtype=torch.bfloat16))
    np.testing.assert_array_equal(arrays["frozen"], np.full(4, 0.5, "float32"))
    gradient = made.layout.unflatten(made.gradient(0, trained, seed=1).gradient)
    assert np.abs(gradient["first.weight"]).max() > 0
    np.testing.assert_array_equal(gradient["first.weight"], gradient["second.weight"])
    assert not gradient["frozen"].any()

    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in make_batches(0, 4)[:3]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    np.testing.assert_array_equal(arrays["first.weight"], model.first.weight.detach().numpy())


def test_own_optimizer_keeps_its_state_by_client() -> None:
    def adam(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.01)

    made = trainer(loader=make_batches, optimizer=adam)
    params = made.initial_params(1)
    first = made.train(0, params, 1, seed=1).params
    # Adam's first step is lr in every direction, for each client that has taken none.
    np.testing.assert_allclose(np.abs(first - params), 0.01, rtol=1e-3)
    other = made.train(1, params, 1, seed=1).params
    np.testing.assert_allclose(np.abs(other - params), 0.01, rtol=1e-3)
    assert np.abs(np.abs(made.train(0, params, 1, seed=1).params - params) - 0.01).max() > 1e-4


def test_cost_is_counted_on_the_model() -> None:
    made = trainer(momentum=0.9)
    params = made.initial_params(1)
    cost = made.cost()
    # Two products forward, their weight gradients, and the input gradient of the second; 2 a x b.
    assert cost.flops_per_example == 2 * (2 * 4 * 8 + 3 * 8 * 2)
    assert cost.examples_per_step == 5
    own = 3 * params.nbytes  # parameters, gradients, momentum
    assert own < cost.memory_bytes < own + 5 * 4 * (4 + 8 + 8 + 2 + 2) + 100
    assert cost is made.cost()


def test_float64_when_asked() -> None:
    made = trainer(make_norm_model, dtype="float64")
    params = made.initial_params(1)
    assert params.dtype == np.float64
    assert made.layout.dtype == np.float64
    trained = made.train(0, params, 2, seed=1).params
    assert trained.dtype == np.float64
    assert np.any(trained != trained.astype("float32"))


def test_it_travels_to_a_worker() -> None:
    made = trainer(momentum=0.9)
    params = made.initial_params(1)
    made.train(0, params, 3, seed=1)
    there = pickle.loads(pickle.dumps(made))
    made.prepare(4)
    assert there.initial_params(1).tobytes() == params.tobytes()
    one, two = (each.train(0, params, 3, seed=1).params for each in (made, there))
    assert one.tobytes() == two.tobytes()


def test_what_goes_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="lr must be above 0, not 0"):
        TorchTrainer(make_model, make_loader, lr=0)
    with pytest.raises(ConfigError, match="momentum"):
        trainer(optimizer=torch.optim.Adam, momentum=0.9)
    with pytest.raises(ConfigError, match=r"\*\.bn.*0\.bias"):
        _ = trainer(exclude=["*.bn"]).layout
    with pytest.raises(ConfigError, match="at least 1 client, not 0"):
        trainer(num_clients=0)
    made = trainer()
    with pytest.raises(ConfigError, match="client 4 is not one of the 4"):
        made.train(4, made.initial_params(1), 1, seed=1)
    empty = trainer(loader=lambda partition, num_partitions: [])
    with pytest.raises(ConfigError, match=r"make_loader\(2, 4\) gives no batches"):
        empty.train(2, empty.initial_params(1), 1, seed=1)


def test_training_code_that_raises_is_named_with_client_and_step() -> None:
    def loader(partition: int, num_partitions: int) -> list[Any]:
        batches = make_batches(partition, num_partitions)
        batches[2] = (torch.zeros(5, 3), batches[2][1])
        return batches

    made = trainer(loader=loader)
    params = made.initial_params(1)
    made.train(3, params, 1, seed=1)
    with pytest.raises(TrainerError) as caught:
        made.train(3, params, 2, seed=1)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("client 3, step 3: RuntimeError")
    assert any("in _backward" in line for line in rest)


def test_own_evaluation() -> None:
    def evaluate(model: nn.Module, client: int | None) -> dict[str, float]:
        assert not model.training
        return {"num_examples": 7, "client": -1 if client is None else client}

    made = trainer(evaluate=evaluate)
    params = made.initial_params(1)
    assert made.evaluate(params).metrics == {"client": -1}
    assert made.evaluate(params, 2).metrics == {"client": 2}
    assert made.evaluate(params).num_examples == 7
    silent = TorchTrainer(make_model, make_loader)
    silent.prepare(1)
    assert silent.evaluate(params).metrics == {}
