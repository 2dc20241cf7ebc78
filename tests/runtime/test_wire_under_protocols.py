"""What the protocols really send survives the wire: runs with and without it are the same."""

from __future__ import annotations

import pytest

from flwr_moshpit.protocol.machine import Message, PeerId
from flwr_moshpit.simulation.network import Replace
from tests.protocol.test_all_algorithms import NAMES, Swarm
from tests.runtime.test_wire import from_frame, to_frame
from tests.trainers import QuadraticTrainer


@pytest.mark.parametrize("name", NAMES)
def test_a_run_over_the_wire_is_the_same_run(name: str) -> None:
    kinds: dict[type[Message], int] = {}

    def over_the_wire(now: float, src: PeerId, dst: PeerId, message: Message) -> Replace:
        kinds[type(message)] = kinds.get(type(message), 0) + 1
        return Replace(from_frame(to_frame(message)))

    def digest(*, wired: bool) -> str:
        trainer = QuadraticTrainer(num_examples=[5, 10, 20], noise=0.1)
        swarm = Swarm(name, 7, trainer, rounds=4)
        if wired:
            swarm.engine.interceptors.append(over_the_wire)
        engine, victim = swarm.engine, PeerId("p02")
        engine.schedule(0.5, lambda: engine.crash(victim))
        engine.schedule(3.0, lambda: engine.restart(victim))
        return swarm.run(faults_until_s=3.0).engine.digest

    assert digest(wired=True) == digest(wired=False)
    assert kinds or name == "local"
