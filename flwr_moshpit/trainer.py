"""What a client supplies: training code behind one small interface.

Protocols speak of flat vectors; a `Trainer` turns them into the user's model and back by its
`layout` (see `vector.py`). `TorchTrainer` and `FlowerTrainer` are the two that most people need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flwr_moshpit.protocol.machine import Evaluated, GradientResult, Trained, Vector

if TYPE_CHECKING:
    from flwr_moshpit.vector import Layout


@dataclass(frozen=True, slots=True)
class Cost:
    """What training costs a device; it sets the virtual clock, never the real one."""

    flops_per_example: float
    """Forward and backward, one example."""
    examples_per_step: int
    """Examples in one optimizer step."""
    memory_bytes: int
    """Parameters, gradients, optimizer state and one batch's activations."""


@runtime_checkable
class Trainer(Protocol):
    """Trains, on one machine, for any number of clients.

    `client` is the index of a client's data, 0 <= client < num_clients as given at construction or
    by `prepare`. Whatever a client keeps between calls (BatchNorm buffers, optimizer state, a
    Flower `context.state`) stays in the trainer, by client. `seed` pins every random draw of the
    call: same arguments and same earlier calls of that client, same result.
    """

    @property
    def layout(self) -> Layout:
        """The averaged arrays, by name, in their flat order."""
        ...

    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        """Say how many clients there are, before any other call. `dtype`: "float32" or "float64"
        for the flat vectors, None for what the layout finds."""
        ...

    def initial_params(self, seed: int) -> Vector:
        """The common initial model, (d,)."""
        ...

    def cost(self) -> Cost:
        """Counted once, on the model."""
        ...

    def examples(self, client: int, num_steps: int) -> int | None:
        """Examples that `train` will go over, or None if only training tells."""
        ...

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        """`num_steps` optimizer steps from `params`, which are not changed."""
        ...

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        """The mean gradient over one batch. Raises ConfigError if the client offers none."""
        ...

    def corrected_steps(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> GradientResult:
        """See `protocol.machine.CorrectedSteps`."""
        ...

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        """Metrics on the test data of `client`, or of the whole task where that is None.

        At least one of "accuracy" and "loss" where the task has them.
        """
        ...
