"""What waits to go to one peer, by the way in which it travels."""

from __future__ import annotations

from collections import deque

from flwr_moshpit.protocol.machine import Delivery, Message

DATAGRAMS_MAX = 1024
SMALL_BYTES = 256
"""What a message without arrays is reckoned to take."""


class Outbox:
    """Three queues: streams in order, the newest of each key, datagrams.

    It keeps references: arrays are encoded only when they leave, so a message that is replaced, or
    a peer that is slow, costs no copy.
    """

    def __init__(self, stream_bytes_max: int) -> None:
        self._stream_bytes_max = stream_bytes_max
        self._streams: deque[Message] = deque()
        self._newest: dict[object, Message] = {}
        self._datagrams: deque[Message] = deque(maxlen=DATAGRAMS_MAX)
        self.stream_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._streams or self._newest or self._datagrams)

    def put(self, message: Message) -> bool:
        """Take `message` over. False: the stream holds more than it may, it must be given up."""
        match message.delivery:
            case Delivery.STREAM:
                self._streams.append(message)
                self.stream_bytes += SMALL_BYTES + message.array_bytes
                return self.stream_bytes <= self._stream_bytes_max
            case Delivery.NEWEST:
                self._newest[message.newest_key] = message
            case Delivery.DATAGRAM:
                self._datagrams.append(message)
        return True

    def pop(self, delivery: Delivery) -> Message | None:
        """The next to leave, or None."""
        match delivery:
            case Delivery.STREAM if self._streams:
                message = self._streams.popleft()
                self.stream_bytes -= SMALL_BYTES + message.array_bytes
                return message
            case Delivery.NEWEST if self._newest:
                return self._newest.pop(next(iter(self._newest)))
            case Delivery.DATAGRAM if self._datagrams:
                return self._datagrams.popleft()
        return None

    @property
    def has_datagrams(self) -> bool:
        return bool(self._datagrams)

    @property
    def has_newest(self) -> bool:
        return bool(self._newest)

    @property
    def begins_small(self) -> bool:
        """Whether the next message of the stream carries no parameters."""
        return bool(self._streams) and not self._streams[0].array_bytes

    def drop_streams(self) -> bool:
        """Give up what waits in order; whether there was anything."""
        had_any = bool(self._streams)
        self._streams.clear()
        self.stream_bytes = 0
        return had_any

    def clear(self) -> bool:
        """Give up everything; whether a stream was among it."""
        self._newest.clear()
        self._datagrams.clear()
        return self.drop_streams()
