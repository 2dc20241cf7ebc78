"""What `sim_to_real.py` trains, and a real peer: `python paced_peer.py WORDS`, `Words` in JSON. A
real peer prints its rounds as JSON lines and leaves its model in a file."""

from __future__ import annotations

import asyncio
import functools
import gzip
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_moshpit.config import ALGORITHMS
from flwr_moshpit.protocol.machine import (
    Evaluated,
    GradientResult,
    PeerId,
    Report,
    Start,
    Trained,
    Vector,
)
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.trainer import Cost
from flwr_moshpit.vector import Layout

DEVICE = "jetson-orin-nano"
BATCH = 16
LEARNING_RATE = 1.0
NUM_CLASSES, NUM_TEST = 10, 360


class PacedTrainer:
    """Handwritten digits for a perceptron with one hidden layer of any width, in numpy, so that
    many of these processes fit one machine. A step takes `step_s`, whatever the machine can do: the
    simulator's clock says so, and a real peer waits until it is true.

    Outputs are divided by the root of the width: the learning rate then fits any.
    """

    def __init__(self, width: int, step_s: float, *, waits: bool) -> None:
        shapes = {"hidden": (65, width), "out": (width, NUM_CLASSES)}
        arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.layout = Layout.of(arrays)
        self.learning_rate = LEARNING_RATE
        self._scale = np.float32(width**-0.5)
        self._step_s = step_s
        self._waits = waits
        self._num_clients = 1
        self._data = digits()

    def prepare(self, num_clients: int, dtype: str | None = None) -> None:
        self._num_clients = num_clients

    def initial_params(self, seed: int) -> Vector:
        params = np.random.default_rng(seed).standard_normal(self.layout.dim, np.float32)
        self.layout.unflatten(params)["hidden"][:] *= 0.2
        params.setflags(write=False)
        return params

    def cost(self) -> Cost:
        device = Fleet.mix({DEVICE: 1.0}, 1)[0]
        return Cost(self._step_s * device.flops_per_s / BATCH, BATCH, memory_bytes=1 << 20)

    def examples(self, client: int, num_steps: int) -> int | None:
        return num_steps * BATCH

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        ends_at = time.monotonic() + num_steps * self._step_s
        x, rng = np.array(params), np.random.default_rng(seed)
        for _ in range(num_steps):
            x -= np.float32(LEARNING_RATE) * self._gradient(x, *self._batch(client, rng))
        self._wait(ends_at)
        x.setflags(write=False)
        return Trained(x, num_steps * BATCH)

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        return self.corrected_steps(client, params, np.zeros_like(params), 1, 0.0, seed)

    def corrected_steps(
        self,
        client: int,
        params: Vector,
        correction: Vector,
        num_steps: int,
        learning_rate: float,
        seed: int,
    ) -> GradientResult:
        ends_at = time.monotonic() + num_steps * self._step_s
        x, total, rng = np.array(params), np.zeros_like(params), np.random.default_rng(seed)
        for _ in range(num_steps):
            gradient = self._gradient(x, *self._batch(client, rng))
            total += gradient
            x -= np.float32(learning_rate) * (gradient + correction)
        self._wait(ends_at)
        mean = total / np.float32(num_steps)
        mean.setflags(write=False)
        return GradientResult(mean, num_steps * BATCH)

    def evaluate(self, params: Vector, client: int | None = None) -> Evaluated:
        """ "accuracy" and "loss" on the images that no client has."""
        _, _, images, classes = self._data
        scores, _ = self._forward(params, images)
        at = scores[np.arange(len(classes)), classes]
        loss = float((np.log(np.exp(scores).sum(axis=1)) - at).mean())
        hits = float((scores.argmax(axis=1) == classes).mean())
        return Evaluated(len(classes), {"accuracy": hits, "loss": loss})

    def _batch(self, client: int, rng: np.random.Generator) -> tuple[Vector, Vector]:
        images, classes, _, _ = self._data
        own = rng.integers(len(classes) // self._num_clients, size=BATCH) * self._num_clients
        return images[own + client], classes[own + client]

    def _forward(self, params: Vector, images: Vector) -> tuple[Vector, Vector]:
        arrays = self.layout.unflatten(params)
        hidden = np.maximum(images @ arrays["hidden"], 0)
        return hidden @ arrays["out"] * self._scale, hidden

    def _gradient(self, params: Vector, images: Vector, classes: Vector) -> Vector:
        out = self.layout.unflatten(params)["out"]
        scores, hidden = self._forward(params, images)
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(classes)), classes] -= 1
        error *= self._scale / np.float32(len(classes))
        back = (error @ out.T) * (hidden > 0)
        return np.concatenate([(images.T @ back).ravel(), (hidden.T @ error).ravel()])

    def _wait(self, ends_at: float) -> None:
        if self._waits:
            time.sleep(max(0.0, ends_at - time.monotonic()))


def digits() -> tuple[Vector, Vector, Vector, Vector]:
    """Images (n, 65), of which the last number is 1, and classes: of training, and of test. As
    `scikit-learn` carries them, which is read as a file."""
    files = importlib.metadata.files("scikit-learn") or []
    path = next(file.locate() for file in files if file.name == "digits.csv.gz")
    with gzip.open(str(path), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    images = np.hstack([table[:, :-1] / 16, np.ones((len(table), 1), np.float32)])
    classes = table[:, -1].astype(np.int64)
    return images[NUM_TEST:], classes[NUM_TEST:], images[:NUM_TEST], classes[:NUM_TEST]


@dataclass(frozen=True)
class Words:
    folder: str
    index: int
    num_peers: int
    host: str
    contacts: Mapping[PeerId, str]
    algorithm: str
    settings: Mapping[str, Any]
    rounds: int
    width: int
    step_s: float

    def make_algorithm(self) -> Any:
        return ALGORITHMS[self.algorithm](**self.settings)


def say(name: str, values: Mapping[str, Any]) -> None:
    print(json.dumps({"name": name, "at": time.monotonic(), **values}), flush=True)


def observe(now: float, peer: PeerId | None, report: Report) -> None:
    if report.name == "round":
        kept = ("round", "coverage", "contributors", "wait_s", "allreduce_s")
        say("round", {key: report.values[key] for key in kept if key in report.values})


async def run(words: Words) -> None:
    make = functools.partial(PacedTrainer, words.width, words.step_s, waits=True)
    # The simulator's batches are drawn under other seeds: results agree as those of two seeds do.
    task = Task(make, words.index, words.num_peers, seed=(0, words.index), initial_seed=0)
    compute = ProcessCompute(task)
    offer = await asyncio.to_thread(compute.start)
    peer = Peer(
        PeerSettings(
            identity=Identity.load(Path(words.folder) / f"p{words.index:02}"),
            algorithm=words.make_algorithm(),
            task=task,
            contacts=words.contacts,
            bind=f"{words.host}:0",
            schedule=Schedule(
                start=Start(words.rounds), gather_peers=words.num_peers, gather_s=120.0
            ),
        ),
        compute,
        offer,
        observers=[observe],
        on_address=lambda address: say("address", {"address": address}),
    )

    async def tell() -> None:
        await peer.driver.finished.wait()
        say("finished", {})

    telling = asyncio.create_task(tell())
    await peer.driver.run(signals=True)
    telling.cancel()
    if peer.driver.last_model is not None:
        params, weight = peer.driver.last_model
        np.savez(Path(words.folder) / f"model{words.index}.npz", params=params, weight=weight)
    say("ended", {"refused": dict(peer.transport.refusals)})


if __name__ == "__main__":
    asyncio.run(run(Words(**json.loads(sys.argv[1]))))
