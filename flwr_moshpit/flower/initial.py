"""Where a Flower app's initial model comes from: it belongs to no client, so Flower's client code
does not tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import RunConfig
from flwr_moshpit.flower.bootstrap import BootstrapApp
from flwr_moshpit.flower.calls import InProcessApp
from flwr_moshpit.flower.compat import quiet_flower
from flwr_moshpit.vector import NamedArrays

InitialModel = Callable[..., Any]
"""() or (run_config) -> a torch module, a state_dict, an ArrayRecord, a dict or list of arrays."""


@dataclass(frozen=True, slots=True)
class Initial:
    arrays: NamedArrays
    train_config: Mapping[str, Any] = field(default_factory=dict)
    """What the app's own server would send along, such as a learning rate."""


def find_initial(
    app: InProcessApp, initial: InitialModel | None = None, num_clients: int = 1
) -> Initial:
    """The initial model, from the first of these that there is:

    1. `initial`, a callable;
    2. the run config's `initial-model = "module:callable"`, the same written down;
    3. the ClientApp's `@app.query("initial")`: a reply with an ArrayRecord;
    4. the app's own ServerApp: it runs until it sends the first message with arrays, which nobody
       gets. So an app that trains on Flower needs nothing of the above.

    Raises ConfigError if there is none of them.
    """
    ref = app.run_config.get("initial-model")
    if initial is None and ref is not None:
        initial = app.load(str(ref), "initial-model", "initial=")
    if initial is not None:
        return Initial(as_arrays(call_with_config(initial, app.run_config)))
    context = app.context(0)
    if app.has("query", "initial"):
        query = Message(RecordDict(), context.node_id, "query.initial")
        for record in app.client_app()(query, context).content.array_records.values():
            return Initial(record)
        raise ConfigError('the reply of @app.query("initial") holds no ArrayRecord')
    server_app = app.server_app()
    if isinstance(server_app, BootstrapApp):
        # It would ask us in turn.
        server_app = None
    found = _overhear(server_app, app.run_config, num_clients) if server_app else None
    if found is not None:
        return found
    if not app.has_folder:
        raise ConfigError(
            "the ClientApp does not tell its initial model, and no app's pyproject.toml names it: "
            "give FlowerTrainer(app, initial=..., run_config=...), where initial() returns a torch "
            "model, arrays by name or a list of them"
        )
    raise ConfigError(
        "the app does not tell its initial model: set initial-model = "
        '"module:callable" in [tool.flwr.app.config], where the callable returns a torch model, '
        'arrays by name or a list of them, or register @app.query("initial")'
    )


def call_with_config(function: Callable[..., Any], run_config: RunConfig) -> Any:
    """`function()`, or `function(run_config)` if it cannot be called without an argument."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return function(dict(run_config))
    return function()


def as_arrays(model: Any) -> NamedArrays:
    """The arrays of whatever a user calls a model."""
    arrays = model.state_dict() if hasattr(model, "state_dict") else model
    if isinstance(arrays, Mapping):
        return {name: value for name, value in arrays.items() if hasattr(value, "shape")}
    if isinstance(arrays, Sequence) and not isinstance(arrays, str):
        return arrays
    raise ConfigError(
        "an initial model must be a torch module, arrays by name or a list of them, "
        f"not {type(model).__name__}"
    )


class _Overheard(BaseException):
    """Ends the ServerApp; not an Exception, so that no handler of the app's own keeps it going."""

    def __init__(self, initial: Initial) -> None:
        super().__init__()
        self.initial = initial


class _ListeningGrid(Grid):
    """Claims to have nodes, and ends the ServerApp at its first message with arrays."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self._num_nodes + 1)

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        kinds = []
        for message in messages:
            kinds.append(message.metadata.message_type)
            for arrays in message.content.array_records.values():
                config: dict[str, Any] = {}
                for record in message.content.config_records.values():
                    config.update(record)
                raise _Overheard(Initial(ArrayRecord(dict(arrays)), config))
        raise ConfigError(
            f"the ServerApp does not begin with a model but with a {', '.join(kinds[:1])} message: "
            "set initial-model in [tool.flwr.app.config]"
        )

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> NoReturn:
        self.push_messages(messages)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        raise ConfigError("the ServerApp waits for replies before it has sent a model")

    def set_run(self, run: Any) -> None:
        """There is none."""

    @property
    def run(self) -> NoReturn:
        raise ConfigError("the ServerApp asks for Flower's run: set initial-model in the config")


def _overhear(server_app: ServerApp, run_config: RunConfig, num_clients: int) -> Initial | None:
    # A ServerApp waits until enough nodes are there, however few clients take part here.
    grid = _ListeningGrid(max(num_clients, 1000))
    context = Context(1, 1, {}, RecordDict(), dict(run_config))
    try:
        with quiet_flower():
            server_app(grid=grid, context=context)
    except _Overheard as overheard:
        return overheard.initial
    return None
