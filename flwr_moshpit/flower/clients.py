"""The clients of one app as their trainer sees them: what each keeps between two calls, and the
requests that it is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.calls import InProcessApp
from flwr_moshpit.flower.initial import InitialModel, find_initial
from flwr_moshpit.flower.messages import Reply, array_record
from flwr_moshpit.flower.requests import Epochs, Request, Talk
from flwr_moshpit.protocol.machine import Vector
from flwr_moshpit.user_code import Call, user_code
from flwr_moshpit.vector import Layout


@dataclass(slots=True)
class Client:
    """What a client keeps between two calls."""

    kept: dict[str, Any]
    """The arrays outside the vector."""
    num_calls: int = 0
    num_steps: int = 0


class Clients:
    """Every client of `app`, none of whom has been called yet."""

    def __init__(
        self, app: InProcessApp, initial: InitialModel | None, exclude: Iterable[str]
    ) -> None:
        self.app = app
        self.count = 0
        self.reads_steps = True
        """Whether the app looked at local-steps when it last trained."""
        self._initial = initial
        self._exclude = list(exclude)
        self._dtype: str | None = None
        self._found: dict[str, Any] | None = None
        self._train_config: Mapping[str, Any] = {}
        self._layout: Layout | None = None
        self._clients: dict[int, Client] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    def prepare(self, count: int, dtype: str | None) -> None:
        """From now there are so many, and none of them remembers anything."""
        self.count = count
        self.app.prepare(count)
        self._dtype = dtype
        self._clients = {}
        self._layout = None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            layout = Layout.of(self.first(), exclude=self._exclude)
            self._layout = layout.with_dtype(self._dtype)
        return self._layout

    @property
    def learning_rate(self) -> float | None:
        """Of `@app.train`, where `lr` or `learning-rate` tells."""
        config = {**self._train_config, **self.app.run_config}
        rate = config.get("lr", config.get("learning-rate"))
        return None if rate is None else float(rate)

    def __getitem__(self, client: int) -> Client:
        """Raises ConfigError for a client that there is not."""
        if client not in self._clients:
            if not 0 <= client < self.count:
                raise ConfigError(
                    f"client {client} is not one of the {self.count} that `prepare` was told of"
                )
            self._clients[client] = Client(self.layout.kept(self.first()))
        return self._clients[client]

    def first(self) -> dict[str, Any]:
        """The initial arrays under seed 0: their names, and what clients keep at first."""
        if self._found is None:
            self._found = self.initial_arrays(0)
        return self._found

    def initial_arrays(self, seed: int) -> dict[str, Any]:
        """The initial model by name. Raises ConfigError where there is none."""
        self.app.client_app()  # which says first what is wrong with the app
        with user_code(Call(None), seed):
            found = find_initial(self.app, self._initial, max(1, self.count))
        self._train_config = found.train_config
        layout = Layout.of(found.arrays)
        for spec in layout.averaged:
            if spec.dtype == "bfloat16":
                raise ConfigError(
                    f"array {spec.name!r} is of bfloat16, which Flower's messages cannot carry: "
                    "give it as float32"
                )
        return layout.unflatten(layout.flatten(found.arrays), layout.kept(found.arrays))

    def ask(
        self,
        message_type: str,
        client: int,
        params: Vector,
        seed: int,
        num_steps: int,
        epochs: Epochs | None = None,
    ) -> Talk[Reply]:
        """What one call comes to, which counts as one of this client's."""
        request = self.request(message_type, client, params, seed, num_steps, epochs=epochs)
        try:
            [reply] = yield [request]
        except GeneratorExit:
            # The job was cancelled before its time: this call has never been.
            self[client].num_calls -= 1
            raise
        if message_type == "train":
            self.reads_steps = reply.steps_were_read
        return reply

    def request(
        self,
        message_type: str,
        client: int,
        params: Vector,
        seed: int,
        num_steps: int | None,
        *,
        keeps: bool = True,
        epochs: Epochs | None = None,
    ) -> Request:
        """For a call of `client`; `keeps`: what the app stores in its context is there later."""
        state = self[client]
        state.num_calls += keeps
        config = {**self.app.run_config, **self._train_config}
        if num_steps is not None:
            config["local-steps"] = num_steps
        config["server-round"] = max(1, state.num_calls)
        arrays = ArrayRecord()
        if epochs is None:
            arrays = array_record(self.layout.unflatten(params, state.kept))
        step = None if num_steps is None else state.num_steps + 1
        return Request(message_type, client, config, arrays, seed, step, keeps, epochs)
