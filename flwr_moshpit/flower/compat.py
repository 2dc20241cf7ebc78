"""Everything that is private in flwr 1.42: when Flower changes, this is the file to look at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity


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
