"""Peers as processes, over gRPC and TLS: killed, stopped and continued, started again, ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.checkpoint import Checkpoints
from flwr_moshpit.runtime.identity import Authority
from tests.runtime.processes import HANG_S, Peer

pytestmark = pytest.mark.slow

NUM_PEERS = 4


@pytest.fixture
def start(tmp_path: Path) -> Generator[Callable[[int, str], Peer], None, None]:
    authority = Authority.create("test-swarm")
    peers: list[Peer] = []

    def start(index: int, contacts: str) -> Peer:
        if not (tmp_path / f"p{index}").exists():
            authority.issue(PeerId(f"p{index}")).save(tmp_path / f"p{index}")
        pairs = [contact.split("=") for contact in contacts.split(",") if contact]
        options = {"num_peers": NUM_PEERS, "contacts": dict(pairs), "checkpoint_s": 0.1}
        peers.append(Peer(tmp_path, index, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


def start_all(start: Callable[[int, str], Peer]) -> list[Peer]:
    first = start(0, "")
    address = first.until(lambda line: line["name"] == "address")["address"]
    return [first, *(start(index, f"p0={address}") for index in range(1, NUM_PEERS))]


def saved_round(folder: Path) -> int:
    """Of the newest checkpoint there; 0 while there is none."""
    loaded = Checkpoints(folder).load() if folder.exists() else None
    return 0 if loaded is None else int(loaded.content["machine"]["round"])


def test_killed_stopped_started_again(start: Callable[[int, str], Peer], tmp_path: Path) -> None:
    peers = start_all(start)
    for peer in peers:
        peer.until_round(*range(NUM_PEERS))
    # It is saved ten times a second: by then a round with training is among it.
    peers[1].until_round_after(time.time() + 1.0)

    peers[1].process.send_signal(signal.SIGKILL)
    peers[1].process.wait(HANG_S)
    saved = saved_round(tmp_path / "state1")
    assert saved > 0
    others = [peers[0], *peers[2:]]
    for peer in others:
        peer.until_status(1, "dead")
        peer.until_round(0, 2, 3, without=1)

    again = start(1, "")
    begun = again.until(lambda line: line["name"] == "begin")
    assert begun["peers"] > 1
    assert begun["round"] == saved
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
