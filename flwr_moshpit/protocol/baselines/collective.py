"""Rounds of local steps and an all-reduce, for ring all-reduce SGD and for random groups.

Every peer tells its coordinator, the first of its group, when its local steps are done. When all
are there the coordinator names the ring and everybody reduces around it. Stated rules:

- Whoever is in the coordinator's view when a ring could be named is waited for, however slow.
- A member that is lost voids the attempt: the coordinator names a ring of the others, and the
  all-reduce begins again. Nobody keeps a part of a void attempt, so no model is a patchwork.
- Whoever finished a round does not do it again: it gives its result to those still in it. So a
  late peer learns where the others are when it says that it is ready, or asks who else is.
- A lost coordinator is replaced by the next of the group. Peers under different views may for a
  round average in two rings; the next round brings them together.
- A peer that restarts asks one of the living for the model and the round of the moment.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.protocol.baselines.common import (
    STATE_RETRY_S,
    Backoff,
    CatchUp,
    RoundTimes,
    Worker,
    earliest,
)
from flwr_moshpit.protocol.baselines.messages import (
    Ask,
    Broken,
    Chunk,
    Elsewhere,
    Ready,
    Ring,
    StateReply,
    StateRequest,
)
from flwr_moshpit.protocol.baselines.ring_reduce import NO_RING, RingAttempt, ring_flaw
from flwr_moshpit.protocol.baselines.roll_call import GroupOf, RollCall
from flwr_moshpit.protocol.machine import (
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    LinkLost,
    Message,
    PeerId,
    Received,
    Send,
    Start,
    State,
    Stop,
    TimerFired,
    Vector,
    ViewChanged,
)


class CollectivePeer:
    """idle -> (catching up) -> training -> waiting (ready, no ring) -> reducing -> training ...

    From every phase a newer state of another peer leads to training, in that peer's round.
    """

    def __init__(
        self, worker: Worker, group_of: GroupOf, rng: np.random.Generator, incarnation: int
    ) -> None:
        self._worker = worker
        self._catch_up = CatchUp(rng, incarnation > 0, self._begin)
        self._backoff = Backoff()
        self._slow_backoff = Backoff(STATE_RETRY_S)
        self._phase = "idle"
        self._times = RoundTimes(0.0, 0.0, 0.0)
        self._roll = RollCall(worker, group_of)
        self._attempt = 0
        self._ring: RingAttempt | None = None
        self._early: list[tuple[PeerId, Chunk]] = []

    @property
    def deadline(self) -> float | None:
        return earliest(
            self._catch_up.deadline, self._backoff.deadline, self._slow_backoff.deadline
        )

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
            case ViewChanged():
                return self._on_view(event, now)
            case LinkLost(peer):
                effects = self._catch_up.on_lost(peer, now)
                return [*effects, *self._without(peer, now, owed=True)]
            case TimerFired():
                return self._on_timer(now)
            case Stop():
                return self._on_stop()
            case _:
                return []

    # The round's course

    def _on_start(self, event: Start, now: float) -> list[Effect]:
        self._worker.start(event)
        if self._phase != "idle" or self._catch_up.active:
            return []
        return self._catch_up.begin(self._worker.others(), now)

    def _begin(self, now: float) -> list[Effect]:
        worker = self._worker
        self._roll.begin()
        self._attempt = 0
        self._ring = None
        self._early = []
        self._backoff.clear()
        self._slow_backoff.clear()
        if worker.done or not worker.started:
            self._phase = "idle"
            return worker.finish() if worker.done else []
        self._phase = "training"
        self._times = RoundTimes(now, now, now)
        return worker.train()

    def _on_trained(self, event: ComputeDone | ComputeFailed, now: float) -> list[Effect]:
        worker = self._worker
        result, effects = worker.trained(event)
        if result is None:
            return effects
        worker.params = result.params
        worker.weight = float(result.num_examples)
        self._phase = "waiting"
        self._times = RoundTimes(self._times.local, now, now)
        self._backoff.arm(now)
        return [*effects, *self._announce(now)]

    def _announce(self, now: float) -> list[Effect]:
        """Tell the coordinator that this peer is ready, or name the ring if that is this peer."""
        coordinator = self._roll.coordinator
        if coordinator == self._worker.peer:
            return self._name_if_complete(now)
        return [Send(coordinator, self._roll.mine())]

    def _name_if_complete(self, now: float) -> list[Effect]:
        worker = self._worker
        if self._phase != "waiting" or self._roll.missing():
            return []
        if self._roll.coordinator != worker.peer:
            return []
        members = self._roll.members()
        self._attempt += 1
        ring = Ring(
            worker.round, self._attempt, worker.peer, tuple(members), tuple(members.values())
        )
        tell: list[Effect] = [Send(peer, ring) for peer in members if peer != worker.peer]
        return tell + self._enter(ring, now)

    def _enter(self, ring: Ring, now: float) -> list[Effect]:
        worker = self._worker
        if self._phase == "waiting":
            self._times = RoundTimes(self._times.local, self._times.wait, now)
        self._phase = "reducing"
        self._backoff.clear()
        self._slow_backoff.arm(now)
        self._attempt = ring.attempt
        self._ring = RingAttempt(ring, worker.peer, worker.params)
        if self._ring.reduce.num_steps == 0:
            return self._complete(self._ring, now)
        effects: list[Effect] = [worker.send(self._ring.after, self._ring.chunk(0))]
        early, self._early = self._early, []
        for src, chunk in early:
            effects += self._on_chunk(src, chunk, now)
        return effects

    def _complete(self, attempt: RingAttempt, now: float) -> list[Effect]:
        worker, ring = self._worker, attempt.ring
        assert attempt.reduce.result is not None
        effects: list[Effect] = [
            self._times.report(
                now, worker, contributors=len(ring.members), weight=sum(ring.weights)
            )
        ]
        worker.advance(attempt.reduce.result)
        if ring.coordinator == worker.peer:
            effects += [worker.state_reply(peer) for peer in self._roll.owed()]
        return effects + self._begin(now)

    # What others say

    def _on_message(self, src: PeerId, message: Message, now: float) -> list[Effect]:
        match message:
            case Ready():
                return self._on_ready(src, message, now)
            case Ring():
                return self._on_ring(src, message, now)
            case Chunk():
                return self._on_chunk(src, message, now)
            case Broken():
                return self._on_broken(src, message, now)
            case Ask(round_):
                return self._on_ask(src, round_)
            case Elsewhere(round_):
                here = round_ == self._worker.round
                return self._without(src, now, owed=False) if here else []
            case StateRequest():
                return [self._worker.state_reply(src)]
            case StateReply():
                return self._on_state(src, message, now)
            case _:
                return []

    def _on_ready(self, src: PeerId, ready: Ready, now: float) -> list[Effect]:
        worker = self._worker
        flaw = self._roll.flaw(ready)
        if flaw:
            return [worker.refuse(src, flaw), *self._without(src, now, owed=True)]
        if ready.round < worker.round:
            return [worker.state_reply(src)]
        self._roll.arrived(src, ready)
        if worker.finished:
            return [Send(src, Elsewhere(ready.round, worker.round))]
        return self._name_if_complete(now)

    def _on_ask(self, src: PeerId, round_: int) -> list[Effect]:
        worker = self._worker
        if round_ < worker.round:
            return [worker.state_reply(src)]
        if worker.finished:
            return [Send(src, Elsewhere(round_, worker.round))]
        if round_ > worker.round:
            return []
        if self._phase == "waiting" and self._roll.coordinator == src:
            return [Send(src, self._roll.mine())]
        reducing = self._phase == "reducing" and self._ring is not None
        led = self._ring.ring.coordinator if reducing and self._ring is not None else src
        if self._phase == "waiting" or led != src:
            return [Send(src, Elsewhere(round_, worker.round))]
        return []

    def _on_ring(self, src: PeerId, ring: Ring, now: float) -> list[Effect]:
        worker = self._worker
        if ring.round < worker.round:
            return [worker.state_reply(src)]
        if ring.round > worker.round:
            return []
        flaw = ring_flaw(ring, src, worker.peer) or self._roll.weights_flaw(ring.weights)
        if flaw:
            return [worker.refuse(src, flaw)]
        newer = (ring.attempt, str(ring.coordinator)) > self._key
        return self._enter(ring, now) if newer and self._in_exchange else []

    @property
    def _key(self) -> tuple[int, str]:
        return NO_RING if self._ring is None else self._ring.key

    @property
    def _in_exchange(self) -> bool:
        return self._phase in ("waiting", "reducing")

    def _on_chunk(self, src: PeerId, chunk: Chunk, now: float) -> list[Effect]:
        worker, attempt = self._worker, self._ring
        if chunk.round != worker.round or not self._in_exchange:
            return []
        key = (chunk.attempt, str(chunk.coordinator))
        if key > self._key:
            # The member before heard of the ring first. It sends no more than N-1 ahead.
            if len(self._early) < 2 * len(worker.view):
                self._early.append((src, chunk))
            return []
        if attempt is None or key < attempt.key or attempt.is_void:
            return []
        reduce = attempt.reduce
        if src != attempt.before:
            return [worker.refuse(src, "a chunk from elsewhere on the ring")]
        if chunk.step < reduce.step:
            return []
        flaw = reduce.flaw(chunk.step, chunk.data)
        if flaw:
            return [worker.refuse(src, flaw), *self._give_up(src, flaw, now)]
        step = reduce.take(chunk.data)
        if step is not None:
            return [worker.send(attempt.after, attempt.chunk(step))]
        return self._complete(attempt, now)

    def _on_broken(self, src: PeerId, broken: Broken, now: float) -> list[Effect]:
        if self._ring is None or self._phase != "reducing":
            return []
        me, ring = self._worker.peer, self._ring.ring
        if src not in ring.members or (broken.round, broken.attempt) != (ring.round, ring.attempt):
            return []
        if ring.coordinator == me:
            return self._exclude(src if broken.peer == me else broken.peer, now)
        return self._exclude(broken.peer, now) if broken.peer == ring.coordinator else []

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
        ring = None if self._ring is None else self._ring.ring
        if self._phase == "reducing" and ring is not None and src not in ring.members:
            # Another group's progress is no reason to break this ring.
            return []
        effects = worker.adopt(reply)
        if ring is not None and ring.coordinator == worker.peer:
            # A member had finished this round before: its result stands for the others too.
            others = [p for p in ring.members if p not in (worker.peer, src)]
            effects += [worker.state_reply(peer) for peer in others]
        return effects + self._begin(now)

    # Who is lost

    def _on_view(self, event: ViewChanged, now: float) -> list[Effect]:
        self._worker.view = event.view
        effects: list[Effect] = []
        for peer in event.lost:
            effects += self._catch_up.on_lost(peer, now)
            effects += self._without(peer, now, owed=False)
            self._roll.forget(peer)
        if self._phase == "waiting":
            effects += self._announce(now)
        return effects

    def _without(self, peer: PeerId, now: float, *, owed: bool) -> list[Effect]:
        """Go on without `peer` in this round."""
        if not self._in_exchange or peer == self._worker.peer:
            return []
        if self._phase == "waiting":
            led = self._roll.coordinator
            self._roll.leave_out(peer, owed=owed)
            return self._announce(now) if peer == led else self._name_if_complete(now)
        if self._ring is not None and peer in self._ring.ring.members:
            return self._give_up(peer, "lost", now)
        return []

    def _give_up(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """This attempt cannot end, because of `peer`: tell who leads it, or take the lead away."""
        assert self._ring is not None
        me, ring = self._worker.peer, self._ring.ring
        broken = Broken(ring.round, ring.attempt, peer, reason)
        if ring.coordinator == me:
            return self._exclude(peer, now)
        if ring.coordinator != peer:
            return [Send(ring.coordinator, broken)]
        tell: list[Effect] = [Send(p, broken) for p in ring.members if p not in (peer, me)]
        return tell + self._exclude(peer, now)

    def _exclude(self, peer: PeerId, now: float) -> list[Effect]:
        """The attempt is void, the next goes on without `peer`."""
        self._roll.leave_out(peer, owed=True)
        self._phase = "waiting"
        if self._ring is not None:
            self._ring.is_void = True
        self._slow_backoff.clear()
        self._backoff.arm(now)
        return self._announce(now)

    def _on_timer(self, now: float) -> list[Effect]:
        effects = self._catch_up.on_timer(now)
        worker = self._worker
        if self._backoff.due(now) and self._phase == "waiting":
            coordinator = self._roll.coordinator
            if coordinator != worker.peer:
                return [*effects, Send(coordinator, self._roll.mine())]
            return [*effects, *(Send(p, Ask(worker.round)) for p in self._roll.missing())]
        if self._slow_backoff.due(now) and self._phase == "reducing":
            assert self._ring is not None
            ring = self._ring.ring
            if ring.coordinator != worker.peer:
                return [*effects, Send(ring.coordinator, self._roll.mine())]
            others = [p for p in ring.members if p != worker.peer]
            return [*effects, *(Send(p, Ask(worker.round)) for p in others)]
        return effects

    def _on_stop(self) -> list[Effect]:
        """A ring under way goes on to its end; whoever waits for this peer is told not to."""
        worker = self._worker
        effects = worker.stop()
        if self._phase == "reducing":
            return effects
        waiting = self._phase == "waiting"
        coordinator = self._roll.coordinator if waiting else worker.peer
        self._phase = "idle"
        self._backoff.clear()
        self._catch_up.cancel()
        if coordinator != worker.peer:
            effects.append(Send(coordinator, Elsewhere(worker.round, worker.round)))
        return effects
