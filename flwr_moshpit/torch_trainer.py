"""`TorchTrainer`: a torch model, a loader of batches and a loss, for any number of clients.

No Flower is needed. One model and one optimizer serve all clients of a process: a client is its
flat vector, copied into the model by one copy, and what it keeps for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import Evaluated, GradientResult, Trained, Vector
from flwr_moshpit.torch_data import Batches, Place, are_classes, moved
from flwr_moshpit.torch_model import FlatModel, model_arrays, model_cost
from flwr_moshpit.trainer import Cost
from flwr_moshpit.user_code import Call, pinned, user_code
from flwr_moshpit.vector import Layout


@dataclass(slots=True)
class _Client:
    """What a client keeps between two calls."""

    place: Place
    kept: dict[str, Tensor]
    num_steps: int = 0
    optimizer_state: dict[Any, Any] = field(default_factory=lambda: defaultdict(dict))


class TorchTrainer:
    """A `Trainer` of torch models.

    Parameters
    ----------
    make_model : () -> nn.Module
        Makes the model; called under the seed of the common initial model.
    make_loader : (partition, num_partitions) -> batches
        The training data of one client, something that can be iterated again and again, such as a
        `DataLoader` or a list of batches (x, y). Called once per client and process. A client's
        place in it persists; batches that are drawn with torch's global generator are pinned.
    lr : float
        Learning rate, of the default optimizer and as what R-FAST starts from.
    loss : (model(x), y) -> Tensor
        Mean loss of a batch; default cross-entropy.
    optimizer : (parameters) -> Optimizer
        Default SGD with `lr`, `momentum` and `weight_decay`. Its state stays with the client and is
        not averaged.
    exclude : patterns of names
        Parameters and buffers that each client keeps for itself, as in `Layout.of`. All clients
        begin with the same values of them.
    make_test_loader : () -> batches
        Test data of the whole task, on which every client is evaluated too.
    evaluate : (model, client or None) -> metrics
        Instead of loss and accuracy on `make_test_loader`: any numbers by name, and the number of
        examples as "num_examples". The model is in evaluation mode.
    device : str
        Where the model lives.

    It can be pickled, for worker processes, if the functions that it was given can; what clients
    keep is left behind.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_loader: Callable[[int, int], Batches],
        lr: float = 0.05,
        loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        exclude: Iterable[str] = (),
        make_test_loader: Callable[[], Batches] | None = None,
        evaluate: Callable[[nn.Module, int | None], Mapping[str, float]] | None = None,
        device: str = "cpu",
    ) -> None:
        if not lr > 0:
            raise ConfigError(f"lr must be above 0, not {lr}")
        if optimizer is not None and (momentum or weight_decay):
            raise ConfigError(
                "momentum and weight_decay belong to the default optimizer: set them "
                "in your own `optimizer`"
            )
        self.learning_rate = lr
        self._make_model = make_model
        self._make_loader = make_loader
        self._loss = loss
        self._make_optimizer = optimizer
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        self._make_test_loader = make_test_loader
        self._evaluate = evaluate
        self._device = torch.device(device)
        self._num_clients = 0
        self._dtype: str | None = None
        self._forget()

    def _forget(self) -> None:
        """Back to what was given: no model, no clients."""
        self._model: FlatModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._clients: dict[int, _Client] = {}
        self._test_batches: Batches | None = None
        self._cost: Cost | None = None

    def __getstate__(self) -> dict[str, Any]:
        live = ("_model", "_optimizer", "_clients", "_test_batches")
        return {name: value for name, value in self.__dict__.items() if name not in live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

    @property
    def layout(self) -> Layout:
        return self._flat_model().layout

    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        """Start anew with `num_clients` clients; "float64" makes the model and its inputs so."""
        if num_clients < 1:
            raise ConfigError(f"there must be at least 1 client, not {num_clients}")
        self._num_clients = num_clients
        self._dtype = dtype
        self._forget()

    def initial_params(self, seed: int) -> Vector:
        with user_code(Call(None), seed):
            return self.layout.flatten(model_arrays(self._new_model()))

    def cost(self) -> Cost:
        """FLOPs counted by torch on a forward and backward pass of one batch of client 0.

        Memory is parameters, gradients, optimizer state and what autograd saves for that batch.
        """
        if self._cost is None:
            with user_code(Call(0), seed=0):
                batch = next(iter(self._new_loader(0)), None)
                if batch is None:
                    raise self._no_batches(0)
                x, y = self._on_device(batch)
                self._cost = model_cost(
                    self._new_model().to(self._device), x, y, self._loss, self._new_optimizer
                )
        return self._cost

    def examples(self, client: int, num_steps: int) -> int | None:
        """Exact for lists of batches and for `DataLoader`s with a batch size; else None."""
        return self._client(client).place.examples_ahead(num_steps)

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        """Metrics: "loss", the mean training loss of the examples."""
        call = Call(client)
        with user_code(call, seed):
            model, optimizer, state = self._load(client, params)
            losses, num_examples = torch.zeros((), device=self._device), 0
            for _ in range(num_steps):
                call.step = state.num_steps + 1
                loss, size = self._backward(model, client)
                optimizer.step()
                state.num_steps += 1
                losses += loss.detach() * size
                num_examples += size
            metrics = {"loss": float(losses) / num_examples} if num_examples else {}
            model.save_kept(state.kept)
            return Trained(model.params(), num_examples, metrics)

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        """Averaged buffers (BatchNorm's running mean) have a gradient too: the one whose step at
        `learning_rate` makes the change that the batch made to them."""
        zero = np.zeros(params.shape, params.dtype)
        return self.corrected_steps(client, params, zero, 1, self.learning_rate, seed)

    def corrected_steps(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> GradientResult:
        """Plain gradient steps: the optimizer and its state have no part in them."""
        call = Call(client)
        with user_code(call, seed):
            model, _, state = self._load(client, params)
            shift = model.tensor(correction)
            total = torch.zeros_like(shift)
            losses, num_examples = torch.zeros((), device=self._device), 0
            for _ in range(num_steps):
                call.step = state.num_steps + 1
                loss, size = self._backward(model, client)
                gradient = model.gradient(self.learning_rate)
                total += gradient
                model.step(gradient.add_(shift), learning_rate)
                state.num_steps += 1
                losses += loss.detach() * size
                num_examples += size
            metrics = {"loss": float(losses) / num_examples} if num_examples else {}
            model.save_kept(state.kept)
            mean = (total / max(1, num_steps)).cpu().numpy()
            mean.flags.writeable = False
            return GradientResult(mean, num_examples, metrics)

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        """Metrics: "loss", and "accuracy" where the model gives one score per class."""
        with user_code(Call(client), seed=0), torch.no_grad():
            model = self._flat_model()
            model.load(params, model.kept if client is None else self._client(client).kept)
            model.module.eval()
            if self._evaluate is not None:
                metrics = dict(self._evaluate(model.module, client))
                return Evaluated(int(metrics.pop("num_examples", 1)), metrics)
            if self._make_test_loader is None:
                return Evaluated(0)
            if self._test_batches is None:
                self._test_batches = self._make_test_loader()
            return self._on_test_data(model.module, self._test_batches)

    def _on_test_data(self, module: nn.Module, batches: Batches) -> Evaluated:
        losses, correct, num_examples = 0.0, 0, 0
        classified = True
        for batch in batches:
            x, y = self._on_device(batch)
            scores, size = module(x), len(y)
            losses += float(self._loss(scores, y)) * size
            num_examples += size
            classified = classified and are_classes(scores, y)
            if classified:
                correct += int((scores.argmax(1) == y).sum())
        if num_examples == 0:
            raise ConfigError("make_test_loader() gives no batches")
        metrics = {"loss": losses / num_examples}
        if classified:
            metrics["accuracy"] = correct / num_examples
        return Evaluated(num_examples, metrics)

    def _load(
        self, client: int, params: Vector
    ) -> tuple[FlatModel, torch.optim.Optimizer, _Client]:
        """The one model and optimizer, as `client` left them, at `params`."""
        state = self._client(client)
        model = self._flat_model()
        if self._optimizer is None:
            self._optimizer = self._new_optimizer(model.module.parameters())
        # The parameters stay the same objects, so each client's state fits as it is.
        self._optimizer.state = state.optimizer_state  # type: ignore[assignment]
        model.load(params, state.kept)
        model.module.train()
        return model, self._optimizer, state

    def _backward(self, model: FlatModel, client: int) -> tuple[Tensor, int]:
        """Gradients of the client's next batch; its loss and number of examples."""
        batch = self._clients[client].place.next()
        if batch is None:
            raise self._no_batches(client)
        x, y = self._on_device(batch)
        model.module.zero_grad(set_to_none=True)
        loss = self._loss(model.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss, len(y)

    def _no_batches(self, client: int) -> ConfigError:
        return ConfigError(
            f"make_loader({client}, {self._num_clients}) gives no batches: it must return what is "
            "not empty and can be iterated again, such as a DataLoader"
        )

    def _client(self, client: int) -> _Client:
        if client not in self._clients:
            kept = {name: value.clone() for name, value in self._flat_model().kept.items()}
            with user_code(Call(client), seed=client):
                self._clients[client] = _Client(Place(self._new_loader(client)), kept)
        return self._clients[client]

    def _new_loader(self, client: int) -> Batches:
        if not 0 <= client < self._num_clients:
            raise ConfigError(
                f"client {client} is not one of the {self._num_clients} that `prepare` was told of"
            )
        return self._make_loader(client, self._num_clients)

    def _flat_model(self) -> FlatModel:
        if self._model is None:
            # One seed for every process: what clients keep for themselves begins equal everywhere.
            with pinned(0):
                module = self._new_model()
            layout = Layout.of(model_arrays(module), exclude=self._exclude, dtype=self._dtype)
            self._model = FlatModel(module.to(self._device), layout)
        return self._model

    def _new_model(self) -> nn.Module:
        module = self._make_model()
        return module.double() if self._dtype == "float64" else module

    def _new_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self._make_optimizer is not None:
            return self._make_optimizer(parameters)
        return torch.optim.SGD(
            parameters,
            lr=self.learning_rate,
            momentum=self._momentum,
            weight_decay=self._weight_decay,
        )

    def _on_device(self, data: Any) -> Any:
        return moved(data, self._device, self._dtype == "float64")
