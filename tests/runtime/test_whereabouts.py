"""Which address of this device others reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.compute import Task, ThreadCompute
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.whereabouts import source_towards
from tests.trainers import QuadraticTrainer


def test_the_source_of_packets_is_found_without_sending_any() -> None:
    assert source_towards(["127.0.0.1:9"]) == "127.0.0.1"
    assert source_towards(["relay@127.0.0.1:9"]) == "127.0.0.1"
    assert source_towards(["", "no address", "127.0.0.1:port", "127.0.0.1:9"]) == "127.0.0.1"
    assert source_towards(["", "no address"]) is None


def test_one_that_listens_anywhere_needs_a_contact(tmp_path: Path) -> None:
    task = Task(QuadraticTrainer, 0, 1, seed=(0,))
    compute = ThreadCompute(task)
    offer = compute.start()
    identity = Authority.create("s").issue(PeerId("a"))
    settings = PeerSettings(identity=identity, algorithm=Moshpit(), task=task, bind="0.0.0.0:0")
    with pytest.raises(ConfigError, match="no contact to find out with"):
        Peer(settings, compute, offer)
    compute.close()
