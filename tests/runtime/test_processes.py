"""Peers as processes, over gRPC and TLS: killed, stopped and continued, started again, ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import Authority

pytestmark = pytest.mark.slow

NUM_PEERS = 4
HANG_S = 60.0

Line = dict[str, Any]


class Peer:
    """A peer's process and what it reports."""

    def __init__(self, folder: Path, index: int, contacts: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.runtime.peer_process",
                str(folder),
                str(index),
                str(NUM_PEERS),
                contacts,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, condition: Callable[[Line], Any]) -> Line:
        """The next line that fulfils `condition`."""
        while True:
            line: Line = json.loads(self._lines.get(timeout=HANG_S))
            if condition(line):
                return line

    def until_round(self, *others: int, without: int | None = None) -> Line:
        """A round with these contributors."""
        return self.until(
            lambda line: (
                line["name"] == "round"
                and all(f"p{other}" in line["contributor_ids"] for other in others)
                and (without is None or f"p{without}" not in line["contributor_ids"])
            )
        )

    def until_status(self, peer: int, status: str) -> Line:
        return self.until(
            lambda line: (
                line["name"] == "peer" and line["peer"] == f"p{peer}" and line["status"] == status
            )
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


@pytest.fixture
def start(tmp_path: Path) -> Generator[Callable[[int, str], Peer], None, None]:
    authority = Authority.create("test-swarm")
    peers: list[Peer] = []

    def start(index: int, contacts: str) -> Peer:
        if not (tmp_path / f"p{index}").exists():
            authority.issue(PeerId(f"p{index}")).save(tmp_path / f"p{index}")
        peers.append(Peer(tmp_path, index, contacts))
        return peers[-1]

    yield start
    for peer in peers:
        peer.process.kill()
        peer.process.wait()
        assert peer.process.stdout is not None
        peer.process.stdout.close()


def start_all(start: Callable[[int, str], Peer]) -> list[Peer]:
    first = start(0, "")
    address = first.until(lambda line: line["name"] == "address")["address"]
    return [first, *(start(index, f"p0={address}") for index in range(1, NUM_PEERS))]


def test_killed_stopped_started_again(start: Callable[[int, str], Peer]) -> None:
    peers = start_all(start)
    for peer in peers:
        peer.until_round(*range(NUM_PEERS))

    peers[1].process.send_signal(signal.SIGKILL)
    others = [peers[0], *peers[2:]]
    for peer in others:
        peer.until_status(1, "dead")
        peer.until_round(0, 2, 3, without=1)

    again = start(1, "")
    begun = again.until(lambda line: line["name"] == "begin")
    assert begun["peers"] > 1
    for peer in (*others, again):
        peer.until_round(0, 1, 2, 3)

    peers[2].process.send_signal(signal.SIGSTOP)
    for peer in (peers[0], peers[3], again):
        peer.until_status(2, "dead")
        peer.until_round(0, 1, 3, without=2)
    peers[2].process.send_signal(signal.SIGCONT)
    peers[2].until(lambda line: line["name"] == "stalled")
    for peer in (peers[0], peers[3], again, peers[2]):
        peer.until_round(0, 1, 2, 3)

    peers[3].process.send_signal(signal.SIGTERM)
    peers[3].until(lambda line: line["name"] == "end")
    assert peers[3].process.wait(HANG_S) == 0
    for peer in (peers[0], peers[2], again):
        peer.until_status(3, "left")
        peer.until_round(0, 1, 2, without=3)
