"""The network: bandwidth, streams, datagrams, lost links, interceptors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import (
    Effect,
    Event,
    LineBusy,
    LineFree,
    LinkLost,
    Message,
    PeerId,
    Received,
    Send,
    Start,
)
from flwr_moshpit.simulation.agenda import Agenda
from flwr_moshpit.simulation.device import builtin_catalogue
from flwr_moshpit.simulation.network import (
    HEADER_BYTES,
    Delay,
    Drop,
    Duplicate,
    Link,
    Network,
    Replace,
    Verdict,
)
from flwr_moshpit.simulation.transfers import Flow, Pipe, Transfers
from tests.simulation.recorder import Box, Bulletin, Letter, Postcard, Recorder, Swarm, started

BY_BOX = Network.from_profiles()


def boxes(*bytes_per_s: float, latency_s: float = 0.0) -> list[Box]:
    return [Box(Link(speed, speed, latency_s)) for speed in bytes_per_s]


class TestLinks:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"uplink_bytes_per_s": 0}, "uplink_bytes_per_s must be above 0, not 0"),
            ({"downlink_bytes_per_s": -1}, "downlink_bytes_per_s must be above 0, not -1"),
            ({"latency_s": float("nan")}, "latency_s must be 0 or more, not nan"),
            ({"jitter_s": -1}, "jitter_s must be 0 or more"),
            ({"loss": 1}, r"loss must be in \[0, 1\), not 1"),
        ],
    )
    def test_impossible_figures_are_named(self, values: dict[str, float], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Network.uniform(**values)  # type: ignore[arg-type]

    def test_devices_bring_their_links_or_share_one(self) -> None:
        device = builtin_catalogue().device("jetson-nano")
        assert BY_BOX.link_of(device) is device.link
        assert Network.uniform(uplink_bytes_per_s=5.0).link_of(device) == Link(5.0, 5.0, 0.005)

    def test_uniform_figures_hold_between_two_peers(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.25, uplink_bytes_per_s=1e12))
        swarm.send(0, 1, Letter(1))
        swarm.run()
        assert swarm[1].times(Received) == [pytest.approx(0.25)]


class TestBandwidth:
    @pytest.mark.parametrize("size", [4_096, 4_097, 1_000_000])
    def test_alone_a_message_takes_its_size_over_the_slower_link(self, size: int) -> None:
        for speeds in ([1e6, 1e5], [1e5, 1e6]):
            swarm = started(2, network=BY_BOX, boxes=boxes(*speeds, latency_s=0.05))
            swarm.send(0, 1, Letter(1, size))
            swarm.run()
            assert swarm[1].times(Received) == [pytest.approx(size / 1e5 + 0.1, rel=1e-3)]

    @pytest.mark.parametrize("size", [4_000, 1_000_000])
    def test_one_uplink_to_many(self, size: int) -> None:
        swarm = started(9, network=BY_BOX, boxes=boxes(1e6, *[1e9] * 8))
        swarm.do(0, *(Send(peer, Letter(1, size)) for peer in swarm.peers[1:]))
        swarm.run()
        arrivals = [swarm[k].times(Received)[0] for k in range(1, 9)]
        assert max(arrivals) == pytest.approx(8 * size / 1e6, rel=0.01)
        if size > 4_096:
            # Concurrent streams share it fairly.
            assert min(arrivals) == pytest.approx(max(arrivals), rel=0.01)

    @pytest.mark.parametrize("size", [4_000, 1_000_000])
    def test_many_to_one_downlink(self, size: int) -> None:
        swarm = started(9, network=BY_BOX, boxes=boxes(1e6, *[1e9] * 8))
        for k in range(1, 9):
            swarm.send(k, 0, Letter(k, size))
        swarm.run()
        assert swarm[0].times(Received)[-1] == pytest.approx(8 * size / 1e6, rel=0.01)

    def test_slow_streams_leave_a_fast_one_what_they_cannot_use(self) -> None:
        """A server of 10 MB/s, ten phones of 0.1 MB/s and one peer of 100 MB/s upload 9 MB each."""
        swarm = started(12, network=BY_BOX, boxes=boxes(1e7, *[1e5] * 10, 1e8))
        for k in range(1, 12):
            swarm.send(k, 0, Letter(k, 9_000_000))
        swarm.run()
        (fast_s,) = [now for now, event in swarm[0].log if _is_letter(event, 11)]
        assert fast_s == pytest.approx(1.0, rel=0.02)
        assert swarm[0].times(Received)[-1] == pytest.approx(90.0, rel=0.01)

    def test_what_ends_early_leaves_its_share_to_the_others(self) -> None:
        """1 MB and 3 MB over 1 MB/s: at half speed until 2 s, then the rest at full speed."""
        swarm = started(3, network=BY_BOX, boxes=boxes(1e6, 1e9, 1e9))
        swarm.send(0, 1, Letter(1, 1_000_000))
        swarm.send(0, 2, Letter(2, 3_000_000))
        swarm.run()
        assert swarm[1].times(Received) == [pytest.approx(2.0, rel=0.01)]
        assert swarm[2].times(Received) == [pytest.approx(4.0, rel=0.01)]

    @pytest.mark.parametrize("jitter_s", [0.0, 0.02])
    def test_butterfly_of_equal_links(self, jitter_s: float) -> None:
        """Each of 8 peers sends 7 parts and 7 averages of s/8: 2 (7/8) s/b."""
        size, speed = 8_000_000, 1e6
        network = Network.uniform(latency_s=0.01, uplink_bytes_per_s=speed, jitter_s=jitter_s)
        swarm = _butterfly([size // 8] * 8, network, [])
        assert swarm.engine.now == pytest.approx(2 * 7 / 8 * size / speed, rel=0.05)

    def test_butterfly_with_one_slow_peer(self) -> None:
        """The slow peer has no share, so only its own parts pass its link: s/b up, s/b down; the
        others then never are the bottleneck."""
        size, slow = 8_000_000, 1e5
        shares = [0] + [size // 7] * 7
        swarm = _butterfly(shares, BY_BOX, boxes(slow, *[1e6] * 7))
        assert swarm.engine.now == pytest.approx(2 * size / slow, rel=0.05)

    def test_both_directions_at_once(self) -> None:
        swarm = started(2, network=BY_BOX, boxes=boxes(1e6, 1e6))
        swarm.send(0, 1, Letter(1, 1_000_000))
        swarm.send(1, 0, Letter(2, 1_000_000))
        swarm.run()
        for k in range(2):
            assert swarm[k].times(Received) == [pytest.approx(1.0, rel=0.01)]

    def test_bytes_are_counted_and_arrays_can_be_scaled(self) -> None:
        swarm = started(2, array_scale=10.0)
        swarm.send(0, 1, Letter(1, 1_064), Postcard(2, 164))
        swarm.run()
        expected = (10_000 + HEADER_BYTES) + (1_000 + HEADER_BYTES)
        assert swarm.engine.usage(swarm.peers[0]).sent_bytes == expected
        assert swarm.engine.usage(swarm.peers[1]).received_bytes == expected

    @settings(deadline=None, max_examples=100)
    @given(st.integers(0, 2**32))
    def test_rates_are_max_min_fair(self, seed: int) -> None:
        """Against progressive filling, after flows have come and gone."""
        chance = random.Random(seed)
        agenda = Agenda()
        transfers = Transfers(agenda)
        count = chance.choice([2, 5, 20])
        pipes = [Pipe(10 ** chance.uniform(4, 7)) for _ in range(2 * count)]
        flows: list[Flow] = []
        for _ in range(chance.choice([3, 10, 60])):
            up, down = chance.randrange(count), count + chance.randrange(count)
            limit = chance.choice([math.inf, math.inf, 10 ** chance.uniform(3, 7)])
            flow = transfers.start(pipes[up], pipes[down], 1e15, _never, limit=limit)
            flows.append(flow)
            if chance.random() < 0.3:
                agenda.advance()
            if chance.random() < 0.2:
                transfers.cancel(flows.pop(chance.randrange(len(flows))))
        while agenda.is_due(0.0):
            agenda.advance()
        for flow, rate in _progressive_filling(flows).items():
            assert flow.rate == pytest.approx(rate, rel=0.05)


def _is_letter(event: Event, number: int) -> bool:
    return (
        isinstance(event, Received)
        and isinstance(event.message, Letter)
        and event.message.number == number
    )


def _never() -> None:
    raise AssertionError("a flow without end has ended")


def _progressive_filling(flows: Sequence[Flow]) -> dict[Flow, float]:
    """All rates grow together until a pipe is full or a flow at its limit; these flows stay, the
    others go on."""
    rates: dict[Flow, float] = {}
    pipes = dict.fromkeys(pipe for flow in flows for pipe in (flow.up, flow.down))
    while len(rates) < len(flows):
        shares = {}
        for pipe in pipes:
            through = [flow for flow in flows if pipe in (flow.up, flow.down)]
            growing = [flow for flow in through if flow not in rates]
            if growing:
                fixed = sum(rates[flow] for flow in through if flow in rates)
                shares[pipe] = (pipe.capacity - fixed) / len(growing)
        full = min(shares, key=lambda pipe: shares[pipe])
        limited = min((flow for flow in flows if flow not in rates), key=lambda flow: flow.limit)
        if limited.limit < shares[full]:
            rates[limited] = limited.limit
            continue
        for flow in flows:
            if full in (flow.up, flow.down) and flow not in rates:
                rates[flow] = shares[full]
    return rates


def _butterfly(shares: list[int], network: Network, devices: list[Box]) -> Swarm:
    """Everybody sends each other its share; who has all parts of its own sends the average."""
    count = len(shares)
    received = [0] * count

    def react(machine: Recorder, event: Event, now: float) -> list[Effect]:
        own = int(machine.info.peer[1:])
        others = [k for k in range(count) if k != own]
        if isinstance(event, Start):
            return [
                Send(PeerId(f"p{k:02}"), Letter(k, HEADER_BYTES + shares[k]))
                for k in others
                if shares[k]
            ]
        if _is_letter(event, own):
            received[own] += 1
            if received[own] == count - 1:
                size = HEADER_BYTES + shares[own]
                return [Send(PeerId(f"p{k:02}"), Letter(99, size)) for k in others]
        return []

    swarm = Swarm(count, react, network=network, boxes=devices)
    swarm.run()
    assert received == [count - 1 if share else 0 for share in shares]
    return swarm


class TestStreams:
    def test_in_order_whatever_the_sizes_jitter_and_loss(self) -> None:
        network = Network.uniform(latency_s=0.01, jitter_s=0.5, loss=0.3, uplink_bytes_per_s=1e6)
        swarm = started(2, network=network)
        chance = random.Random(0)
        for number in range(100):
            size = chance.choice([64, 2_000, 30_000])
            swarm.at(chance.choice([number, number + 0.01]), swarm.send, 0, 1, Letter(number, size))
        swarm.run()
        numbers = swarm[1].numbers()
        order = [event.message.number for event in swarm[1].events(Received)]
        assert sorted(numbers) == list(range(100))
        assert order == numbers == sorted(numbers)

    def test_a_small_letter_waits_behind_a_large_one_to_the_same_peer_only(self) -> None:
        swarm = started(3, network=Network.uniform(uplink_bytes_per_s=1e6))
        swarm.send(0, 1, Letter(1, 1_000_000), Letter(2))
        swarm.send(0, 2, Letter(3))
        swarm.run()
        assert swarm[1].numbers() == [1, 2]
        assert swarm[1].times(Received)[1] >= 1.0
        assert swarm[2].times(Received)[0] < 0.02

    def test_a_stream_that_loses_packets_is_held_to_the_square_root_law(self) -> None:
        """sqrt(3 / (2 x 0.002)) segments of 1448 bytes in 60 ms are 661 kB/s."""
        size, count = 1 << 16, 2_000
        network = Network.uniform(latency_s=0.03, uplink_bytes_per_s=1e9, loss=0.002)
        swarm = started(2, network=network)
        swarm.send(0, 1, *(Letter(number, size) for number in range(count)))
        swarm.run()
        assert swarm[1].numbers() == [*range(count)]
        assert count * size / swarm.engine.now == pytest.approx(661e3, rel=0.12)

    def test_loss_is_lateness_by_retransmission(self) -> None:
        """With 20 % loss and RTO = 0.2 s a small letter is late by 0.25 losses x 0.2 s."""
        swarm = started(2, network=Network.uniform(latency_s=0.01, loss=0.2))
        for number in range(2_000):
            swarm.at(10.0 * number, swarm.send, 0, 1, Letter(number))
        swarm.run()
        times = swarm[1].times(Received)
        late = [now - 10.0 * number - 0.01 for number, now in enumerate(times)]
        assert len(late) == 2_000
        assert sum(late) / len(late) == pytest.approx(0.25 * 0.2, rel=0.15)

    def test_a_letter_to_a_dead_process_is_refused_after_a_round_trip(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.05))
        swarm.engine.crash(swarm.peers[1])
        swarm.send(0, 1, Letter(1), Letter(2))
        swarm.run()
        assert [event.peer for event in swarm[0].events(LinkLost)] == [swarm.peers[1]]
        assert swarm[0].times(LinkLost) == [pytest.approx(0.1, rel=0.01)]

    def test_a_letter_to_nobody_is_refused(self) -> None:
        swarm = started(1)
        swarm.do(0, Send(PeerId("nobody"), Letter(1)))
        swarm.run()
        assert swarm[0].events(LinkLost) == [LinkLost(PeerId("nobody"))]

    def test_a_crash_resets_the_connections_of_both_directions(self) -> None:
        swarm = started(4, network=Network.uniform(latency_s=0.05))
        swarm.send(0, 1, Letter(1))
        swarm.send(2, 0, Letter(2))
        swarm.run(1.0)
        swarm.engine.crash(swarm.peers[0])
        swarm.run()
        for k in (1, 2):
            assert swarm[k].events(LinkLost) == [LinkLost(swarm.peers[0])]
            assert swarm[k].times(LinkLost) == [pytest.approx(1.05)]
        assert swarm[3].events(LinkLost) == []

    def test_a_crash_loses_what_has_not_left_and_no_more(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.5, uplink_bytes_per_s=1e6))
        swarm.send(0, 1, Letter(1), Letter(2, 1_000_000), Letter(3))
        swarm.run(0.4)
        swarm.engine.crash(swarm.peers[0])
        swarm.run()
        assert swarm[1].numbers() == [1]
        assert swarm[1].times(Received)[0] < swarm[1].times(LinkLost)[0]

    def test_what_is_on_its_way_to_a_crash_is_lost_and_said_so_once(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.5, uplink_bytes_per_s=1e6))
        swarm.send(0, 1, Letter(1), Letter(2, 1_000_000), Letter(3))
        swarm.run(0.4)
        swarm.engine.crash(swarm.peers[1])
        swarm.engine.restart(swarm.peers[1])
        swarm.run()
        assert swarm[1].numbers() == []
        assert swarm[0].times(LinkLost) == [pytest.approx(0.9)]
        swarm.send(0, 1, Letter(4))
        swarm.run()
        assert swarm[1].numbers() == [4]

    def test_a_partition_is_noticed_after_the_detection_delay(self) -> None:
        swarm = started(2, network=Network.uniform(uplink_bytes_per_s=1e6))
        swarm.send(0, 1, Letter(1, 5_000_000))
        swarm.run(1.0)
        swarm.engine.partition([swarm.peers[:1]])
        swarm.send(0, 1, Letter(2))
        swarm.run()
        assert swarm[1].numbers() == []
        (told_s,) = swarm[0].times(LinkLost)
        assert 2.0 <= told_s <= 4.0
        assert swarm[1].events(LinkLost) == []
        swarm.engine.heal()
        swarm.send(0, 1, Letter(3))
        swarm.run()
        assert swarm[1].numbers() == [3]

    def test_what_arrives_at_a_partition_is_lost_and_said_so(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.5))
        swarm.send(0, 1, Letter(1))
        swarm.at(0.2, swarm.engine.partition, [swarm.peers[:1]])
        swarm.run()
        assert swarm[1].numbers() == []
        assert swarm[0].events(LinkLost) == [LinkLost(swarm.peers[1])]

    def test_a_reset_does_not_overtake_the_letters_before_it(self) -> None:
        swarm = started(2)
        swarm.engine.interceptors.append(lambda now, src, dst, message: Delay(5.0))
        swarm.send(0, 1, Letter(1))
        swarm.at(1.0, swarm.engine.crash, swarm.peers[0])
        swarm.run()
        (received_s,), (lost_s,) = swarm[1].times(Received), swarm[1].times(LinkLost)
        assert 5.0 < received_s <= lost_s

    def test_death_beyond_a_partition_sends_no_reset(self) -> None:
        swarm = started(2)
        swarm.send(0, 1, Letter(1))
        swarm.run(1.0)
        swarm.engine.partition([swarm.peers[:1]])
        swarm.engine.crash(swarm.peers[0])
        swarm.run(1.9)
        assert swarm[1].events(LinkLost) == []

    def test_after_one_end_broke_off_the_other_still_learns_of_its_death(self) -> None:
        swarm = started(2)
        swarm.send(0, 1, Letter(1))
        swarm.run(1.0)
        swarm.engine.partition([swarm.peers[:1]])
        swarm.send(0, 1, Letter(2))
        swarm.run(10.0)
        assert swarm[0].events(LinkLost) == [LinkLost(swarm.peers[1])]
        swarm.engine.heal()
        swarm.send(1, 0, Letter(3))
        swarm.at(10.0, swarm.engine.crash, swarm.peers[0])
        swarm.run()
        assert swarm[0].numbers() == []
        assert swarm[1].events(LinkLost) == [LinkLost(swarm.peers[0])]


class TestDatagrams:
    @pytest.mark.parametrize("kind", [Postcard, Bulletin])
    def test_lost_at_the_rate_of_the_link_and_silently(self, kind: type[Letter]) -> None:
        swarm = started(2, network=Network.uniform(loss=0.3))
        for number in range(4_000):
            swarm.at(float(number), swarm.send, 0, 1, kind(number))
        swarm.run()
        # Three standard deviations are 87.
        assert len(swarm[1].numbers()) == pytest.approx(2_800, abs=90)
        assert swarm[0].events(LinkLost) == []

    def test_jitter_reorders_and_sometimes_duplicates(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.01, jitter_s=0.1))
        for number in range(2_000):
            swarm.at(0.01 * number, swarm.send, 0, 1, Postcard(number))
        swarm.run()
        numbers = swarm[1].numbers()
        assert numbers != sorted(numbers)
        assert list(dict.fromkeys(sorted(numbers))) == list(range(2_000))
        assert 5 <= len(numbers) - 2_000 <= 45

    @pytest.mark.parametrize(
        ("size", "expected"),
        # A small one begins to leave when it is sent, a large one when the instant is over.
        [(4_000, [0, 3, 10]), (500_000, [2, 10, 3])],
    )
    def test_a_newer_one_replaces_what_waits_under_its_key(
        self, size: int, expected: list[int]
    ) -> None:
        swarm = started(2, network=Network.uniform(uplink_bytes_per_s=1e4))
        swarm.send(0, 1, *(Bulletin(number, size, "a") for number in range(3)))
        swarm.send(0, 1, Bulletin(10, size, "b"))
        swarm.at(0.1, swarm.send, 0, 1, Bulletin(3, size, "a"))
        swarm.run()
        assert swarm[1].numbers() == expected
        assert swarm.engine.usage(swarm.peers[0]).sent_bytes == 3 * size

    def test_the_sender_is_told_while_a_large_one_has_to_wait(self) -> None:
        swarm = started(2, network=Network.uniform(uplink_bytes_per_s=1e4, latency_s=0.5))
        swarm.send(0, 1, *(Bulletin(number, 100_000, "a") for number in range(3)))
        swarm.send(0, 1, Bulletin(10, 100_000, "b"))
        swarm.at(50.0, swarm.send, 0, 1, Bulletin(11, 100_000, "a"))
        swarm.at(52.0, swarm.engine.partition, [swarm.peers[:1]])
        swarm.run()
        assert swarm[0].events(LineBusy) == [LineBusy(swarm.peers[1])] * 2
        assert swarm[0].events(LineFree) == [LineFree(swarm.peers[1])] * 2
        (first, second), began = swarm[0].times(LineFree), swarm[0].times(LineBusy)[0]
        assert first - began == pytest.approx(20.0, rel=0.01), "when the last has left"
        assert second == pytest.approx(52.0, abs=0.1), "what waited for the other side is lost"
        assert swarm[1].events(LineBusy) == []

    def test_what_waits_dies_with_its_sender(self) -> None:
        swarm = started(2, network=Network.uniform(uplink_bytes_per_s=1e4))
        swarm.send(0, 1, Bulletin(0, 100_000, "a"), Bulletin(1, 100_000, "b"))
        swarm.send(0, 1, Postcard(2, 100_000))
        swarm.at(1.0, swarm.engine.crash, swarm.peers[0])
        swarm.run()
        assert swarm[1].numbers() == []

    def test_a_partition_stops_them_silently(self) -> None:
        swarm = started(2, network=Network.uniform(latency_s=0.5))
        swarm.send(0, 1, Postcard(1), Bulletin(2), Postcard(3, 10_000_000))
        swarm.at(0.2, swarm.engine.partition, [swarm.peers[:1]])
        swarm.at(0.3, swarm.send, 0, 1, Postcard(4), Bulletin(5))
        swarm.run()
        assert swarm[1].numbers() == []
        assert swarm[0].events(LinkLost) == []


class TestInterceptors:
    def run(self, verdict: Verdict | None, *messages: Message) -> Swarm:
        swarm = started(2, network=Network.uniform(latency_s=0.01))

        def intercept(now: float, src: PeerId, dst: PeerId, message: Message) -> Verdict | None:
            assert (src, dst) == (swarm.peers[0], swarm.peers[1])
            return verdict if isinstance(message, Letter) and message.number == 1 else None

        swarm.engine.interceptors.append(intercept)
        swarm.send(0, 1, *(messages or (Letter(1), Letter(2))))
        swarm.run()
        return swarm

    def test_nothing_special(self) -> None:
        assert self.run(None)[1].numbers() == [1, 2]

    def test_drop_tells_nobody(self) -> None:
        swarm = self.run(Drop())
        assert swarm[1].numbers() == [2]
        assert swarm[0].events(LinkLost) == []

    def test_duplicate(self) -> None:
        assert self.run(Duplicate())[1].numbers() == [1, 1, 2]

    def test_replace(self) -> None:
        assert self.run(Replace(Letter(7)))[1].numbers() == [7, 2]

    def test_a_delayed_letter_holds_up_its_stream(self) -> None:
        swarm = self.run(Delay(5.0))
        assert swarm[1].numbers() == [1, 2]
        assert swarm[1].times(Received)[1] >= 5.0

    def test_a_delayed_datagram_is_overtaken(self) -> None:
        assert self.run(Delay(5.0), Postcard(1), Postcard(2))[1].numbers() == [2, 1]

    def test_a_sender_that_an_interceptor_kills_sends_nothing_more(self) -> None:
        swarm = started(2)
        swarm.engine.interceptors.append(lambda now, src, dst, message: swarm.engine.crash(src))
        swarm.send(0, 1, Letter(1), Letter(2))
        swarm.run()
        assert swarm[1].numbers() == []
