"""What a death costs a group whose reducers keep sums, not parts."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from flwr_moshpit.protocol.allreduce import AllReduce
from flwr_moshpit.protocol.machine import PeerId, Round, Send
from flwr_moshpit.protocol.messages import (
    Answer,
    Ask,
    Average,
    GroupId,
    GroupKey,
    GroupNamed,
    Member,
    Part,
    PlanId,
    Query,
    Share,
    Version,
    Waiting,
)

A, B, C, D = PEERS = [PeerId(name) for name in "ABCD"]
KEY = GroupKey(PlanId(1, A), Round(0), 0, 0)
GROUP = GroupId(KEY, A, 0)
PIECE = 4
NAMED = GroupNamed(
    group=GROUP,
    version=Version(0, 0),
    members=tuple(Member(peer, 1.0 + index, 1, 0) for index, peer in enumerate(PEERS)),
    # B reduces two pieces; the others none, so that one member's sums are all there is.
    shares=(Share(0, 2 * PIECE, B),),
    ranks=(A, B, C, D),
    dim=2 * PIECE,
    part_elems=PIECE,
    stall_s=2.0,
    sweep=False,
)
WEIGHTS = {member.peer: member.weight for member in NAMED.members}
VECTORS = {peer: np.random.default_rng(ord(peer)).normal(size=2 * PIECE) for peer in PEERS}


def member(peer: PeerId) -> AllReduce:
    return AllReduce(peer, NAMED, VECTORS[peer].copy(), lambda other: True, 0.0)


def part(peer: PeerId, offset: int) -> Part:
    return Part(GROUP, offset, VECTORS[peer][offset : offset + PIECE].copy())


def sent(effects, kind):
    return [
        (effect.dst, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


def without(*lost: PeerId, version: Version) -> GroupNamed:
    members = tuple(each for each in NAMED.members if each.peer not in lost)
    return replace(NAMED, version=version, members=members)


def mean(peers, offset: int):
    total = sum(WEIGHTS[peer] for peer in peers)
    return sum(WEIGHTS[p] / total * VECTORS[p][offset : offset + PIECE] for p in peers)


def next_version(reducer: AllReduce, named: GroupNamed):
    """Its namer A asks whether it has finished, and names it."""
    reducer.handle(A, Query(GROUP, named.version), 1.0)
    return reducer.handle(A, named, 1.0)


def test_a_sum_without_the_dead_goes_on_and_nobody_sends_again() -> None:
    reducer = member(B)
    reducer.start(0.0)
    for offset in (0, PIECE):
        reducer.handle(A, part(A, offset), 0.1)
        reducer.handle(C, part(C, offset), 0.1)
    effects = next_version(reducer, without(D, version=Version(1, 0)))
    assert sent(effects, Ask) == []
    averages = sent(effects, Average)
    assert sorted((to, average.offset) for to, average in averages) == [
        (peer, offset) for peer in (A, C) for offset in (0, PIECE)
    ]
    for _, average in averages:
        assert np.allclose(average.data, mean([A, B, C], average.offset), rtol=1e-14)
    assert reducer.outcome is not None
    assert reducer.outcome.contributors == (A, B, C)


def test_a_sum_with_the_dead_is_begun_anew_from_those_who_were_in_it() -> None:
    reducer = member(B)
    reducer.start(0.0)
    reducer.handle(A, part(A, 0), 0.1)
    reducer.handle(D, part(D, 0), 0.1)
    effects = next_version(reducer, without(D, version=Version(1, 0)))
    # C's part is still on its way, and in the second piece nobody was yet.
    assert sent(effects, Ask) == [(A, Ask(GROUP, Version(1, 0), 0))]
    for peer, offset in ((C, 0), (A, PIECE), (C, PIECE), (A, 0)):
        assert reducer.outcome is None
        effects = reducer.handle(peer, part(peer, offset), 1.1)
    assert reducer.outcome is not None
    for offset in (0, PIECE):
        average = reducer.outcome.average[offset : offset + PIECE]
        assert np.allclose(average, mean([A, B, C], offset), rtol=1e-14)


def test_a_part_that_comes_twice_counts_once() -> None:
    reducer = member(B)
    reducer.start(0.0)
    for peer in (A, A, C, A, D):
        effects = reducer.handle(peer, part(peer, 0), 0.1)
    (average, *_) = [message for _, message in sent(effects, Average)]
    assert np.allclose(average.data, mean(PEERS, 0), rtol=1e-14)


def test_who_is_asked_for_a_new_sum_sends_its_part_again_at_once_and_once() -> None:
    sender = member(A)
    first = sent(sender.start(0.0), Part)
    assert [(to, each.offset) for to, each in first] == [(B, 0), (B, PIECE)]
    again = Ask(GROUP, Version(1, 1), 0)
    # No version that I have not been asked about can have been named.
    assert sent(sender.handle(B, again, 0.5), Part) == []
    sender.handle(B, Query(GROUP, Version(1, 1)), 0.6)
    ((to, repeated),) = sent(sender.handle(B, again, 0.7), Part)
    assert to == B
    assert np.array_equal(repeated.data, VECTORS[A][:PIECE])
    # The same question once more: it is on its way.
    effects = sender.handle(B, again, 0.8)
    assert sent(effects, Part) == []
    assert sent(effects, Waiting) == [(B, Waiting(GROUP))]


def test_a_part_for_a_version_that_has_not_been_named_to_me_is_used() -> None:
    heir = member(C)
    heir.start(0.0)
    # A and D know already that B is dead and that C reduces in its place.
    for peer in (A, D):
        for offset in (0, PIECE):
            assert sent(heir.handle(peer, part(peer, offset), 0.5), Average) == []
    named = replace(
        without(B, version=Version(1, 0)), shares=(replace(NAMED.shares[0], reducer=C),)
    )
    heir.handle(A, Query(GROUP, named.version), 1.0)
    assert sent(heir.handle(A, Query(GROUP, named.version), 1.0), Answer)
    effects = heir.handle(A, named, 1.1)
    assert len(sent(effects, Average)) == 4
    assert heir.outcome is not None
    assert np.allclose(heir.outcome.average[PIECE:], mean([A, C, D], PIECE), rtol=1e-14)


@pytest.mark.parametrize("complete", [False, True])
def test_no_part_is_kept(complete: bool) -> None:
    reducer = member(B)
    reducer.start(0.0)
    kept = []
    for peer in (A, C, D) if complete else (A, C):
        came = part(peer, 0)
        kept.append(weakref.ref(came.data))
        reducer.handle(peer, came, 0.1)
        del came
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_an_average_that_comes_early_is_used_and_one_that_is_too_long_is_not_kept() -> None:
    waiting = member(A)
    waiting.start(0.0)
    named = without(D, version=Version(1, 0))
    long = np.zeros(1000)
    gone = weakref.ref(long)
    waiting.handle(B, Average(GROUP, named.version, PIECE, long), 0.5)
    del long
    gc.collect()
    assert gone() is None
    for offset in (0, PIECE):
        data = mean([A, B, C], offset)
        waiting.handle(B, Average(GROUP, named.version, offset, data), 0.6)
    assert waiting.outcome is None
    waiting.handle(C, named, 1.0)
    assert waiting.outcome is not None
    assert np.allclose(waiting.outcome.average, np.hstack([mean([A, B, C], at) for at in (0, 4)]))
