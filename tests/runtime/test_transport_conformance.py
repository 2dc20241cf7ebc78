"""What every transport must hold: order, delivery or a lost link, credit, and an end."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import numpy as np
import pytest

from flwr_moshpit.protocol import membership_messages as membership
from flwr_moshpit.protocol import messages
from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.runtime.neighbour import Settings
from tests.runtime.networks import ALL, QUICK, REAL, Station, Stations, run
from tests.runtime.samples import GROUP, example

MB = 1 << 20

EVERYWHERE = pytest.mark.parametrize("kind", ALL)
REAL_ONLY = pytest.mark.parametrize("kind", REAL)
"""Of what only real networks have: credit, frames, links that are retired, an end with grace."""


def ask(number: int) -> Message:
    return messages.Ask(GROUP, messages.Version(0, 0), number)


def part(number: int, size: int) -> messages.Part:
    data = np.full(size, number, np.float32)
    data.setflags(write=False)
    return messages.Part(GROUP, number, data)


def push(number: int, size: int = 1) -> messages.Push:
    rho = np.full(size, number, np.float32)
    push: messages.Push = example(messages.Push, counter=number, rho=rho)
    return push


def numbers(station: Station, src: Station) -> list[int]:
    return [message.offset for message in station.came_from(src)]


@EVERYWHERE
def test_streams_arrive_in_order_both_ways_at_once(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        sizes = [0, 1, 5_000, 70_000, 3, 200_000]
        for number, size in zip(range(60), itertools.cycle(sizes)):
            message = part(number, size) if size else ask(number)
            a.send(b, message)
            b.send(a, message)
        for one, other in ((a, b), (b, a)):
            await one.until(lambda: len(one.inbox) == 60)  # noqa: B023
            assert numbers(one, other) == list(range(60))
            parts = [m for m in one.came_from(other) if isinstance(m, messages.Part)]
            assert all((m.data == m.offset).all() for m in parts)
            assert one.lost == []

    run(kind, scenario)


@EVERYWHERE
@pytest.mark.parametrize(
    "size", [0, 1, MB - 1, MB, MB + 1, pytest.param(16 * MB, marks=pytest.mark.slow)]
)
def test_arrays_of_any_size_arrive(kind: str, size: int) -> None:
    """Up to 4 MB and a little more or less, in the slow tests 64 MB and, as float64, 128 MB."""

    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a", dim=size), await stations.add("b", dim=size)
        sent = np.random.default_rng(size).standard_normal(size)
        sent.setflags(write=False)
        single = sent.astype(np.float32)
        single.setflags(write=False)
        for data in (sent, single):
            a.send(b, messages.Part(GROUP, 0, data))
        await b.until(lambda: len(b.inbox) == 2)
        for came, data in zip(b.came_from(a), (sent, single), strict=True):
            assert came.data.dtype == data.dtype
            assert came.data.tobytes() == data.tobytes()

    run(kind, scenario)


@REAL_ONLY
def test_what_came_is_read_only_and_not_the_senders(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        sent = [part(0, 100), part(1, 1 << 18)]
        for message in sent:
            a.send(b, message)
        await b.until(lambda: len(b.inbox) == 2)
        for message, came in zip(sent, b.came_from(a), strict=True):
            assert not came.data.flags.writeable
            assert not np.shares_memory(came.data, message.data)

    run(kind, scenario)


@EVERYWHERE
def test_a_letter_to_oneself_arrives_later(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a = await stations.add("a")
        a.send(a, ask(1))
        assert a.inbox == []
        await a.until(lambda: a.inbox == [("a", ask(1))])

    run(kind, scenario)


@EVERYWHERE
def test_a_message_to_nobody_is_a_lost_link(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        a.transport.send(PeerId("x"), ask(1))
        await a.until(lambda: a.lost == ["x"])
        await b.transport.close()
        a.send(b, ask(1))
        await a.until(lambda: a.lost == ["x", "b"])
        a.send(b, ask(2))
        await a.until(lambda: a.lost == ["x", "b", "b"])

    run(kind, scenario)


@EVERYWHERE
def test_nothing_is_told_of_datagrams_and_newest_that_cannot_arrive(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a = await stations.add("a")
        for number in range(3):
            a.transport.send(PeerId("x"), push(number))
            a.transport.send(PeerId("x"), membership.Vouch(PeerId("b")))
        a.transport.send(PeerId("y"), ask(1))
        await a.until(lambda: a.lost == ["y"])

    run(kind, scenario)


@EVERYWHERE
def test_a_peer_that_ends_leaves_a_prefix_and_a_lost_link(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        for number in range(80):
            a.send(b, part(number, 1 << 16))
        await b.until(lambda: len(b.inbox) >= 20)
        await b.transport.close(grace_s=0.0)
        await a.until(lambda: a.lost == ["b"])
        came = numbers(b, a)
        assert came == list(range(len(came)))
        assert len(came) < 80

    run(kind, scenario)


@EVERYWHERE
def test_both_ends_of_a_link_hear_of_its_loss_whoever_spoke(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        a.send(b, ask(1))
        await b.until(lambda: len(b.inbox) == 1)
        await a.transport.close()
        await b.until(lambda: b.lost == ["a"])

    run(kind, scenario)


@EVERYWHERE
def test_a_restarted_peer_is_found_at_its_new_address(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b", incarnation=1)
        a.send(b, ask(1))
        await b.until(lambda: len(b.inbox) == 1)
        await b.transport.close()
        await a.until(lambda: a.lost == ["b"])
        again = await stations.add("b", incarnation=2)
        a.send(again, ask(2))
        await again.until(lambda: numbers(again, a) == [2])
        again.send(a, ask(3))
        await a.until(lambda: numbers(a, again) == [3])
        assert a.lost == ["b"]

    run(kind, scenario)


@REAL_ONLY
def test_a_peer_from_before_its_restart_is_refused(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b", incarnation=2)
        b.send(a, ask(1))
        await a.until(lambda: len(a.inbox) == 1)
        await b.transport.close()
        await a.until(lambda: a.lost == ["b"])
        zombie = await stations.add("b", incarnation=1)
        zombie.send(a, ask(2))
        await zombie.until(lambda: zombie.lost == ["a"])
        assert a.transport.refusals["stale"] == 1
        a.send(zombie, ask(3))
        await a.until(lambda: a.lost == ["b", "b"])
        assert numbers(a, zombie) == [1]
        assert zombie.inbox == []

    run(kind, scenario)


@REAL_ONLY
def test_a_peer_that_has_lost_its_state_is_let_in_when_its_life_before_is_forgotten(
    kind: str,
) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b", incarnation=2)
        b.send(a, ask(1))
        await a.until(lambda: len(a.inbox) == 1)
        await b.transport.close()
        await a.until(lambda: a.lost == ["b"])
        a.transport.forget(b.peer)
        blank = await stations.add("b", incarnation=0)
        blank.send(a, ask(2))
        await a.until(lambda: numbers(a, blank) == [1, 2])
        a.send(blank, ask(3))
        await blank.until(lambda: numbers(blank, a) == [3])
        assert a.transport.refusals == Counter()

    run(kind, scenario)


@EVERYWHERE
def test_a_newer_message_replaces_the_one_that_waits(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        for number in range(100):
            a.send(b, push(number, 1 << 18))
        await b.until(lambda: len(b.inbox) == 1)
        for number in range(100, 200):
            a.send(b, push(number, 1 << 18))
        await b.until(lambda: len(b.inbox) == 2)
        a.send(b, push(200))
        await b.until(lambda: len(b.inbox) == 3)
        assert [message.counter for message in b.came_from(a)] == [99, 199, 200]

    run(kind, scenario)


@EVERYWHERE
def test_a_sender_is_told_while_what_is_newest_has_to_wait(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        a.send(b, push(0, 1 << 18))
        await a.until(lambda: (b.peer, False) in a.lines)
        assert a.lines == [(b.peer, True), (b.peer, False)]
        await b.until(lambda: len(b.inbox) == 1)
        assert b.lines == []

    run(kind, scenario)


@REAL_ONLY
def test_a_peer_that_takes_nothing_is_sent_a_bounded_amount(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        pending: list[asyncio.Future[None]] = []

        def take(src: PeerId, message: Message) -> asyncio.Future[None] | None:
            if isinstance(message, membership.Vouch):
                return None
            pending.append(asyncio.get_running_loop().create_future())
            return pending[-1]

        a, b = await stations.add("a"), await stations.add("b", take=take)
        c = await stations.add("c")
        count, size = 40, 1 << 17
        for number in range(count):
            a.send(b, part(number, size))
        await b.until(lambda: len(pending) >= 8)
        # Others, and what does not travel in the stream, go on.
        for number in range(200):
            a.send(c, ask(number))
        for _ in range(20):
            a.send(b, membership.Vouch(PeerId("x")))
        a.send(b, push(1, size))
        await c.until(lambda: len(c.inbox) == 200)
        await b.until(lambda: len(b.inbox) == len(pending) + 20)
        window = 1 << 23
        assert 4 * size * (len(pending) - 2) <= window + 4 * size
        while len(numbers_of_parts(b, a)) < count:
            for future in pending:
                if not future.done():
                    future.set_result(None)
            before = len(b.inbox)
            await b.until(lambda: len(b.inbox) > before or len(b.inbox) == count + 21)  # noqa: B023
        assert numbers_of_parts(b, a) == list(range(count))
        assert a.lost == []

    run(kind, scenario)


def numbers_of_parts(station: Station, src: Station) -> list[int]:
    return [m.offset for m in station.came_from(src) if isinstance(m, messages.Part)]


@EVERYWHERE
def test_heartbeats_overtake_a_large_message(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        size = 1 << 23
        a, b = await stations.add("a", dim=size), await stations.add("b", dim=size)
        a.send(b, ask(0))
        await b.until(lambda: len(b.inbox) == 1)
        a.send(b, part(1, size))
        a.send(b, membership.Vouch(PeerId("x")))
        await b.until(lambda: len(b.inbox) == 3)
        assert [type(m) for m in b.came_from(a)] == [
            messages.Ask,
            membership.Vouch,
            messages.Part,
        ]

    run(kind, scenario)


@REAL_ONLY
def test_too_much_that_waits_is_a_lost_link(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        settings = Settings(outbox_bytes=1 << 20, backoff_s=0.01)
        a = await stations.add("a", settings=settings)
        b = await stations.add("b")
        for number in range(10):
            a.send(b, part(number, 1 << 16))
        await a.until(lambda: a.lost != [])
        a.send(b, ask(11))
        await b.until(lambda: numbers(b, a)[-1:] == [11])
        assert len(numbers(b, a)) < 11

    run(kind, scenario)


@EVERYWHERE
def test_twelve_peers_talk_all_at_once(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        peers = [await stations.add(f"p{i:02}") for i in range(12)]
        for number in range(5):
            for one, other in itertools.permutations(peers, 2):
                one.send(other, part(number, 1000 * number + 1))
        for one in peers:
            await one.until(lambda: len(one.inbox) == 55)  # noqa: B023
            assert all(
                numbers(one, other) == [0, 1, 2, 3, 4] for other in peers if other is not one
            )
        if kind != "simulated":
            # One link for each pair, although all have dialled at once, and nobody dials any more.
            for one in peers:
                await one.until(lambda: one.transport.num_links == 11)  # noqa: B023
                neighbours = one.transport._neighbours.values()
                assert all(each.dialling is None for each in neighbours)
        assert [one.lost for one in peers] == [[]] * 12
        assert [one.transport.refusals for one in peers] == [Counter()] * 12

    run(kind, scenario)


@EVERYWHERE
def test_an_end_under_load_does_not_hang(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        peers = [await stations.add(f"p{i}") for i in range(5)]
        for number in range(50):
            for one, other in itertools.permutations(peers, 2):
                one.send(other, part(number, 50_000))
        await peers[0].until(lambda: len(peers[0].inbox) >= 10)
        await asyncio.gather(*(each.transport.close(grace_s=0.0) for each in peers))
        for one, other in itertools.permutations(peers, 2):
            one.send(other, ask(0))
            came = numbers(one, other)
            assert came == list(range(len(came)))

    run(kind, scenario)


@REAL_ONLY
def test_what_was_sent_before_the_end_arrives(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        for number in range(30):
            a.send(b, part(number, 100_000))
        await a.transport.close(grace_s=30.0)
        assert numbers(b, a) == list(range(30))

    run(kind, scenario)


@REAL_ONLY
def test_a_forgotten_peer_is_not_reported_and_can_come_back(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b")
        a.send(b, ask(1))
        await b.until(lambda: len(b.inbox) == 1)
        a.send(b, part(2, 1 << 18))
        a.transport.forget(b.peer)
        await b.until(lambda: b.lost == ["a"])
        a.transport.set_address(b.peer, b.transport.address)
        a.send(b, ask(3))
        await b.until(lambda: numbers(b, a)[-1:] == [3])
        assert a.lost == []

    run(kind, scenario)


@REAL_ONLY
def test_links_that_nobody_uses_are_retired_without_loss(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        settings = Settings(idle_s=0.05, backoff_s=0.01)
        a = await stations.add("a", settings=settings)
        b = await stations.add("b", settings=settings)
        for number in range(5):
            a.send(b, part(number, 1000))
            b.send(a, part(number, 1000))
            await b.until(lambda: len(b.inbox) == number + 1)  # noqa: B023
            await a.until(lambda: len(a.inbox) == number + 1)  # noqa: B023
            await a.until(lambda: a.transport.num_links == b.transport.num_links == 0)
        assert numbers(b, a) == numbers(a, b) == [0, 1, 2, 3, 4]
        assert a.lost == b.lost == []

    run(kind, scenario)


@REAL_ONLY
def test_nothing_is_lost_while_links_are_retired_all_the_time(kind: str) -> None:
    async def scenario(stations: Stations) -> None:
        settings = Settings(idle_s=0.002, backoff_s=0.01)
        a = await stations.add("a", settings=settings)
        b = await stations.add("b", settings=settings)
        for number in range(100):
            a.send(b, ask(number))
            if number % 3 == 0:
                b.send(a, part(number, 30_000))
            if number % 7 == 0:
                await b.until(lambda: len(b.inbox) == number + 1)  # noqa: B023
        await b.until(lambda: len(b.inbox) == 100)
        await a.until(lambda: len(a.inbox) == 34)
        assert numbers(b, a) == list(range(100))
        assert numbers(a, b) == list(range(0, 100, 3))
        assert a.lost == b.lost == []

    run(kind, scenario)


@REAL_ONLY
def test_what_nobody_could_read_is_left_out_and_the_rest_arrives(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stations: Stations) -> None:
        a, b = await stations.add("a"), await stations.add("b", settings=QUICK)
        a.send(b, messages.Part(GROUP, -1, np.zeros(3, np.float32)))
        a.send(b, part(1, 1 << 20))
        a.send(b, ask(2))
        await b.until(lambda: numbers(b, a) == [2])

    run(kind, scenario)
    assert "left out" in caplog.text
