"""The other direction of a link: from frames to messages, every bound checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np

from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.protocol.machine import Message
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.frames import Breach, unpack
from flwr_moshpit.runtime.wire import Limits, decode

Deliver = Callable[[Message], "asyncio.Future[None] | None"]

UNTAKEN_DATAGRAMS_MAX = 256
MALFORMED_MAX = 100
"""So many malformed messages from one link, and it is closed."""


class _Assembly:
    """A message whose data is still coming in; None in its place is skipped."""

    def __init__(self, data_bytes: int) -> None:
        # Not touched before it is filled, so an announcement alone takes no memory.
        self.array = np.empty(data_bytes, np.uint8)
        self.buffer = self.array.data
        self.filled_bytes = 0
        self.message: Message | None = None

    def fill(self, data: memoryview) -> bool:
        """Whether it is complete now."""
        end = self.filled_bytes + len(data)
        if not data or end > len(self.buffer):
            raise Breach("malformed", "more data than announced, or none")
        self.buffer[self.filled_bytes : end] = data
        self.filled_bytes = end
        return end == len(self.buffer)


class _Lane:
    """What came in one lane: how much of it was taken, and what is still owed."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.used_bytes = 0
        """Of the credit that the sender has."""
        self.returnable_bytes = 0
        self.untaken_bytes = 0
        self.assembly: _Assembly | None = None

    def use(self, num_bytes: int) -> None:
        if self.used_bytes >= self.window_bytes:
            raise Breach("credit")
        self.used_bytes += num_bytes

    @property
    def owes(self) -> bool:
        """Whether so much was taken that a receipt cannot wait for one that the sender asks for,
        which it does twice per window."""
        return 4 * self.grantable_bytes >= 3 * self.window_bytes

    @property
    def grantable_bytes(self) -> int:
        return self.returnable_bytes if self.untaken_bytes <= self.window_bytes else 0

    def grant(self) -> int:
        granted = self.grantable_bytes
        self.returnable_bytes -= granted
        self.used_bytes -= granted
        return granted


class Receiver:
    """Takes frames in and hands messages over.

    `deliver` may return a future: until it is done the message counts as not taken, and the credit
    that it used is not given back. `wake` is called when there is something to tell the sender.
    """

    def __init__(
        self,
        limits: Limits,
        first_sequence: int,
        deliver: Deliver,
        wake: Callable[[], None],
        refusals: Counter[str],
    ) -> None:
        self.on_receipt: Callable[[pb.Receipt], None] = lambda receipt: None
        self.bye: str | None = None
        """What the other side gave as reason for its leave, "" for none."""
        self._limits = limits
        self._sequence = first_sequence
        self._deliver = deliver
        self._wake = wake
        self._refusals = refusals
        self.num_messages = 0
        self._malformed = 0
        self._wanted = False
        self._untaken_datagrams = 0
        self._lanes: dict[int, _Lane] = {
            lane: _Lane(limits.window_bytes) for lane in (pb.STREAM, pb.NEWEST)
        }

    @property
    def is_assembling(self) -> bool:
        """Whether a message has begun to come and is not here."""
        return any(lane.assembly is not None for lane in self._lanes.values())

    def on_frame(self, raw: bytes) -> None:
        """Raises `Breach`."""
        frame, data = unpack(raw, self._limits)
        if frame.sequence != self._sequence:
            raise Breach("sequence", f"{frame.sequence} instead of {self._sequence}")
        self._sequence += 1
        if frame.HasField("receipt"):
            self.on_receipt(frame.receipt)
        match frame.WhichOneof("kind"):
            case "envelope":
                self._on_envelope(frame.envelope, data, len(raw))
            case "more":
                self._on_more(frame.more, data, len(raw))
            case "bye":
                self.bye = frame.bye.reason[:128]
            case "hello":
                raise Breach("malformed", "a second hello")
        if frame.receipt_wanted:
            self._wanted = True
            self._wake()

    def receipt(self) -> pb.Receipt | None:
        """What the sender should know, if it wants to or should: to be sent at once."""
        stream, newest = self._lanes[pb.STREAM], self._lanes[pb.NEWEST]
        if not (self._wanted or stream.owes or newest.owes):
            return None
        self._wanted = False
        return pb.Receipt(
            sequence=self._sequence - 1,
            stream_bytes=stream.grant(),
            newest_bytes=newest.grant(),
        )

    def _on_envelope(self, envelope: pb.Envelope, data: memoryview, size: int) -> None:
        total = envelope.data_bytes
        if total > self._limits.data_bytes:
            raise Breach("oversize", f"{total} bytes announced")
        lane = self._lanes.get(envelope.lane)
        if lane is None:
            if envelope.lane != pb.DATAGRAM or total != len(data):
                raise Breach("malformed", "a message in no lane, or a torn datagram")
            message = self._decode(envelope, data)
            if message is not None:
                self._hand_over_datagram(message)
            return
        lane.use(size)
        if lane.assembly is not None:
            raise Breach("malformed", "a message before the end of another")
        if total == len(data):
            self._hand_over(self._decode(envelope, data), lane, size, size)
            return
        assembly = lane.assembly = _Assembly(total)
        assembly.message = self._decode(envelope, assembly.buffer)
        if data:
            assembly.fill(data)
        self._absorbed(lane, size)

    def _on_more(self, number: int, data: memoryview, size: int) -> None:
        lane = self._lanes.get(number)
        if lane is None or lane.assembly is None:
            raise Breach("malformed", "more of nothing")
        lane.use(size)
        assembly = lane.assembly
        if assembly.fill(data):
            lane.assembly = None
            assembly.array.setflags(write=False)
            self._hand_over(assembly.message, lane, size, len(assembly.buffer))
        else:
            self._absorbed(lane, size)

    def _decode(self, envelope: pb.Envelope, data: memoryview) -> Message | None:
        self.num_messages += 1
        try:
            return decode(envelope, data, self._limits)
        except RemoteProtocolError as error:
            self._malformed += 1
            if self._malformed > MALFORMED_MAX:
                raise Breach("malformed", str(error)) from error
            self._refusals["malformed"] += 1
            return None

    def _hand_over(
        self, message: Message | None, lane: _Lane, credit_bytes: int, held_bytes: int
    ) -> None:
        taken = None if message is None else self._deliver(message)
        if taken is None or taken.done():
            self._absorbed(lane, credit_bytes)
            return
        lane.untaken_bytes += held_bytes

        def on_taken(future: asyncio.Future[None]) -> None:
            lane.untaken_bytes -= held_bytes
            self._absorbed(lane, credit_bytes)

        taken.add_done_callback(on_taken)

    def _hand_over_datagram(self, message: Message) -> None:
        # Nobody waits for datagrams, so those that nobody takes are lost.
        if self._untaken_datagrams >= UNTAKEN_DATAGRAMS_MAX:
            return
        taken = self._deliver(message)
        if taken is None or taken.done():
            return
        self._untaken_datagrams += 1

        def on_taken(future: asyncio.Future[None]) -> None:
            self._untaken_datagrams -= 1

        taken.add_done_callback(on_taken)

    def _absorbed(self, lane: _Lane, num_bytes: int) -> None:
        lane.returnable_bytes += num_bytes
        if lane.owes:
            self._wake()
