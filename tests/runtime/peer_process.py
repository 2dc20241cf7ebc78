"""One peer as a process, for tests: `python -m tests.runtime.peer_process OPTIONS`, with options in
JSON, see `Options`. Prints its reports as JSON lines, and obeys lines of its input."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_moshpit.config import ALGORITHMS, Moshpit
from flwr_moshpit.observe.json_lines import plain
from flwr_moshpit.protocol.machine import GradientResult, PeerId, Report, Start, Trained, Vector
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Buildable, Schedule
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.trace import Recipe
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from tests.trainers import QuadraticTrainer

SAID = ("round", "peer", "stalled", "refused", "training_failed", "joined", "attached", "group")


@dataclass(frozen=True)
class Options:
    folder: str
    """Holds the identities, p0, p1, ..., and the states."""
    index: int
    num_peers: int
    contacts: Mapping[PeerId, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    dialable: bool = True
    algorithm: Mapping[str, Any] = field(default_factory=lambda: {"local_steps": 2})
    until_round: int | None = None
    dim: int = 20_000
    train_s: float = 0.0
    """How long a training job takes, at least."""
    checkpoint_s: float = 15.0


class Trainer(QuadraticTrainer):
    def __init__(self, dim: int, train_s: float) -> None:
        super().__init__(dim, num_examples=[10, 20, 30])
        self._train_s = train_s

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        time.sleep(self._train_s)
        return super().train(client, params, num_steps, seed)

    def gradient(self, client: int, params: Vector, seed: int) -> GradientResult:
        time.sleep(self._train_s)
        return super().gradient(client, params, seed)


def say(name: str, values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"name": name, "at": time.time(), **plain(values)}) + "\n")
    sys.stdout.flush()


def observe(now: float, peer: PeerId | None, report: Report) -> None:
    if report.name in SAID:
        say(report.name, {"t": now, **report.values})


def obey() -> None:
    """ "clock S": the wall clock jumps by S seconds, as this process sees it."""
    words = sys.stdin.readline().split()
    if not words:
        asyncio.get_running_loop().remove_reader(0)
    elif words[0] == "clock":
        real, jump_s = time.time, float(words[1])
        time.time = lambda: real() + jump_s


async def run(options: Options) -> None:
    index, state = options.index, Path(options.folder) / f"state{options.index}"
    has_state = state.exists()
    make_trainer = functools.partial(Trainer, options.dim, options.train_s)
    task = Task(make_trainer, index, options.num_peers, seed=(index, int(has_state)))
    compute = ProcessCompute(task)
    offer = await asyncio.to_thread(compute.start)
    settings = dict(options.algorithm)
    kind = ALGORITHMS[settings.pop("name")] if "name" in settings else Moshpit

    def begin(recipe: Recipe) -> Buildable:
        saved = recipe.state
        say("begin", {"round": saved["round"] if saved else 0, "peers": len(recipe.view)})
        return recipe

    peer = Peer(
        PeerSettings(
            identity=Identity.load(Path(options.folder) / f"p{index}"),
            algorithm=kind(**settings),
            task=task,
            contacts=options.contacts,
            bind=f"{options.host}:0",
            dialable=options.dialable,
            schedule=Schedule(
                start=Start(options.until_round),
                gather_peers=2 if has_state else options.num_peers,
                gather_s=60.0,
                checkpoint_s=options.checkpoint_s,
            ),
            state=state,
        ),
        compute,
        offer,
        observers=[observe],
        on_address=lambda address: say("address", {"address": address, "pid": compute.pid}),
        wrap=begin,
    )

    asyncio.get_running_loop().add_reader(0, obey)
    await peer.driver.run(signals=True)
    say("end", {"children": compute.pid})


if __name__ == "__main__":
    asyncio.run(run(Options(**json.loads(sys.argv[1]))))
