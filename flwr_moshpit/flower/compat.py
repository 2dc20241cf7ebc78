"""Everything that is private in flwr 1.42: when Flower changes, this is the file to look at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

CLIENT_APP_RAISED = 2
"""Flower's code of the error that a ClientApp raised an exception."""
NOBODY_ANSWERED = (3, 4, 5)
"""Flower's codes for a message or reply that is gone, and for a SuperNode that is."""

_SCALARS = (bool, int, float, str, bytes)

Call: TypeAlias = Callable[[Message, Context], Message]
Mod: TypeAlias = Callable[[Message, Context, Call], Message]


def ensure_identity() -> None:
    """Let `Message(...)` be made outside of a process that Flower has started."""
    if TaskIdentity._run_id is None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def has_action(app: ClientApp, category: str, action: str = "default") -> bool:
    """Whether `app` has a function registered by `@app.CATEGORY(ACTION)`."""
    return f"{category}.{action}" in app._registered_funcs


def has_client_fn(app: ClientApp) -> bool:
    """Whether `app` is of the deprecated kind `ClientApp(client_fn=...)`."""
    return app._call is not None


def wrap_actions(app: ClientApp, mod: Mod) -> None:
    """Put `mod` around every function of `app`, those registered later too.

    Flower's `ClientApp(mods=...)` does so for who makes the app; here it is made already.
    """

    def around(call: Call) -> Call:
        return lambda message, context: mod(message, context, call)

    for name, call in app._registered_funcs.items():
        app._registered_funcs[name] = around(call)
    app._mods = [mod, *app._mods]


def register(app: ClientApp, category: str, action: str, function: Call) -> None:
    """As `@app.CATEGORY(ACTION)`, but none of the app's mods sees these messages.

    Some, such as `LocalDpMod`, refuse every message that does not carry a model.
    """
    app._registered_funcs[f"{category}.{action}"] = function


def fill(record: ConfigRecord, values: Mapping[str, Any]) -> None:
    """`record.update(values)`. Flower checks each value in a way that takes longer, for a config of
    twenty keys, than calling a small app does; a scalar's type is seen at once."""
    data = record.__dict__.get("_data")
    for key, value in values.items():
        if data is not None and type(key) is str and type(value) in _SCALARS:
            data[key] = value
        else:
            record[key] = value


def is_simulated(grid: Grid) -> bool:
    """Whether the SuperNodes of `grid` are virtual: they are not, where messages go over HTTP."""
    return type(grid).__name__ != "HttpGrid"


def log() -> logging.Logger:
    """Flower's: what it is told is shown by `flwr run --stream` and `flwr log`."""
    return logging.getLogger("flwr")


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Without Flower's log of rounds, but with its warnings."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
