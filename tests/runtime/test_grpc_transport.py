"""Who may talk to a peer over the network, and what those do no harm with who may."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from flwr_moshpit.errors import TransportError
from flwr_moshpit.protocol import membership_messages, messages
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime import certificates, grpc_transport, wire
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.certificates import new_key, public_key
from flwr_moshpit.runtime.frames import Breach, pack, unpack
from flwr_moshpit.runtime.greeting import BREACHES_MAX
from flwr_moshpit.runtime.grpc_transport import GrpcTransport
from flwr_moshpit.runtime.identity import Authority, Identity
from flwr_moshpit.runtime.neighbour import Settings
from flwr_moshpit.runtime.wire import WIRE_VERSION, Limits
from tests.runtime.intruder import LIMITS, Intruder
from tests.runtime.networks import CAP_S, Station
from tests.runtime.samples import GROUP, example
from tests.runtime.test_wire import hostile_frames

SWARM = "swarm"
AUTHORITY = Authority.create(SWARM)
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
QUICK = Settings(handshake_s=0.5, backoff_s=0.01, backoff_max_s=0.05)


class Site:
    """A network of real ports, everything on it closed at the end."""

    def __init__(self) -> None:
        self._stations: list[Station] = []
        self._intruders: list[Intruder] = []
        self._others: list[Callable[[], Awaitable[None]]] = []

    async def station(
        self, identity: Identity, settings: Settings = QUICK, bind: str = "127.0.0.1:0"
    ) -> Station:
        station = Station(GrpcTransport(identity, bind, LIMITS, settings=settings))
        await station.start()
        self._stations.append(station)
        return station

    def intruder(self, credentials: Any, target: Station, swarm: str = SWARM) -> Intruder:
        intruder = Intruder(credentials, target.transport.address, swarm, target.peer)
        self._intruders.append(intruder)
        return intruder

    def later(self, close: Callable[[], Awaitable[None]]) -> None:
        self._others.append(close)

    async def close(self) -> None:
        for intruder in self._intruders:
            await intruder.close()
        for station in self._stations:
            await station.transport.close(grace_s=0.0)
        for close in self._others:
            await close()


def run(scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def main() -> None:
        site = Site()
        try:
            await asyncio.wait_for(scenario(site), CAP_S)
        finally:
            await asyncio.wait_for(site.close(), CAP_S)

    asyncio.run(main())


async def still_serves(site: Site, station: Station) -> None:
    """An honest peer gets through to `station`."""
    honest = await site.station(AUTHORITY.issue(PeerId("honest")))
    honest.transport.set_address(station.peer, station.transport.address)
    before = len(station.inbox)
    honest.send(station, messages.Waiting(GROUP))
    await station.until(lambda: len(station.inbox) == before + 1)
    assert honest.lost == []


async def port_of(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def test_plaintext_is_refused() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(None, a)
        with pytest.raises((grpc.RpcError, ConnectionError)):
            await intruder.greet("b")
        reader, writer = await port_of(a.transport.address)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100))
        answer = await reader.read()
        assert b"HTTP" not in answer
        writer.close()
        assert a.inbox == []
        await still_serves(site, a)

    run(scenario)


def test_a_peer_says_nothing_to_a_plaintext_server() -> None:
    async def scenario(site: Site) -> None:
        heard = bytearray()
        came = asyncio.Event()

        async def eavesdrop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\0\0\0\4\0\0\0\0\0")
            heard.extend(await reader.read(1 << 16))
            came.set()
            writer.close()

        server = await asyncio.start_server(eavesdrop, "127.0.0.1", 0)
        a = await site.station(AUTHORITY.issue(A))
        port = server.sockets[0].getsockname()[1]
        a.transport.set_address(B, f"127.0.0.1:{port}")
        a.transport.send(B, messages.Accuse(GROUP, C, "something secret"))
        await a.until(lambda: a.lost == [B])
        await came.wait()
        tls_handshake = 0x16
        assert heard[0] == tls_handshake
        assert b"secret" not in heard
        assert b"moshpit.peer" not in heard
        server.close()
        await server.wait_closed()

    run(scenario)


def signed(peer: PeerId, *, swarm: str = SWARM, valid_s: float = 1e6) -> tuple[bytes, bytes]:
    """A key, and a certificate by the swarm's authority, which an honest one would not sign."""
    key = new_key()
    certificate = certificates.sign_peer(
        AUTHORITY.key_pem, AUTHORITY.certificate_pem, swarm, peer, public_key(key), valid_s
    )
    return key, certificate


def credentials(key: bytes | None, certificate: bytes | None) -> Any:
    return grpc.ssl_channel_credentials(AUTHORITY.certificate_pem, key, certificate)


def test_only_certificates_of_this_swarm_and_authority_get_in() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        stranger = Authority.create(SWARM).issue(B)
        bad = {
            "none": credentials(None, None),
            "foreign authority": credentials(stranger.key_pem, stranger.certificate_pem),
            "self-signed": credentials(*self_signed()),
            "expired": credentials(*signed(B, valid_s=-60)),
            "another swarm": credentials(*signed(B, swarm="other")),
            "no peer": credentials(*signed(PeerId(""))),
        }
        for name, each in bad.items():
            intruder = site.intruder(each, a)
            with pytest.raises((grpc.RpcError, ConnectionError, Breach)):
                pytest.fail(f"{name}: {await intruder.greet('b')}")
        assert a.inbox == []
        assert a.transport.refusals == {"certificate": 2}
        good = site.intruder(credentials(*signed(B)), a)
        assert (await good.greet("b")).src == A
        await still_serves(site, a)

    run(scenario)


def self_signed() -> tuple[bytes, bytes]:
    key = new_key()
    return key, certificates.sign_authority(key, SWARM, 1e6)


def test_a_peer_talks_to_nobody_but_the_one_it_dialled() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        b = await site.station(AUTHORITY.issue(B))
        stranger = await site.station(Authority.create(SWARM).issue(C))
        a.transport.set_address(C, b.transport.address)
        a.transport.send(C, messages.Waiting(GROUP))
        await a.until(lambda: a.lost == [C])
        a.transport.set_address(C, stranger.transport.address)
        a.transport.send(C, messages.Waiting(GROUP))
        await a.until(lambda: a.lost == [C, C])
        assert b.inbox == stranger.inbox == []

    run(scenario)


@pytest.mark.parametrize("kind", ["expired", "another swarm"])
def test_a_peer_does_not_talk_to_a_server_without_a_valid_certificate(kind: str) -> None:
    async def scenario(site: Site) -> None:
        key, certificate = signed(B, valid_s=-60) if kind == "expired" else signed(B, swarm="other")
        server = grpc.aio.server()
        pairs = [(key, certificate)]
        port = server.add_secure_port(
            "127.0.0.1:0",
            grpc.ssl_server_credentials(pairs, AUTHORITY.certificate_pem, True),
        )
        await server.start()
        site.later(lambda: server.stop(0))
        a = await site.station(AUTHORITY.issue(A))
        a.transport.set_address(B, f"127.0.0.1:{port}")
        a.transport.send(B, messages.Waiting(GROUP))
        await a.until(lambda: a.lost == [B])

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"src": "c"}, "peer"),
        ({"src": "a"}, "peer"),
        ({"dst": "c"}, "peer"),
        ({"swarm": "other"}, "swarm"),
        ({"window_bytes": 0}, "malformed"),
    ],
)
def test_a_greeting_for_or_of_somebody_else_is_refused(changes: Any, reason: str) -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(credentials(*signed(B)), a)
        with pytest.raises(Breach, match=reason):
            await intruder.greet(**{"src": "b", **changes})
        assert a.transport.refusals == {reason: 1}
        assert a.transport.num_links == 0

    run(scenario)


def part_frame(sequence: int) -> bytes:
    outgoing = wire.encode(messages.Part(GROUP, 0, np.ones(8, np.float32)))
    return pack(pb.Frame(sequence=sequence, envelope=outgoing.envelope), list(outgoing.arrays))


def test_a_replayed_frame_is_refused() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(credentials(*signed(B)), a)
        first = (await intruder.greet("b")).first_sequence
        recorded = part_frame(first)
        await intruder.write(recorded)
        await a.until(lambda: len(a.inbox) == 1)
        await intruder.write(recorded)
        await intruder.until_thrown_out()
        assert a.transport.refusals == {"sequence": 1}
        # On a link of its own it is too late as well.
        assert (await intruder.greet("b")).first_sequence != first
        await intruder.write(recorded)
        await intruder.until_thrown_out()
        assert a.transport.refusals == {"sequence": 2}
        assert len(a.inbox) == 1

    run(scenario)


def envelope_frame(sequence: int, **changes: Any) -> bytes:
    envelope = wire.encode(messages.Part(GROUP, 0, np.ones(8, np.float32))).envelope
    for name, value in changes.items():
        setattr(envelope, name, value)
    return pack(pb.Frame(sequence=sequence, envelope=envelope))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (lambda s: [envelope_frame(s, data_bytes=LIMITS.data_bytes + 1)], "oversize"),
        (lambda s: [envelope_frame(s, data_bytes=2**63)], "oversize"),
        (lambda s: [envelope_frame(s), envelope_frame(s + 1)], "malformed"),
        (lambda s: [envelope_frame(s, lane=pb.DATAGRAM)], "malformed"),
        (lambda s: [envelope_frame(s, lane=7)], "malformed"),
        (lambda s: [pack(pb.Frame(sequence=s, more=pb.STREAM))], "malformed"),
        (
            lambda s: [envelope_frame(s), pack(pb.Frame(sequence=s + 1, more=pb.STREAM))],
            "malformed",
        ),
        (
            lambda s: [
                envelope_frame(s),
                pack(pb.Frame(sequence=s + 1, more=pb.STREAM), [memoryview(bytes(33))]),
            ],
            "malformed",
        ),
        (lambda s: [pack(pb.Frame(sequence=s, hello=pb.Hello()))], "malformed"),
        (lambda s: [bytes((0x08, WIRE_VERSION + 1))], "version"),
        (lambda s: [b"junk"], "version"),
    ],
)
def test_what_breaks_the_rules_ends_the_link(
    frames: Callable[[int], list[bytes]], reason: str
) -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(credentials(*signed(B)), a)
        first = (await intruder.greet("b")).first_sequence
        await intruder.until_thrown_out(frames(first))
        assert a.transport.refusals == {reason: 1}
        assert a.inbox == []
        await a.until(lambda: a.lost == [B] and a.transport.num_links == 0)
        await still_serves(site, a)

    run(scenario)


def test_a_frame_larger_than_any_is_not_even_read() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(credentials(*signed(B)), a)
        await intruder.greet("b")
        await intruder.until_thrown_out([bytes(LIMITS.frame_bytes + 1)])
        await a.until(lambda: a.lost == [B])
        await still_serves(site, a)

    run(scenario)


def test_malformed_messages_are_dropped_and_too_many_end_the_link() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(credentials(*signed(B)), a)
        first = (await intruder.greet("b")).first_sequence
        unknown = pb.Envelope(lane=pb.STREAM)
        await intruder.write(pack(pb.Frame(sequence=first, envelope=unknown)))
        await intruder.write(part_frame(first + 1))
        await a.until(lambda: len(a.inbox) == 1)
        assert a.transport.refusals == {"malformed": 1}
        await intruder.until_thrown_out(
            pack(pb.Frame(sequence=first + number, envelope=unknown)) for number in range(2, 200)
        )
        assert a.transport.refusals["malformed"] == 101

    run(scenario)


def test_a_sender_that_ignores_its_credit_is_thrown_out() -> None:
    async def scenario(site: Site) -> None:
        station = Station(
            GrpcTransport(AUTHORITY.issue(A), "127.0.0.1:0", LIMITS, settings=QUICK),
            take=lambda src, message: asyncio.get_running_loop().create_future(),
        )
        await station.start()
        site.later(lambda: station.transport.close(0.0))
        intruder = site.intruder(credentials(*signed(B)), station)
        first = (await intruder.greet("b")).first_sequence
        outgoing = wire.encode(messages.Part(GROUP, 0, np.ones(1 << 17, np.float32)))
        await intruder.until_thrown_out(
            pack(
                pb.Frame(sequence=first + number, envelope=outgoing.envelope),
                list(outgoing.arrays),
            )
            for number in range(100)
        )
        await station.until(lambda: station.transport.refusals == {"credit": 1})
        assert len(station.inbox) <= LIMITS.window_bytes // (1 << 19) + 1

    run(scenario)


def test_who_connects_and_says_nothing_is_thrown_out() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        sockets = [await port_of(a.transport.address) for _ in range(50)]
        half = sockets[:25]
        for _, writer in half:
            writer.write(b"\x16\x03\x01")
        silent = site.intruder(credentials(*signed(B)), a)
        await silent.call()
        await still_serves(site, a)
        await silent.until_thrown_out()
        assert a.transport.refusals["handshake"] == 1
        for reader, writer in sockets:
            await reader.read()
            assert reader.at_eof()
            writer.close()

    run(scenario)


def numbered(raw: bytes, sequence: int) -> bytes:
    """The frame with the sequence that is expected, or nothing behind that check is reached."""
    try:
        frame, data = unpack(raw, LIMITS)
    except Breach:
        return raw
    frame.sequence = sequence
    return pack(frame, [data] if data else [])


async def torment(count: int) -> None:
    """`count` hostile frames into a live port, which serves on."""
    site = Site()
    try:
        a = await site.station(AUTHORITY.issue(A))
        links = survived = 0
        sequence: int | None = None
        for raw in hostile_frames(seed=3, count=count):
            if sequence is None:
                # Under one name it would soon be banned.
                name = f"b{links // (BREACHES_MAX - 1)}"
                if links % (BREACHES_MAX - 1) == 0:
                    intruder = site.intruder(credentials(*signed(PeerId(name))), a)
                sequence, links = (await intruder.greet(name)).first_sequence, links + 1
            if await provoke(intruder, numbered(raw, sequence), sequence):
                sequence, survived = sequence + 2, survived + 1
            else:
                sequence = None
        assert count // 10 < links < count
        assert count // 10 < survived < count
        assert sum(a.transport.refusals.values()) > links // 2
        assert a.transport.banned == {}
        await intruder.close()
        await still_serves(site, a)
        await a.until(lambda: a.transport.num_links <= 1)
        assert len(asyncio.all_tasks()) < 30
    finally:
        await site.close()


async def provoke(intruder: Intruder, raw: bytes, sequence: int) -> bool:
    """Send `raw`, and whether the link has survived it."""
    try:
        await intruder.write(raw)
        await intruder.write(pack(pb.Frame(sequence=sequence + 1, receipt_wanted=True)))
        while True:
            frame, _ = unpack(await intruder.read(), LIMITS)
            if frame.receipt.sequence == sequence + 1:
                return True
    except (ConnectionError, grpc.RpcError, asyncio.InvalidStateError):
        return False


def test_hostile_frames_into_a_live_port() -> None:
    asyncio.run(asyncio.wait_for(torment(200), CAP_S))


@pytest.mark.slow
def test_5_000_hostile_frames_into_a_live_port() -> None:
    asyncio.run(asyncio.wait_for(torment(5_000), 20 * CAP_S))


def test_who_breaks_the_rules_again_and_again_is_banned() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        intruder = site.intruder(credentials(*signed(B)), a)
        for _ in range(BREACHES_MAX):
            await intruder.greet("b")
            await intruder.until_thrown_out([part_frame(0)])
        await a.until(lambda: list(a.transport.banned) == [B])
        assert a.transport.banned[B].startswith("sequence")
        with pytest.raises(Breach, match="banned"):
            await intruder.greet("b")
        assert a.transport.refusals == {"sequence": BREACHES_MAX, "banned": 1}
        a.lost.clear()
        a.transport.set_address(B, "127.0.0.1:1")
        a.transport.send(B, messages.Waiting(GROUP))
        await a.until(lambda: a.lost == [B])
        await still_serves(site, a)

    run(scenario)


def test_a_port_that_is_taken_is_an_error_with_a_name() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        with pytest.raises(TransportError, match=a.transport.address):
            await site.station(AUTHORITY.issue(B), bind=a.transport.address)

    run(scenario)


class Proxy:
    """Passes TCP on, at some rate if asked to, until it is told to swallow everything."""

    def __init__(self, target: str, bytes_per_s: float | None = None) -> None:
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open = asyncio.Event()
        self._open.set()
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._open.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await port_of(self._target)
        self._tasks += [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                if self._bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


def test_a_line_that_goes_dead_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "KEEPALIVE_S", 0.5)
    monkeypatch.setattr(grpc_transport, "KEEPALIVE_TIMEOUT_S", 0.5)

    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        b = await site.station(AUTHORITY.issue(B))
        proxy = Proxy(b.transport.address)
        await proxy.start()
        site.later(proxy.close)
        a.transport.set_address(B, proxy.address)
        a.send(b, messages.Waiting(GROUP))
        await b.until(lambda: len(b.inbox) == 1)
        proxy.cut()
        a.send(b, messages.Waiting(GROUP))
        await a.until(lambda: a.lost == [B])
        await b.until(lambda: b.lost == [A])
        # The line is back, elsewhere.
        a.transport.set_address(B, b.transport.address)
        a.send(b, example(messages.Gone))
        await b.until(lambda: b.came_from(a)[-1] == example(messages.Gone))

    run(scenario)


@pytest.mark.slow
def test_heartbeats_get_through_a_slow_line_that_is_full() -> None:
    async def scenario(site: Site) -> None:
        a = await site.station(AUTHORITY.issue(A))
        b = await site.station(AUTHORITY.issue(B))
        proxy = Proxy(b.transport.address, bytes_per_s=1e6)
        await proxy.start()
        site.later(proxy.close)
        a.transport.set_address(B, proxy.address)
        vector = np.zeros(1 << 18, np.float32)
        for number in range(6):
            a.send(b, messages.Part(GROUP, number, vector))
        await b.until(lambda: b.inbox != [])

        # The line is full now, and stays so for five seconds.
        def came(kind: type) -> int:
            return sum(isinstance(each, kind) for each in b.came_from(a))

        for count in range(1, 26):
            a.send(b, membership_messages.Vouch(B))
            await b.until(lambda count=count: came(membership_messages.Vouch) >= count)
        assert came(messages.Part) < 6

    run(scenario)


@pytest.mark.slow
def test_a_message_that_takes_longer_than_a_link_may_be_idle_arrives() -> None:
    """Over a slow line, to the side that has dialled and says nothing meanwhile."""

    async def scenario(site: Site) -> None:
        settings = Settings(idle_s=0.3, backoff_s=0.01)
        a = await site.station(AUTHORITY.issue(A), settings=settings)
        b = await site.station(AUTHORITY.issue(B), settings=settings)
        proxy = Proxy(a.transport.address, bytes_per_s=5e5)
        await proxy.start()
        site.later(proxy.close)
        b.transport.set_address(A, proxy.address)
        a.transport.set_address(B, b.transport.address)
        b.send(a, messages.Waiting(GROUP))
        await a.until(lambda: a.inbox != [])
        a.send(b, messages.Part(GROUP, 0, np.zeros(1 << 18, np.float32)))
        await b.until(lambda: b.inbox != [] or a.lost != [])
        assert (a.lost, len(b.inbox)) == ([], 1)

    run(scenario)


def test_expiry_is_known() -> None:
    identity = AUTHORITY.issue(A, valid_s=1000)
    left = identity.expires_at - datetime.datetime.now(datetime.timezone.utc)
    assert datetime.timedelta(0) < left < datetime.timedelta(seconds=1001)


def test_the_limits_follow_from_the_model() -> None:
    assert Limits(0).data_bytes == 0
    assert Limits(10).data_bytes == 160
