"""One direction of a link: from an outbox to frames, as far as credit and pacing allow."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr_moshpit.errors import LocalProtocolError
from flwr_moshpit.protocol.machine import Delivery
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.frames import Breach, Cursor, pack
from flwr_moshpit.runtime.outbox import Outbox
from flwr_moshpit.runtime.pacing import Pacer
from flwr_moshpit.runtime.wire import Limits, encode

log = logging.getLogger(__name__)

QUEUE_NOTICED_S = 0.005
"""What leaves within this has left at once."""

_BULK = {Delivery.STREAM: pb.STREAM, Delivery.NEWEST: pb.NEWEST}


class Sender:
    """Says what the next frame is. Datagrams go first, then the stream and the newest in turn.

    At most one message per lane is under way, so a large one does not hold up the other lanes.
    `receipt` gives the receipt that this side owes, or None.
    """

    def __init__(
        self,
        outbox: Outbox,
        limits: Limits,
        first_sequence: int,
        window_bytes: int,
        receipt: Callable[[], pb.Receipt | None],
    ) -> None:
        self.pacer = Pacer(window_bytes)
        self.may_begin = True
        """Whether messages are taken from the outbox; false on a link that is being given up."""
        self.flushing = False
        """Ask for a receipt of everything at once."""
        self.num_messages = 0
        self.newest_leaves_at = 0.0
        """When the line has taken the last message of `Delivery.NEWEST`, if no receipt is sooner.
        Until then a newer one had to wait behind it."""
        self._newest_sequence = 0
        """Of that message's last frame."""
        self._outbox = outbox
        self._limits = limits
        self._sequence = first_sequence
        self._receipt = receipt
        self._window_bytes = window_bytes
        self._credit = dict.fromkeys(_BULK, window_bytes)
        self._under_way: dict[Delivery, Cursor] = {}
        self._turn = Delivery.STREAM

    @property
    def is_idle(self) -> bool:
        """Nothing is under way or without a receipt; something may wait in the outbox."""
        return not self._under_way and self.pacer.under_way_bytes == 0

    def line_is_busy(self, now: float) -> bool:
        """Something of `Delivery.NEWEST` has not left, or not all of it."""
        is_under_way = Delivery.NEWEST in self._under_way or self._outbox.has_newest
        return is_under_way or now < self.newest_leaves_at

    def next_frame(self, now: float) -> bytes | None:
        """None when there is nothing to say, or it has to wait for a receipt."""
        frame = self._next_message(now)
        if frame is None:
            receipt = self._receipt()
            if receipt is not None:
                return self._pack(pb.Frame(receipt=receipt), now)
        return frame

    def _next_message(self, now: float) -> bytes | None:
        if self.may_begin and self._outbox.has_datagrams:
            frame = self._datagram(now)
            if frame is not None:
                return frame
        if not self.pacer.is_open:
            frame = self._small(now)
            if frame is not None:
                return frame
            # The window may have shrunk below what was sent since a receipt was last asked for;
            # then nobody would say anything any more.
            return None if self.pacer.waits_for_receipt else self.ask(now)
        other = Delivery.NEWEST if self._turn is Delivery.STREAM else Delivery.STREAM
        for delivery in (self._turn, other):
            frame = self._bulk(delivery, now)
            if frame is not None:
                self._turn = Delivery.NEWEST if delivery is Delivery.STREAM else Delivery.STREAM
                return frame
        if self.flushing and self.pacer.under_way_bytes and not self.pacer.waits_for_receipt:
            return self.ask(now)
        return None

    def ask(self, now: float) -> bytes:
        """A frame that only asks for a receipt."""
        return self._pack(pb.Frame(receipt_wanted=True), now)

    def bye(self, reason: str, now: float) -> bytes:
        return self._pack(pb.Frame(bye=pb.Bye(reason=reason)), now)

    def on_receipt(self, receipt: pb.Receipt, now: float) -> None:
        """Raises `Breach` for one of what was not sent: the uplink would be measured by it."""
        if receipt.sequence >= self._sequence:
            raise Breach("malformed", "a receipt of what was not sent")
        self.pacer.receipt(receipt.sequence, now)
        if receipt.sequence >= self._newest_sequence:
            self.newest_leaves_at = 0.0
        self._credit[Delivery.STREAM] += receipt.stream_bytes
        self._credit[Delivery.NEWEST] += receipt.newest_bytes
        if max(self._credit.values()) > self._window_bytes:
            raise Breach("malformed", "more credit than there is")

    def _datagram(self, now: float) -> bytes | None:
        cursor = self._begin(Delivery.DATAGRAM)
        if cursor is None:
            return None
        data = cursor.take(self._limits.chunk_bytes)
        return self._pack(pb.Frame(envelope=cursor.envelope), now, data)

    def _small(self, now: float) -> bytes | None:
        """A message of the stream that does not wait until a full link has taken what is on its
        way: without parameters, such as the renewal of a lease."""
        is_free = self.may_begin and Delivery.STREAM not in self._under_way
        return self._bulk(Delivery.STREAM, now) if is_free and self._outbox.begins_small else None

    def _bulk(self, delivery: Delivery, now: float) -> bytes | None:
        if self._credit[delivery] <= 0:
            return None
        cursor = self._under_way.get(delivery)
        if cursor is not None:
            frame = pb.Frame(more=_BULK[delivery])
        else:
            cursor = self._begin(delivery) if self.may_begin else None
            if cursor is None:
                return None
            frame = pb.Frame(envelope=cursor.envelope)
            self._under_way[delivery] = cursor
        data = cursor.take(self.pacer.chunk_bytes(self._limits.chunk_bytes))
        if not cursor.remaining_bytes:
            del self._under_way[delivery]
            if delivery is Delivery.NEWEST:
                self._newest_leaves(frame, data, now)
        raw = self._pack(frame, now, data)
        self._credit[delivery] -= len(raw)
        return raw

    def _newest_leaves(self, frame: pb.Frame, data: list[memoryview], now: float) -> None:
        """With `frame`, the last of its message."""
        leaves_s = self.pacer.leaves_s(sum(map(len, data)))
        self._newest_sequence = self._sequence
        frame.receipt_wanted = leaves_s > QUEUE_NOTICED_S
        self.newest_leaves_at = now + leaves_s if frame.receipt_wanted else 0.0

    def _begin(self, delivery: Delivery) -> Cursor | None:
        """The next message of `delivery`; one that no peer would take is logged and left out."""
        while (message := self._outbox.pop(delivery)) is not None:
            try:
                outgoing = encode(message)
            except LocalProtocolError:
                log.exception("a message of ours is left out")
                continue
            size, limits = outgoing.envelope.data_bytes, self._limits
            most = limits.chunk_bytes if delivery is Delivery.DATAGRAM else limits.data_bytes
            if size > most or outgoing.envelope.ByteSize() > limits.envelope_bytes:
                log.error("%s of %d bytes is left out: too long", type(message).__name__, size)
                continue
            self.num_messages += 1
            return Cursor(outgoing)
        return None

    def _pack(self, frame: pb.Frame, now: float, data: list[memoryview] | None = None) -> bytes:
        size = sum(map(len, data)) + frame.envelope.ByteSize() if data is not None else 0
        frame.receipt_wanted = frame.receipt_wanted or self.pacer.wants_receipt(size)
        frame.sequence = self._sequence
        if not frame.HasField("receipt"):
            receipt = self._receipt()
            if receipt is not None:
                frame.receipt.CopyFrom(receipt)
        raw = pack(frame, data or ())
        self.pacer.sent(self._sequence, size, frame.receipt_wanted, now)
        self._sequence += 1
        return raw
