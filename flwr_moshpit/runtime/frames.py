"""Frames: what travels on a link, one gRPC message each. See `Frame` in peer.proto.

The layout is protobuf's own, except that the large field comes first and is written and read by
hand, so that array data is copied once on the way out and not at all on the way in.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from flwr_moshpit.errors import RemoteProtocolError
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.wire import WIRE_VERSION, Limits, Outgoing

_VERSION = bytes((0x08, WIRE_VERSION))
_DATA = b"\x12"
_DATA_AT = 8
"""Where array data begins: aligned for float64, because the bytes object's content is."""
_FRAME_BYTES = 64
"""Most of a frame beside its data and the envelope."""


class Breach(RemoteProtocolError):
    """A peer broke the rules of a link, which cannot go on. `reason`: one word, for counting."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason
        self.text = text


def pack(frame: pb.Frame, data: Sequence[memoryview] = ()) -> bytes:
    """The bytes of `frame`, whose version and data are not set, with `data`."""
    rest: bytes = frame.SerializeToString()
    if not data:
        return _VERSION + rest
    length = sum(map(len, data))
    places = [length >> shift & 0x7F for shift in (0, 7, 14, 21, 28)]
    head = bytes([*(place | 0x80 for place in places[:4]), places[4]])
    return b"".join([_VERSION, _DATA, head, *data, rest])


def unpack(raw: bytes, limits: Limits) -> tuple[pb.Frame, memoryview]:
    """A frame without its data, and the data, a view of `raw`. Raises `Breach`."""
    if raw[:2] != _VERSION:
        raise Breach("version", f"not {WIRE_VERSION}")
    view = memoryview(raw)
    data, rest = view[:0], view[2:]
    if raw[2:3] == _DATA:
        head = raw[3:_DATA_AT]
        length = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(head))
        end = _DATA_AT + length
        if len(head) < 5 or min(head[:4]) < 0x80 or head[4] >= 0x80:
            raise Breach("malformed", "no length of data")
        if not 0 < length <= limits.chunk_bytes or end > len(raw):
            raise Breach("malformed", f"{length} bytes of data in a frame of {len(raw)}")
        data, rest = view[_DATA_AT:end], view[end:]
    if len(rest) > limits.envelope_bytes + _FRAME_BYTES:
        raise Breach("oversize", f"an envelope of {len(rest)} bytes")
    try:
        frame = pb.Frame.FromString(bytes(rest))
    except DecodeError as error:
        raise Breach("malformed", "no protobuf") from error
    if frame.data or frame.version:
        raise Breach("malformed", "data or version in the wrong place")
    return frame, data


class Cursor:
    """The data of one outgoing message, taken off in chunks."""

    def __init__(self, message: Outgoing) -> None:
        self.envelope: pb.Envelope = message.envelope
        self._arrays = list(message.arrays)
        self._array = 0
        self._offset = 0
        self.remaining_bytes: int = message.envelope.data_bytes

    def take(self, size: int) -> list[memoryview]:
        """Up to `size` bytes, as views."""
        views = []
        while size > 0 and self.remaining_bytes > 0:
            view = self._arrays[self._array][self._offset : self._offset + size]
            views.append(view)
            size -= len(view)
            self.remaining_bytes -= len(view)
            self._offset += len(view)
            if self._offset == len(self._arrays[self._array]):
                self._array, self._offset = self._array + 1, 0
        return views
