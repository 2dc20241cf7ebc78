"""Requests as Flower's messages: what a ServerApp sends and a `serverless` ClientApp understands.

Beside the app's own records a message carries `moshpit`: the client's number, the seed of its
random draws, and what else a `Request` says. The app sees none of it.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_moshpit.errors import TrainerError
from flwr_moshpit.flower.messages import Reply, array_record
from flwr_moshpit.flower.requests import Epochs, Request
from flwr_moshpit.vector import ArraySpec, Layout

_ORDERS, _VECTORS, _KEPT = "moshpit", "moshpit-vectors", "moshpit-kept"


def to_message(request: Request, node_id: int, undo: bool = False) -> Message:
    """`request` for the SuperNode `node_id`; `undo`: its last call shall not have been."""
    orders: dict[str, Any] = {
        "client": request.client,
        "seed": request.seed,
        "step": request.step or 0,
        "keeps": request.keeps,
        "undo": undo,
    }
    config = {name: value for name, value in request.config.items() if value is not None}
    content = RecordDict({"arrays": request.arrays, "config": ConfigRecord(config)})
    epochs = request.epochs
    if epochs is not None:
        orders["layout"] = _layout_text(epochs.layout)
        orders["num-steps"] = epochs.num_steps
        orders["learning-rate"] = epochs.learning_rate
        if epochs.step_size is not None:
            orders["step-size"] = epochs.step_size
        vectors = {"params": epochs.params, "correction": epochs.correction}
        content[_VECTORS] = array_record(vectors)
        content[_KEPT] = array_record(epochs.kept)
    content[_ORDERS] = ConfigRecord(orders)
    return Message(content, node_id, request.message_type)


def from_message(message: Message) -> Request | None:
    """The request that `message` is; None for a message that nobody of ours has sent."""
    content = message.content
    orders: Any = content.config_records.get(_ORDERS)
    if orders is None:
        return None
    epochs = None
    if "layout" in orders:
        vectors = content.array_records[_VECTORS]
        epochs = Epochs(
            layout=_layout(orders["layout"]),
            params=vectors["params"].numpy(),
            correction=vectors["correction"].numpy(),
            num_steps=orders["num-steps"],
            learning_rate=orders["learning-rate"],
            kept={name: array.numpy() for name, array in content.array_records[_KEPT].items()},
            step_size=orders.get("step-size"),
        )
    return Request(
        message.metadata.message_type,
        client=orders["client"],
        config=dict(content.config_records["config"]),
        arrays=content.array_records.get("arrays", ArrayRecord()),
        seed=orders["seed"],
        step=orders["step"] or None,
        keeps=orders["keeps"],
        epochs=epochs,
    )


def undoes(message: Message) -> bool:
    """Whether the client's last call shall not have been."""
    orders: Any = message.content.config_records[_ORDERS]
    return bool(orders["undo"])


def to_reply(reply: Reply, message: Message) -> Message:
    """`reply` as the answer to `message`."""
    content = RecordDict(dict(reply.content))
    content[_ORDERS] = ConfigRecord({"steps-were-read": reply.steps_were_read})
    return Message(content, reply_to=message)


def from_reply(message: Message, whose: str) -> Reply:
    """What a ClientApp has answered. Raises TrainerError if that is an error."""
    if message.has_error():
        reason = message.error.reason or ""
        if reason.startswith(whose):
            raise TrainerError(reason)
        raise TrainerError(f"{whose}: the ClientApp answered with an error: {reason}")
    content = message.content
    orders: Any = content.config_records.get(_ORDERS, ConfigRecord())
    return Reply(content, whose, bool(orders.get("steps-were-read", True)))


def _layout_text(layout: Layout) -> str:
    averaged = [[spec.name, spec.shape, spec.dtype] for spec in layout.averaged]
    return json.dumps([averaged, layout.kept_names, layout.dtype.name, layout.names])


def _layout(text: str) -> Layout:
    averaged, kept, dtype, names = json.loads(text)
    specs = [ArraySpec(name, tuple(shape), kind) for name, shape, kind in averaged]
    return Layout(specs, kept, dtype, names)
