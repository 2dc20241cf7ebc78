"""What goes through the SuperLink, beside what the peers exchange: counted at the socket."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.flower_processes import Deployment, wait_until
from tests.flower.swarms import LONG_S, begin, ended, peer_pids, rounds_of

pytestmark = pytest.mark.slow

PEERS = 4
DIM = 10_000_000
ROUNDS = 20

PYPROJECT = """
[project]
name = "large"
version = "1.0.0"
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
initial-model = "client_app:make_model"
examples-per-step = 16
flops-per-example = 6e7
rounds = 20
local-steps = 1
min-supernodes = 4
log-every-s = 60.0
out = ""
"""
SERVER_APP = "from flwr_moshpit.flower import bootstrap_app\n\napp = bootstrap_app()\n"
CLIENT_APP = f"""
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_moshpit.flower import serverless

app = ClientApp()


def make_model():
    return [np.random.default_rng(0).standard_normal({DIM}, np.float32)]


@app.train()
def train(msg, context):
    steps = msg.content["config"]["local-steps"]
    [w] = msg.content["arrays"].to_numpy_ndarrays()
    client = context.node_config["partition-id"]
    arrays = ArrayRecord([w + np.float32(client)])
    metrics = MetricRecord({{"num-examples": 16 * steps}})
    return Message(RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=msg)


serverless(app)
"""


class CountingProxy:
    """Carries connections to `target`, and counts what goes through, both ways."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for open_socket in (self._listener, *self._open):
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._open += (near, far)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    self.num_bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()


@pytest.fixture
def proxy(deployment: Deployment) -> Iterator[CountingProxy]:
    made = CountingProxy(deployment.address)
    yield made
    made.close()


def test_what_goes_through_the_superlink_is_less_than_a_hundredth(
    deployment: Deployment, proxy: CountingProxy, tmp_path: Path
) -> None:
    """With the model that comes back at the end, which is the only array on that way."""
    app = tmp_path / "app"
    app.mkdir()
    files = {"pyproject.toml": PYPROJECT, "server_app.py": SERVER_APP, "client_app.py": CLIENT_APP}
    for name, text in files.items():
        (app / name).write_text(text)
    deployment.register(PEERS - 1)
    for number in range(PEERS):
        deployment.start_supernode(number, of=PEERS, superlink=proxy.address)
    out = tmp_path / "out"
    said = deployment.run(app, f"rounds={ROUNDS} out='{out}'", timeout_s=1500)
    assert re.search(rf"swarm large-\w+: {PEERS} peers begin", said), said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["alive"] == PEERS, said
    vector_bytes = 4 * DIM
    # Each sends its group three quarters of the vector, and three quarters of what it has averaged.
    assert summary["bytes"] > 0.9 * ROUNDS * PEERS * 1.5 * vector_bytes
    assert proxy.num_bytes > vector_bytes
    print(f"peers {summary['bytes'] / 1e9:.2f} GB, SuperLink {proxy.num_bytes / 1e6:.1f} MB")  # noqa: T201
    assert proxy.num_bytes < 0.01 * summary["bytes"]
    # What is left without the result is logs and questions.
    assert proxy.num_bytes - vector_bytes < 0.002 * summary["bytes"]


def test_while_peers_train_only_questions_go_through_the_superlink(
    deployment: Deployment, proxy: CountingProxy
) -> None:
    """Bytes a minute, of a model of 19 kB that is averaged many times a second."""
    for number in range(3):
        deployment.start_supernode(number, of=3, superlink=proxy.address)
    begin(deployment, "rounds=1000000 log-every-s=20 min-supernodes=3 budget-h=0.025")
    wait_until(lambda: rounds_of(deployment, "client-0") > 1, LONG_S, "they train")
    began_at, before = time.monotonic(), proxy.num_bytes
    rounds = rounds_of(deployment, "client-0")
    pids = peer_pids(deployment).values()
    wait_until(lambda: all(map(ended, pids)), LONG_S, "all peers end")
    minutes = (time.monotonic() - began_at) / 60
    rounds = rounds_of(deployment, "client-0") - rounds
    through = proxy.num_bytes - before
    print(f"{through / minutes / 1e3:.0f} kB a minute, {rounds / minutes:.0f} rounds a minute")  # noqa: T201
    assert rounds > 10
    # Had the model gone through Flower once a round:
    assert through < 4 * 4810 * 2 * 3 * rounds
