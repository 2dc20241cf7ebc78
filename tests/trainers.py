"""A trainer whose optimum is known in closed form: for every test that needs exact numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_moshpit.protocol.machine import Evaluated, GradientResult, Trained, Vector
from flwr_moshpit.trainer import Cost
from flwr_moshpit.vector import Layout


class QuadraticTrainer:
    """Client i has f_i(x) = 0.5 ||A_i x - b_i||^2 with its own A_i (dim, dim) and b_i (dim,).

    A_i = diag(s_i) (I - 2 u_i u_i^T): not diagonal, its squared singular values lie in
    [1 / condition, 1], so gradient steps with lr <= 1 converge, and it costs O(dim) to apply and
    to keep. Gradients are full ones, so nothing depends on `seed`, unless `noise` > 0: then each
    gradient gets N(0, noise^2) per element from the call's seed.

    One step goes over all of a client's examples: `train` reports num_steps * num_examples[client].
    """

    def __init__(
        self,
        dim: int = 8,
        *,
        num_examples: Sequence[int] | int = 10,
        lr: float = 0.1,
        condition: float = 10.0,
        noise: float = 0.0,
        dtype: str = "float64",
        seed: int = 0,
        flops_per_example: float = 1e9,
        memory_bytes: int | None = None,
    ) -> None:
        """`num_examples` is per client and repeats when there are more clients, or one for all."""
        self.dim = dim
        self.lr = lr
        self.noise = noise
        self.dtype = np.dtype(dtype)
        self.num_clients = 0
        self.calls: list[tuple[str, int]] = []
        """Every training call so far, as (method, client), in order."""
        self._examples = [num_examples] if isinstance(num_examples, int) else list(num_examples)
        self._condition = condition
        self._seed = seed
        self._flops_per_example = flops_per_example
        self._memory_bytes = memory_bytes
        self._problems: dict[int, tuple[Vector, Vector, Vector]] = {}

    # The problem, for tests to compare with.

    def num_examples(self, client: int) -> int:
        return self._examples[client % len(self._examples)]

    def matrix(self, client: int) -> Vector:
        """A_i, (dim, dim)."""
        s, u, _ = self._problem(client)
        return s[:, None] * (np.eye(self.dim) - 2.0 * np.outer(u, u))

    def target(self, client: int) -> Vector:
        """b_i, (dim,)."""
        return self._problem(client)[2]

    def exact_gradient(self, client: int, x: Vector) -> Vector:
        """A_i^T (A_i x - b_i), (dim,), in the dtype of x."""
        s, u, b = (part.astype(x.dtype, copy=False) for part in self._problem(client))
        residual = s * (x - (2 * (u @ x)) * u) - b
        back = s * residual
        return back - (2 * (u @ back)) * u

    def loss(self, client: int, x: Vector) -> float:
        s, u, b = self._problem(client)
        residual = s * (x - (2 * (u @ x)) * u) - b
        return 0.5 * float(residual @ residual)

    def optimum(
        self, clients: Sequence[int] | None = None, weights: Sequence[float] | None = None
    ) -> Vector:
        """argmin of sum_i w_i f_i over `clients` (all), (dim,); w_i = num_examples by default."""
        clients = range(self.num_clients) if clients is None else clients
        if weights is None:
            weights = [float(self.num_examples(client)) for client in clients]
        hessian = np.zeros((self.dim, self.dim))
        right = np.zeros(self.dim)
        for client, weight in zip(clients, weights, strict=True):
            a = self.matrix(client)
            hessian += weight * a.T @ a
            right += weight * a.T @ self.target(client)
        return np.linalg.solve(hessian, right)

    # Trainer

    @property
    def layout(self) -> Layout:
        return Layout.of({"x": np.zeros(self.dim, self.dtype)})

    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        self.num_clients = num_clients
        if dtype is not None:
            self.dtype = np.dtype(dtype)

    def initial_params(self, seed: int) -> Vector:
        x = np.random.default_rng([seed, 17]).standard_normal(self.dim)
        return _frozen(x.astype(self.dtype))

    def cost(self) -> Cost:
        memory = 4 * self.dim * self.dtype.itemsize
        return Cost(
            flops_per_example=self._flops_per_example,
            examples_per_step=max(self._examples),
            memory_bytes=memory if self._memory_bytes is None else self._memory_bytes,
        )

    def examples(self, client: int, num_steps: int) -> int | None:
        return num_steps * self.num_examples(client)

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        self.calls.append(("train", client))
        rng = np.random.default_rng(seed)
        x = params.astype(self.dtype)
        for _ in range(num_steps):
            x -= self.lr * self._noisy(self.exact_gradient(client, x), rng)
        loss = self.loss(client, x)
        return Trained(_frozen(x), num_steps * self.num_examples(client), {"loss": loss})

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        self.calls.append(("gradient", client))
        rng = np.random.default_rng(seed)
        x = params.astype(self.dtype)
        g = self._noisy(self.exact_gradient(client, x), rng)
        loss = self.loss(client, x)
        return GradientResult(_frozen(g), self.num_examples(client), {"loss": loss})

    def corrected_steps(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> GradientResult:
        self.calls.append(("corrected_steps", client))
        rng = np.random.default_rng(seed)
        y = params.astype(self.dtype)
        total = np.zeros_like(y)
        for _ in range(num_steps):
            g = self._noisy(self.exact_gradient(client, y), rng)
            total += g
            y -= learning_rate * (g + correction)
        return GradientResult(_frozen(total / num_steps), num_steps * self.num_examples(client))

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        """ "loss": weighted by examples over the clients asked for."""
        clients = range(self.num_clients) if client is None else [client]
        examples = [self.num_examples(client) for client in clients]
        x = params.astype(np.float64)
        losses = [self.loss(client, x) for client in clients]
        return Evaluated(sum(examples), {"loss": float(np.average(losses, weights=examples))})

    def _problem(self, client: int) -> tuple[Vector, Vector, Vector]:
        """(s_i, u_i, b_i), each (dim,) float64, drawn once per client."""
        if client not in self._problems:
            rng = np.random.default_rng([self._seed, client])
            s = np.sqrt(rng.uniform(1.0 / self._condition, 1.0, self.dim))
            u = rng.standard_normal(self.dim)
            self._problems[client] = (s, u / np.linalg.norm(u), rng.standard_normal(self.dim))
        return self._problems[client]

    def _noisy(self, gradient: Vector, rng: np.random.Generator) -> Vector:
        if self.noise:
            gradient = gradient + self.noise * rng.standard_normal(self.dim)
        return gradient.astype(self.dtype, copy=False)


def _frozen(array: Vector) -> Vector:
    array.setflags(write=False)
    return array
