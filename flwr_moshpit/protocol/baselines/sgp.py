"""SGP and OSGP: push-sum along the one-peer exponential graph, in step or overlapped.

Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
arXiv 1811.10792, Algorithms 1 and 2. True push-sum: weights travel with the models.

In round k peer i, after its local steps, pushes half of its mass to the peer 2^(k mod log2 N)
places further and takes in what is pushed to it. The paper keeps the numerator x and the weight w,
and trains at z = x / w; here (z, w) is kept, which is the same and rounds better:

    z += n / w (trained - z)             n: examples of these local steps; x += n (trained - z)
    push (z, w / 2), keep (z, w / 2)
    take (z', w'):  z += w' / (w + w') (z' - z),  w += w'

w is n after a peer's first local steps. sum(w) is kept, and sum(w z) but for what training adds to
it, so that the swarm's mean moves as FedAvg's.

SGP waits for the push of this round, OSGP for that of `overlap` rounds ago. Departs from the paper,
which knows no failures: a push is confirmed, and taken back if its receiver is lost before that
(reported as duplicated if it did arrive); a lost sender is not waited for; a peer that is owed
nothing in a round, because its in-neighbour has another view, is told so when it asks; a peer that
restarts takes over z and the round of one of the living and brings new mass, w = n.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.config import OSGP, SGP
from flwr_moshpit.protocol.baselines.common import (
    Backoff,
    CatchUp,
    RoundTimes,
    Worker,
    earliest,
    frozen,
)
from flwr_moshpit.protocol.baselines.graphs import num_hops, pushed_by, pushes_to
from flwr_moshpit.protocol.baselines.messages import (
    Ask,
    Elsewhere,
    Push,
    PushTaken,
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
    Report,
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


class SGPPeer:
    """idle -> (catching up) -> training -> waiting (for the push that is due) -> training ..."""

    def __init__(
        self,
        config: SGP | OSGP,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        *,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
    ) -> None:
        self._overlap = config.overlap if isinstance(config, OSGP) else 0
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
        # No mass before the first local steps have told n.
        self._has_mass = False
        # Who owes this peer a push, by round.
        self._due: dict[int, PeerId] = {}
        self._arrived: list[tuple[int, PeerId, Push]] = []
        self._unconfirmed: dict[tuple[PeerId, int], Push] = {}

    @property
    def deadline(self) -> float | None:
        return earliest(self._catch_up.deadline, self._backoff.deadline)

    @property
    def params(self) -> Vector:
        """z, (d,)."""
        return self._worker.params

    @property
    def weight(self) -> float:
        """w."""
        return self._worker.weight

    def snapshot(self) -> State:
        return {**self._worker.snapshot(), "params": self._worker.params}

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
        self._backoff.clear()
        if worker.done:
            self._phase = "idle"
            return [*self._take_arrived(), *worker.finish()]
        self._phase = "training"
        self._times = RoundTimes(now, now, now)
        return worker.train()

    def _on_trained(self, event: ComputeDone | ComputeFailed, now: float) -> list[Effect]:
        worker = self._worker
        result, effects = worker.trained(event)
        if result is None:
            return effects
        self._take_in(result)
        self._phase = "waiting"
        self._times = RoundTimes(self._times.local, now, now)
        self._backoff.arm(now)
        return [*effects, *self._push(), *self._go_on_if_complete(now)]

    def _take_in(self, result: Trained) -> None:
        """z += n / w (trained - base): something may have been taken back meanwhile."""
        worker = self._worker
        examples = float(result.num_examples)
        if not self._has_mass:
            # A peer without data still has to carry its part of the mean.
            worker.weight = max(examples, 1.0)
            self._has_mass = True
        if worker.weight == examples and worker.params is worker.base:
            worker.params = result.params
        else:
            share = worker.params.dtype.type(examples / worker.weight)
            worker.params = frozen(worker.params + share * (result.params - worker.base))

    def _push(self) -> list[Effect]:
        worker = self._worker
        peers = list(worker.view)
        target = pushes_to(peers, worker.peer, worker.round)
        source = pushed_by(peers, worker.peer, worker.round)
        if target is None or source is None:
            return []
        self._due[worker.round] = source
        worker.weight /= 2
        push = Push(worker.round, worker.params, worker.weight, worker.schema)
        self._unconfirmed[target, worker.round] = push
        return [worker.send(target, push)]

    def _overdue(self) -> dict[int, PeerId]:
        """What this round cannot end without."""
        last = self._worker.round - self._overlap
        return {round_: peer for round_, peer in self._due.items() if round_ <= last}

    def _go_on_if_complete(self, now: float) -> list[Effect]:
        worker = self._worker
        if self._phase != "waiting" or self._overdue():
            return []
        times = RoundTimes(self._times.local, self._times.wait, now)
        taken = [push for round_, _, push in self._arrived if round_ <= worker.round]
        effects = self._take_arrived()
        report = times.report(now, worker, contributors=1 + len(taken), weight=worker.weight)
        worker.advance(worker.params)
        return [*effects, report, *self._begin(now)]

    def _take_arrived(self) -> list[Effect]:
        """Take in what was pushed in rounds up to this one, by round and sender."""
        worker = self._worker
        ready = [entry for entry in self._arrived if entry[0] <= worker.round]
        self._arrived = [entry for entry in self._arrived if entry[0] > worker.round]
        effects: list[Effect] = []
        for round_, src, push in sorted(ready, key=lambda entry: entry[:2]):
            self._absorb(push)
            effects.append(Send(src, PushTaken(round_)))
        return effects

    def _absorb(self, push: Push) -> None:
        worker = self._worker
        total = worker.weight + push.weight
        share = worker.params.dtype.type(push.weight / total)
        worker.params = frozen(worker.params + share * (push.params - worker.params))
        worker.weight = total

    def _on_message(self, src: PeerId, message: Message, now: float) -> list[Effect]:
        worker = self._worker
        match message:
            case Push():
                return self._on_push(src, message, now)
            case PushTaken(round_):
                known = self._unconfirmed.pop((src, round_), None)
                twice = Report("duplicated", {"peer": src, "round": round_})
                return [] if known is not None else [twice]
            case Ask(round_):
                gone = worker.finished or worker.round > round_
                waiting = worker.round == round_ and self._phase == "waiting"
                return [Send(src, Elsewhere(round_, worker.round))] if gone or waiting else []
            case Elsewhere(round_, own_round):
                if self._due.get(round_) == src:
                    del self._due[round_]
                return [*self._behind(src, own_round), *self._go_on_if_complete(now)]
            case StateRequest():
                reply = StateReply(worker.round, worker.params, worker.schema)
                return [worker.send(src, reply)]
            case StateReply():
                return self._on_state(src, message, now)
            case _:
                return []

    def _on_push(self, src: PeerId, push: Push, now: float) -> list[Effect]:
        worker = self._worker
        flaw = worker.flaw(push.params, push.weight, push.schema)
        if not flaw and push.weight == 0:
            flaw = "weight 0"
        effects: list[Effect] = []
        if flaw:
            effects = [worker.refuse(src, flaw)]
        elif any(entry[:2] == (push.round, src) for entry in self._arrived):
            return []
        elif len(self._arrived) > len(worker.view) + self._apart():
            effects = [worker.refuse(src, "too many pushes")]
        else:
            self._arrived.append((push.round, src, push))
            effects = self._behind(src, push.round)
        if self._due.get(push.round) == src:
            del self._due[push.round]
        if self._phase == "idle" and self._has_mass:
            effects += self._take_arrived()
        return effects + self._go_on_if_complete(now)

    def _behind(self, src: PeerId, round_: int) -> list[Effect]:
        """Ask `src` for its state if this peer is so late that the others went on without it."""
        worker = self._worker
        if not worker.started or worker.finished or self._catch_up.active:
            return []
        return [Send(src, StateRequest())] if round_ > worker.round + self._apart() else []

    def _apart(self) -> int:
        """Rounds that peers in step can be apart: each hop that news takes through the graph may
        wait for its turn, and for the overlap."""
        hops = num_hops(max(2, len(self._worker.view)))
        return 1 + hops * (hops + self._overlap)

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
        self._due = {}
        return [*worker.adopt(reply), *self._begin(now)]

    def _on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        """Take back what `peer` did not get, and wait for nothing from it."""
        effects = self._catch_up.on_lost(peer, now)
        for target, round_ in [key for key in self._unconfirmed if key[0] == peer]:
            self._absorb(self._unconfirmed.pop((target, round_)))
        self._due = {round_: source for round_, source in self._due.items() if source != peer}
        return effects + self._go_on_if_complete(now)

    def _on_timer(self, now: float) -> list[Effect]:
        effects = self._catch_up.on_timer(now)
        if self._backoff.due(now) and self._phase == "waiting":
            effects += [Send(peer, Ask(round_)) for round_, peer in self._overdue().items()]
        return effects

    def _on_stop(self) -> list[Effect]:
        effects = self._worker.stop()
        self._phase = "idle"
        self._backoff.clear()
        self._catch_up.cancel()
        return effects
