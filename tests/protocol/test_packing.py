"""Parts and means as fewer bytes: smaller, agreed by all, and without bias in the long run."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from flwr_moshpit.compression import codec_of
from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.allreduce import AllReduce, Outcome
from flwr_moshpit.protocol.group_checks import objection
from flwr_moshpit.protocol.machine import PeerId, Round, Send, Vector
from flwr_moshpit.protocol.messages import (
    Average,
    GroupId,
    GroupKey,
    GroupNamed,
    Member,
    Part,
    PlanId,
    Share,
    Version,
)
from flwr_moshpit.protocol.moshpit import MoshpitPeer
from flwr_moshpit.protocol.packing import Packing, unpacked
from flwr_moshpit.testing.swarm import Swarm
from tests.trainers import QuadraticTrainer

PEERS = [PeerId(name) for name in "abcd"]
DIM = 2000
LOSSY = ("float16", "int8")


def group(number: int, compression: str, weights: list[float]) -> GroupNamed:
    key = GroupKey(PlanId(1, PEERS[0]), Round(number), 0, 0)
    size = DIM // len(PEERS)
    return GroupNamed(
        group=GroupId(key, PEERS[0], 0),
        version=Version(0, 0),
        members=tuple(
            Member(peer, weight, 1, 0) for peer, weight in zip(PEERS, weights, strict=True)
        ),
        # In each round another one averages a piece, as the shares of real groups change too.
        shares=tuple(
            Share(k * size, (k + 1) * size, PEERS[(k + number) % len(PEERS)])
            for k in range(len(PEERS))
        ),
        ranks=tuple(PEERS),
        dim=DIM,
        part_elems=300,
        stall_s=2.0,
        sweep=False,
        compression=compression,
    )


def average(
    named: GroupNamed, vectors: list[Vector], packings: list[Packing] | None
) -> tuple[list[Outcome], int]:
    """How the group ends for each, and the bytes of arrays that were sent."""
    members = {
        peer: AllReduce(
            peer,
            named,
            vectors[k],
            lambda peer: True,
            0.0,
            packing=None if packings is None else packings[k],
        )
        for k, peer in enumerate(PEERS)
    }
    queue = deque((peer, effect) for peer in PEERS for effect in members[peer].start(0.0))
    num_bytes = 0
    while queue:
        src, effect = queue.popleft()
        assert isinstance(effect, Send)
        num_bytes += effect.message.array_bytes
        assert isinstance(effect.message, Part | Average)
        answers = members[effect.dst].handle(src, effect.message, 0.0)
        queue.extend((effect.dst, answer) for answer in answers)
    outcomes = [members[peer].outcome for peer in PEERS]
    return [outcome for outcome in outcomes if outcome is not None], num_bytes


def models(seed: int) -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(DIM).astype(np.float32) for _ in PEERS]


def packing() -> Packing:
    return Packing(DIM, np.dtype(np.float32))


@pytest.mark.parametrize(("codec", "share"), [("float16", 0.5), ("int8", 0.275)])
def test_all_get_the_same_in_fewer_bytes(codec: str, share: float) -> None:
    vectors, weights = models(0), [1.0, 2.0, 3.0, 4.0]
    plain, plain_bytes = average(group(0, "none", weights), vectors, None)
    packed, packed_bytes = average(group(0, codec, weights), vectors, [packing() for _ in PEERS])
    assert packed_bytes <= share * plain_bytes
    exact, got = plain[0].average, [outcome.average for outcome in packed]
    assert exact is not None
    assert len(got) == len(PEERS)
    for each in got:
        assert each is not None
        assert each.tobytes() == got[0].tobytes()  # type: ignore[union-attr]
        assert 0 < np.abs(each - exact).max() < 0.05


@pytest.mark.parametrize("codec", LOSSY)
def test_the_mean_of_a_hundred_rounds_has_no_bias(codec: str) -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    packings = [packing() for _ in PEERS]
    vectors = models(1)
    exact = np.average(np.array(vectors, np.float64), axis=0, weights=weights)
    once = total = np.zeros(DIM)
    for number in range(100):
        outcomes, _ = average(group(number, codec, weights), vectors, packings)
        assert outcomes[0].average is not None
        total = total + outcomes[0].average
        once = np.abs(outcomes[0].average - exact) if number == 0 else once
    assert np.abs(total / 100 - exact).max() < 0.1 * once.max()


@pytest.mark.parametrize("codec", LOSSY)
def test_a_model_that_is_averaged_again_and_again_does_not_drift(codec: str) -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    packings = [packing() for _ in PEERS]
    vectors, changes = models(2), models(3)
    mean = np.average(np.array(vectors, np.float64), axis=0, weights=weights)
    change = np.average(np.array(changes, np.float64), axis=0, weights=weights) / 100
    errors = []
    for number in range(100):
        outcomes, _ = average(group(number, codec, weights), vectors, packings)
        assert outcomes[0].average is not None
        errors.append(np.abs(outcomes[0].average - (mean + number * change)).max())
        vectors = [outcomes[0].average + each / np.float32(100) for each in changes]
    assert max(errors) < 3 * max(errors[:5])


def test_bytes_that_are_no_part_are_the_loss_of_their_sender() -> None:
    named = group(0, "int8", [1.0] * 4)
    member = AllReduce(PEERS[0], named, models(0)[0], lambda peer: True, 0.0, packing=packing())
    member.start(0.0)
    bad = Part(named.group, 0, np.zeros(3, np.uint8))
    names = [getattr(effect, "name", "") for effect in member.handle(PEERS[1], bad, 0.0)]
    assert "refused" in names


def test_values_are_taken_where_bytes_may_come() -> None:
    values = models(0)[0]
    assert unpacked(values, "int8", DIM, values.dtype) is values
    packed = codec_of("int8").encode(values)
    assert unpacked(packed, "none", DIM, values.dtype) is packed
    assert unpacked(packed[:-1], "int8", DIM, values.dtype) is None


def test_a_group_with_a_compression_of_its_own_is_refused() -> None:
    assert objection(group(0, "int8", [1.0] * 4), DIM) is None
    assert objection(group(0, "zip", [1.0] * 4), DIM) == "unknown compression"


def test_a_weight_that_changes_keeps_the_mass_of_what_was_left_out() -> None:
    kept = packing()
    kept.begin("int8", 2.0, 8.0)
    values = models(0)[0]
    kept.part(0, values)
    kept.end(contributed=True, averaged=True)
    before = kept._parts.residual.copy()
    assert before.any()
    kept.begin("int8", 4.0, 8.0)
    np.testing.assert_allclose(kept._parts.residual, before / 2, rtol=1e-6)
    kept.part(0, values)
    kept.end(contributed=False, averaged=False)
    np.testing.assert_allclose(kept._parts.residual, before / 2, rtol=1e-6)


def test_the_setting_is_checked() -> None:
    assert Moshpit(compression="int8").compression == "int8"
    with pytest.raises(ConfigError, match="none, float16, int8, not 'zip'"):
        Moshpit(compression="zip")


def bytes_in_a_round(compression: str, exact_peer: bool = False) -> tuple[int, float]:
    """Of all peers, in one round with training, and how far apart they are after a sweep."""
    net = Swarm(
        QuadraticTrainer(20_000, num_examples=[10, 20, 30, 40]),
        peers=4,
        algorithm=Moshpit(local_steps=1, compression=compression),
        seed=1,
    )
    net.run(rounds=1)
    if exact_peer:
        machine = net.machine(3)
        assert isinstance(machine, MoshpitPeer)
        machine.config = Moshpit(local_steps=1)
    rounds = [report.values for _, _, report in net.run(rounds=1).named("round")]
    num_bytes = sum(int(values["bytes_sent"]) for values in rounds if values["round"] == 1)
    net.average()
    distance = net.consensus_distance()
    net.close()
    return num_bytes, distance


def test_a_swarm_sends_fewer_bytes_and_sweeps_exactly() -> None:
    plain, _ = bytes_in_a_round("none")
    for codec, share in (("float16", 0.51), ("int8", 0.28)):
        packed, distance = bytes_in_a_round(codec)
        assert 0 < packed <= share * plain
        assert distance < 1e-5


def test_one_member_that_wants_it_exact_is_enough() -> None:
    assert bytes_in_a_round("int8", exact_peer=True)[0] == bytes_in_a_round("none")[0]
