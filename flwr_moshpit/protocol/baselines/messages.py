"""The messages of the rivals. Models are whole, in one message; arrays are read-only."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_moshpit.protocol.machine import Message, PeerId, Vector


@dataclass(frozen=True, slots=True)
class GlobalModel(Message):
    """FedAvg, server to client: train from these, or, if `final`, these are the end."""

    round: int
    params: Vector
    schema: bytes
    final: bool
    contributors: int
    """Clients that made this model."""
    weight: float
    """Their examples."""

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class ClientUpdate(Message):
    """FedAvg, client to server: what local steps of this round made of the global model."""

    round: int
    params: Vector
    num_examples: float
    schema: bytes

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class StateRequest(Message):
    """From a peer that starts late or fell behind: where are you?"""


@dataclass(frozen=True, slots=True)
class StateReply(Message):
    """The sender's model at the beginning of `round`, its own. Also sent, unasked, to a peer that
    works on a round which the sender has finished."""

    round: int
    params: Vector
    schema: bytes

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """I wait for what you owe me in this round: send it, or say that it will not come."""

    round: int


@dataclass(frozen=True, slots=True)
class Elsewhere(Message):
    """Do not wait for me in `round`. I am in `own_round`."""

    round: int
    own_round: int


# Ring all-reduce, of everybody or of random groups


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """To the coordinator: my local steps of this round are done."""

    round: int
    weight: float
    dim: int
    schema: bytes


@dataclass(frozen=True, slots=True)
class Ring(Message):
    """From the coordinator: average around this ring. A higher (attempt, coordinator) replaces a
    lower one of the same round, which then is void."""

    round: int
    attempt: int
    coordinator: PeerId
    members: tuple[PeerId, ...]
    """Each sends to the next; the last to the first."""
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Broken(Message):
    """To the coordinator: this attempt cannot end, because of `peer`."""

    round: int
    attempt: int
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk(Message):
    """To the next on the ring. Steps 0 to N-2 reduce, steps N-1 to 2N-3 gather."""

    round: int
    attempt: int
    coordinator: PeerId
    step: int
    data: Vector

    @property
    def array_bytes(self) -> int:
        return self.data.nbytes


# Gossip


@dataclass(frozen=True, slots=True)
class Model(Message):
    """D-PSGD, to every neighbour: my model after the local steps of this round."""

    round: int
    params: Vector
    weight: float
    degree: int
    """How many neighbours the sender averages with."""
    schema: bytes

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class PairRequest(Message):
    """AD-PSGD, to a random neighbour: average with me."""

    serial: int
    params: Vector
    weight: float
    schema: bytes

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class PairReply(Message):
    """AD-PSGD: the neighbour's model as it was before it averaged."""

    serial: int
    params: Vector
    weight: float
    schema: bytes

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class PairRefused(Message):
    """AD-PSGD: nothing was averaged."""

    serial: int
    reason: str


@dataclass(frozen=True, slots=True)
class Push(Message):
    """Push-sum: `weight` of mass at `params`, which the sender no longer has."""

    round: int
    params: Vector
    weight: float
    schema: bytes

    @property
    def array_bytes(self) -> int:
        return self.params.nbytes


@dataclass(frozen=True, slots=True)
class PushTaken(Message):
    """Push-sum: the push of this round is mine now; until then the sender may take it back."""

    round: int
