"""What a trainer asks of ClientApps, apart from how it gets to them and who carries it out.

A method of `FlowerTrainer` is a talk: a generator that yields requests and is sent the replies. In
this process `perform` calls the ClientApp; in Flower's simulation a request travels as a message
and `perform` calls the ClientApp there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_moshpit.errors import TrainerError
from flwr_moshpit.flower.messages import Config, Reply, array_record, scratch
from flwr_moshpit.protocol.machine import Vector
from flwr_moshpit.user_code import Call, user_code
from flwr_moshpit.vector import Layout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Epochs:
    """Local epochs of R-FAST, all of them in one call: see `protocol.machine.CorrectedSteps`."""

    layout: Layout
    params: Vector
    correction: Vector
    num_steps: int
    learning_rate: float
    kept: Mapping[str, Any]
    """The arrays outside the vector."""
    step_size: float | None = None
    """Of a ClientApp without gradients, whose single steps of SGD take their place."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of one client's ClientApp."""

    message_type: str
    client: int
    config: Mapping[str, Any]
    arrays: ArrayRecord
    """Empty for `epochs`."""
    seed: int
    step: int | None = None
    """The client's optimizer step, from 1; None outside training."""
    keeps: bool = True
    """Whether what the app stores in its context is still there at its next call."""
    epochs: Epochs | None = None


Talk: TypeAlias = Generator[Sequence[Request], Sequence[Reply], T]


class Carrier(Protocol):
    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        """The replies, in order. Raises TrainerError for what a ClientApp raised."""
        ...

    def settle(self, clients: Sequence[int]) -> None:
        """Wait until what these clients have done is known."""
        ...


def hold(talk: Talk[T], carrier: Carrier) -> T:
    """What `talk` comes to when `carrier` carries its requests."""
    try:
        requests = next(talk)
        while True:
            requests = talk.send(carrier.exchange(requests))
    except StopIteration as end:
        value: T = end.value
        return value


def perform(
    request: Request, call: Callable[[RecordDict, Context], object], context: Context
) -> Reply:
    """Call a client's ClientApp, once or for all of `request.epochs`.

    `call(content, context)` hands it a message. Raises TrainerError for what it raises and for what
    is no answer.
    """
    if not request.keeps:
        context = scratch(context)
    if request.epochs is not None:
        return _perform_epochs(request, request.epochs, call, context)
    return _perform_once(request, request.arrays, 0, call, context)


def _perform_once(
    request: Request,
    arrays: ArrayRecord,
    number: int,
    call: Callable[[RecordDict, Context], object],
    context: Context,
) -> Reply:
    config = Config(request.config)
    if number:
        config["server-round"] = int(request.config["server-round"]) + number
    whose = Call(request.client, None if request.step is None else request.step + number)
    # One seed for every step would draw one batch for every step.
    with user_code(whose, request.seed + number):
        reply = call(RecordDict({"arrays": arrays, "config": config}), context)
    if not isinstance(reply, Message):
        kind = type(reply).__name__
        raise TrainerError(f"{whose}: the ClientApp returned {kind} instead of a Message")
    if reply.has_error():
        raise TrainerError(f"{whose}: the ClientApp answered with an error: {reply.error.reason}")
    return Reply(reply.content, str(whose), config.steps_were_read)


def _perform_epochs(
    request: Request,
    epochs: Epochs,
    call: Callable[[RecordDict, Context], object],
    context: Context,
) -> Reply:
    layout, kept = epochs.layout, epochs.kept
    y = np.array(epochs.params)
    total = np.zeros_like(y)
    num_examples = 0
    metrics: Mapping[str, float] = {}
    steps_were_read = False
    for number in range(epochs.num_steps):
        arrays = array_record(layout.unflatten(y, kept))
        reply = _perform_once(request, arrays, number, call, context)
        gradient, kept = gradient_of(reply, layout, y, kept, epochs.step_size)
        total += gradient
        y -= epochs.learning_rate * (gradient + epochs.correction)
        num_examples += reply.num_examples()
        metrics, steps_were_read = reply.metrics(), reply.steps_were_read
    mean = total / max(1, epochs.num_steps)
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "gradient": array_record({"gradient": mean}),
        "kept": array_record(kept),
        "metrics": MetricRecord({**metrics, "num-examples": num_examples}),
    }
    whose = str(Call(request.client, request.step))
    return Reply(RecordDict(content), whose, steps_were_read)


def gradient_of(
    reply: Reply,
    layout: Layout,
    params: Vector,
    kept: Mapping[str, Any],
    step_size: float | None,
) -> tuple[Vector, dict[str, Any]]:
    """The gradient that `reply` holds, (d,), and the arrays outside it.

    With `step_size` the reply holds the parameters after one step of SGD from `params`.
    """
    if step_size is not None:
        named = {**kept, **reply.arrays(layout)}
        return (params - layout.flatten(named)) / step_size, layout.kept(named)
    zeros = {spec.name: np.zeros(spec.shape, "float32") for spec in layout.averaged}
    named = {**zeros, **kept, **reply.arrays(layout, optional=True)}
    return layout.flatten(named), layout.kept(named)
