"""Real peers in network namespaces: behind NAT, cut off, stopped, moved, with clocks that jump.

Rounds take seconds here, because a training job sleeps: what counts is in which round a peer that
was away is back, not how fast a round is.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.testing.lan import Lan, reason_against
from tests.runtime.processes import Peer

pytestmark = pytest.mark.slow

TRAIN_S = 4.0


class Net:
    """Peers of one swarm, each at a place of its own."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self.lan = lan
        self.peers: dict[int, Peer] = {}
        self._folder = folder
        self._authority = Authority.create("lan")
        self._contacts: dict[str, str] = {}

    def start(self, index: int, num_peers: int, *, closed: bool = False, **options: Any) -> Peer:
        """The first is the others' contact."""
        name = f"p{index}"
        host = self.lan.add(name, closed=closed)
        self._authority.issue(PeerId(name)).save(self._folder / name)
        prefix = [*self.lan.command(name), *options.pop("prefix", ())]
        place = {"host": host if not self._contacts else "0.0.0.0", "contacts": self._contacts}
        more = {"num_peers": num_peers, **place, **options}
        peer = self.peers[index] = Peer(self._folder, index, prefix, **more)
        if not self._contacts:
            self._contacts = {name: peer.until_named("address")["address"]}
        return peer

    def start_all(self, count: int, **options: Any) -> list[Peer]:
        for index in range(count):
            self.start(index, count, train_s=TRAIN_S, **options)
        peers = list(self.peers.values())
        for peer in peers:
            peer.until_round(*range(count))
        return peers


@pytest.fixture
def net(tmp_path: Path) -> Generator[Net, None, None]:
    reason = reason_against(closed=True)
    if reason is not None:
        pytest.skip(reason)
    with Lan() as lan:
        net = Net(lan, tmp_path)
        yield net
        for peer in net.peers.values():
            peer.end()


def check_back(peers: Sequence[Peer], away: Peer, since: float) -> None:
    """Everybody averages with `away`, and it with them, in the round that was under way at `since`
    or in one of the next two."""
    for peer in peers:
        rounds = 0

        def is_back(line: dict[str, Any], peer: Peer = peer) -> bool:
            nonlocal rounds
            if line["name"] != "round" or line["at"] < since:
                return False
            rounds += 1
            return line["contributors"] > 1 and away.name in line["contributor_ids"]

        peer.until(is_back)
        assert rounds <= 3, f"{peer.name} had {rounds} rounds until {away.name} was back"


def test_peers_behind_nat_are_reached_through_others(net: Net) -> None:
    """Two of five cannot be dialled. Their relay dies, and they are reached through another."""
    for index in range(3):
        net.start(index, 5, until_round=None, train_s=0.5)
    hidden = [net.start(k, 5, closed=True, dialable=False, train_s=0.5) for k in (3, 4)]
    relays = [peer.until_named("address")["address"].partition("@")[0] for peer in hidden]
    assert {*relays} <= {"p0", "p1", "p2"}
    for peer in net.peers.values():
        line = peer.until_round(0, 1, 2, 3, 4)
        assert line["coverage"] == 1
    for peer in hidden:
        # It sends its vector of 8 bytes an element once, and reduces nothing.
        line = peer.until_round(0, 1, 2, 3, 4)
        assert line["bytes_sent"] <= 1.01 * 8 * 20_000

    dead = int(relays[0][1:])
    net.peers[dead].process.send_signal(signal.SIGKILL)
    left = [k for k in range(5) if k != dead]
    hidden[0].until(
        lambda line: line["name"] == "address" and not line["address"].startswith(f"p{dead}@")
    )
    for k in left:
        net.peers[k].until_round(*left, without=dead)
        net.peers[k].until_round(*left, without=dead)


def test_a_link_that_was_cut_for_30_s(net: Net) -> None:
    peers = net.start_all(4)
    cut_at = time.time()
    net.lan.cut("p2")
    for k in (0, 1, 3):
        peers[k].until_status(2, "dead")
        peers[k].until_round(0, 1, 3, without=2)
    peers[0].until_round_after(cut_at + 30)
    since = time.time()
    net.lan.mend("p2")
    check_back(peers, peers[2], since)


def test_a_process_that_was_stopped_for_10_s(net: Net) -> None:
    peers = net.start_all(4)
    process = peers[2].process
    process.send_signal(signal.SIGSTOP)
    stopped_at = time.time()
    for k in (0, 1, 3):
        peers[k].until_status(2, "dead")
        peers[k].until_round(0, 1, 3, without=2)
    peers[0].until_round_after(stopped_at + 10)
    since = time.time()
    process.send_signal(signal.SIGCONT)
    check_back(peers, peers[2], since)


def test_a_device_that_has_another_address(net: Net) -> None:
    peers = net.start_all(4)
    since = time.time()
    address = net.lan.move("p2")
    line = peers[2].until_named("address")
    assert line["address"].startswith(f"{address}:")
    check_back(peers, peers[2], since)


def test_a_slow_line_is_measured_and_spared(net: Net) -> None:
    """A third of the vector each while nothing is known; then the slow one only sends its own."""
    dim, peers = 250_000, []
    for index in range(3):
        peers.append(net.start(index, 3, dim=dim))
        net.lan.limit(f"p{index}", 250e3 if index == 2 else 1e6)
    for k, least, most in ((2, 1.0, 1.01), (0, 1.4, 1.6)):
        peers[k].until(
            lambda line, least=least, most=most: (
                line["name"] == "round"
                and line["contributors"] == 3
                and least <= line["bytes_sent"] / (8 * dim) <= most
            )
        )


@pytest.mark.parametrize("jump_s", [7200, -7200])
def test_a_clock_that_jumps(net: Net, jump_s: int) -> None:
    """The wall clock of one device as its process sees it, in the midst of the run; after that all
    connect to it anew. The machine's own clock, which others use too, is left alone."""
    for index in range(3):
        net.start(index, 3, train_s=0.5)
    peers = list(net.peers.values())
    for peer in peers:
        peer.until_round(0, 1, 2)
    now = time.time()
    peers[2].tell(f"clock {jump_s}")
    peers[2].until(lambda line: line["name"] == "round" and abs(line["at"] - now - jump_s) < 600)
    for _ in range(4):
        for peer in peers:
            assert peer.until_named("round")["coverage"] == 1
    net.lan.cut("p2")
    for peer in peers[:2]:
        peer.until_status(2, "dead")
    net.lan.mend("p2")
    for peer in peers:
        peer.until_round(0, 1, 2)
        assert "stalled" not in [line["name"] for line in peer.lines]
