"""Messages to bytes and back. Everything that comes in is checked; nothing is unpickled.

A message is an `Envelope` of peer.proto, small, and the data of its arrays, which may be large and
is never copied here: what leaves are views of the message's arrays, what comes in are read-only
views of the bytes that came. `frames.py` cuts both into frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_moshpit.errors import LocalProtocolError, RemoteProtocolError
from flwr_moshpit.protocol import membership_messages as membership
from flwr_moshpit.protocol import messages
from flwr_moshpit.protocol.baselines import messages as rivals
from flwr_moshpit.protocol.machine import Delivery, Message, Vector
from flwr_moshpit.runtime import peer_pb2 as pb
from flwr_moshpit.runtime.codec import Arrays, Bounds, Codec, Compiler

WIRE_VERSION = 3
"""Two peers that talk have the same. At most 127, because it must take one byte."""

MESSAGES: Mapping[str, type[Message]] = {
    "announce": messages.Announce,
    "arrive": messages.Arrive,
    "call": messages.Call,
    "hold": messages.Hold,
    "late": messages.Late,
    "refused": messages.Refused,
    "newer_plan": messages.NewerPlan,
    "which_plan": messages.WhichPlan,
    "group_named": messages.GroupNamed,
    "part": messages.Part,
    "average": messages.Average,
    "ask": messages.Ask,
    "fetch": messages.Fetch,
    "waiting": messages.Waiting,
    "gone": messages.Gone,
    "accuse": messages.Accuse,
    "query": messages.Query,
    "answer": messages.Answer,
    "stands": messages.Stands,
    "state_wanted": messages.StateWanted,
    "state_offer": messages.StateOffer,
    "state_denied": messages.StateDenied,
    "state_ask": messages.StateAsk,
    "state_chunk": messages.StateChunk,
    "attach": messages.Attach,
    "grant": messages.Grant,
    "renew": messages.Renew,
    "detach": messages.Detach,
    "detached": messages.Detached,
    "push": messages.Push,
    "model": messages.Model,
    "ping": membership.Ping,
    "ack": membership.Ack,
    "ping_for": membership.PingFor,
    "vouch": membership.Vouch,
    "gossip": membership.Gossip,
    "summary": membership.Summary,
    "listing": membership.Listing,
    "want": membership.Want,
    "update": membership.Update,
    "global_model": rivals.GlobalModel,
    "client_update": rivals.ClientUpdate,
    "state_request": rivals.StateRequest,
    "state_reply": rivals.StateReply,
    "rival_ask": rivals.Ask,
    "elsewhere": rivals.Elsewhere,
    "ready": rivals.Ready,
    "ring": rivals.Ring,
    "broken": rivals.Broken,
    "chunk": rivals.Chunk,
    "rival_model": rivals.Model,
    "pair_request": rivals.PairRequest,
    "pair_reply": rivals.PairReply,
    "pair_refused": rivals.PairRefused,
    "rival_push": rivals.Push,
    "push_taken": rivals.PushTaken,
}
"""Every message that can travel, by its field in `Envelope`. To add one: the dataclass, a protobuf
message with the same fields, a line here."""

VARIANTS: Mapping[str, Mapping[str, type]] = {
    "flwr_moshpit.peer.Scalar.scalar": {"integer": int, "text": str},
    "flwr_moshpit.peer.Record.value": {
        "plan": messages.Plan,
        "root_claim": messages.RootClaim,
        "text": str,
    },
}
"""What fields of type Any may hold, by the oneof that stands for them."""

BOUNDS = Bounds(id_length=128, text_length=1024, bytes_length=64, count=4096)

LANES = {Delivery.STREAM: pb.STREAM, Delivery.NEWEST: pb.NEWEST, Delivery.DATAGRAM: pb.DATAGRAM}

_COMPILER = Compiler(BOUNDS, VARIANTS)
_FIELDS = {cls: name for name, cls in MESSAGES.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """How large things may be that come from a peer, all following from the model's size."""

    dim: int
    """Elements of the model: no array is longer."""
    chunk_bytes: int = 1 << 20
    """Most array data in one frame."""
    envelope_bytes: int = 1 << 18
    """Most of everything else in one message."""
    window_bytes: int = 1 << 23
    """How much a peer may send ahead of what was taken from it, in each lane."""

    @classmethod
    def of(cls, params: Vector) -> Limits:
        """For models like `params`, (d,). What comes from all groupmates at once is held in memory
        until it is taken: with less than a large model it is less."""
        window_bytes = min(max(params.nbytes // 16, 1 << 20), 1 << 23)
        return cls(len(params), window_bytes=window_bytes)

    @property
    def data_bytes(self) -> int:
        """Most array data in one message: no message holds more than two arrays."""
        return 2 * 8 * self.dim

    @property
    def frame_bytes(self) -> int:
        return self.chunk_bytes + self.envelope_bytes + 128


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message in the form in which it travels."""

    envelope: pb.Envelope
    arrays: Sequence[memoryview]
    """The data of its arrays, as bytes, in order."""


def codec_of(field: str) -> Codec:
    """Raises `TypeError` when the dataclass and its form in peer.proto do not fit."""
    descriptor = pb.Envelope.DESCRIPTOR.fields_by_name[field].message_type
    return _COMPILER.codec(MESSAGES[field], descriptor)


def encode(message: Message) -> Outgoing:
    """Raises `LocalProtocolError` for what no peer would accept."""
    field = _FIELDS.get(type(message))
    if field is None:
        raise LocalProtocolError(f"{type(message).__name__} has no form on the wire")
    envelope = pb.Envelope(lane=LANES[message.delivery])
    arrays: list[Vector] = []
    body = getattr(envelope, field)
    body.SetInParent()
    codec = codec_of(field)
    try:
        codec.encode(message, body, arrays)
    except (RemoteProtocolError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    views = [np.ascontiguousarray(array).data.cast("B") for array in arrays if array.size]
    envelope.data_bytes = sum(map(len, views))
    return Outgoing(envelope, views)


def decode(envelope: pb.Envelope, data: memoryview, limits: Limits) -> Message:
    """The message, with read-only views of `data` as its arrays. Raises `RemoteProtocolError`.

    `data` may still be filled afterwards: its content is not looked at.
    """
    field = envelope.WhichOneof("message")
    if field is None:
        raise RemoteProtocolError("a message of an unknown type")
    if envelope.lane != LANES[MESSAGES[field].delivery]:
        raise RemoteProtocolError(f"{field} in lane {envelope.lane}")
    arrays = Arrays(data, limits.dim)
    message: Message = codec_of(field).decode(getattr(envelope, field), arrays)
    if arrays.used_bytes != len(data):
        raise RemoteProtocolError("arrays and their data differ in length")
    return message
