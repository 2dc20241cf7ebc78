"""What the protocols really send survives the wire: runs with and without it are the same."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_moshpit.protocol.machine import (
    Message,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Record,
    Round,
    Send,
    Start,
)
from flwr_moshpit.protocol.membership import Membership
from flwr_moshpit.protocol.membership_checks import flaw
from flwr_moshpit.protocol.membership_messages import (
    ALIVE,
    Claim,
    Listing,
    MembershipMessage,
    News,
    Ping,
    Summary,
    Update,
    Want,
)
from flwr_moshpit.protocol.messages import Plan, PlanId, RootClaim
from flwr_moshpit.protocol.planning import PLAN_KEY
from flwr_moshpit.protocol.roster import NUM_BUCKETS
from flwr_moshpit.runtime import wire
from flwr_moshpit.simulation.network import Replace
from tests.protocol.test_all_algorithms import NAMES, Swarm
from tests.runtime.samples import same
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


def test_what_a_peer_of_a_thousand_says_of_them_fits_into_its_messages() -> None:
    """With long names, long addresses, a plan for all and a record of each."""
    peers = [PeerId(f"device-{k:04}".ljust(64, "x")) for k in range(1000)]
    claims = [Claim(PeerInfo(peer), "h" * 250 + ":9100", 3, 7, ALIVE) for peer in peers]
    me, other = peers[0], peers[1]
    rng = np.random.default_rng(0)
    member = Membership(PeerInfo(me), "h:1", {}, rng, known=claims)
    member.handle(Start(), 0.0)
    plan = Plan(PlanId(3, me), (32, 32), tuple(peers) + tuple(peers[:24]), Round(9))
    records = [Record(PLAN_KEY, (3, me), plan)]
    records += [Record(("root", peer), (5, 1), RootClaim(5, 1000, 1e6)) for peer in peers]
    said = [effect for r in records for effect in member.handle(Publish(r), 0.1)]
    keys = tuple(record.key for record in records)
    for message in (
        Ping(News((claims[1],), (), 1)),
        Summary((0,) * NUM_BUCKETS),
        Listing(tuple(range(NUM_BUCKETS)), (), ()),
        Want(tuple(peers), keys),
    ):
        said += member.handle(Received(other, message), 0.2)

    limits = wire.Limits(1)
    messages = [effect.message for effect in said if isinstance(effect, Send)]
    for each in messages:
        assert isinstance(each, MembershipMessage)
        envelope = wire.encode(each).envelope
        assert envelope.ByteSize() <= limits.envelope_bytes, type(each)
        assert flaw(each) is None
        assert same(wire.decode(envelope, memoryview(b""), limits), each)
    updates = [each for each in messages if isinstance(each, Update)]
    assert len({claim.info.peer for update in updates for claim in update.claims}) == 1000
    assert {record.key for update in updates for record in update.records} == set(keys)
    (listing,) = [each for each in messages if isinstance(each, Listing)]
    assert 500 < len(listing.lives) + len(listing.names) < 700
