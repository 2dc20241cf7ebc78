"""Peers that nobody can dial, over gRPC on this machine: reached through others, end to end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import cast

import grpc
import numpy as np
import pytest

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.protocol.messages import Hold, Part
from flwr_moshpit.runtime import relay_service
from flwr_moshpit.runtime.carrier import is_relayed
from flwr_moshpit.runtime.grpc_transport import GrpcTransport
from flwr_moshpit.runtime.identity import Authority, Identity
from flwr_moshpit.runtime.relay import Caller, Relayed
from flwr_moshpit.runtime.relay_service import PAIR_MAX, WAITING_MAX, RelayService
from flwr_moshpit.runtime.wire import Limits
from tests.runtime.networks import CAP_S, QUICK, Station
from tests.runtime.samples import GROUP

DIM = 1 << 18


class Yard:
    """Stations, of which some cannot be dialled; everybody knows where everybody is."""

    def __init__(self) -> None:
        self.authority = Authority.create("swarm")
        self.stations: dict[PeerId, Station] = {}
        self.addresses: dict[PeerId, str] = {}
        self.changed = asyncio.Event()

    async def add(self, name: str, *, dialable: bool = True) -> Station:
        peer = PeerId(name)
        relayed = Relayed(self._relays, lambda address: self._moved(peer, address))
        transport = GrpcTransport(
            self.authority.issue(peer),
            "127.0.0.1:0",
            Limits(DIM),
            settings=QUICK,
            relayed=None if dialable else relayed,
        )
        station = self.stations[peer] = Station(transport)
        await station.start()
        for other, address in self.addresses.items():
            transport.set_address(other, address)
        if dialable:
            self._moved(peer, transport.address)
        await self.until(lambda: peer in self.addresses)
        return station

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def lose(self, name: str) -> None:
        peer = PeerId(name)
        del self.addresses[peer]
        await self.stations.pop(peer).transport.close(0.0)

    def _relays(self) -> dict[PeerId, str]:
        return {peer: at for peer, at in self.addresses.items() if not is_relayed(at)}

    def _moved(self, peer: PeerId, address: str) -> None:
        self.addresses[peer] = address
        for other, station in self.stations.items():
            if other != peer:
                station.transport.set_address(peer, address)
        self.changed.set()


def run(scenario: Callable[[Yard], Awaitable[None]]) -> None:
    async def main() -> None:
        yard = Yard()
        try:
            await asyncio.wait_for(scenario(yard), CAP_S)
        finally:
            stations = list(yard.stations.values())
            await asyncio.gather(*(each.transport.close(0.0) for each in stations))
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not [task for task in left if "flwr_moshpit" in repr(task.get_coro())]

    asyncio.run(main())


def part(count: int = DIM // 2) -> Part:
    return Part(GROUP, 0, np.full(count, 1.5, np.float32))


async def both_ways(one: Station, other: Station) -> None:
    for src, dst in ((one, other), (other, one)):
        before = len(dst.came_from(src))
        src.send(dst, part())
        src.send(dst, Hold(GROUP.key))
        await dst.until(
            lambda before=before, src=src, dst=dst: len(dst.came_from(src)) > before + 1
        )
        assert np.array_equal(dst.came_from(src)[before].data, part().data)


def test_two_that_cannot_be_dialled_talk_through_a_relay_that_understands_nothing() -> None:
    async def scenario(yard: Yard) -> None:
        relay = await yard.add("relay")
        one = await yard.add("one", dialable=False)
        other = await yard.add("other", dialable=False)
        assert yard.addresses[one.peer] == f"relay@{relay.transport.address}"
        await both_ways(one, other)
        assert relay.transport.relay.carried_bytes > 2 * part().array_bytes
        assert relay.inbox == []
        assert (one.lost, other.lost) == ([], [])

    run(scenario)


def test_one_that_can_dial_its_caller_calls_back() -> None:
    async def scenario(yard: Yard) -> None:
        relay = await yard.add("relay")
        other = await yard.add("b-other")
        for name in ("a-one", "c-one"):
            one = await yard.add(name, dialable=False)
            await both_ways(other, one)
            assert (one.lost, other.lost) == ([], [])
        for each in (relay, other):
            assert each.transport.relay.carried_bytes == 0

    run(scenario)


def test_a_relay_carries_as_many_connections_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_service, "WAITING_MAX", 3)

    async def scenario(yard: Yard) -> None:
        await yard.add("relay")
        hidden = [await yard.add(name, dialable=False) for name in ("one", "two", "three")]
        for one, other in itertools.combinations(hidden, 2):
            await both_ways(one, other)
        assert [each.lost for each in hidden] == [[], [], []]

    run(scenario)


def test_another_relay_is_found_when_one_is_gone() -> None:
    async def scenario(yard: Yard) -> None:
        for name in ("r1", "r2"):
            await yard.add(name)
        one = await yard.add("one", dialable=False)
        other = await yard.add("other", dialable=False)
        await both_ways(one, other)
        gone = yard.addresses[one.peer].partition("@")[0]
        await yard.lose(gone)
        left = "r1" if gone == "r2" else "r2"
        both = (one.peer, other.peer)
        await yard.until(lambda: all(yard.addresses[p].startswith(left) for p in both))
        await both_ways(one, other)

    run(scenario)


def test_the_relay_carries_for_nobody_else() -> None:
    """Of another swarm, for a peer that does not wait there, or in another's place."""

    async def scenario(yard: Yard) -> None:
        relay = await yard.add("relay")
        await yard.add("one", dialable=False)
        address = relay.transport.address

        async def refused(authority: Authority, method: str, **words: str) -> grpc.StatusCode:
            caller = Caller(authority.issue(PeerId("x")), [], 5.0)
            channel, call = caller.call(relay.peer, address, method, **words)
            try:
                async for _ in call:
                    pass
                return await call.code()
            except grpc.aio.AioRpcError as error:
                return error.code()
            finally:
                await channel.close()

        good, foreign = yard.authority, Authority.create("swarm")
        codes = [
            await refused(foreign, "Connect", target="one"),
            await refused(good, "Connect", target="nobody"),
            await refused(good, "Connect"),
            await refused(good, "Accept", number="0123456789abcdef"),
        ]
        assert codes == [
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
        ]
        assert relay.transport.refusals["malformed"] == 1
        assert relay.transport.relay.carried_bytes == 0

    run(scenario)


class Aborted(Exception):
    pass


class Context:
    """Of a call to a relay by `peer`, who neither reads nor says anything."""

    def __init__(self, peer: str, **words: str) -> None:
        self.peer = peer
        self.words = words
        self.code: grpc.StatusCode | None = None

    def auth_context(self) -> str:
        return self.peer

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(key, value.encode().hex()) for key, value in self.words.items()]

    async def send_initial_metadata(self, metadata: object) -> None: ...

    async def write(self, data: bytes) -> None:
        await asyncio.Event().wait()

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def abort(self, code: grpc.StatusCode, text: str = "") -> None:
        self.code = code
        raise Aborted


class Names:
    def peer_of(self, peer: str) -> PeerId:
        return PeerId(peer)


def test_two_peers_cannot_use_up_a_relay() -> None:
    """One waits and reads nothing, the other calls it for ever: neither memory nor room is lost."""

    async def go() -> None:
        service = RelayService(cast(Identity, Names()), lambda reason: None, 0.0)
        wait = asyncio.ensure_future(service._wait(None, Context("mute")))
        await asyncio.sleep(0)
        codes: set[grpc.StatusCode | None] = set()
        for _ in range(2 * WAITING_MAX):
            calls = [Context("liar", target="mute") for _ in range(2 * PAIR_MAX)]
            ends = [service._connect(None, call) for call in calls]
            await asyncio.gather(*ends, return_exceptions=True)
            codes |= {call.code for call in calls}
            assert service._waiting[PeerId("mute")].qsize() <= WAITING_MAX
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert not service._calls
        service._handshake_s = CAP_S
        other = asyncio.ensure_future(service._wait(None, Context("other")))
        calls = [Context("liar", target="other") for _ in range(2 * PAIR_MAX)]
        held = [asyncio.ensure_future(service._connect(None, call)) for call in calls]
        honest = asyncio.ensure_future(service._connect(None, Context("honest", target="other")))
        for _ in range(100):  # turns of the loop, more than these calls take to come in
            await asyncio.sleep(0)
        assert len(service._calls) == PAIR_MAX + 1
        assert [call.caller for call in service._calls.values()].count(PeerId("honest")) == 1
        for task in (wait, other, honest, *held):
            task.cancel()
        await asyncio.gather(wait, other, honest, *held, return_exceptions=True)

    asyncio.run(asyncio.wait_for(go(), CAP_S))
