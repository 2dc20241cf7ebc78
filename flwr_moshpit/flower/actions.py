"""`serverless(app)`: the second of the two lines that an existing ClientApp needs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.app import app_folder
from flwr_moshpit.flower.compat import (
    CLIENT_APP_RAISED,
    has_action,
    has_client_fn,
    register,
    wrap_actions,
)
from flwr_moshpit.flower.memory import Memory
from flwr_moshpit.flower.orders import from_message, to_reply, undoes
from flwr_moshpit.flower.peer_actions import add_peer_actions
from flwr_moshpit.flower.requests import perform
from flwr_moshpit.user_code import one_torch_thread

PARTITION = "partition"
"""The query by which a ServerApp learns whose data a simulated SuperNode has."""


def serverless(app: ClientApp) -> ClientApp:
    """Let the clients of `app` train and average among themselves; returns `app` itself.

    `@app.train` and `@app.evaluate` stay as they are, and so does what any other ServerApp's
    messages do. Added are the `@app.query` actions by which `bootstrap_app` speaks to a client, and
    on a device to its peer; for those it must be called in a module of the app's folder. Harmless
    twice. Raises ConfigError for an app of the deprecated kind `ClientApp(client_fn=...)`.
    """
    if has_client_fn(app):
        raise ConfigError(
            "the ClientApp is made of a client_fn, which Flower has deprecated: register a "
            "function with @app.train() instead"
        )
    if is_serverless(app):
        return app
    wrap_actions(app, _under_orders)
    file = sys._getframe(1).f_globals.get("__file__")
    folder = app_folder(str(file)) if file else None
    if folder is not None:
        add_peer_actions(app, folder)

    register(app, "query", PARTITION, _tell_partition)
    return app


def is_serverless(app: ClientApp) -> bool:
    """Whether `serverless(app)` was called."""
    return has_action(app, "query", PARTITION)


def _tell_partition(message: Message, context: Context) -> Message:
    known = ConfigRecord(dict(context.node_config))
    return Message(RecordDict({"partition": known}), reply_to=message)


def _under_orders(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A mod: calls the app as it would be called in the process of the simulation.

    The same seed draws the same numbers, so results do not depend on the process.
    """
    request = from_message(message)
    if request is None:
        return call_next(message, context)

    def call(content: RecordDict, context: Context) -> Message:
        message.content = content
        return call_next(message, context)

    memory = Memory(context, undo=undoes(message))
    try:
        with one_torch_thread():
            reply = perform(request, call, memory.context)
        if request.keeps:
            memory.keep()
        return to_reply(reply, message)
    except MoshpitError as error:
        return Message(Error(CLIENT_APP_RAISED, str(error)), reply_to=message)
