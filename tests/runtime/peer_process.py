"""One peer as a process, for tests: `python -m tests.runtime.peer_process FOLDER INDEX PEERS
CONTACTS`, with contacts as "p0=host:port,...". Prints its reports as JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flwr_moshpit.config import Moshpit
from flwr_moshpit.observe.json_lines import plain
from flwr_moshpit.protocol.machine import PeerId, PeerInfo, Report, Start, View
from flwr_moshpit.protocol.membership import Membership
from flwr_moshpit.runtime.checkpoint import Checkpoints
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Driver, Schedule
from flwr_moshpit.runtime.grpc_transport import GrpcTransport
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.trace import Recipe
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from flwr_moshpit.runtime.wire import Limits
from tests.trainers import QuadraticTrainer

DIM = 20_000


def trainer() -> QuadraticTrainer:
    return QuadraticTrainer(DIM, num_examples=[10, 20, 30])


def say(name: str, values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"name": name, **plain(values)}) + "\n")
    sys.stdout.flush()


def observe(now: float, peer: PeerId | None, report: Report) -> None:
    if report.name in ("round", "peer", "stalled", "refused", "training_failed"):
        say(report.name, {"t": now, **report.values})


async def run(folder: Path, index: int, num_peers: int, contacts: dict[PeerId, str]) -> None:
    identity = Identity.load(folder / f"p{index}")
    checkpoints = Checkpoints(folder / f"state{index}")
    saved = checkpoints.load()
    state = saved.content["machine"] if saved else None
    incarnation = saved.content["incarnation"] + 1 if saved else 0
    if saved:
        contacts = saved.content["addresses"]
    compute = ProcessCompute(Task(trainer, index, num_peers, seed=(index, incarnation)))
    offer = await asyncio.to_thread(compute.start)
    rng = np.random.default_rng([index, incarnation])

    def join(address: str) -> Membership:
        say("address", {"address": address, "pid": compute.pid})
        return Membership(PeerInfo(identity.peer, incarnation), address, contacts, rng)

    def make(info: PeerInfo, view: View) -> Recipe:
        say("begin", {"round": 0 if state is None else state["round"], "peers": len(view)})
        return Recipe(
            Moshpit(local_steps=2), info, offer.params, view, (index,), offer.schema, state
        )

    driver = Driver(
        GrpcTransport(identity, "127.0.0.1:0", Limits(DIM), incarnation=incarnation),
        join,
        make,
        compute,
        schedule=Schedule(start=Start(), gather_peers=2 if saved else num_peers, gather_s=60.0),
        observers=[observe],
        checkpoints=checkpoints,
    )
    await driver.run(signals=True)
    say("end", {"children": compute.pid})


if __name__ == "__main__":
    where, number, peers, known = sys.argv[1:]
    pairs = [contact.split("=") for contact in known.split(",") if contact]
    asyncio.run(run(Path(where), int(number), int(peers), {PeerId(peer): at for peer, at in pairs}))
