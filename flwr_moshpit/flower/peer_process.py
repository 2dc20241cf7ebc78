"""The peer of a SuperNode, in a process that outlives the ClientApp calls: `python -m ... FOLDER`.

It listens at once, so that a taken port is told when it joins. When its certificate is there it
meets the others; from then on it needs neither SuperNode nor SuperLink. Nothing here needs Flower:
on a Jetson this may be the system's Python 3.10 with NVIDIA's torch (`peer-python`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.flower.app_trainer import make_app_trainer
from flwr_moshpit.flower.peer_folder import PeerFolder
from flwr_moshpit.flower.profile import PROFILE_KEY, suited
from flwr_moshpit.flower.settings import budget_s, flower_settings
from flwr_moshpit.observe.json_lines import json_line
from flwr_moshpit.protocol.machine import PeerId, Report, Start, Vector
from flwr_moshpit.runtime.certificates import new_key, public_key
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.memory import share_one_heap
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.private_files import write_private
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from flwr_moshpit.simulation.device import own_device

JOINED_S = 900.0
"""How long a peer that has joined waits for its certificate."""
GATHER_S = 120.0
"""How long those who start wait for the others to load their trainers."""
POLL_S = 0.1
SAMPLES = 256


def main(folder: PeerFolder) -> int:
    """Run the peer of `folder` to its end, and write there what became of it."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    share_one_heap()
    try:
        joined = _written(folder, "join")
        listener = _listen(joined["bind"])
        key_pem = _key(folder)
        host, _, _ = joined["bind"].rpartition(":")
        port = listener.getsockname()[1]
        bound = f"{host}:{port}"
        told = joined["address"] or bound
        address = f"{told.rpartition(':')[0]}:{port}" if told.endswith(":0") else told
        public_pem = public_key(key_pem).decode()
        content = {"pid": os.getpid(), "address": address, "public-key": public_pem}
        folder.write("peer", content)
        start = _wait_for_start(folder)
        # gRPC opens the port itself.
        listener.close()
        if start is not None:
            _run(folder, joined, start, key_pem, bound, address)
        return 0
    except MoshpitError as error:
        folder.write("end", {"error": str(error)})
    except Exception as error:
        traceback.print_exc()
        folder.write("end", {"error": f"{type(error).__name__}: {error}; see {folder.log}"})
    return 1


def _written(folder: PeerFolder, name: str) -> dict[str, Any]:
    content = folder.read(name)
    if content is None:
        raise ConfigError(f"{folder.path} holds no {name}.json")
    return content


def _listen(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"peer-address: cannot listen on {bind} ({error.strerror}): give this SuperNode "
            "another one, in --node-config 'peer-address=\"HOST:PORT\"'; where others reach it at "
            "an address that is not this device's own, give peer-bind too"
        ) from error
    return listener


def _key(folder: PeerFolder) -> bytes:
    """This peer's own, made in its first life; it never leaves the device."""
    path = folder.path / "peer.key"
    if not path.exists():
        write_private(path, new_key())
    return path.read_bytes()


def _wait_for_start(folder: PeerFolder) -> dict[str, Any] | None:
    """None if nobody wants this peer any more."""
    ends_at = time.monotonic() + JOINED_S
    while time.monotonic() < ends_at:
        start = folder.read("start")
        if start is not None:
            return start
        time.sleep(POLL_S)
    folder.write("end", {"error": f"no certificate came within {JOINED_S:.0f} s"})
    return None


def _run(
    folder: PeerFolder,
    joined: Mapping[str, Any],
    start: Mapping[str, Any],
    key_pem: bytes,
    bound: str,
    address: str,
) -> None:
    client, num_clients = int(start["client"]), int(start["num-clients"])
    settings = flower_settings(joined["run-config"], num_clients)
    identity = Identity(
        start["swarm"],
        PeerId(joined["peer"]),
        key_pem,
        start["certificate"].encode(),
        start["authority"].encode(),
    )
    profile = joined["node-config"].get(PROFILE_KEY)
    device = None if profile is None else own_device(Path(str(profile)))
    config = joined["run-config"]
    task = Task(
        make_app_trainer(
            load_app(joined["app"]), config, node_config=joined["node-config"], device=device
        ),
        client,
        num_clients,
        # Two lives of one peer shall not draw the same batches.
        seed=(settings.seed, client, time.time_ns()),
        initial_seed=settings.seed,
        dtype=settings.dtype,
        tells_cost=device is not None,
    )
    schedule = Schedule(
        start=Start(until_round=settings.rounds),
        gather_peers=int(start["gather"]),
        gather_s=GATHER_S,
    )
    peer_settings = PeerSettings(
        identity=identity,
        algorithm=settings.algorithm,
        task=task,
        contacts={PeerId(peer): at for peer, at in start["contacts"].items()},
        bind=bound,
        advertised=None if address == bound or not start["dialable"] else address,
        dialable=bool(start["dialable"]),
        schedule=schedule,
        seed=settings.seed,
        state=folder.checkpoints,
    )
    compute = ProcessCompute(task)
    try:
        offer = compute.start()
        if offer.schema.hex() != start["schema"]:
            raise ConfigError(
                f"the model of {joined['peer']} has other arrays than the ServerApp's: is it the "
                "same app, with the same settings?"
            )
        events = _Events(folder)
        if device is not None:
            peer_settings, remarks = suited(peer_settings, config, device, offer)
            for remark in remarks:
                events(0.0, identity.peer, Report("derived", {"what": remark}))
        peer = Peer(peer_settings, compute, offer, observers=[events])
        asyncio.run(_drive(folder, peer, budget_s(config)))
    finally:
        compute.close()


async def _drive(folder: PeerFolder, peer: Peer, limit_s: float) -> None:
    driver = peer.driver
    loop = asyncio.get_running_loop()
    # Whom nobody reaches any more ends by itself.
    loop.call_later(limit_s, driver.stop)
    watching = loop.create_task(_tell_finished(folder, peer))
    try:
        await peer.run(signals=True)
    finally:
        watching.cancel()
    if driver.result is None and driver.last_model is not None:
        params, weight = driver.last_model
        _save(folder, peer, params, weight, finished=False)
    elif (end := folder.read("end")) is not None:
        folder.write("end", {**end, "sent-bytes": peer.transport.sent_bytes})


async def _tell_finished(folder: PeerFolder, peer: Peer) -> None:
    driver = peer.driver
    await driver.finished.wait()
    assert driver.result is not None
    model = await driver.model()
    weight = 1.0 if model is None else model[1]
    await asyncio.to_thread(_save, folder, peer, driver.result, weight, finished=True)


def _save(folder: PeerFolder, peer: Peer, params: Vector, weight: float, *, finished: bool) -> None:
    partial_file = folder.model.with_suffix(".partial.npy")
    np.save(partial_file, params)
    partial_file.replace(folder.model)
    folder.write(
        "end",
        {
            "finished": finished,
            "sha256": hashlib.sha256(np.ascontiguousarray(params).data).hexdigest(),
            # So that peers can be compared whose parameters are not the same, bit for bit.
            "sample": [float(x) for x in params[:: max(1, len(params) // SAMPLES)]],
            "weight": weight,
            "sent-bytes": peer.transport.sent_bytes,
        },
    )


class _Events:
    """Appends every report, a line each, and shows it at once: another process reads along."""

    def __init__(self, folder: PeerFolder) -> None:
        self._file = folder.events.open("a", encoding="utf-8")

    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        self._file.write(json_line(now, peer, report))
        self._file.flush()


if __name__ == "__main__":
    sys.exit(main(PeerFolder(Path(sys.argv[1]))))
