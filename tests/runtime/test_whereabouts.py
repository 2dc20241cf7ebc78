"""Which address of this device others reach."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime import peer as peers
from flwr_moshpit.runtime.compute import Task, ThreadCompute
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.whereabouts import source_towards
from tests.trainers import QuadraticTrainer

HANG_S = 60.0


def test_the_source_of_packets_is_found_without_sending_any() -> None:
    assert source_towards(["127.0.0.1:9"]) == "127.0.0.1"
    assert source_towards(["relay@127.0.0.1:9"]) == "127.0.0.1"
    assert source_towards(["", "no address", "127.0.0.1:port", "127.0.0.1:9"]) == "127.0.0.1"
    assert source_towards(["", "no address"]) is None


def settings_of(**more: Any) -> PeerSettings:
    return PeerSettings(
        identity=Authority.create("s").issue(PeerId("a")),
        algorithm=Moshpit(),
        task=Task(QuadraticTrainer, 0, 1, seed=(0,)),
        bind="0.0.0.0:0",
        **more,
    )


def test_one_that_listens_anywhere_needs_a_contact() -> None:
    settings = settings_of()
    compute = ThreadCompute(settings.task)
    offer = compute.start()
    with pytest.raises(ConfigError, match="no contact to find out with"):
        Peer(settings, compute, offer)
    compute.close()


def test_a_peer_that_follows_its_address_goes_on_while_names_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which may take as long as the network is gone."""
    said: list[str] = []
    loop_thread = threading.get_ident()

    def look_up(addresses: Iterable[str]) -> str:
        assert "name.invalid:1" in list(addresses)
        return "127.0.0.1" if threading.get_ident() == loop_thread else "127.0.0.2"

    monkeypatch.setattr(peers, "source_towards", look_up)
    monkeypatch.setattr(peers, "LOOK_S", 0.01)
    settings = settings_of(contacts={PeerId("b"): "name.invalid:1"})
    compute = ThreadCompute(settings.task)
    offer = compute.start()

    def on_address(address: str) -> None:
        said.append(address.partition(":")[0])
        if len(said) == 2:
            peer.driver.stop()

    peer = Peer(settings, compute, offer, on_address=on_address)
    asyncio.run(asyncio.wait_for(peer.run(), HANG_S))
    assert said == ["127.0.0.1", "127.0.0.2"]
