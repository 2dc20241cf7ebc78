"""Who hears of a run that was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from flwr_moshpit.errors import TransportError
from flwr_moshpit.flower import controller
from flwr_moshpit.flower.swarm import Swarm
from flwr_moshpit.protocol.machine import PeerId


class Clock:
    """Time passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Swarm:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    swarm = Swarm.create("app", 3600.0)
    for name in ("early", "late", "gone"):
        swarm.note(PeerId(name), f"{name}:9000")
    return swarm


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(controller, "time", clock)
    return clock


def test_who_listens_only_after_the_stop_hears_of_it_too(
    swarm: Swarm, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has just been started loads its trainer first, and the others are gone by then."""
    listens_at = {"early:9000": 0.0, "late:9000": 20.0}
    told: list[tuple[str, float]] = []

    async def ask(identity: object, address: str, method: str, request: bytes = b"") -> bytes:
        assert method == "Stop"
        if clock.now < listens_at.get(address, float("inf")):
            raise TransportError(address)
        told.append((address, clock.now))
        return b""

    monkeypatch.setattr(controller, "ask", ask)
    said: list[str] = []
    controller.stop_all(swarm, said.append)
    assert told == [("early:9000", 0.0), ("late:9000", 20.0)]
    assert said == ["the run was stopped: early has taken the swarm's stop and tells the others"]
    assert clock.now == controller.STOP_S


def test_it_says_so_when_nobody_can_be_reached(
    swarm: Swarm, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(identity: object, address: str, method: str, request: bytes = b"") -> bytes:
        raise TransportError(address)

    monkeypatch.setattr(controller, "ask", ask)
    said: list[str] = []
    controller.stop_all(swarm, said.append)
    assert said == ["the run was stopped, and no peer can be reached: they end by their budget"]
