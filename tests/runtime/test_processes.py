"""Peers as processes, over gRPC and TLS: killed, stopped and continued, started again, ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from flwr_moshpit.protocol.machine import PeerId
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
        peers.append(Peer(tmp_path, index, num_peers=NUM_PEERS, contacts=dict(pairs)))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


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
