"""Moments in the life of a mesh that only a scripted network can bring about."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from flwr_moshpit.protocol import messages
from flwr_moshpit.protocol.machine import PeerId, Round
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.carrier import Accept, Pipe
from flwr_moshpit.runtime.frames import pack
from flwr_moshpit.runtime.greeting import BUSY, Greeting
from flwr_moshpit.runtime.mesh import Mesh
from flwr_moshpit.runtime.neighbour import Settings
from flwr_moshpit.runtime.transport import LocalPipe
from flwr_moshpit.runtime.wire import Limits
from tests.runtime.networks import CAP_S, Station

A, B = PeerId("a"), PeerId("b")
PLAN = messages.PlanId(1, A)
CALL = messages.Call(messages.GroupKey(PLAN, Round(1), 0, 0), sweep=True)


class ScriptedCarrier:
    """Gives out the near ends of pipes whose far ends the test holds."""

    def __init__(self) -> None:
        self.dialled: list[LocalPipe] = []
        self.came = asyncio.Event()
        self.accept: Accept | None = None

    async def start(self, accept: Accept) -> str:
        self.accept = accept
        return "here"

    async def dial(self, peer: PeerId, address: str) -> Pipe:
        near, far = LocalPipe.pair()
        self.dialled.append(far)
        self.came.set()
        return near

    async def close(self) -> None:
        return None


async def scripted(settings: Settings) -> tuple[Station, ScriptedCarrier]:
    carrier = ScriptedCarrier()
    station = Station(Mesh("swarm", B, carrier, Limits(8), settings=settings))
    await station.start()
    station.transport.set_address(A, "there")
    return station, carrier


def test_a_dial_that_was_overtaken_does_not_begin_again() -> None:
    """`wait_for` of Python 3.11 swallows a cancellation that comes when it has a result."""

    async def scenario() -> None:
        station, carrier = await scripted(Settings(backoff_s=0.0))
        station.transport.send(A, CALL)
        await carrier.came.wait()
        neighbour = station.transport._neighbours[A]
        dialling = neighbour.dialling
        assert dialling is not None
        far = carrier.dialled[0]
        close_near = far._far.close

        async def close_and_be_overtaken() -> None:
            def overtake() -> None:
                neighbour.dialling = None
                dialling.cancel()

            await close_near()
            asyncio.get_running_loop().call_soon(overtake)

        far._far.close = close_and_be_overtaken  # type: ignore[method-assign]
        await far.read()
        await far.write(pack(pb.Frame(bye=pb.Bye(reason=BUSY))))
        with contextlib.suppress(asyncio.CancelledError):
            await dialling
        assert len(carrier.dialled) == 1
        assert station.lost == []
        await station.transport.close()

    asyncio.run(asyncio.wait_for(scenario(), CAP_S))


def test_a_peer_that_is_forgotten_as_it_answers_is_forgotten() -> None:
    """See above: here what `wait_for` goes on with is a connection."""

    async def scenario() -> None:
        station, carrier = await scripted(Settings(backoff_s=0.0))
        transport = station.transport
        call = transport._door.call

        async def call_and_be_forgotten(pipe: Pipe, dst: PeerId) -> Any:
            greetings = await call(pipe, dst)
            asyncio.get_running_loop().call_soon(transport.forget, A)
            return greetings

        transport._door.call = call_and_be_forgotten
        transport.send(A, CALL)
        await carrier.came.wait()
        dialling = transport._neighbours[A].dialling
        far = carrier.dialled[0]
        await far.read()
        await far.write(Greeting("swarm", A, B, 0, 1, 1 << 20).pack())
        with contextlib.suppress(asyncio.CancelledError):
            await dialling
        assert await far.read() is None
        assert transport.num_links == 0
        assert station.lost == []
        await transport.close()

    asyncio.run(asyncio.wait_for(scenario(), CAP_S))


def test_a_peer_that_says_busy_and_never_comes_is_given_up() -> None:
    async def scenario() -> None:
        station, carrier = await scripted(Settings(backoff_s=0.001, backoff_max_s=0.002))
        station.transport.send(A, CALL)
        while station.lost == []:
            await asyncio.wait_for(carrier.came.wait(), CAP_S)
            carrier.came.clear()
            far = carrier.dialled[-1]
            await far.read()
            await far.write(pack(pb.Frame(bye=pb.Bye(reason=BUSY))))
            calls = len(carrier.dialled)
            await station.until(lambda: len(carrier.dialled) > calls or station.lost != [])  # noqa: B023
        assert station.lost == [A]
        assert len(carrier.dialled) == 8
        await station.transport.close()

    asyncio.run(asyncio.wait_for(scenario(), CAP_S))


def test_a_peer_that_does_not_answer_is_given_up_after_a_while() -> None:
    async def scenario() -> None:
        station, carrier = await scripted(Settings(handshake_s=0.02))
        station.transport.send(A, CALL)
        await station.until(lambda: station.lost == [A])
        assert await carrier.dialled[0].read() is not None
        assert await carrier.dialled[0].read() is None
        await station.transport.close()

    asyncio.run(asyncio.wait_for(scenario(), CAP_S))


def test_the_end_does_not_wait_for_a_peer_that_does_not_answer() -> None:
    async def scenario() -> None:
        station, carrier = await scripted(Settings(handshake_s=CAP_S))
        station.transport.send(A, CALL)
        await carrier.came.wait()
        await station.transport.close(grace_s=0.01)
        assert len(asyncio.all_tasks()) == 2  # this, and the one that waits for it

    asyncio.run(asyncio.wait_for(scenario(), CAP_S / 2))
