"""Every message that travels between peers, as a frozen dataclass.

Arrays are read-only views. Times in messages are durations in seconds, never points in time: peers'
clocks do not agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from flwr_moshpit.protocol.machine import Delivery, Message, PeerId, Round, Vector

ROUND_MAX = 1 << 31
"""Rounds are numbered below this."""


class PlanId(NamedTuple):
    """Identifies a plan; the highest wins."""

    term: int
    coordinator: PeerId


class GroupKey(NamedTuple):
    """One line of cells of one plan's grid in one round: the peers that should average together."""

    plan: PlanId
    round: Round
    axis: int
    """The dimension along which the line runs, `round` modulo the number of dimensions."""
    line: int
    """Which of the lines along `axis`."""


class GroupId(NamedTuple):
    key: GroupKey
    leader: PeerId
    incarnation: int
    """The leader's: one that restarted does not reuse an id."""


class Version(NamedTuple):
    """A version of a group: the higher replaces the lower."""

    counter: int
    rank: int
    """Position of the member that named it in the group's first version."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which peer holds which cells of a mixed-radix grid. Spread as a `Record`."""

    id: PlanId
    radices: tuple[int, ...]
    """(m_1, ..., m_d); their product is the number of cells."""
    holders: tuple[PeerId, ...]
    """The holder of each cell, in the order of cells; a stand-in holds several."""
    from_round: Round
    """The first round that it rules. A new shape waits for the end of a sweep."""

    def __hash__(self) -> int:
        # The id says it all; hashing every holder at each look-up costs as much as a small swarm.
        return hash(self.id)


@dataclass(frozen=True, slots=True)
class Member:
    """One peer's part in a group."""

    peer: PeerId
    weight: float
    """What its vector counts for; one of weight 0 sends nothing and is given the mean."""
    num_cells: int
    """How many cells of the line it holds: more than one for a stand-in."""
    incarnation: int
    """Which life of the peer: one that restarted is not in the groups that it was in before."""


@dataclass(frozen=True, slots=True)
class Share:
    """The elements begin <= k < end of the vector are averaged by `reducer`."""

    begin: int
    end: int
    reducer: PeerId


# Matchmaking


@dataclass(frozen=True, slots=True)
class Announce(Message):
    """To the leader: I shall come to this round, in `eta_s` seconds. A later one corrects it."""

    key: GroupKey
    eta_s: float
    local_s: float
    """How long my local steps take in all; 0 if I have never done any: then `eta_s` is a guess."""


@dataclass(frozen=True, slots=True)
class Arrive(Message):
    """To the leader: I am here. Sent again while nothing is heard; the leader takes it once."""

    key: GroupKey
    weight: float
    dim: int
    schema: bytes
    """Hash of names, shapes and dtypes: averaging needs equal ones."""
    incarnation: int
    sweep: bool
    """For me this is a round without training: wait for everybody who can come."""
    local_s: float
    compression: str = "none"
    """What I should like to send and can read, see `compression.py`."""


@dataclass(frozen=True, slots=True)
class Call(Message):
    """From the leader to a member that has said nothing: are you coming?"""

    key: GroupKey
    sweep: bool
    """A round without training: drop what you are training and come."""


@dataclass(frozen=True, slots=True)
class Hold(Message):
    """From the leader to one that asks again: I heard you, we wait."""

    key: GroupKey


@dataclass(frozen=True, slots=True)
class Late(Message):
    """Instead of a group: this round is closed, or, to a leader that calls: I am past it."""

    key: GroupKey
    round: Round
    """The first round that may still be open, as far as the sender knows."""


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """From the leader: you cannot take part."""

    key: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class NewerPlan(Message):
    """Answers a message under an older plan."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class WhichPlan(Message):
    """Answers a message under a plan that I do not know yet: send it to me."""


# Inside a group


@dataclass(frozen=True, slots=True)
class GroupNamed(Message):
    """Who averages with whom, who reduces what, and with which weights. Fixed for its version."""

    group: GroupId
    version: Version
    members: tuple[Member, ...]
    shares: tuple[Share, ...]
    ranks: tuple[PeerId, ...]
    """The members of the first version, in order: `Version.rank` indexes it."""
    dim: int
    part_elems: int
    """Largest piece of a vector in one message."""
    stall_s: float
    """Without any progress for this long a member asks again."""
    sweep: bool
    """Weights travel: all cells leave with an equal part of the members' weights."""
    compression: str = "none"
    """How parts and averages may travel, as bytes; as values they are what they are."""


@dataclass(frozen=True, slots=True)
class Part(Message):
    """A piece of the sender's vector, for the member that reduces it."""

    group: GroupId
    offset: int
    data: Vector

    @property
    def array_bytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Average(Message):
    """A piece of the group's weighted mean, from its reducer or from another that has it."""

    group: GroupId
    version: Version
    offset: int
    data: Vector

    @property
    def array_bytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """From a reducer: send me your part at `offset` (again), for a sum begun in `version`."""

    group: GroupId
    version: Version
    offset: int


@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Send me the average at `offset` (again)."""

    group: GroupId
    version: Version
    offset: int


@dataclass(frozen=True, slots=True)
class Waiting(Message):
    """Answers a `Fetch` for what is not there yet: I am alive and wait for others."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Gone(Message):
    """Answers about a group that I am not in: it cannot count on me."""

    group: GroupId
    finished: bool
    """I was in it, it was finished, and I cannot serve its result any more."""


@dataclass(frozen=True, slots=True)
class Accuse(Message):
    """To the namer: `peer` is lost to me, or sent what cannot be used, or is me and declines."""

    group: GroupId
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Query(Message):
    """From who wants to name `ballot`: have you finished an earlier version? If not, do not."""

    group: GroupId
    ballot: Version


@dataclass(frozen=True, slots=True)
class Answer(Message):
    """`ballot` is the highest that the sender has answered; above the asked one it means no."""

    group: GroupId
    ballot: Version


@dataclass(frozen=True, slots=True)
class Stands(Message):
    """The version `named` was finished by `holder`: it stands, fetch from there what you miss."""

    named: GroupNamed
    holder: PeerId

    @property
    def group(self) -> GroupId:
        return self.named.group


# Joining late; see `state_transfer.py`


@dataclass(frozen=True, slots=True)
class StateWanted(Message):
    """From a peer that has joined late: may I have your model?"""

    dim: int
    schema: bytes
    """Hash of names, shapes and dtypes."""
    least_round: Round
    """The model of an earlier round would be of no use."""


@dataclass(frozen=True, slots=True)
class StateOffer(Message):
    """Answers `StateWanted`: there is a snapshot for you, of this round. Ask for its pieces."""

    serial: int
    round: Round


@dataclass(frozen=True, slots=True)
class StateDenied(Message):
    """Answers `StateWanted` or `StateAsk`: not from me."""

    reason: str
    again: bool
    """It may be worth to ask me again."""


@dataclass(frozen=True, slots=True)
class StateAsk(Message):
    """Send me the elements offset <= k < offset + size. Pieces are asked for in order: with the
    last one the snapshot may be forgotten."""

    serial: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class StateChunk(Message):
    """Answers `StateAsk`."""

    serial: int
    offset: int
    data: Vector

    @property
    def array_bytes(self) -> int:
        return self.data.nbytes


# R-FAST: edges and leases. An edge belongs to the peer that pushes on it, its child end.


class Label(NamedTuple):
    """How new a peer's news of its root is. Labels of one peer only grow; see `attachment.py`."""

    term: int
    root: PeerId
    beat: int
    """Counts the root's steps and idle ticks."""


class EdgeId(NamedTuple):
    """Names one attachment of one child for ever; the higher replaces the lower."""

    incarnation: int
    """The child's."""
    epoch: int
    """Grows with every `Attach` that the child sends."""


class Subtree(NamedTuple):
    """What a child tells about itself and everybody below it, beside the gradients."""

    peers: int
    contributors: int
    """Peers whose gradient is in `rho`."""
    weight: float
    """Sum of the weights with which these gradients count."""
    seen: int
    """Mean, over the contributors, by weight, of the root's step at whose model a gradient was
    taken."""
    period_s: float
    """Seconds between two training steps of the fastest peer in it."""


@dataclass(frozen=True, slots=True)
class RootClaim:
    """I am the root of a tree. Spread as a `Record`; None in its place takes it back."""

    term: int
    live: int
    """Peers in the tree, as far as its root knows."""
    examples: float
    """Sum of their weights."""


@dataclass(frozen=True, slots=True)
class Attach(Message):
    """To a peer: may I push to you?"""

    edge: EdgeId
    label: Label
    step: int
    """The root's steps so far, as far as the sender knows: how far its model is trained."""
    dim: int
    schema: bytes
    """Hash of names, shapes and dtypes: tracking needs equal ones."""
    insist: bool
    """All those who were asked have their hands full: take me nevertheless."""


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """From the parent: your edge stands. Accepts an `Attach`, later renews its lease."""

    edge: EdgeId
    incarnation: int
    """The parent's."""
    clock_s: float
    """The parent's own clock, which means nothing to the child: it gives it back as an echo."""
    label: Label
    path: tuple[PeerId, ...]
    """From the parent's parent up to the root."""
    have: int
    """Counter of the newest `Push` that arrived."""
    answer: bool
    """The child should answer with a `Renew` at once."""


@dataclass(frozen=True, slots=True)
class Renew(Message):
    """To the parent: I am here, and this is the last of your clock that I know."""

    edge: EdgeId
    echo_s: float
    have: int
    """Counter of the newest `Model` that arrived."""
    answer: bool
    """The parent should answer with a `Grant` at once."""


@dataclass(frozen=True, slots=True)
class Detach(Message):
    """To the parent: forget what I pushed on this edge, and say so with `Detached`."""

    edge: EdgeId


@dataclass(frozen=True, slots=True)
class Detached(Message):
    """From the parent: of this edge I hold nothing, and never shall. Refuses an `Attach` too."""

    edge: EdgeId
    reason: str
    instead: tuple[PeerId, ...] = ()
    """Whom to ask instead."""


@dataclass(frozen=True, slots=True)
class Push(Message):
    """The running sum of everything ever pushed on an edge: a lost one is made good by the next."""

    delivery: ClassVar[Delivery] = Delivery.NEWEST

    edge: EdgeId
    counter: int
    rho: Vector
    """(d,)."""
    echo_s: float
    """As in `Renew`."""
    subtree: Subtree

    @property
    def array_bytes(self) -> int:
        return self.rho.nbytes


@dataclass(frozen=True, slots=True)
class Model(Message):
    """The sender's model after its descent, v of the paper, for those that mix it into theirs."""

    delivery: ClassVar[Delivery] = Delivery.NEWEST

    incarnation: int
    counter: int
    v: Vector
    """(d,)."""
    edge: EdgeId | None
    """On a tree, the receiver's edge to the sender."""
    clock_s: float
    """As in `Grant`."""
    label: Label
    path: tuple[PeerId, ...]
    step: int
    """The root's steps so far."""
    period_s: float
    """Seconds between two steps of the root."""
    contributors: int
    """Peers in the root's sum of gradients."""
    scale: float
    """What is left of the step size after halvings."""
    direction: Vector | None = None
    """(d,), the mean gradient at the root, where peers take several local steps."""
    taken: int = -1
    """Counter of the receiver's newest push that is in `direction`, -1 for none."""

    @property
    def array_bytes(self) -> int:
        return self.v.nbytes + (0 if self.direction is None else self.direction.nbytes)
