"""Joiners and donors of a model, in virtual time: see `state_transfer.py`."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.protocol.machine import Effect, PeerId, Report, Round, Send, Vector
from flwr_moshpit.protocol.messages import (
    StateAsk,
    StateChunk,
    StateDenied,
    StateOffer,
    StateWanted,
)
from flwr_moshpit.protocol.state_transfer import Donor, Joiner, denial

DIM = 1000
PIECE = 64
SCHEMA = b"schema"


class Peer:
    """A donor, if it has `params`, and a joiner, if it `joins`."""

    def __init__(self, name: str, params: Any, round: int = 5) -> None:
        self.name = PeerId(name)
        self.params = params
        self.round = Round(round)
        self.donor = Donor()
        self.joiner: Joiner | None = None
        self.pieces_given = 0
        self.change: Callable[[Any], Any] = lambda message: message
        """What it does to the messages that it sends."""


class Net:
    """Delivers after `delay_s[src]`; never to or from the `dead`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.peers: dict[PeerId, Peer] = {}
        self.delay_s: dict[PeerId, float] = {}
        self.dead: dict[PeerId, None] = {}
        self.reports: list[Report] = []
        self.before_delivery: Callable[[Peer, Any], None] = lambda peer, message: None
        self._heap: list[tuple[float, int, PeerId, PeerId, Any]] = []
        self._count = itertools.count()

    def add(self, peer: Peer) -> Peer:
        self.peers[peer.name] = peer
        return peer

    def joiner(self, name: str, least_round: int = 0, seed: int = 0) -> Joiner:
        peer = self.add(Peer(name, None))

        def donors() -> list[PeerId]:
            return [other for other in self.peers if other != peer.name]

        rng = np.random.default_rng([seed, len(self.peers)])
        blank = np.zeros(DIM, np.float32)
        peer.joiner = Joiner(blank, SCHEMA, Round(least_round), PIECE, donors, rng)
        return peer.joiner

    def begin(self) -> None:
        for peer in list(self.peers.values()):
            if peer.joiner is not None:
                self.carry_out(peer, peer.joiner.begin(self.now))

    def run(self, limit_s: float = 1000.0) -> None:
        """Until every joiner is done."""
        while any(peer.joiner and not peer.joiner.is_over for peer in self.peers.values()):
            due = [
                (peer.joiner.deadline, name)
                for name, peer in self.peers.items()
                if peer.joiner is not None and peer.joiner.deadline is not None
            ]
            first = self._heap[0][0] if self._heap else np.inf
            assert due or self._heap, "nobody waits for anything"
            deadline, name = min(due) if due else (np.inf, PeerId(""))
            self.now = max(self.now, min(first, deadline))
            assert self.now < limit_s
            if deadline < first:
                peer = self.peers[name]
                assert peer.joiner is not None
                self.carry_out(peer, peer.joiner.on_timer(self.now))
            else:
                _, _, src, dst, message = heapq.heappop(self._heap)
                self._deliver(src, self.peers[dst], message)

    def carry_out(self, peer: Peer, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Report):
                self.reports.append(effect)
            else:
                assert isinstance(effect, Send)
                at = self.now + self.delay_s.get(peer.name, 0.01)
                message = peer.change(effect.message)
                if not {peer.name, effect.dst} & set(self.dead):
                    item = (at, next(self._count), peer.name, effect.dst, message)
                    heapq.heappush(self._heap, item)

    def _deliver(self, src: PeerId, peer: Peer, message: Any) -> None:
        if {src, peer.name} & set(self.dead):
            return
        self.before_delivery(peer, message)
        joiner, now = peer.joiner, self.now
        effects: list[Effect] = []
        if isinstance(message, StateWanted):
            has_model = peer.params is not None
            denied = denial(message, DIM, SCHEMA, peer.round, has_model, has_finished=False)
            params = np.empty(0) if peer.params is None else peer.params
            effects = peer.donor.on_wanted(src, params, peer.round, denied, now)
        elif isinstance(message, StateAsk):
            effects = peer.donor.on_ask(src, message, now)
            peer.pieces_given += sum(
                isinstance(effect, Send) and isinstance(effect.message, StateChunk)
                for effect in effects
            )
        elif joiner is not None and isinstance(message, StateDenied):
            effects = joiner.on_denied(src, message, now)
        elif joiner is not None and isinstance(message, StateOffer):
            effects = joiner.on_offer(src, message, now)
        elif joiner is not None and isinstance(message, StateChunk):
            effects = joiner.on_chunk(src, message, now)
        self.carry_out(peer, effects)


def model(seed: int) -> Vector:
    vector = np.random.default_rng(seed).normal(size=DIM).astype(np.float32)
    vector.setflags(write=False)
    return vector


def donors(net: Net, count: int) -> list[Peer]:
    return [net.add(Peer(f"donor-{k}", model(k), round=5 + k)) for k in range(count)]


def test_a_joiner_takes_one_donors_snapshot_whatever_the_donor_does_meanwhile() -> None:
    net = Net()
    (donor,) = donors(net, 1)
    joiner = net.joiner("new")
    taken = donor.params

    def train_on(peer: Peer, message: Any) -> None:
        if isinstance(message, StateAsk):
            peer.params, peer.round = model(99), Round(6)

    net.before_delivery = train_on
    net.begin()
    net.run()
    assert joiner.given is not None
    assert np.array_equal(joiner.given.params, taken)
    assert (joiner.given.round, joiner.given.donor) == (5, "donor-0")
    assert not joiner.given.params.flags.writeable
    assert donor.pieces_given == -(-DIM // PIECE)


@pytest.mark.parametrize("how", ["slow", "silent", "lost"])
def test_a_donor_that_is_of_no_use_is_left_for_another(how: str) -> None:
    net = Net()
    bad, good = donors(net, 2)
    joiner = net.joiner("new", seed=next(s for s in range(99) if _asks_first(s, "donor-0")))

    def spoil(peer: Peer, message: Any) -> None:
        if peer is not bad or not isinstance(message, StateAsk) or peer.pieces_given < 5:
            return
        net.delay_s[bad.name] = 30.0
        if how != "slow":
            net.dead[bad.name] = None
        if how == "lost":
            net.carry_out(net.peers[PeerId("new")], joiner.on_lost(bad.name, net.now))

    net.before_delivery = spoil
    net.begin()
    net.run()
    assert joiner.given is not None
    assert joiner.given.donor == good.name
    assert np.array_equal(joiner.given.params, model(1)), "pieces of two snapshots"
    assert net.now < (2.5 if how != "lost" else 1.0)
    assert [report.values["reason"] for report in net.reports] == [
        "lost" if how == "lost" else "slow"
    ]


def _asks_first(seed: int, name: str) -> bool:
    net = Net()
    donors(net, 2)
    joiner = net.joiner("new", seed=seed)
    (first,) = joiner.begin(0.0)
    assert isinstance(first, Send)
    return first.dst == name


def test_twenty_joiners_at_once_spread_over_the_donors() -> None:
    net = Net()
    givers = donors(net, 5)
    joiners = [net.joiner(f"new-{k}", seed=k) for k in range(20)]
    at_once = 0

    def count(peer: Peer, message: Any) -> None:
        nonlocal at_once
        at_once = max(at_once, len(peer.donor._snapshots))

    net.before_delivery = count
    net.begin()
    net.run()
    by_donor = Counter(joiner.given.donor for joiner in joiners if joiner.given is not None)
    assert sum(by_donor.values()) == 20
    assert set(by_donor) == {giver.name for giver in givers}
    assert max(by_donor.values()) <= 8
    assert at_once == 2
    for joiner in joiners:
        assert joiner.given is not None
        giver = net.peers[joiner.given.donor]
        assert np.array_equal(joiner.given.params, giver.params)
        assert joiner.given.round == giver.round


def test_where_nobody_has_anything_a_joiner_knows_at_once() -> None:
    net = Net()
    for k in range(5):
        net.add(Peer(f"blank-{k}", None))
    joiners = [net.joiner(f"new-{k}") for k in range(3)]
    net.begin()
    net.run()
    assert all(joiner.given is None for joiner in joiners)
    assert net.now < 0.5


def test_nobody_waits_for_ever_for_those_who_say_nothing() -> None:
    net = Net()
    for peer in donors(net, 3):
        net.dead[peer.name] = None
    joiner = net.joiner("new")
    net.begin()
    net.run(limit_s=400.0)
    assert joiner.given is None


def test_a_joiner_waits_for_a_round_that_is_still_to_come() -> None:
    net = Net()
    donors(net, 2)
    joiner = net.joiner("new", least_round=9)

    def go_on(peer: Peer, message: Any) -> None:
        if isinstance(message, StateWanted) and net.now > 3:
            peer.round = Round(9)

    net.before_delivery = go_on
    net.begin()
    net.run()
    assert joiner.given is not None
    assert joiner.given.round == 9
    assert 3 < net.now < 5


BAD: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda chunk: StateChunk(chunk.serial, chunk.offset, chunk.data * np.float32(np.nan)),
    "wrong length or type": lambda chunk: StateChunk(chunk.serial, chunk.offset, chunk.data[1:]),
    "impossible round": lambda offer: StateOffer(offer.serial, Round(1 << 40)),
}


@pytest.mark.parametrize("reason", BAD)
def test_rubbish_is_refused_and_taken_from_another(reason: str) -> None:
    net = Net()
    bad, good = donors(net, 2)
    kind = StateOffer if reason == "impossible round" else StateChunk
    bad.change = lambda message: BAD[reason](message) if isinstance(message, kind) else message
    joiner = net.joiner("new", seed=next(s for s in range(99) if _asks_first(s, "donor-0")))
    net.begin()
    net.run()
    assert joiner.given is not None
    assert joiner.given.donor == good.name
    assert np.array_equal(joiner.given.params, good.params)
    assert [report.values for report in net.reports] == [
        {"peer": "donor-0", "reason": reason, "what": "state"}
    ]


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (DIM, 1), (DIM - 1, 2), (0, 0), (0, -3)])
def test_a_donor_gives_no_piece_that_does_not_exist(offset: int, size: int) -> None:
    donor = Donor()
    (offer,) = donor.on_wanted(PeerId("new"), model(0), Round(1), None, 0.0)
    assert isinstance(offer, Send)
    assert isinstance(offer.message, StateOffer)
    (refused,) = donor.on_ask(PeerId("new"), StateAsk(offer.message.serial, offset, size), 0.0)
    assert isinstance(refused, Report)


def test_a_donor_denies_other_models_and_forgets_who_went_away() -> None:
    wanted = StateWanted(DIM, SCHEMA, Round(3))
    denied = [
        denial(StateWanted(DIM + 1, SCHEMA, Round(0)), DIM, SCHEMA, Round(5), True, False),
        denial(StateWanted(DIM, b"other", Round(0)), DIM, SCHEMA, Round(5), True, False),
        denial(wanted, DIM, SCHEMA, Round(5), False, False),
        denial(wanted, DIM, SCHEMA, Round(2), True, True),
    ]
    assert [each is not None and each.again for each in denied] == [False] * 4
    assert denial(wanted, DIM, SCHEMA, Round(2), True, False) == StateDenied(
        "not there yet", again=True
    )
    donor = Donor()
    for k in range(3):
        (answer,) = donor.on_wanted(PeerId(f"new-{k}"), model(0), Round(5), None, 0.0)
        assert isinstance(answer, Send)
        assert isinstance(answer.message, StateOffer if k < 2 else StateDenied)
    (answer,) = donor.on_wanted(PeerId("new-2"), model(0), Round(5), None, 10.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, StateOffer), "the first two have not said a word for long"
