"""What the rivals share: a model with its round counter and one training job, the checks of what
others send, and the two ways of not waiting for ever.

None of it is a protocol: machines hold these as attributes and join their effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_moshpit.protocol.baselines.messages import StateReply, StateRequest
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    ComputeDone,
    ComputeFailed,
    Effect,
    Finish,
    JobId,
    LocalSteps,
    Message,
    PeerId,
    PeerInfo,
    Report,
    Send,
    Start,
    State,
    Trained,
    Vector,
    View,
)

RETRY_S = 1.0
"""First wait before something is asked for again; it doubles with every try."""

RETRY_MAX_S = 60.0

STATE_RETRY_S = 30.0
"""The same for a whole model, which takes its time: only a reply that got lost needs it."""


def frozen(vector: Vector) -> Vector:
    """`vector` itself if nobody can write to it, else a read-only copy."""
    if vector.flags.writeable:
        vector = vector.copy()
        vector.setflags(write=False)
    return vector


def usable(vector: Vector) -> bool:
    """Whether all elements are finite, and so small that no mean of such vectors can overflow."""
    if vector.size == 0:
        return True
    limit = float(np.finfo(vector.dtype).max) / 4
    # A NaN makes both of them NaN, which is not below anything.
    return float(vector.max()) <= limit and -float(vector.min()) <= limit


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """sum(w x) / sum(w) in the given order, summed in float64; the plain mean if all w are 0.

    Weights are divided before they are multiplied, so that finite vectors cannot overflow.
    """
    total = math.fsum(weights)
    shares = [w / total for w in weights] if total > 0 else [1 / len(weights)] * len(weights)
    mean = np.zeros(vectors[0].shape, np.float64)
    for vector, share in zip(vectors, shares, strict=True):
        mean += share * vector
    return frozen(mean.astype(vectors[0].dtype))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """When the stages of a round began, in the driver's seconds."""

    local: float
    wait: float
    """Own local steps done."""
    exchange: float
    """The others there too, as far as they are waited for. Gossip cannot tell waiting for a
    neighbour from waiting for its model's last byte: there all of it is waiting."""

    def report(
        self,
        now: float,
        worker: Worker,
        *,
        contributors: int,
        weight: float,
        coverage: float = 1.0,
    ) -> Report:
        """The report of `worker`'s round, which ends now. weight: the contributors' together."""
        return Report(
            "round",
            {
                "round": worker.round,
                "coverage": coverage,
                "contributors": contributors,
                "weight": weight,
                "examples": worker.examples,
                "bytes_sent": worker.bytes_sent,
                "local_s": self.wait - self.local,
                "wait_s": self.exchange - self.wait,
                "allreduce_s": now - self.exchange,
                "duration_s": now - self.local,
            },
        )


class Backoff:
    """A timer that fires ever more seldom: after `first_s`, then 2, 4, ... times that."""

    def __init__(self, first_s: float = RETRY_S) -> None:
        self._first_s = first_s
        self._next_s = first_s
        self.deadline: float | None = None

    def arm(self, now: float) -> None:
        self._next_s = self._first_s
        self.deadline = now + self._next_s

    def due(self, now: float) -> bool:
        """Whether it has fired; if so it is armed again."""
        if self.deadline is None or now < self.deadline:
            return False
        self._next_s = min(2 * self._next_s, max(RETRY_MAX_S, self._first_s))
        self.deadline = now + self._next_s
        return True

    def clear(self) -> None:
        self.deadline = None


class Worker:
    """A peer's model, its round counter and its one training job.

    `base` is the model that the round under way began with, `params` the model of the moment:
    what local steps made of `base` while the round's exchange goes on, equal to it before.
    """

    def __init__(
        self,
        me: PeerInfo,
        params: Vector,
        view: View,
        *,
        local_steps: int,
        weight_max: float,
        schema: bytes,
        state: State | None,
    ) -> None:
        self.peer = me.peer
        self.view = view
        self.schema = schema
        self.round = 0
        self.weight = 1.0
        self.params = frozen(params)
        if state is not None:
            self.round = int(state["round"])
            self.weight = float(state["weight"])
            self.params = frozen(np.asarray(state["params"], params.dtype))
        self.base = self.params
        self.until_round: int | None = None
        self.started = False
        self.stopped = False
        self.finished = False
        self.bytes_sent = 0
        self.examples = 0
        self._local_steps = local_steps
        self._weight_max = weight_max
        self._job: JobId | None = None
        self._num_jobs = 0
        self._num_refused: dict[PeerId, int] = {}

    @property
    def training(self) -> bool:
        return self._job is not None

    @property
    def done(self) -> bool:
        """Whether no further round is to be trained."""
        return self.stopped or (self.until_round is not None and self.round >= self.until_round)

    def others(self) -> list[PeerId]:
        """The living peers but this one, in order."""
        return [peer for peer in self.view if peer != self.peer]

    def start(self, event: Start) -> None:
        self.until_round = event.until_round
        self.started = True
        self.finished = False

    def stop(self) -> list[Effect]:
        self.stopped = True
        return [*self.cancel(), *self.finish()]

    def finish(self) -> list[Effect]:
        """`Finish`, once for every `Start`."""
        if self.finished:
            return []
        self.finished = True
        return [Finish(self.params)]

    def train(self) -> list[Effect]:
        """Local steps from `base`."""
        effects = self.cancel()
        self._job = JobId(self._num_jobs)
        self._num_jobs += 1
        return [*effects, Compute(self._job, LocalSteps(self.base, self._local_steps))]

    def cancel(self) -> list[Effect]:
        if self._job is None:
            return []
        job, self._job = self._job, None
        return [Cancel(job)]

    def trained(self, event: ComputeDone | ComputeFailed) -> tuple[Trained | None, list[Effect]]:
        """The outstanding job's result, None if the event is about another job.

        A job that failed, or whose result cannot be used, counts as training that changed nothing:
        the others wait for this peer, so it comes as it is.
        """
        if event.job_id != self._job:
            return None, []
        self._job = None
        self.examples = 0
        unchanged = Trained(self.base, round(self.weight))
        if isinstance(event, ComputeFailed):
            return unchanged, [Report("failed", {"round": self.round, "error": event.error})]
        result = event.result
        flaw = "not a training result"
        if isinstance(result, Trained):
            weight = float(result.num_examples)
            flaw = self.flaw(result.params, weight, self.schema)
            if not flaw:
                self.examples = result.num_examples
                return Trained(frozen(result.params), result.num_examples, result.metrics), []
        return unchanged, [self.refuse(self.peer, f"own training: {flaw}")]

    def flaw(self, params: Vector, weight: float = 0.0, schema: bytes | None = None) -> str:
        """Why a model, its weight or its schema cannot be used; empty if they can."""
        if schema is not None and schema != self.schema:
            return "schema differs"
        if params.shape != self.params.shape:
            return f"shape {params.shape} instead of {self.params.shape}"
        if params.dtype != self.params.dtype:
            return f"dtype {params.dtype} instead of {self.params.dtype}"
        if not usable(params):
            return "not finite, or too large to be summed"
        return self.weight_flaw(weight)

    def weight_flaw(self, weight: float) -> str:
        if 0 <= weight <= self._weight_max:
            return ""
        return f"weight {weight} is not in [0, {self._weight_max:g}]"

    def refuse(self, peer: PeerId, reason: str) -> Report:
        count = self._num_refused.get(peer, 0) + 1
        self._num_refused[peer] = count
        return Report("refused", {"peer": peer, "reason": reason, "count": count})

    def send(self, peer: PeerId, message: Message) -> Send:
        self.bytes_sent += message.array_bytes
        return Send(peer, message)

    def state_reply(self, peer: PeerId) -> Send:
        return self.send(peer, StateReply(self.round, self.base, self.schema))

    def adopt(self, reply: StateReply) -> list[Effect]:
        """Go on from another peer's round and model; what was trained in this round is given up."""
        self.round = reply.round
        self.base = self.params = frozen(reply.params)
        self.bytes_sent = 0
        return self.cancel()

    def advance(self, params: Vector) -> None:
        """The round's exchange is over: `params` is the next round's beginning."""
        self.round += 1
        self.base = self.params = frozen(params)
        self.bytes_sent = 0

    def snapshot(self) -> State:
        """What a restart goes on from; a round under way begins again."""
        return {
            "params": self.base,
            "round": self.round,
            "weight": self.weight,
            "peer": str(self.peer),
        }


class CatchUp:
    """A restarted peer asks one of the living where they are before it trains.

    Whoever is asked answers at once, so two that ask each other cannot wait for ever. Asks the
    next, in random order, when one is lost or silent, and goes on as it is after the last.
    """

    def __init__(
        self, rng: np.random.Generator, restarted: bool, then: Callable[[float], list[Effect]]
    ) -> None:
        """`then(now)`: what to do when there is nothing, or nobody, to ask."""
        self._rng = rng
        self._restarted = restarted
        self._then = then
        self._donors: list[PeerId] = []
        self._asked: PeerId | None = None
        self._backoff = Backoff(STATE_RETRY_S)

    @property
    def active(self) -> bool:
        return self._asked is not None

    @property
    def deadline(self) -> float | None:
        return self._backoff.deadline

    def begin(self, peers: Sequence[PeerId], now: float) -> list[Effect]:
        """Ask the first of `peers`, shuffled; only once, and only if this peer restarted."""
        if self._restarted:
            self._restarted = False
            self._donors = [peers[k] for k in self._rng.permutation(len(peers))]
            self._backoff.arm(now)
        return self._next(now)

    def on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        if peer in self._donors:
            self._donors.remove(peer)
        return self._next(now) if peer == self._asked else []

    def on_timer(self, now: float) -> list[Effect]:
        return self._next(now) if self.active and self._backoff.due(now) else []

    def end(self, now: float) -> list[Effect]:
        """An answer came that changes nothing; nothing to do if none was asked for."""
        if not self.active:
            return []
        self._donors = []
        return self._next(now)

    def cancel(self) -> None:
        self._asked = None
        self._backoff.clear()

    def _next(self, now: float) -> list[Effect]:
        if not self._donors:
            self.cancel()
            return self._then(now)
        self._asked = self._donors.pop(0)
        return [Send(self._asked, StateRequest())]


def earliest(*deadlines: float | None) -> float | None:
    """The first of the deadlines that are set."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)
