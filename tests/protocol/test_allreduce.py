"""One group alone, under every order of deliveries, deaths and losses that can be drawn.

`AllReduce` objects on FIFO links. Each member brings a unit vector of its own, so a result shows
who is in it. Deaths are noticed late, by each member at another moment, and never wrongly; a dying
member's messages go out up to any of them.
"""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.protocol.allreduce import AllReduce
from flwr_moshpit.protocol.machine import PeerId, Round, Send
from flwr_moshpit.protocol.messages import (
    GroupId,
    GroupKey,
    GroupNamed,
    Member,
    PlanId,
    Share,
    Version,
)

PIECES = 2
"""That each reducer has."""


def named_group(peers, weights, reducers):
    size = PIECES * len(peers)
    shares = [Share(k * size, (k + 1) * size, peer) for k, peer in enumerate(reducers)]
    members = [Member(peer, weights[peer], 1, 0) for peer in peers]
    key = GroupKey(PlanId(1, peers[0]), Round(0), 0, 0)
    return GroupNamed(
        group=GroupId(key, peers[0], 0),
        version=Version(0, 0),
        members=tuple(members),
        shares=tuple(shares),
        ranks=tuple(peers),
        dim=size * len(reducers),
        part_elems=len(peers),
        stall_s=2.0,
        sweep=False,
    )


class Group:
    """Runs one group to its end; what happens next is drawn from `rng`."""

    def __init__(self, rng, size, crashes, cuts, drops):
        self.rng = rng
        self.peers = [PeerId(name) for name in "ABCDEFGH"[:size]]
        self.weights = {peer: float(rng.random() > 0.15) for peer in self.peers}
        self.weights[rng.choice(self.peers)] = 1.0
        reducers = self.peers
        if rng.random() < 0.4:
            reducers = sorted(rng.sample(self.peers, rng.randint(1, size)))
        named = named_group(self.peers, self.weights, reducers)
        self.left = {"crash": crashes, "cut": cuts, "drop": drops}
        self.now = 0.0
        self.dead: list[PeerId] = []
        self.seen: dict[PeerId, list[PeerId]] = {peer: [] for peer in self.peers}
        self.queues: dict[tuple[PeerId, PeerId], list] = {}
        self.pace: dict[tuple[PeerId, PeerId], float] = {}
        self.members = {
            peer: AllReduce(
                peer,
                named,
                np.tile(np.eye(size)[index], PIECES * len(reducers)),
                lambda other, mine=peer: other not in self.seen[mine],
                0.0,
            )
            for index, peer in enumerate(self.peers)
        }
        for peer in self.peers:
            self.carry_out(peer, self.members[peer].start(0.0))

    @property
    def living(self):
        return [peer for peer in self.peers if peer not in self.dead]

    def carry_out(self, src, effects, at_most=None):
        for effect in effects[:at_most]:
            if isinstance(effect, Send) and effect.dst == src:
                self.carry_out(src, self.members[src].handle(src, effect.message, self.now))
            elif isinstance(effect, Send):
                self.queues.setdefault((src, effect.dst), []).append(effect.message)

    def run(self):
        for _ in range(6000):
            choices = self.choices()
            if choices:
                self.now += 0.001
                actions, odds = zip(*choices, strict=True)
                self.rng.choices(actions, odds)[0]()
            elif all(self.members[peer].outcome for peer in self.living):
                return
            else:
                self.now += 1.0
                for peer in self.living:
                    self.carry_out(peer, self.members[peer].on_timer(self.now))
            if self.now > 300:
                return

    def choices(self):
        """(what can happen next, how likely)."""
        found = []
        for link, queue in self.queues.items():
            if queue and link[1] not in self.dead:
                pace = self.pace.setdefault(link, self.rng.choice([1, 1, 1, 0.1, 0.02]))
                found.append((lambda link=link: self.deliver(*link), pace))
        for peer in self.living:
            found += [
                (lambda p=peer, g=gone: self.notice(p, g), 0.15)
                for gone in self.dead
                if gone not in self.seen[peer] and not self.queues.get((gone, peer))
            ]
        if self.left["crash"] and len(self.living) > 2:
            found.append((lambda: self.crash(self.rng.choice(self.living)), 0.15))
        if self.left["cut"] and len(self.living) > 1:
            found.append((self.cut, 0.1))
        return found

    def deliver(self, src, dst):
        message = self.queues[src, dst].pop(0)
        if self.left["drop"] and self.rng.random() < 0.05:
            self.left["drop"] -= 1
            return
        effects = self.members[dst].handle(src, message, self.now)
        dies = self.left["crash"] and len(self.living) > 2 and self.rng.random() < 0.05
        self.carry_out(dst, effects, self.rng.randint(0, 4) if dies else None)
        if dies:
            self.crash(dst)

    def crash(self, peer):
        self.left["crash"] -= 1
        self.dead.append(peer)
        for (src, _), queue in self.queues.items():
            if src == peer:
                del queue[self.rng.randint(0, len(queue)) :]

    def notice(self, peer, gone):
        self.seen[peer].append(gone)
        self.carry_out(peer, self.members[peer].on_lost(gone, self.now))

    def cut(self):
        """A connection breaks: what is queued is lost, and the sender is told."""
        self.left["cut"] -= 1
        src, dst = self.rng.sample(self.living, 2)
        self.queues[src, dst] = []
        self.carry_out(src, self.members[src].on_link_lost(dst, self.now))

    def check(self):
        """Nobody hangs; results are whole, say truly who is in them, and share nobody."""
        within = {}
        for peer in self.living:
            outcome = self.members[peer].outcome
            assert outcome is not None, f"{peer} waits for {self.members[peer].waits_for()}"
            if outcome.average is None:
                continue
            pieces = outcome.average.reshape(-1, len(self.peers))
            assert np.allclose(pieces, pieces[0]), "a patchwork of several averages"
            weights = [self.weights[p] * (p in outcome.contributors) for p in self.peers]
            assert np.allclose(pieces[0], np.divide(weights, sum(weights)))
            within[peer] = outcome.contributors
        for peer in self.living:
            outcome = self.members[peer].outcome
            if outcome.average is None and not outcome.lost_track:
                assert not any(peer in others for others in within.values())
        assert len({*within.values()}) <= 1
        return within


FAULTS = {
    "one death": (1, 0, 0),
    "deaths": (3, 0, 0),
    "cut links": (0, 3, 0),
    "deaths and cut links": (2, 3, 0),
    "lost messages": (0, 0, 3),
    "deaths and lost messages": (2, 0, 3),
}


def drawn(seed, faults):
    rng = Random(seed)
    group = Group(rng, rng.randint(3, 6), *FAULTS[faults])
    group.run()
    return group


@pytest.mark.parametrize("faults", FAULTS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_one_result_over_one_set_of_contributors(faults, seed):
    drawn(seed, faults).check()


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
def test_one_result_in_many_schedules(faults):
    for seed in range(3000):
        drawn(seed, faults).check()


def test_without_faults_all_have_the_mean_of_all():
    for seed in range(50):
        rng = Random(seed)
        group = Group(rng, rng.randint(2, 6), 0, 0, 0)
        group.run()
        assert sorted(group.check()) == group.peers
