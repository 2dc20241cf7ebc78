"""The first frame of both sides of a link: who is there."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.frames import Breach, pack, unpack
from flwr_moshpit.runtime.wire import Limits

BUSY = "busy"
"""Instead of a greeting: I am dialling you myself."""
REFUSED = "refused"
"""The other side does not want this link."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What one side says of itself in its first frame. See `Hello` in peer.proto."""

    swarm: str
    src: PeerId
    dst: PeerId
    incarnation: int
    first_sequence: int
    window_bytes: int

    def pack(self) -> bytes:
        hello = pb.Hello(
            swarm=self.swarm,
            src=self.src,
            dst=self.dst,
            incarnation=self.incarnation,
            first_sequence=self.first_sequence,
            window_bytes=self.window_bytes,
        )
        return pack(pb.Frame(hello=hello))

    @classmethod
    def unpack(cls, raw: bytes, limits: Limits) -> Greeting:
        """Raises `Breach`, with the other side's reason where it says bye instead."""
        frame, data = unpack(raw, limits)
        if frame.WhichOneof("kind") == "bye":
            raise Breach(BUSY if frame.bye.reason == BUSY else REFUSED, frame.bye.reason[:128])
        if frame.WhichOneof("kind") != "hello" or data or frame.sequence:
            raise Breach("malformed", "no hello")
        hello = frame.hello
        return cls(
            hello.swarm,
            PeerId(hello.src),
            PeerId(hello.dst),
            hello.incarnation,
            hello.first_sequence,
            min(hello.window_bytes, limits.window_bytes),
        )


def draw_sequence() -> int:
    """Where the frames of a new link begin to count: so that none fits on two links."""
    return secrets.randbits(62) + 1
