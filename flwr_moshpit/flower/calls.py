"""A ClientApp in this process: found, checked, and called as Flower's engine would call it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import App, RunConfig, app_of, load_app
from flwr_moshpit.flower.compat import ensure_identity, has_action, has_client_fn
from flwr_moshpit.flower.messages import Reply
from flwr_moshpit.flower.requests import Request, perform

_RUN_ID = 1


class InProcessApp:
    """A ClientApp, or an app in a folder. It can be pickled if there is a folder, which is also
    found for a ClientApp that an app's `pyproject.toml` names."""

    def __init__(
        self,
        app: ClientApp | App | str | Path,
        run_config: RunConfig,
        node_config: RunConfig | None = None,
    ) -> None:
        self._client_app: ClientApp | None = None
        self._app: App | None = None
        if isinstance(app, ClientApp):
            self._client_app, self._app = app, app_of(app)
        else:
            self._app = app if isinstance(app, App) else load_app(app)
        own: Mapping[str, Any] = self._app.config if self._app is not None else {}
        self.run_config: dict[str, Any] = {**own, **run_config}
        """`context.run_config` of every client."""
        self._node_config = dict(node_config or {})
        self.num_clients = 0
        self._contexts: dict[int, Context] = {}

    def __getstate__(self) -> dict[str, Any]:
        if self._app is None:
            raise ConfigError(
                "this ClientApp cannot travel to worker processes: use workers = 0, or give the "
                "path of its app's folder instead"
            )
        return {**self.__dict__, "_client_app": None, "_contexts": {}}

    def client_app(self) -> ClientApp:
        """The ClientApp, with its app's modules in place.

        Raises ConfigError if there is none or it cannot train.
        """
        ensure_identity()
        if self._app is not None:
            self._app.activate()
        if self._client_app is None:
            assert self._app is not None
            found = self._app.load(self._app.client_ref)
            if not isinstance(found, ClientApp):
                raise ConfigError(f"{self._app.client_ref!r} is no ClientApp but {found!r}")
            self._client_app = found
        if has_client_fn(self._client_app):
            raise ConfigError(
                "the ClientApp is made of a client_fn, which Flower has deprecated: register a "
                "function with @app.train() instead"
            )
        if not has_action(self._client_app, "train"):
            raise ConfigError("the ClientApp has no train function: register one with @app.train()")
        return self._client_app

    def server_app(self) -> ServerApp | None:
        """The app's ServerApp, if it has one."""
        if self._app is None or self._app.server_ref is None:
            return None
        found = self._app.load(self._app.server_ref)
        return found if isinstance(found, ServerApp) else None

    def has(self, category: str, action: str = "default") -> bool:
        return has_action(self.client_app(), category, action)

    def load(self, ref: str, key: str, instead: str) -> Any:
        """What `ref`, the value of the setting `key`, means in the app's folder."""
        if self._app is None:
            raise ConfigError(f"{key} = {ref!r} needs an app in a folder: give `{instead}`")
        return self._app.load(ref)

    @property
    def has_folder(self) -> bool:
        """Whether there is a `pyproject.toml` to read settings from."""
        return self._app is not None

    def prepare(self, num_clients: int) -> None:
        """From now there are so many, and none of them remembers anything."""
        self.num_clients = num_clients
        self._contexts = {}

    def context(self, client: int) -> Context:
        """A new one, with nothing in its state."""
        node_config: dict[str, Any] = {
            "partition-id": client,
            "num-partitions": max(1, self.num_clients),
            **self._node_config,
        }
        return Context(_RUN_ID, client + 1, node_config, RecordDict(), dict(self.run_config))

    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        """See `Carrier`. Each client has a context of its own that persists."""
        return [self._answer(request) for request in requests]

    def settle(self, clients: Sequence[int]) -> None:
        """See `Carrier`. Here everything is done at once."""

    def _answer(self, request: Request) -> Reply:
        app = self.client_app()
        client = request.client
        if client not in self._contexts:
            self._contexts[client] = self.context(client)

        def call(content: RecordDict, context: Context) -> object:
            return app(Message(content, context.node_id, request.message_type), context)

        return perform(request, call, self._contexts[client])


class Meter(Protocol):
    """Counts what happens in a `with` block."""

    @property
    def flops(self) -> int: ...

    @property
    def saved_bytes(self) -> int: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> None: ...


class _NoMeter:
    flops = 0
    saved_bytes = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


def new_meter() -> Meter:
    """One of torch's operations if the app has imported torch, else one that counts nothing."""
    if "torch" not in sys.modules:
        return _NoMeter()
    from flwr_moshpit import torch_model

    return torch_model.Meter()
