"""AD-PSGD: everybody trains at its own pace, and averages with a random neighbour meanwhile.

Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML
2018, arXiv 1710.06952, Algorithm 1.

When its local steps begin, peer i sends x_i to a random neighbour j; j answers at once with x_j,
even while it trains, and both move towards each other:

    x_j += n_i / (n_i + n_j) (x_i as sent - x_j)         n: examples of the last local steps
    x_i += n_j / (n_i + n_j) (x_j as answered - x_i as sent)

Local steps start from a copy of x_i, and what they change is added to the x_i of the moment. Since
both change by what was sent, and not by what they are when it arrives, sum(n x) is kept whatever
happens in between, and nobody has to be locked. (The paper locks, and avoids deadlock by a graph in
two parts.) Nobody averages before its first local steps, which tell its n. A peer goes on when its
local steps are done and its partner has answered; a lost partner is not waited for. One that
restarts takes over the model and the round of one of the living.

Fast peers take more steps than slow ones: the fixed point is weighted by speed, as in the paper.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.config import ADPSGD
from flwr_moshpit.protocol.baselines.common import (
    STATE_RETRY_S,
    Backoff,
    CatchUp,
    RoundTimes,
    Worker,
    earliest,
    frozen,
)
from flwr_moshpit.protocol.baselines.graphs import neighbours
from flwr_moshpit.protocol.baselines.messages import (
    PairRefused,
    PairReply,
    PairRequest,
    StateReply,
    StateRequest,
)
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    LinkLost,
    Message,
    PeerId,
    PeerInfo,
    Received,
    Send,
    Start,
    State,
    Stop,
    TimerFired,
    Trained,
    Vector,
    View,
    ViewChanged,
)


class ADPSGDPeer:
    """idle -> (catching up) -> training and averaging -> ... ; answers others in every state."""

    def __init__(
        self,
        config: ADPSGD,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        *,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
    ) -> None:
        self._topology = config.topology
        self._rng = rng
        self._worker = Worker(
            me,
            params,
            view,
            local_steps=config.local_steps,
            weight_max=config.weight_max,
            schema=schema,
            state=state,
        )
        self._catch_up = CatchUp(rng, incarnation > 0, self._begin)
        # A model and its answer take their time: only an answer that got lost needs this.
        self._patience = Backoff(STATE_RETRY_S)
        self._times = RoundTimes(0.0, 0.0, 0.0)
        self._partner: PeerId | None = None
        self._request: PairRequest | None = None
        # Serials of another incarnation must not look like this one's.
        self._serial = incarnation << 32
        self._weighed = False
        self._contributors = 1
        self._weight_sum = 0.0

    @property
    def deadline(self) -> float | None:
        return earliest(self._catch_up.deadline, self._patience.deadline)

    @property
    def params(self) -> Vector:
        return self._worker.params

    @property
    def weight(self) -> float:
        return self._worker.weight

    def snapshot(self) -> State:
        return {**self._worker.snapshot(), "params": self._worker.params}

    def handle(self, event: Event, now: float) -> list[Effect]:
        worker = self._worker
        match event:
            case Start():
                return self._on_start(event, now)
            case Received(src, message):
                return self._on_message(src, message, now)
            case ComputeDone() | ComputeFailed():
                return self._on_trained(event, now)
            case ViewChanged(view, _, lost):
                worker.view = view
                return [effect for peer in lost for effect in self._on_lost(peer, now)]
            case LinkLost(peer):
                return self._on_lost(peer, now)
            case TimerFired():
                effects = self._catch_up.on_timer(now)
                partner = self._partner
                if partner is not None and self._patience.due(now):
                    effects += self._on_lost(partner, now)
                return effects
            case Stop():
                self._partner = self._request = None
                self._patience.clear()
                self._catch_up.cancel()
                return worker.stop()
            case _:
                return []

    def _on_start(self, event: Start, now: float) -> list[Effect]:
        worker = self._worker
        running = worker.started and not worker.finished
        worker.start(event)
        if running:
            return []
        return self._catch_up.begin(worker.others(), now)

    def _begin(self, now: float) -> list[Effect]:
        worker = self._worker
        if worker.done:
            return worker.finish()
        worker.base = worker.params
        self._times = RoundTimes(now, now, now)
        self._contributors, self._weight_sum = 1, worker.weight
        effects = worker.train()
        partners = neighbours(self._topology, list(worker.view), worker.peer)
        if partners and self._weighed:
            self._partner = partners[int(self._rng.integers(len(partners)))]
            self._serial += 1
            self._request = PairRequest(self._serial, worker.params, worker.weight, worker.schema)
            self._patience.arm(now)
            effects.append(worker.send(self._partner, self._request))
        return effects

    def _on_trained(self, event: ComputeDone | ComputeFailed, now: float) -> list[Effect]:
        worker = self._worker
        result, effects = worker.trained(event)
        if result is None:
            return effects
        self._take_in(result)
        self._times = RoundTimes(self._times.local, now, now)
        return effects + self._go_on_if_complete(now)

    def _take_in(self, result: Trained) -> None:
        worker = self._worker
        if worker.params is worker.base:
            worker.params = result.params
        else:
            worker.params = frozen(worker.params + (result.params - worker.base))
        # A weight of 0 would make this peer drop its own model at its next average.
        worker.weight = max(float(result.num_examples), 1.0)
        self._weighed = True

    def _go_on_if_complete(self, now: float) -> list[Effect]:
        worker = self._worker
        running = worker.started and not worker.finished and not self._catch_up.active
        if not running or worker.training or self._partner is not None:
            return []
        report = RoundTimes(self._times.local, self._times.wait, now).report(
            now, worker, contributors=self._contributors, weight=self._weight_sum
        )
        worker.advance(worker.params)
        return [report, *self._begin(now)]

    def _on_message(self, src: PeerId, message: Message, now: float) -> list[Effect]:
        match message:
            case PairRequest():
                return self._on_request(src, message)
            case PairReply():
                return self._on_reply(src, message, now)
            case PairRefused(serial):
                return self._end_pair(now) if self._awaits(src, serial) else []
            case StateRequest():
                worker = self._worker
                reply = StateReply(worker.round, worker.params, worker.schema)
                return [worker.send(src, reply)]
            case StateReply():
                return self._on_state(src, message, now)
            case _:
                return []

    def _flaw(self, message: PairRequest | PairReply) -> str:
        flaw = self._worker.flaw(message.params, message.weight, message.schema)
        return flaw or ("" if message.weight > 0 else "weight 0")

    def _on_request(self, src: PeerId, request: PairRequest) -> list[Effect]:
        worker = self._worker
        flaw = self._flaw(request)
        if flaw:
            return [worker.refuse(src, flaw), Send(src, PairRefused(request.serial, flaw))]
        if not self._weighed:
            return [Send(src, PairRefused(request.serial, "no local steps yet"))]
        reply = PairReply(request.serial, worker.params, worker.weight, worker.schema)
        self._move(request, worker.params, worker.weight)
        return [worker.send(src, reply)]

    def _on_reply(self, src: PeerId, reply: PairReply, now: float) -> list[Effect]:
        if not self._awaits(src, reply.serial) or self._request is None:
            return []
        flaw = self._flaw(reply)
        if flaw:
            return [self._worker.refuse(src, flaw), *self._end_pair(now)]
        self._move(reply, self._request.params, self._request.weight)
        self._contributors += 1
        self._weight_sum += reply.weight
        return self._end_pair(now)

    def _move(self, other: PairRequest | PairReply, mine: Vector, weight: float) -> None:
        """Towards `other`, by its share of the difference to what this peer gave for it."""
        worker = self._worker
        share = other.params.dtype.type(other.weight / (other.weight + weight))
        worker.params = frozen(worker.params + share * (other.params - mine))

    def _awaits(self, src: PeerId, serial: int) -> bool:
        request = self._request
        return request is not None and src == self._partner and serial == request.serial

    def _end_pair(self, now: float) -> list[Effect]:
        self._partner = self._request = None
        self._patience.clear()
        return self._go_on_if_complete(now)

    def _on_state(self, src: PeerId, reply: StateReply, now: float) -> list[Effect]:
        worker = self._worker
        if not self._catch_up.active:
            return []
        flaw = worker.flaw(reply.params, schema=reply.schema)
        if flaw:
            return [worker.refuse(src, flaw), *self._catch_up.on_lost(src, now)]
        if reply.round > worker.round:
            worker.adopt(reply)
        return self._catch_up.end(now)

    def _on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        effects = self._catch_up.on_lost(peer, now)
        return effects + (self._end_pair(now) if peer == self._partner else [])
