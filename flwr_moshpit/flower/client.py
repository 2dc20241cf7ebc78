"""`FlowerTrainer`: an unmodified Flower ClientApp, called in process as Flower's engine would."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.actions import is_serverless
from flwr_moshpit.flower.app import App, RunConfig
from flwr_moshpit.flower.calls import InProcessApp, Meter, new_meter
from flwr_moshpit.flower.clients import Clients
from flwr_moshpit.flower.initial import InitialModel
from flwr_moshpit.flower.messages import array_record, common_names, mean_of
from flwr_moshpit.flower.requests import (
    Carrier,
    Epochs,
    Talk,
    gradient_of,
    hold,
)
from flwr_moshpit.protocol.machine import (
    CorrectedSteps,
    Evaluate,
    Evaluated,
    Gradient,
    GradientResult,
    Job,
    LocalSteps,
    Result,
    Trained,
    Vector,
)
from flwr_moshpit.trainer import Cost
from flwr_moshpit.user_code import Call, user_code
from flwr_moshpit.vector import Layout

EvaluateFn = Callable[[int, ArrayRecord], Any]
"""As for Flower's `strategy.start(evaluate_fn=...)`: (server_round, arrays) -> MetricRecord."""

_CLIENTS_EVALUATED = 10


class FlowerTrainer:
    """A `Trainer` that calls a ClientApp's `@app.train` and `@app.evaluate` functions.

    Each client has a `Context` of its own that persists, with `partition-id` and `num-partitions`
    in its `node_config`. `local-steps` and `server-round` (the client's own count of calls) travel
    in `msg.content["config"]`, beside the run config and what the app's server would send. An app
    that does not look at `local-steps` keeps its own number of epochs and gets one warning.

    Parameters
    ----------
    app : ClientApp, App or str
        A ClientApp, or an app in a folder as `load_app` gives it or finds it. A ClientApp that was
        imported from an app's folder, where `pyproject.toml` names it, stands for that app. One
        without a folder cannot travel to worker processes.
    run_config : mapping, optional
        `context.run_config`, over the app's own `[tool.flwr.app.config]`. These keys, all of them
        optional, are ours:

        initial-model = "module:callable"
            See `initial`.
        evaluate-fn = "module:callable"
            See `evaluate`.
        exclude = "*.bn.* head.*"
            See `exclude`.
        examples-per-step = 16
            Examples in every local step, where that is certain. Training then need not be waited
            for to know how long it takes in virtual time; it is checked against `num-examples`.
        flops-per-example = 1.2e6
            Forward and backward, for the virtual clock. Otherwise counted by torch in a call of
            one step, and without torch 6 per parameter.
        lr = 0.05 (or learning-rate)
            The learning rate of `@app.train`.
    initial : callable, optional
        () or (run_config) -> a torch module, a state_dict, an ArrayRecord, or arrays by name or in
        a list. Without it: `initial-model`, then `@app.query("initial")`, then what the app's own
        ServerApp first sends; see `flower.initial.find_initial`.
    evaluate : callable, optional
        (server_round, arrays: ArrayRecord) -> MetricRecord, on the test data of the whole task, as
        one gives it to Flower's `strategy.start(evaluate_fn=...)`. Without it the mean of
        `@app.evaluate` over up to 10 clients takes its place.
    exclude : patterns of names
        Arrays that each client keeps for itself, as in `Layout.of`.
    node_config : mapping, optional
        `context.node_config` of the one client that trains on a device, over `partition-id` and
        `num-partitions`.

    R-FAST needs gradients: a reply of `@app.train("gradient")` holds under "arrays" the mean
    gradient over one batch at the given parameters (arrays without one may be missing) and
    `num-examples`. An app without it that takes `local-steps` and plain SGD steps of a known `lr`
    serves as well: the gradient is then the change that one step makes, divided by -lr.
    """

    def __init__(
        self,
        app: ClientApp | App | str | Path,
        run_config: RunConfig | None = None,
        *,
        initial: InitialModel | None = None,
        evaluate: EvaluateFn | None = None,
        exclude: Iterable[str] = (),
        node_config: RunConfig | None = None,
    ) -> None:
        self._calls = InProcessApp(app, run_config or {}, node_config)
        self._carrier: Carrier = self._calls
        self._run_config = self._calls.run_config
        self._evaluate_fn = evaluate
        given = [exclude] if isinstance(exclude, str) else list(exclude)
        listed = str(self._run_config.get("exclude", "")).replace(",", " ").split()
        self._clients = Clients(self._calls, initial, [*given, *listed])
        self._cost: Cost | None = None
        self._warned: dict[str, None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_carrier": self._calls}

    def carry_by(self, carrier: Carrier) -> None:
        """Let `carrier` bring requests to the clients, which are elsewhere.

        The initial model, its cost and `evaluate` on the whole task's data stay in this process.
        """
        self._carrier = carrier

    def check_serverless(self) -> None:
        """Raises ConfigError unless the app's clients can be reached by messages of ours."""
        if not is_serverless(self._calls.client_app()):
            raise ConfigError(
                "the ClientApp is not serverless: add `from flwr_moshpit.flower import serverless` "
                "and, at the end of the module that makes it, `serverless(app)`"
            )

    @property
    def learning_rate(self) -> float | None:
        """Of `@app.train`, where `lr` or `learning-rate` tells."""
        return self._clients.learning_rate

    @property
    def takes_steps(self) -> bool:
        """Whether clients train for as many local steps as they are told; known after `cost()`."""
        return self._clients.reads_steps

    @property
    def layout(self) -> Layout:
        return self._clients.layout

    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        """Start anew with `num_clients` clients. `dtype` is the vector's; the app gets its own."""
        if num_clients < 1:
            raise ConfigError(f"there must be at least 1 client, not {num_clients}")
        self._clients.prepare(num_clients, dtype)
        self._cost = None

    def initial_params(self, seed: int) -> Vector:
        return self.layout.flatten(self._clients.initial_arrays(seed))

    def cost(self) -> Cost:
        """As the config says or as a call of `@app.train` with one step on client 0 was seen.

        Memory is three times the parameters (with gradients and optimizer state) and, with torch,
        what autograd saves. The call leaves no trace in the client's context.
        """
        if self._cost is None:
            flops = self._run_config.get("flops-per-example")
            size = self._run_config.get("examples-per-step")
            num_examples, meter = self._probe(1)
            flops = flops or meter.flops / max(1, num_examples)
            if self._clients.reads_steps and size is None and self._probe(2)[0] == num_examples:
                self._warn(
                    "the app reports the same num-examples for 1 and 2 local steps: weights and "
                    "virtual time go by it, so it should count the examples gone over"
                )
            self._cost = Cost(
                flops_per_example=float(flops or 6 * self.layout.dim),
                examples_per_step=int(size or max(1, num_examples)),
                memory_bytes=3 * self.layout.dim * self.layout.dtype.itemsize + meter.saved_bytes,
            )
        return self._cost

    def examples(self, client: int, num_steps: int) -> int | None:
        """Known if the config has `examples-per-step`."""
        size = self._run_config.get("examples-per-step")
        return None if size is None else num_steps * int(size)

    def talk(self, client: int, job: Job, seed: int) -> Talk[Result]:
        """What it takes to answer `job`, for who carries requests of several jobs at a time.

        `LocalSteps` have their `num_steps`. At most one talk of a client at a time.
        """
        match job:
            case LocalSteps(params, num_steps):
                assert num_steps is not None
                return self._training(client, params, num_steps, seed)
            case Gradient(params):
                return self._gradient(client, params, seed)
            case CorrectedSteps(params, correction, num_steps, learning_rate):
                return self._epochs(client, params, correction, num_steps, learning_rate, seed)
            case Evaluate(params):
                return self._evaluation([client], params)

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        return hold(self._training(client, params, num_steps, seed), self._carrier)

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        return hold(self._gradient(client, params, seed), self._carrier)

    def corrected_steps(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> GradientResult:
        """`num_steps` calls of `gradient`, since an app's own steps cannot be corrected."""
        talk = self._epochs(client, params, correction, num_steps, learning_rate, seed)
        return hold(talk, self._carrier)

    def _training(self, client: int, params: Vector, num_steps: int, seed: int) -> Talk[Trained]:
        if num_steps == 0:
            return Trained(params, 0)
        state = self._clients[client]
        reply = yield from self._clients.ask("train", client, params, seed, num_steps)
        named = {**state.kept, **reply.arrays(self.layout)}
        trained = Trained(self.layout.flatten(named), reply.num_examples(), reply.metrics())
        state.kept = self.layout.kept(named)
        state.num_steps += num_steps
        expected = self.examples(client, num_steps)
        if expected is not None and trained.num_examples != expected:
            raise ConfigError(
                f"examples-per-step says {expected} examples in {num_steps} steps, but client "
                f"{client} reports num-examples = {trained.num_examples}: correct or remove the key"
            )
        if not self._clients.reads_steps:
            self._warn(
                "the app does not look at local-steps in the message's config: its clients train "
                "for their own number of epochs"
            )
        return trained

    def _gradient(self, client: int, params: Vector, seed: int) -> Talk[GradientResult]:
        action, step_size = self._gradient_action()
        state = self._clients[client]
        reply = yield from self._clients.ask(action, client, params, seed, 1)
        self._check_step(step_size)
        gradient, state.kept = gradient_of(reply, self.layout, params, state.kept, step_size)
        state.num_steps += 1
        return GradientResult(gradient, reply.num_examples(), reply.metrics())

    def _epochs(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> Talk[GradientResult]:
        action, step_size = self._gradient_action()
        state, layout = self._clients[client], self.layout
        epochs = Epochs(layout, params, correction, num_steps, learning_rate, state.kept, step_size)
        reply = yield from self._clients.ask(action, client, params, seed, 1, epochs=epochs)
        self._check_step(step_size)
        state.kept = reply.kept(layout)
        state.num_steps += num_steps
        # Each step counts as a call of the app, of which `_ask` has counted one.
        state.num_calls += num_steps - 1
        return GradientResult(reply.vector("gradient"), reply.num_examples(), reply.metrics())

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        """Clients' contexts stay as they were: looking more often changes nothing."""
        if client is not None:
            return self._evaluate_on([client], params)
        function = self._evaluate_fn
        ref = self._run_config.get("evaluate-fn")
        if function is None and ref is not None:
            function = self._calls.load(str(ref), "evaluate-fn", "evaluate=")
        if function is None:
            count = min(self._clients.count, _CLIENTS_EVALUATED)
            some = [index * self._clients.count // count for index in range(count)]
            return self._evaluate_on(some, params)
        kept = self.layout.kept(self._clients.first())
        with user_code(Call(None), seed=0):
            found = function(0, array_record(self.layout.unflatten(params, kept)))
        metrics = dict(found or {})
        return Evaluated(int(metrics.get("num-examples", 1)), common_names(metrics.items()))

    def _evaluate_on(self, clients: Sequence[int], params: Vector) -> Evaluated:
        self._carrier.settle(clients)
        return hold(self._evaluation(clients, params), self._carrier)

    def _evaluation(self, clients: Sequence[int], params: Vector) -> Talk[Evaluated]:
        """The mean over `clients`, who are asked at the same time."""
        if not self._calls.has("evaluate"):
            return Evaluated(0)
        replies = yield [
            self._clients.request("evaluate", client, params, 0, None, keeps=False)
            for client in clients
        ]
        return mean_of([Evaluated(reply.num_examples(), reply.metrics()) for reply in replies])

    def _gradient_action(self) -> tuple[str, float | None]:
        """(message type, step size of the steps that take the place of gradients)."""
        if self._calls.has("train", "gradient"):
            return "train.gradient", None
        if self.learning_rate is None:
            self._check_step(math.nan)
        return "train", self.learning_rate

    def _check_step(self, step_size: float | None) -> None:
        if step_size is None or (math.isfinite(step_size) and self._clients.reads_steps):
            return
        raise ConfigError(
            'the app gives no gradients: register @app.train("gradient"), or let @app.train take '
            'msg.content["config"]["local-steps"] steps of plain SGD with the learning rate `lr` '
            "of the run config"
        )

    def _probe(self, num_steps: int) -> tuple[int, Meter]:
        """Train on client 0 in a context that is thrown away."""
        params = self.layout.flatten(self._clients.first())
        self._calls.client_app()  # whose modules import torch, or do not
        meter = new_meter()
        request = self._clients.request("train", 0, params, 0, num_steps, keeps=False)
        with meter:
            [reply] = self._calls.exchange([request])
        self._clients.reads_steps = reply.steps_were_read
        return reply.num_examples(), meter

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned[what] = None
            warnings.warn(what, stacklevel=3)
