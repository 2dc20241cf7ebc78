"""What the R-FAST experiments share: the problem, and the method without running sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flwr_moshpit.config import RFast
from flwr_moshpit.protocol.machine import (
    Compute,
    ComputeDone,
    Event,
    Gradient,
    GradientResult,
    JobId,
    PeerInfo,
    Received,
    Send,
    Start,
    Vector,
    View,
)
from flwr_moshpit.protocol.messages import EdgeId, Label, Model, Push, Subtree
from flwr_moshpit.protocol.topology import binary_tree
from tests.protocol.harness import LeastSquares, Logistic, Net, Problem

NUM_PEERS = 7


def one_class_a_peer() -> Logistic:
    return Logistic.drawn(NUM_PEERS)


def least_squares(num_peers: int = NUM_PEERS) -> LeastSquares:
    """kappa about 8."""
    problem = LeastSquares.drawn(num_peers)
    return replace(problem, a=problem.a * np.linspace(1, 1.3, problem.dim))


def network(problem: Problem, topology: str, **changes: Any) -> Net:
    """Seven peers, 30 % loss, delays of 0.3 mean step times, no books."""
    settings = {"learning_rate": problem.learning_rate(), "lease_s": 20.0}  # type: ignore[attr-defined]
    config = RFast(topology=topology, **(settings | changes.pop("config", {})))
    return Net(problem, NUM_PEERS, config, **({"loss": 0.3, "books": False} | changes))


class NaivePeer:
    """Gradient tracking on a binary tree that sends what it pushes instead of the sum of all.

    The same contract and the same messages; `Push.rho` is a_ji z of this one step.
    """

    deadline = None
    is_root = False
    parent = None

    def __init__(
        self,
        config: RFast,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        incarnation: int = 0,
        state: Any = None,
    ) -> None:
        graph = binary_tree(list(view))
        self.params = params
        self._parent = graph.parent(me.peer)
        self._children = graph.sources.get(me.peer, [])
        self._rate = config.learning_rate / len(view) / 4
        self._z = np.zeros_like(params)
        self._g = np.zeros_like(params)
        self._step = 0

    def handle(self, event: Event, now: float) -> list[Any]:
        match event:
            case Start():
                return [Compute(JobId(0), Gradient(self.params))]
            case Received(_, Push(rho=rho)):
                self._z = self._z + rho
            case Received(_, Model(v=v, counter=counter)) if counter >= self._step:
                self._step, self.params = counter, v
                return self._spread()
            case ComputeDone(_, GradientResult(gradient=gradient)):
                return self._on_gradient(gradient)
        return []

    def _on_gradient(self, gradient: Vector) -> list[Any]:
        self._z = self._z + gradient - self._g
        self._g = gradient
        effects: list[Any] = []
        if self._parent is None:
            self.params = self.params - self._rate * self._z
            self._step += 1
            effects += self._spread()
        else:
            push = Push(EdgeId(0, 0), 0, self._z, 0.0, Subtree(1, 1, 1.0, 0, 1.0))
            effects.append(Send(self._parent, push))
            self._z = np.zeros_like(self._z)
        return [*effects, Compute(JobId(0), Gradient(self.params))]

    def _spread(self) -> list[Any]:
        label = Label(0, self._children[0], 0) if self._children else None
        return [
            Send(child, Model(0, self._step, self.params, None, 0.0, label, (), 0, 1.0, 1, 1.0))
            for child in self._children
            if label is not None
        ]
