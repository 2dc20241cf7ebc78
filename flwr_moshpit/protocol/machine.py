"""The contract between a protocol and whatever drives it.

A protocol is a `Machine`: an object without a clock, a socket, a thread, a log or global
randomness. Events go in, effects come out, and there is one deadline. The same object runs in the
simulator's virtual time, in a pytest test and on a device.

The host's duties
-----------------
1. Call `handle` with one event at a time, `Start` first. `now` is in seconds on any monotonic
   clock and never decreases.
2. Carry the returned effects out in order. Then read `deadline` and arm one timer with it: when it
   is due, call `handle(TimerFired(), now)`. Timers may fire late, early or more than once; the
   machine compares `now`.
3. `Send` never blocks and never raises. How a message travels is declared by its type, see
   `Delivery`. What is sent to oneself is delivered like anything else.
4. `Compute(job_id, job)` is answered by exactly one `ComputeDone` or `ComputeFailed` with its
   `job_id`, unless `Cancel(job_id)` comes first, after which neither may follow. At most one
   training job (`LocalSteps`, `Gradient`) is outstanding at a time; evaluation is free.
5. `Publish(record)` hands a record to the membership, which spreads it to every living peer: each
   machine gets `Learned(record)`, its own publisher too. Of two records with one key the higher
   `rank` wins; an older one may never arrive.
6. `ViewChanged` tells who is alive, as far as this peer knows: views differ between peers for a
   while. `LinkLost(peer)` says that something sent to, or expected from, `peer` on a stream will
   not come; the peer may well be alive.
7. `LineBusy(peer)` says that a `newest` message to `peer` has not left at once: until
   `LineFree(peer)` another one would only wait, or replace one that waits. `LinkLost(peer)` ends it
   too. Of messages that weigh no more than a few packets a host need not say it.
8. `Report(name, values)` goes to the observer. `Finish(result)` says that the machine has done its
   own work; it goes on serving others until `Stop`, or until the host ends.

The machine's duties
--------------------
Messages are frozen dataclasses with read-only arrays; nobody changes what it received. Randomness
comes from the `numpy.random.Generator` given to the constructor, hashes from `hashlib`. Iterate
lists and dicts, never sets. Reduce in group order, never in arrival order. A parent machine owns
its children as attributes, joins their effects and takes the minimum of their deadlines. Messages
from peers are checked before use: what is impossible is dropped and counted in a `Report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NewType, Protocol, TypeAlias

import numpy.typing as npt

PeerId = NewType("PeerId", str)
Round = NewType("Round", int)
JobId = NewType("JobId", int)

Vector: TypeAlias = npt.NDArray[Any]
"""A flat vector, shape (d,), float32 or float64."""


class Delivery(Enum):
    """How messages of one type travel."""

    STREAM = "stream"
    """Ordered per pair of peers; delivered, or followed by `LinkLost` at the sender."""

    NEWEST = "newest"
    """Like a datagram, but an older one with the same `newest_key` still waiting in the sender's
    outbox is replaced: at most one waits."""

    DATAGRAM = "datagram"
    """May be lost, reordered and duplicated."""

    # Enum's own is written in Python, and lanes are looked up several times for each frame.
    __hash__ = object.__hash__


class Message:
    """Base of everything in `messages.py`: what a driver needs to know of any message."""

    __slots__ = ()
    delivery: ClassVar[Delivery] = Delivery.STREAM

    @property
    def newest_key(self) -> object:
        """For `Delivery.NEWEST`: messages to one peer with equal keys replace each other."""
        return type(self)

    @property
    def array_bytes(self) -> int:
        """Bytes of parameters that this message carries, without its header."""
        return 0


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What the swarm knows of one living peer."""

    peer: PeerId
    incarnation: int = 0
    """Grows when the peer restarts."""
    speed: float = 1.0
    """Training rate relative to the other peers'; any unit, the same for all."""
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    dialable: bool = True
    """Whether others can open a connection to it. One that cannot be dialled only sends."""


@dataclass(frozen=True, slots=True)
class View:
    """The living peers, itself included, in order of their ids. Shared between machines."""

    peers: Mapping[PeerId, PeerInfo]

    def __contains__(self, peer: object) -> bool:
        return peer in self.peers

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self.peers)

    def __len__(self) -> int:
        return len(self.peers)


@dataclass(frozen=True, slots=True)
class Record:
    """Something that every peer should know: a plan, an attachment, a stop. See `Publish`."""

    key: tuple[str, ...]
    """Such as ("plan",) or ("attachment", peer)."""
    rank: tuple[Any, ...]
    """Of two records with one key the higher rank wins."""
    value: Any


# Jobs: data, never a closure, so that a trace can print them and a replay can skip them.


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Train from `params`, for `num_steps` optimizer steps or, if that is None, for `budget_s`."""

    params: Vector
    num_steps: int | None = None
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """The mean gradient over one batch at `params`."""

    params: Vector


@dataclass(frozen=True, slots=True)
class CorrectedSteps:
    """Local epochs of R-FAST: y <- y - lr (grad(y) + correction), `num_steps` times from `params`.

    Answered by a `GradientResult` with the mean of the `num_steps` gradients met on the way.
    """

    params: Vector
    correction: Vector
    """(d,), added to every gradient."""
    num_steps: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    params: Vector


Job: TypeAlias = LocalSteps | Gradient | CorrectedSteps | Evaluate


@dataclass(frozen=True, slots=True)
class Trained:
    """Answers `LocalSteps`."""

    params: Vector
    num_examples: int
    """Examples that the steps went over, each as often as it was used."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradientResult:
    """Answers `Gradient` and `CorrectedSteps`."""

    gradient: Vector
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Answers `Evaluate`."""

    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


Result: TypeAlias = Trained | GradientResult | Evaluated


# Events


@dataclass(frozen=True, slots=True)
class Start:
    """The first event of every machine; a later one lets a machine that has finished go on.

    The machine trains until its round counter reaches `until_round` (None: until `Stop`), then, if
    `sweep`, averages once through all peers without training, and then returns `Finish`. Protocols
    without rounds of their own count one for every training job, and ignore `sweep`.
    """

    until_round: int | None = None
    sweep: bool = True


@dataclass(frozen=True, slots=True)
class Received:
    src: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    pass


@dataclass(frozen=True, slots=True)
class ComputeDone:
    job_id: JobId
    result: Result


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    job_id: JobId
    error: str


@dataclass(frozen=True, slots=True)
class ViewChanged:
    view: View
    joined: tuple[PeerId, ...] = ()
    """New since the last view of this peer; a restarted peer is in `lost` and in `joined`."""
    lost: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Learned:
    record: Record


@dataclass(frozen=True, slots=True)
class LinkLost:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LineBusy:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LineFree:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Stop:
    """Wind down: cancel jobs, hand over what others need. The host ends soon after."""


Event: TypeAlias = (
    Start
    | Received
    | TimerFired
    | ComputeDone
    | ComputeFailed
    | ViewChanged
    | Learned
    | LinkLost
    | LineBusy
    | LineFree
    | Stop
)


# Effects


@dataclass(frozen=True, slots=True)
class Send:
    dst: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Compute:
    job_id: JobId
    job: Job


@dataclass(frozen=True, slots=True)
class Cancel:
    job_id: JobId


@dataclass(frozen=True, slots=True)
class Publish:
    record: Record


@dataclass(frozen=True, slots=True)
class Report:
    """Something to observe. `values` holds numbers, strings, and tuples and dicts of them."""

    name: str
    values: Mapping[str, Any]


def refused(peer: PeerId, what: str, reason: str) -> Report:
    """That a message of `peer` was dropped, for people to see."""
    return Report("refused", {"peer": peer, "reason": reason, "what": what})


def expired(peer: PeerId, message: Message) -> Report:
    """That a message of `peer` was dropped because its round is over: he is late, or it was sent
    again."""
    return Report("expired", {"peer": peer, "what": type(message).__name__.lower()})


@dataclass(frozen=True, slots=True)
class Finish:
    params: Vector


Effect: TypeAlias = Send | Compute | Cancel | Publish | Report | Finish

State: TypeAlias = dict[str, Any]
"""Numbers, strings, bytes, arrays, and lists and dicts of them: what a checkpoint can hold."""


class Machine(Protocol):
    """One peer's protocol. See the module's docstring for both sides' duties."""

    @property
    def deadline(self) -> float | None:
        """When the next `TimerFired` is due, in the driver's seconds; None for no timer."""
        ...

    @property
    def params(self) -> Vector:
        """(d,), this peer's model of the moment, read-only."""
        ...

    @property
    def weight(self) -> float:
        """This peer's weight in the swarm's mean: sum(weight * params) / sum(weight)."""
        ...

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in and return what the host must carry out, in order."""
        ...

    def snapshot(self) -> State:
        """Everything, of one instant: for checkpoints, donors and replay."""
        ...
