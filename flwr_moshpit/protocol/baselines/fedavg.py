"""FedAvg: everybody trains from the server's model, the server averages by examples.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, arXiv 1602.05629, Algorithm 1.

The server is one more peer of the swarm, `SERVER`, that trains nothing. It waits for every client
that it sampled, however slow, and not for one that died. Its weight in the swarm's mean is 1 and
the clients' is 0: the mean of the swarm is the global model. Without it nothing moves: clients wait
for it, and a server that restarts begins again from its checkpoint.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.config import FedAvg
from flwr_moshpit.protocol.baselines.common import Backoff, RoundTimes, Worker, weighted_mean
from flwr_moshpit.protocol.baselines.messages import ClientUpdate, GlobalModel
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    LinkLost,
    PeerId,
    PeerInfo,
    Received,
    Report,
    Start,
    State,
    Stop,
    TimerFired,
    Vector,
    View,
    ViewChanged,
)

SERVER = PeerId("server")


class FedAvgPeer:
    """The server if it is called `SERVER`, else a client."""

    def __init__(
        self,
        config: FedAvg,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        *,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
    ) -> None:
        worker = Worker(
            me,
            params,
            view,
            local_steps=config.local_steps,
            weight_max=config.weight_max,
            schema=schema,
            state=state,
        )
        self._worker = worker
        self._role: _Server | _Client
        if me.peer == SERVER:
            worker.weight = 1.0
            self._role = _Server(worker, config.fraction, rng)
        else:
            worker.weight = 0.0
            self._role = _Client(worker)

    @property
    def deadline(self) -> float | None:
        return self._role.backoff.deadline

    @property
    def params(self) -> Vector:
        return self._worker.params

    @property
    def weight(self) -> float:
        return self._worker.weight

    def handle(self, event: Event, now: float) -> list[Effect]:
        return self._role.handle(event, now)

    def snapshot(self) -> State:
        return self._worker.snapshot()


class _Server:
    """idle -> open (waits for the sampled) -> open ... -> finished.

    A round closes when every living client that was sampled has answered. One that nobody answered
    is opened again, after a while or when a client joins.
    """

    def __init__(self, worker: Worker, fraction: float, rng: np.random.Generator) -> None:
        self.backoff = Backoff()
        self._worker = worker
        self._fraction = fraction
        self._rng = rng
        self._awaited: list[PeerId] = []
        self._sampled: tuple[PeerId, ...] = ()
        self._answers: dict[PeerId, ClientUpdate] = {}
        # Those who may have missed the end: no later round will tell them.
        self._untold: dict[PeerId, None] = {}
        self._opened_s = 0.0
        self._made_by = (0, 0.0)

    def handle(self, event: Event, now: float) -> list[Effect]:
        worker = self._worker
        match event:
            case Start():
                worker.start(event)
                return [] if self._awaited else self._open(now)
            case Received(src, ClientUpdate() as update):
                return self._on_update(src, update, now)
            case ViewChanged(view, joined, lost):
                worker.view = view
                effects = self._drop(lost, now)
                if worker.finished:
                    return [*effects, *self._tell(joined)]
                idle = worker.started and not self._awaited
                return [*effects, *(self._open(now) if idle else [])]
            case LinkLost(peer):
                return self._on_link_lost(peer, now)
            case TimerFired() if self.backoff.due(now) and not self._awaited:
                return self._tell_again() if worker.finished else self._open(now)
            case Stop():
                self._awaited = []
                self.backoff.clear()
                return worker.stop()
            case _:
                return []

    def _open(self, now: float) -> list[Effect]:
        worker = self._worker
        clients = worker.others()
        if worker.done:
            self.backoff.clear()
            return [] if worker.stopped else [*self._tell(clients), *worker.finish()]
        if not clients:
            return []
        num_sampled = max(1, round(self._fraction * len(clients)))
        if num_sampled < len(clients):
            drawn = self._rng.choice(len(clients), num_sampled, replace=False)
            clients = [clients[k] for k in sorted(drawn)]
        self._sampled = tuple(clients)
        self._awaited = clients
        self._answers = {}
        self._opened_s = now
        self.backoff.clear()
        return self._tell(self._sampled)

    def _tell(self, clients: tuple[PeerId, ...] | list[PeerId]) -> list[Effect]:
        worker = self._worker
        message = GlobalModel(
            worker.round, worker.params, worker.schema, worker.done, *self._made_by
        )
        return [worker.send(client, message) for client in clients]

    def _on_link_lost(self, client: PeerId, now: float) -> list[Effect]:
        if self._worker.finished and not self._worker.stopped:
            self._untold[client] = None
            if self.backoff.deadline is None:
                self.backoff.arm(now)
            return []
        return self._drop((client,), now)

    def _tell_again(self) -> list[Effect]:
        untold, self._untold = [p for p in self._untold if p in self._worker.view], {}
        if not untold:
            self.backoff.clear()
        return self._tell(untold)

    def _on_update(self, src: PeerId, update: ClientUpdate, now: float) -> list[Effect]:
        worker = self._worker
        # Any sampled client may answer until the round closes, also one whose link was lost.
        if update.round != worker.round or src not in self._sampled or src in self._answers:
            return []
        flaw = worker.flaw(update.params, update.num_examples, update.schema)
        if flaw:
            return [worker.refuse(src, flaw), *self._drop((src,), now)]
        self._answers[src] = update
        return self._drop((src,), now)

    def _drop(self, clients: tuple[PeerId, ...], now: float) -> list[Effect]:
        """Wait for these no longer; the last one closes the round."""
        if not self._awaited:
            return []
        self._awaited = [client for client in self._awaited if client not in clients]
        if self._awaited:
            return []
        if not self._answers:
            self.backoff.arm(now)
            return []
        return [*self._close(now), *self._open(now)]

    def _close(self, now: float) -> list[Effect]:
        worker = self._worker
        answers = [self._answers[client] for client in self._sampled if client in self._answers]
        weights = [answer.num_examples for answer in answers]
        self._made_by = (len(answers), sum(weights))
        report = RoundTimes(self._opened_s, self._opened_s, now).report(
            now, worker, contributors=len(answers), weight=sum(weights)
        )
        worker.advance(weighted_mean([answer.params for answer in answers], weights))
        self._sampled = ()
        self._answers = {}
        return [report]


class _Client:
    """idle (waits for the server's model) -> training -> idle, its update sent."""

    def __init__(self, worker: Worker) -> None:
        self.backoff = Backoff()
        self._worker = worker
        self._early: GlobalModel | None = None
        self._update: ClientUpdate | None = None
        self._begun_s = 0.0
        self._sent_s = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        worker = self._worker
        match event:
            case Start():
                worker.start(event)
                early, self._early = self._early, None
                return [] if early is None else self._on_model(early, now)
            case Received(src, GlobalModel() as model):
                if src != SERVER:
                    return [worker.refuse(src, "not the server")]
                return self._on_model(model, now)
            case ComputeDone() | ComputeFailed():
                return self._on_trained(event, now)
            case ViewChanged(view):
                worker.view = view
                return []
            case LinkLost(peer) if peer == SERVER and self._update is not None:
                if self.backoff.deadline is None:
                    self.backoff.arm(now)
                return []
            case TimerFired() if self.backoff.due(now) and self._update is not None:
                return [worker.send(SERVER, self._update)] if SERVER in worker.view else []
            case Stop():
                self.backoff.clear()
                return worker.stop()
            case _:
                return []

    def _on_model(self, model: GlobalModel, now: float) -> list[Effect]:
        worker = self._worker
        flaw = worker.flaw(model.params, schema=model.schema)
        if flaw:
            return [worker.refuse(SERVER, flaw)]
        if not worker.started:
            self._early = model
            return []
        if worker.stopped:
            return []
        effects: list[Effect] = []
        if self._update is not None and model.round > self._update.round:
            effects.append(self._report(model, now))
        if self._update is not None and model.round == self._update.round and not model.final:
            # The server opened the round again: the work is done already.
            return [worker.send(SERVER, self._update)]
        self._update = None
        self.backoff.clear()
        worker.round = model.round
        worker.base = worker.params = model.params
        if not model.final:
            worker.bytes_sent = 0
            self._begun_s = now
            return [*effects, *worker.train()]
        effects += worker.cancel()
        # A later Start may have asked for more rounds while this model was on its way.
        more = worker.until_round is not None and model.round < worker.until_round
        return effects if more else [*effects, *worker.finish()]

    def _on_trained(self, event: ComputeDone | ComputeFailed, now: float) -> list[Effect]:
        worker = self._worker
        result, effects = worker.trained(event)
        if result is None:
            return effects
        worker.params = result.params
        self._sent_s = now
        self._update = ClientUpdate(
            worker.round, result.params, float(result.num_examples), worker.schema
        )
        return [*effects, worker.send(SERVER, self._update)]

    def _report(self, model: GlobalModel, now: float) -> Report:
        """On the round that made `model`, which this client took part in."""
        return RoundTimes(self._begun_s, self._sent_s, now).report(
            now, self._worker, contributors=model.contributors, weight=model.weight
        )
