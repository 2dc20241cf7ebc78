"""What a SuperNode does for its peer when the ServerApp asks: `@app.query` actions.

    join     start the peer process, and answer where it listens and with what key
    dial     which other peers can be dialled from here
    start    hand it its certificate and whom it meets
    status   what it has reported since, and whether it lives
    result   its parameters; the only answer with an array
    stop     end it

Each is a call of seconds; in between the SuperNode is free, and the peer needs it for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.compat import CLIENT_APP_RAISED, register
from flwr_moshpit.flower.messages import array_record
from flwr_moshpit.flower.peer_folder import PeerFolder
from flwr_moshpit.flower.profile import PROFILE_KEY, trainer_threads
from flwr_moshpit.runtime.whereabouts import why_unreachable
from flwr_moshpit.simulation.device import own_device

LISTENING_S = 60.0
"""How long a peer process may take to listen; a loaded Jetson imports torch for half of that."""
DIALLED_S = 5.0
STOPPED_S = 10.0
POLL_S = 0.1
REPORT_BYTES_MAX = 1 << 18
"""Most that one answer tells of what a peer has reported; the next answer goes on."""

_ANSWER = "moshpit"

Answer = tuple[dict[str, Any], dict[str, Any]]
"""(what JSON can hold, arrays by name)."""


def add_peer_actions(app: ClientApp, folder: Path) -> None:
    """Let ServerApps look after the peer of `app`, whose code is in `folder`."""
    actions: dict[str, Callable[[dict[str, Any], Context], Answer]] = {
        "join": partial(_join, folder),
        "dial": _dial,
        "start": _start,
        "status": _status,
        "result": _result,
        "stop": _stop,
    }
    for name, action in actions.items():
        register(app, "query", name, partial(_answered, action))


def ask_message(node_id: int, action: str, ttl_s: float, **asked: Any) -> Message:
    """The ServerApp's message for one of the actions."""
    content = RecordDict({_ANSWER: ConfigRecord({"json": json.dumps(asked)})})
    return Message(content, node_id, f"query.{action}", ttl=ttl_s)


def answer_of(reply: Message) -> dict[str, Any]:
    """What a SuperNode has answered. Raises ConfigError for an error."""
    if reply.has_error():
        raise ConfigError(reply.error.reason or f"error {reply.error.code}")
    record: Any = reply.content.config_records[_ANSWER]
    answer: dict[str, Any] = json.loads(record["json"])
    return answer


def _answered(
    action: Callable[[dict[str, Any], Context], Answer], message: Message, context: Context
) -> Message:
    record: Any = message.content.config_records[_ANSWER]
    try:
        told, arrays = action(json.loads(record["json"]), context)
    except MoshpitError as error:
        return Message(Error(CLIENT_APP_RAISED, str(error)), reply_to=message)
    return reply_to(message, told, arrays)


def reply_to(message: Message, told: Mapping[str, Any], arrays: Mapping[str, Any]) -> Message:
    """A SuperNode's answer to `message`."""
    content = RecordDict({_ANSWER: ConfigRecord({"json": json.dumps(told)})})
    if arrays:
        content["arrays"] = array_record(arrays)
    return Message(content, reply_to=message)


def _join(app_folder: Path, asked: dict[str, Any], context: Context) -> Answer:
    partition = context.node_config.get("partition-id")
    peer = f"node-{context.node_id}" if partition is None else f"client-{partition}"
    folder = PeerFolder.of(asked["swarm"], peer)
    folder.make()
    end = folder.read("end") or {}
    relayed = bool(context.node_config.get("peer-relayed", False))
    if relayed and "peer-address" in context.node_config:
        raise ConfigError("peer-address: a peer that is relayed has none that others could dial")
    if PROFILE_KEY in context.node_config:
        # Said to whoever runs the SuperNode before there is a process that could not train.
        own_device(Path(str(context.node_config[PROFILE_KEY])))
    if folder.pid() is None and not end.get("finished"):
        folder.remove("peer", "end")
        here = "127.0.0.1:0" if relayed else f"{_own_host()}:0"
        address = str(context.node_config.get("peer-address", here))
        folder.write(
            "join",
            {
                "peer": peer,
                "app": str(app_folder),
                "run-config": dict(context.run_config),
                "node-config": dict(context.node_config),
                "address": address,
                "bind": str(context.node_config.get("peer-bind", address)),
            },
        )
        process = _spawn(folder, str(context.node_config.get("peer-python", sys.executable)))
        _wait_until_listening(folder, process)
    joined, listening, start = (folder.read(name) for name in ("join", "peer", "start"))
    assert joined is not None
    assert listening is not None
    # Afterwards it has what it began with.
    dialable = start["dialable"] if start is not None else False if relayed else None
    return {
        "peer": joined["peer"],
        "address": listening["address"],
        "public-key": listening["public-key"],
        "client": partition,
        "num-clients": context.node_config.get("num-partitions"),
        "host": socket.gethostname(),
        "dialable": dialable,
        "started": start is not None,
    }, {}


def _own_host() -> str:
    """The address by which this device reaches others; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host


def _spawn(folder: PeerFolder, python: str) -> subprocess.Popen[bytes]:
    """Start the peer process so that it outlives this one and holds none of its files open."""
    with folder.log.open("ab") as log:
        try:
            return subprocess.Popen(
                [python, "-m", "flwr_moshpit.flower.peer_process", str(folder.path)],
                cwd=folder.path,
                # One processor is left to answer others; whoever sets it knows better.
                env={"OMP_NUM_THREADS": str(trainer_threads()), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"peer-python: cannot run {python}: {error.strerror}") from error


def _wait_until_listening(folder: PeerFolder, process: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + LISTENING_S
    while folder.read("peer") is None:
        has_ended = process.poll() is not None
        end = folder.read("end")
        if end is not None:
            raise ConfigError(end["error"])
        if has_ended or time.monotonic() > ends_at:
            raise ConfigError(
                f"the peer does not listen: see {folder.log}, which ends with: {_last_line(folder)}"
            )
        time.sleep(POLL_S)


def _last_line(folder: PeerFolder) -> str:
    lines = folder.log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "nothing")


def _dial(asked: dict[str, Any], context: Context) -> Answer:
    addresses: dict[str, str] = asked["addresses"]
    with ThreadPoolExecutor(max_workers=16) as pool:
        reasons = list(pool.map(partial(why_unreachable, within_s=DIALLED_S), addresses.values()))
    return {"failures": {p: r for p, r in zip(addresses, reasons, strict=True) if r}}, {}


def _start(asked: dict[str, Any], context: Context) -> Answer:
    folder = PeerFolder.of(asked["swarm"], asked["peer"])
    if folder.pid() is None:
        raise ConfigError(f"{asked['peer']} has died since it joined: see {folder.log}")
    folder.write("start", asked)
    return {}, {}


def _status(asked: dict[str, Any], context: Context) -> Answer:
    folder = PeerFolder.of(asked["swarm"], asked["peer"])
    reports, offset = "", int(asked["offset"])
    # Looked at first: what it has reported until its end is complete.
    is_alive, end = folder.pid() is not None, folder.read("end")
    with contextlib.suppress(FileNotFoundError), folder.events.open("rb") as file:
        file.seek(offset)
        whole, newline, _ = file.read(REPORT_BYTES_MAX).rpartition(b"\n")
        reports = (whole + newline).decode()
        offset += len(whole + newline)
    told = {"alive": is_alive, "end": end, "reports": reports, "offset": offset}
    return told, {}


def _result(asked: dict[str, Any], context: Context) -> Answer:
    folder = PeerFolder.of(asked["swarm"], asked["peer"])
    try:
        params = np.load(folder.model, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{asked['peer']} has no result: {error}") from error
    return {"sha256": hashlib.sha256(params.data).hexdigest()}, {"params": params}


def _stop(asked: dict[str, Any], context: Context) -> Answer:
    folder = PeerFolder.of(asked["swarm"], asked["peer"])
    pid = folder.pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        ends_at = time.monotonic() + STOPPED_S
        while folder.pid() is not None and time.monotonic() < ends_at:
            time.sleep(POLL_S)
    end: Mapping[str, Any] | None = folder.read("end")
    return {"alive": folder.pid() is not None, "end": end}, {}
