"""Books on what R-FAST tracks, kept beside the machines from trainer calls and wire messages.

On trees the machines compute z by a formula, so what they say of it proves nothing by itself. Here
the gradients are those that trainers returned, `rho` is what the newest push on an edge said, and
`rho_buf` what the newest push that arrived on it said. From a machine come only z, and which edges
it counts at present.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_moshpit.config import RFast
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    Effect,
    Event,
    GradientResult,
    PeerId,
    Received,
    Report,
    Send,
)
from flwr_moshpit.protocol.messages import EdgeId, Push
from flwr_moshpit.protocol.rfast import RFastPeer

Vector64 = npt.NDArray[np.float64]


class Books:
    """Those of one incarnation of one peer.

    Summed over all living peers `mass` is sum z + sum (rho - rho_buf), and equal to the sum of
    `gradient`: at every instant, whatever was lost, late, repeated or out of order.
    """

    def __init__(self, machine: RFastPeer, config: RFast) -> None:
        """`note` must see everything that happens to `machine`, from its first event on."""
        self.gradient: Vector64 = np.zeros(len(machine.params))
        """(d,), the newest that its trainer returned, weighted."""
        self._machine = machine
        self._config = config
        self._sent: dict[PeerId, tuple[EdgeId, Vector64]] = {}
        self._absorbed: dict[PeerId, tuple[EdgeId, int, Vector64]] = {}

    def note(self, event: Event, effects: Sequence[Effect]) -> None:
        """The machine has answered `event` with `effects`."""
        refused = False
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Push):
                push = effect.message
                self._sent[effect.dst] = (push.edge, push.rho.astype(np.float64))
            refused |= isinstance(effect, Report) and effect.name == "refused"
        if refused:
            return
        if isinstance(event, ComputeDone) and isinstance(event.result, GradientResult):
            weight = 1.0
            if self._config.weigh_examples:
                weight = min(float(event.result.num_examples), self._config.weight_max)
            self.gradient = weight * event.result.gradient.astype(np.float64)
        elif isinstance(event, Received) and isinstance(event.message, Push):
            self._note_arrival(event.src, event.message)

    @property
    def mass(self) -> Vector64:
        """(d,), z, what is under way from this peer, less what it has taken in."""
        machine = self._machine
        mass = machine.tracked.astype(np.float64)
        for parent, out in machine.ledger.outs.items():
            sent = self._sent.get(parent)
            if sent is not None and sent[0] == out.edge:
                mass += sent[1]
        for child, held in machine.ledger.ins.items():
            taken = self._absorbed.get(child)
            if taken is not None and taken[0] == held.edge:
                mass -= taken[2]
        return mass

    def _note_arrival(self, child: PeerId, push: Push) -> None:
        """On an edge that is held the newest counter counts, whatever comes later."""
        held = self._machine.ledger.ins.get(child)
        if held is None or held.edge != push.edge:
            return
        known = self._absorbed.get(child)
        if known is None or known[0] != push.edge or known[1] < push.counter:
            self._absorbed[child] = (push.edge, push.counter, push.rho.astype(np.float64))


class BookedPeer:
    """A machine with books: the same contract, and everything else that the machine has."""

    def __init__(self, machine: RFastPeer, config: RFast) -> None:
        self.books = Books(machine, config)
        self._machine = machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._machine.handle(event, now)
        self.books.note(event, effects)
        return effects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)
