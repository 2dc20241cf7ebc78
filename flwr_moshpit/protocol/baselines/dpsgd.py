"""D-PSGD: local steps, then a weighted average with one's neighbours, all in step.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized
Algorithms?", NeurIPS 2017, arXiv 1705.09056, Algorithm 1.

    y_i = local steps from x_i
    x_i = y_i + sum over neighbours j of  s_ij / n_i (y_j - y_i)
    s_ij = min(n_i, n_j) / (1 + max(degree_i, degree_j)),  n the examples of this round

With equal n these are the Metropolis weights: a doubly stochastic matrix, which keeps the mean.
With unequal n, sum(n x) is kept, so that the swarm's mean is weighted by examples as all others'.

Departs from the paper: averages after the local steps instead of beside them, and there may be more
than one. Nothing is said there about failures. Here: a lost neighbour is left out of the round,
which may change the mean; one that sends a model without being expected is averaged with; whoever
hears from a neighbour that is rounds ahead, or restarts, takes over that one's model and round.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.config import DPSGD
from flwr_moshpit.protocol.baselines.common import Backoff, CatchUp, RoundTimes, Worker, earliest
from flwr_moshpit.protocol.baselines.graphs import neighbours
from flwr_moshpit.protocol.baselines.messages import (
    Ask,
    Elsewhere,
    Model,
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
    Vector,
    View,
    ViewChanged,
)


class DPSGDPeer:
    """idle -> (catching up) -> training -> mixing (waits for the neighbours' models) -> training"""

    def __init__(
        self,
        config: DPSGD,
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
        self._backoff = Backoff()
        self._phase = "idle"
        self._times = RoundTimes(0.0, 0.0, 0.0)
        self._awaited: list[PeerId] = []
        self._degree = 0
        # By sender, this round's model and the next one's: no neighbour gets further ahead.
        self._models: dict[PeerId, dict[int, Model]] = {}
        # The last round whose model each peer was sent.
        self._told: dict[PeerId, int] = {}

    @property
    def deadline(self) -> float | None:
        return earliest(self._catch_up.deadline, self._backoff.deadline)

    @property
    def params(self) -> Vector:
        return self._worker.params

    @property
    def weight(self) -> float:
        return self._worker.weight

    def snapshot(self) -> State:
        return self._worker.snapshot()

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Start():
                return self._on_start(event, now)
            case Received(src, message):
                return self._on_message(src, message, now)
            case ComputeDone() | ComputeFailed():
                return self._on_trained(event, now)
            case ViewChanged(view, _, lost):
                self._worker.view = view
                return [effect for peer in lost for effect in self._on_lost(peer, now)]
            case LinkLost(peer):
                return self._on_lost(peer, now)
            case TimerFired():
                return self._on_timer(now)
            case Stop():
                return self._on_stop()
            case _:
                return []

    def _on_start(self, event: Start, now: float) -> list[Effect]:
        self._worker.start(event)
        if self._phase != "idle" or self._catch_up.active:
            return []
        return self._catch_up.begin(self._worker.others(), now)

    def _begin(self, now: float) -> list[Effect]:
        worker = self._worker
        self._awaited = []
        self._backoff.clear()
        for models in self._models.values():
            for round_ in [r for r in models if r < worker.round]:
                del models[round_]
        if worker.done:
            self._phase = "idle"
            return worker.finish()
        self._phase = "training"
        self._times = RoundTimes(now, now, now)
        return worker.train()

    def _on_trained(self, event: ComputeDone | ComputeFailed, now: float) -> list[Effect]:
        worker = self._worker
        result, effects = worker.trained(event)
        if result is None:
            return effects
        worker.params = result.params
        # A peer without data still has to mix, or it would keep its model for ever.
        worker.weight = max(float(result.num_examples), 1.0)
        self._phase = "mixing"
        self._times = RoundTimes(self._times.local, now, now)
        self._backoff.arm(now)
        self._awaited = neighbours(self._topology, list(worker.view), worker.peer)
        self._degree = len(self._awaited)
        effects += [self._tell(peer) for peer in self._awaited]
        for peer, models in self._models.items():
            if worker.round in models:
                effects += self._join(peer)
        return effects + self._mix_if_complete(now)

    def _tell(self, peer: PeerId) -> Effect:
        worker = self._worker
        self._told[peer] = worker.round
        model = Model(worker.round, worker.params, worker.weight, self._degree, worker.schema)
        return worker.send(peer, model)

    def _join(self, peer: PeerId) -> list[Effect]:
        """`peer` averages with this one, whether the graph says so or not."""
        if peer in self._awaited:
            return []
        self._awaited.append(peer)
        return [] if self._told.get(peer) == self._worker.round else [self._tell(peer)]

    def _mix_if_complete(self, now: float) -> list[Effect]:
        worker = self._worker
        round_ = worker.round
        if self._phase != "mixing":
            return []
        if any(round_ not in self._models.get(peer, {}) for peer in self._awaited):
            return []
        models = [self._models[peer][round_] for peer in sorted(self._awaited)]
        report = RoundTimes(self._times.local, self._times.wait, now).report(
            now,
            worker,
            contributors=1 + len(models),
            weight=worker.weight + sum(model.weight for model in models),
        )
        worker.advance(self._mixed(models))
        return [report, *self._begin(now)]

    def _mixed(self, models: list[Model]) -> Vector:
        """x_i of the module's docstring, (d,)."""
        worker = self._worker
        shares = [
            min(worker.weight, m.weight) / (1 + max(self._degree, m.degree)) / worker.weight
            for m in models
        ]
        # Unexpected neighbours may add up to more than 1, which would be no average.
        excess = max(1.0, sum(shares))
        mean = worker.params.copy()
        for model, share in zip(models, shares, strict=True):
            mean += mean.dtype.type(share / excess) * (model.params - worker.params)
        return mean

    def _on_message(self, src: PeerId, message: Message, now: float) -> list[Effect]:
        worker = self._worker
        match message:
            case Model():
                return self._on_model(src, message, now)
            case Ask(round_):
                return self._on_ask(src, round_)
            case Elsewhere(round_, own_round):
                if own_round > worker.round + 1:
                    return self._fell_behind(src)
                return self._on_lost(src, now) if round_ == worker.round else []
            case StateRequest():
                return [worker.state_reply(src)]
            case StateReply():
                return self._on_state(src, message, now)
            case _:
                return []

    def _on_model(self, src: PeerId, model: Model, now: float) -> list[Effect]:
        worker = self._worker
        flaw = worker.flaw(model.params, model.weight, model.schema)
        if not flaw and (model.weight < 1 or model.degree < 0):
            flaw = f"weight {model.weight} below 1, or degree {model.degree} below 0"
        if flaw:
            here = model.round == worker.round
            lost = self._on_lost(src, now) if here else []
            return [worker.refuse(src, flaw), *lost]
        if model.round < worker.round:
            # It waits for a model that this peer never sent it: let it come here instead.
            told = self._told.get(src, -1) >= model.round
            return [] if told else [worker.state_reply(src)]
        if model.round > worker.round + 1:
            return self._fell_behind(src)
        self._models.setdefault(src, {})[model.round] = model
        if self._phase != "mixing" or model.round > worker.round:
            if worker.finished:
                return [Send(src, Elsewhere(model.round, worker.round))]
            return []
        return [*self._join(src), *self._mix_if_complete(now)]

    def _fell_behind(self, src: PeerId) -> list[Effect]:
        worker = self._worker
        if not worker.started or worker.finished or self._catch_up.active:
            return []
        return [Send(src, StateRequest())]

    def _on_ask(self, src: PeerId, round_: int) -> list[Effect]:
        worker = self._worker
        if round_ < worker.round:
            return [worker.state_reply(src)]
        if worker.finished:
            return [Send(src, Elsewhere(round_, worker.round))]
        if round_ == worker.round and self._phase == "mixing":
            return self._join(src) or [self._tell(src)]
        return []

    def _on_state(self, src: PeerId, reply: StateReply, now: float) -> list[Effect]:
        worker = self._worker
        if worker.finished:
            return []
        flaw = worker.flaw(reply.params, schema=reply.schema)
        if flaw:
            return [worker.refuse(src, flaw), *self._catch_up.on_lost(src, now)]
        if reply.round <= worker.round:
            return self._catch_up.end(now)
        self._catch_up.cancel()
        return [*worker.adopt(reply), *self._begin(now)]

    def _on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        """Go on without `peer` in this round, unless its model is here already."""
        effects = self._catch_up.on_lost(peer, now)
        if self._worker.round in self._models.get(peer, {}):
            return effects
        self._models.pop(peer, None)
        self._awaited = [p for p in self._awaited if p != peer]
        return effects + self._mix_if_complete(now)

    def _on_timer(self, now: float) -> list[Effect]:
        effects = self._catch_up.on_timer(now)
        if self._backoff.due(now) and self._phase == "mixing":
            round_ = self._worker.round
            missing = [p for p in self._awaited if round_ not in self._models.get(p, {})]
            effects += [Send(peer, Ask(round_)) for peer in missing]
        return effects

    def _on_stop(self) -> list[Effect]:
        effects = self._worker.stop()
        self._phase = "idle"
        self._backoff.clear()
        self._catch_up.cancel()
        return effects
