"""What a link says next."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_moshpit.protocol import messages
from flwr_moshpit.protocol.machine import PeerId, Round
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.frames import Breach, unpack
from flwr_moshpit.runtime.outbox import Outbox
from flwr_moshpit.runtime.sender import Sender
from flwr_moshpit.runtime.wire import Limits

LIMITS = Limits(1 << 20)
KEY = messages.GroupKey(messages.PlanId(1, PeerId("a")), Round(3), 0, 0)
GROUP = messages.GroupId(KEY, PeerId("a"), 0)


class Side:
    def __init__(self) -> None:
        self.outbox = Outbox(1 << 24)
        self.owed: list[pb.Receipt] = []
        self.sender = Sender(self.outbox, LIMITS, 1, 1 << 23, self.receipt)

    def receipt(self) -> pb.Receipt | None:
        return self.owed.pop() if self.owed else None

    def say(self, now: float = 0.0) -> pb.Frame | None:
        raw = self.sender.next_frame(now)
        return None if raw is None else unpack(raw, LIMITS)[0]


def test_a_receipt_travels_with_what_goes_anyway() -> None:
    side = Side()
    side.outbox.put(messages.Part(GROUP, 0, np.ones(8, np.float32)))
    side.owed.append(pb.Receipt(sequence=7, stream_bytes=100))
    frame = side.say()
    assert frame is not None
    assert frame.WhichOneof("kind") == "envelope"
    assert (frame.receipt.sequence, frame.receipt.stream_bytes) == (7, 100)
    assert side.say() is None


def test_a_receipt_goes_alone_when_there_is_nothing_else() -> None:
    side = Side()
    side.owed.append(pb.Receipt(sequence=7))
    frame = side.say()
    assert frame is not None
    assert frame.WhichOneof("kind") is None
    assert frame.receipt.sequence == 7
    assert side.say() is None


def test_what_carries_no_parameters_passes_a_full_link() -> None:
    side = Side()
    parameters = np.ones(1 << 18, np.float32)
    edge = messages.EdgeId(0, 1)
    subtree = messages.Subtree(1, 1, 1.0, 0, 0.1)
    side.outbox.put(messages.Push(edge, 1, parameters, 0.0, subtree))
    while side.say() is not None:
        pass
    assert not side.sender.pacer.is_open
    side.outbox.put(messages.Renew(edge, 0.0, 0, True))
    frame = side.say()
    assert frame is not None
    assert frame.envelope.WhichOneof("message") == "renew"
    side.outbox.put(messages.Part(GROUP, 0, parameters))
    side.outbox.put(messages.Renew(edge, 0.0, 0, True))
    assert side.say() is None, "parameters wait, and what comes after them in order"


def test_a_line_is_free_when_the_last_of_what_is_newest_has_left() -> None:
    side = Side()
    sender, model = side.sender, np.ones(10_000, np.float32)
    edge, subtree = messages.EdgeId(0, 1), messages.Subtree(1, 1, 1.0, 0, 0.1)

    def push(counter: int, now: float) -> pb.Frame:
        side.outbox.put(messages.Push(edge, counter, model, 0.0, subtree))
        assert sender.line_is_busy(now)
        frame = None
        while (said := side.say(now)) is not None:
            frame = said
        assert frame is not None
        return frame

    # The first receipt says nothing of the line but how long a round trip takes: 0.1 s.
    first = push(1, 0.0)
    assert not sender.line_is_busy(0.0)
    sender.on_receipt(pb.Receipt(sequence=first.sequence), 0.1)
    # The second comes 0.4 s later than that, which the line has needed for it.
    second = push(2, 1.0)
    sender.on_receipt(pb.Receipt(sequence=second.sequence), 1.5)
    assert not sender.line_is_busy(1.5)

    third = push(3, 2.0)
    assert third.receipt_wanted
    assert sender.line_is_busy(2.3)
    assert not sender.line_is_busy(2.5)
    sender.on_receipt(pb.Receipt(sequence=third.sequence), 2.5)
    fourth = push(4, 3.0)
    sender.on_receipt(pb.Receipt(sequence=third.sequence), 3.1)
    assert sender.line_is_busy(3.1), "this was about the one before"
    sender.on_receipt(pb.Receipt(sequence=fourth.sequence), 3.15)
    assert not sender.line_is_busy(3.15)


@pytest.mark.parametrize(
    "receipt",
    [
        pb.Receipt(sequence=2),
        pb.Receipt(sequence=1, stream_bytes=1 << 40),
        pb.Receipt(sequence=1, newest_bytes=1),
    ],
)
def test_a_receipt_of_what_was_not_sent_is_refused(receipt: pb.Receipt) -> None:
    side = Side()
    side.outbox.put(messages.Part(GROUP, 0, np.ones(8, np.float32)))
    assert side.say() is not None
    side.sender.on_receipt(pb.Receipt(sequence=1), 0.1)
    with pytest.raises(Breach, match="malformed"):
        side.sender.on_receipt(receipt, 0.2)
