"""Moshpit averaging: local steps, matchmaking, all-reduce in the group, next key; again and again.

Ryabinin et al., "Moshpit SGD", NeurIPS 2021, arXiv 2103.03239, Algorithm 1 and section 3.1.

    IDLE       before `Start`, after `Finish`
    TRAINING   a job is out; announced to the leaders of this round's lines
    MEETING    arrived in a lobby, or averaging, once for each line that I hold a cell of
    WAITING    no plan known, or no cell in it
    JOINING    the swarm began, or ended, without me: somebody gives me its model

Departs from the paper:
- The grid is planned, mixed-radix and exact for every number of peers (`grid.py`). Cells are
  virtual peers (`cells.py`): a stand-in takes part once for each line on which it holds a cell.
- A peer weighs as much as the examples that it has last trained on. Training on n that changes x by
  delta adds n delta to the sum of w x, and a group's average leaves every member its own weight:
  neither changes the sum of w, so the swarm's mean moves exactly as FedAvg's. Where the examples
  change from round to round (`local_s`), so does w, and the mean besides by what peers differ.
- In a sweep, which trains nothing, weights travel: peers average w x and w alike, and all members
  of a group leave it with equal cells. That is what makes d rounds exact for unequal weights. Who
  trains again takes its own weight back: where all hold the same, this moves no mean.
- Rounds are numbered; a peer that comes too late keeps what it has and joins the next open round.
- A peer that joins or restarts is given the model of another (`state_transfer.py`). If nobody gives
  it any, it first takes part with weight 0, which gives it the mean of its group and takes nothing
  from anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import LocalProtocolError
from flwr_moshpit.protocol.cells import Cells
from flwr_moshpit.protocol.grid import Grid, grid_of
from flwr_moshpit.protocol.grid import objection as unsound
from flwr_moshpit.protocol.group_checks import unusable
from flwr_moshpit.protocol.groups import Groups
from flwr_moshpit.protocol.machine import (
    Cancel,
    Compute,
    ComputeDone,
    ComputeFailed,
    Effect,
    Event,
    Finish,
    JobId,
    Learned,
    LinkLost,
    LocalSteps,
    Message,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Record,
    Report,
    Round,
    Send,
    Start,
    State,
    Stop,
    TimerFired,
    Trained,
    Vector,
    View,
    ViewChanged,
    expired,
    refused,
)
from flwr_moshpit.protocol.matchmaking import GroupTerms, Rendezvous
from flwr_moshpit.protocol.messages import (
    ROUND_MAX,
    Accuse,
    Announce,
    Answer,
    Arrive,
    Ask,
    Average,
    Call,
    Fetch,
    Gone,
    GroupKey,
    GroupNamed,
    Hold,
    Late,
    NewerPlan,
    Part,
    Plan,
    Query,
    Refused,
    Stands,
    StateAsk,
    StateChunk,
    StateDenied,
    StateOffer,
    StateWanted,
    Waiting,
    WhichPlan,
)
from flwr_moshpit.protocol.planning import PLAN_KEY, Planner
from flwr_moshpit.protocol.seat import Seat, round_values
from flwr_moshpit.protocol.state_transfer import Donor, Joiner, denial

GUESS_S = 0.1
"""Least guess of how long a first training still takes."""

LATE_S = 0.03
"""Least guess of how long a training still takes that takes longer than the last one."""

SKIPPED_MAX = 8
"""So many rounds a peer leaves out at one leader's word, which may be wrong; then it asks again."""

KEPT_ROUNDS = 2
"""For so many rounds after its end a group is still served to members that missed its result."""


class Phase(Enum):
    IDLE = "idle"
    TRAINING = "training"
    MEETING = "meeting"
    WAITING = "waiting for a cell"
    JOINING = "waiting for the model"


@dataclass(slots=True)
class _Training:
    """The job that is out. `base` is what it started from."""

    job_id: JobId
    base: Vector
    began_at: float
    round: int
    slip_at: float | None


class MoshpitPeer:
    """One peer of a Moshpit swarm; see the module's docstring. `params` is the model, (d,)."""

    def __init__(
        self,
        config: Moshpit,
        me: PeerInfo,
        params: Vector,
        view: View,
        rng: np.random.Generator,
        incarnation: int = 0,
        schema: bytes = b"",
        state: State | None = None,
    ) -> None:
        self.config = config
        self.me = me.peer
        self.round = Round(0)
        self.phase = Phase.IDLE
        self._view = view
        self._incarnation = incarnation
        self._schema = schema
        self._cells = Cells(params)
        self._tag_along = incarnation > 0
        """Take part without training until somebody has given me the swarm's model."""
        self._planner = Planner(me.peer, config)
        self._seats: list[Seat] = []
        self._groups = Groups(me.peer, incarnation)
        self._fruitless = 0
        """Groups in a row that gave me no model, though I came in time."""
        self._training: _Training | None = None
        self._trained: tuple[Vector, Trained] | None = None
        self._skip_training = False
        self._num_examples = 0
        self._local_s = config.local_s or 0.0
        """How long my local steps take; 0 while that is not known."""
        self._took_s = 0.0
        """How long the last ones took, the first ones too, which had to load data and code."""
        self._until: int | None = 0
        self._sweep = False
        self._has_finished = False
        self._met_at = 0.0
        self._next_job = 0
        self._rng = rng
        self._donor = Donor()
        self._joiner: Joiner | None = None
        self._needs_result = False
        """Joined late and has averaged with nobody: the others' result is all that it can have."""
        self._part_elems = max(1, config.part_bytes // params.itemsize)
        self._rendezvous = Rendezvous(
            me.peer,
            incarnation,
            GroupTerms(
                len(params),
                params.itemsize,
                schema,
                config.patience,
                config.share_bytes_min,
                config.weight_max,
                self._part_elems,
            ),
        )
        if state is not None:
            self._restore(state)

    # What a driver sees

    @property
    def params(self) -> Vector:
        return self._cells.mean

    @property
    def weight(self) -> float:
        return self._cells.weight

    @property
    def deadline(self) -> float | None:
        times = [self._replan_at, self._rendezvous.deadline]
        if self._training is not None:
            times.append(self._training.slip_at)
        times += [seat.deadline for seat in self._seats]
        if self._joiner is not None:
            times.append(self._joiner.deadline)
        return min((time for time in times if time is not None), default=None)

    def snapshot(self) -> State:
        """To begin again from (round, cells, tag_along, local_s), and for people to look at.

        What a codec had left out of parts is not in it: a peer that begins again starts with none.
        """
        plan = self._planner.newest
        return {
            "round": int(self.round),
            "phase": self.phase.value,
            "phase_began_at": self._phase_began_at,
            "cells": self._cells.snapshot(),
            "tag_along": self._tag_along,
            "local_s": self._local_s,
            "plan": plan and [list(plan.id), list(plan.radices), list(plan.holders)],
            "waits_for": [
                each.waits_for() for each in (*self._seats, self._joiner) if each is not None
            ],
        }

    @property
    def _phase_began_at(self) -> float:
        if self.phase is Phase.TRAINING and self._training is not None:
            return self._training.began_at
        return self._met_at

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received():
                effects = self._on_message(event.src, event.message, now)
            case TimerFired():
                effects = self._on_timer(now)
            case ComputeDone():
                effects = self._on_trained(event, now)
            case ComputeFailed():
                effects = self._on_failed(event, now)
            case Learned():
                effects = self._on_learned(event.record, now)
            case ViewChanged():
                effects = self._on_view(event, now)
            case LinkLost():
                effects = self._on_link_lost(event.peer, now)
            case Start():
                effects = self._on_start(event, now)
            case Stop():
                effects = self._on_stop()
        return self._settle(effects, now)

    def _settle(self, effects: list[Effect], now: float) -> list[Effect]:
        """Take in what I sent to myself, and end the round when all its seats are done."""
        out: list[Effect] = []
        queue = effects
        while True:
            later: list[Effect] = []
            for effect in queue:
                if type(effect) is Send and effect.dst == self.me:
                    later += self._on_message(self.me, effect.message, now)
                else:
                    out.append(effect)
            if not later and self.phase is Phase.MEETING:
                later = self._check_round(now)
            elif not later and self._joiner is not None and self._joiner.is_over:
                later = self._end_joining(self._joiner, now)
            if not later:
                return out
            queue = later

    # Rounds

    def _on_start(self, event: Start, now: float) -> list[Effect]:
        self._until, self._sweep = event.until_round, event.sweep
        self._has_finished = False
        self._planner.on_view(self._view, now)
        if self.phase is not Phase.IDLE:
            return []
        return self._join(now) if self._tag_along else self._begin_round(now)

    def _on_stop(self) -> list[Effect]:
        effects: list[Effect] = [Cancel(self._training.job_id)] if self._training else []
        self._training, self._trained = None, None
        self._until, self._sweep = 0, False
        self.phase = Phase.IDLE
        self._seats = []
        self._joiner = None
        return effects

    def _trains_in(self, round: int) -> bool:
        return self._until is None or round < self._until

    @property
    def _end(self) -> Round | None:
        """The round in which everything is done."""
        if self._until is None:
            return None
        return Round(self._until + (self._planner.num_axes if self._sweep else 0))

    def _begin_round(self, now: float) -> list[Effect]:
        absorbed = self._absorb()
        self._rendezvous.heard_of(self.round, self.me)
        if not self._trains_in(self.round):
            end = self._end
            assert end is not None
            if self.round >= end:
                return self._join(now, end) if self._needs_result else self._finish(now)
            if self._training is not None:
                return [Cancel(self._drop_training()), *self._meet(now)]
            return self._meet(now)
        if self._training is not None:
            self.phase = Phase.TRAINING
            return self._keep_training(self._training, now)
        if absorbed or self._tag_along or self._skip_training:
            return self._meet(now)
        self.phase = Phase.TRAINING
        return self._train(now)

    # Joining late

    @property
    def _replan_at(self) -> float | None:
        """A newcomer makes no plan before it knows in which round the others are."""
        knows = self._joiner is None or self._joiner.round is not None
        return self._planner.replan_at if knows else None

    def _join(self, now: float, least_round: int = 0) -> list[Effect]:
        """Ask for a model of `least_round` or later. What is being trained goes on: perhaps nobody
        has anything better."""
        self.phase = Phase.JOINING
        self._met_at = now

        def others() -> list[PeerId]:
            return [peer for peer in self._view if peer != self.me]

        least = Round(least_round)
        self._joiner = Joiner(self.params, self._schema, least, self._part_elems, others, self._rng)
        return self._joiner.begin(now)

    def _end_joining(self, joiner: Joiner, now: float) -> list[Effect]:
        self._joiner = None
        given = joiner.given
        if given is None:
            self._tag_along = not joiner.nobody_has_any
            self._needs_result = False
            return self._begin_round(now)
        effects: list[Effect] = [Cancel(self._drop_training())] if self._training else []
        self._trained = None
        self._cells.begin_with(given.params)
        self._tag_along = False
        self.round = self._planner.adopt(max(self.round, given.round))
        self._needs_result = self._end is not None and given.round < self._end
        values = {"donor": given.donor, "round": given.round, "wait_s": now - self._met_at}
        return [*effects, Report("joined", values), *self._begin_round(now)]

    def _on_state_offer(self, src: PeerId, message: StateOffer, now: float) -> list[Effect]:
        if self._joiner is None:
            return []
        return self._joiner.on_offer(src, message, now)

    def _on_state_wanted(self, src: PeerId, message: StateWanted, now: float) -> list[Effect]:
        has_model = self.weight > 0 or self.round > 0
        has_model = has_model and not self._tag_along and self.phase is not Phase.JOINING
        dim = len(self.params)
        denied = denial(
            message, dim, self._schema, self.round, has_model, has_finished=self._has_finished
        )
        return self._donor.on_wanted(src, self.params, self.round, denied, now)

    def _finish(self, now: float) -> list[Effect]:
        self._has_finished = True
        self.phase = Phase.IDLE
        self._seats = []
        effects: list[Effect] = []
        if self._training is not None:
            effects.append(Cancel(self._drop_training()))
        return [*effects, Finish(self.params)]

    def _drop_training(self) -> JobId:
        assert self._training is not None
        job_id, self._training = self._training.job_id, None
        return job_id

    def _train(self, now: float) -> list[Effect]:
        """Start local steps for this round, or, in delayed mode, for the next one."""
        round = Round(self.round + (self.phase is Phase.MEETING))
        self._next_job += 1
        job_id = JobId(self._next_job)
        job = LocalSteps(self._cells.mean, self.config.steps, self.config.local_s)
        known = self._local_s > 0
        slip_at = now + self._local_s * 1.05 if known else None
        self._training = _Training(job_id, job.params, now, round, slip_at)
        effects: list[Effect] = [Compute(job_id, job)]
        return effects + (self._announce(round, self._local_s) if known else [])

    def _keep_training(self, training: _Training, now: float) -> list[Effect]:
        """What is being trained is for this round now, whatever it was announced for."""
        if training.round == self.round:
            return []
        lobbies = self._lobbies(Round(training.round))
        effects: list[Effect] = [Send(peer, Late(key, self.round)) for peer, key in lobbies]
        training.round = self.round
        known = self._local_s > 0
        return effects + (self._announce(self.round, self._left_s(now)) if known else [])

    def _announce(self, round: Round, eta_s: float) -> list[Effect]:
        lobbies = self._lobbies(round)
        return [Send(peer, Announce(key, eta_s, self._local_s)) for peer, key in lobbies]

    def _lobbies(self, round: Round) -> list[tuple[PeerId, GroupKey]]:
        """Leader and key of each group that I am to meet in `round`."""
        grid = self._planner.grid
        if grid is None:
            return []
        keys = dict.fromkeys(grid.key(round, cell) for cell in self._cells.numbers)
        led = [(grid.leaders(key, self._view)[:1], key) for key in keys if len(grid.line(key)) > 1]
        return [(leader, key) for leaders, key in led for leader in leaders]

    def _on_trained(self, event: ComputeDone, now: float) -> list[Effect]:
        training = self._training
        if training is None or event.job_id != training.job_id:
            return []
        if not isinstance(event.result, Trained):
            raise LocalProtocolError(f"LocalSteps was answered by {type(event.result).__name__}")
        self._training = None
        self._took_s = now - training.began_at
        if training.job_id > 1:
            self._local_s = self._took_s
        result = event.result
        reason = unusable(result.params, len(training.base), training.base.dtype, 1.0)
        if reason:
            report = refused(self.me, "training", reason)
            return [report, *self._after_training(now)]
        self._trained = (training.base, result)
        return self._after_training(now)

    def _on_failed(self, event: ComputeFailed, now: float) -> list[Effect]:
        if self._training is None or event.job_id != self._training.job_id:
            return []
        self._training = None
        return [Report("training_failed", {"error": event.error}), *self._after_training(now)]

    def _after_training(self, now: float) -> list[Effect]:
        if self.phase is not Phase.TRAINING:
            return []
        self._absorb()
        return self._meet(now)

    def _absorb(self) -> bool:
        """n examples that changed x by delta add n delta to w x.

        Only between two rounds: what is being averaged must not change under way.
        """
        if self._trained is None:
            return False
        (base, result), self._trained = self._trained, None
        self._num_examples = result.num_examples
        if result.num_examples > 0:
            # With equal weights the change would have to count by its examples, more than once
            # for some: a peer would go beyond where it trained to, and the swarm would diverge.
            self._cells.weigh(float(result.num_examples))
            self._cells.add_training(base, result.params)
        return True

    def _meet(self, now: float) -> list[Effect]:
        """Go to the lobbies of this round's lines, under the newest plan."""
        self.phase = Phase.MEETING
        self._met_at = now
        self.round = self._planner.adopt(self.round)
        grid = self._planner.grid
        if grid is not None:
            self._cells.assign(grid.cells_of.get(self.me, []))
        if grid is None or not self._cells.numbers:
            self.phase = Phase.WAITING
            self._seats = []
            return []
        by_key: dict[GroupKey, list[int]] = {}
        for cell in self._cells.numbers:
            by_key.setdefault(grid.key(self.round, cell), []).append(cell)
        self._seats = [
            Seat(key, cells, *self._cells.joined(cells)) for key, cells in by_key.items()
        ]
        effects: list[Effect] = []
        for seat in self._seats:
            effects += self._arrive(seat, now)
        delayed = self.config.delayed and not self._tag_along and self._training is None
        if delayed and self._trains_in(self.round + 1):
            effects += self._train(now)
        return effects

    def _arrive(self, seat: Seat, now: float) -> list[Effect]:
        grid = self._planner.grid
        assert grid is not None
        return seat.go(self.me, grid, self._view, self._arrival(seat), now)

    def _arrival(self, seat: Seat) -> Arrive:
        sweep = not self._trains_in(self.round)
        dim = len(seat.vector)
        schema, life = self._schema, self._incarnation
        # A sweep is to be exact.
        seat.compression = asked = "none" if sweep else self.config.compression
        local_s = self._local_s or self._took_s
        return Arrive(seat.key, seat.weight, dim, schema, life, sweep, local_s, asked)

    def _check_round(self, now: float) -> list[Effect]:
        return self._end_round(now) if all(seat.check() for seat in self._seats) else []

    def _end_round(self, now: float) -> list[Effect]:
        values = {
            "round": self.round,
            "trained": self._trains_in(self.round),
            "examples": self._num_examples,
            "local_s": self._took_s if self._num_examples else 0.0,
            **round_values(self._seats, now, self._met_at),
        }
        effects: list[Effect] = [Report("round", values)]
        for seat in self._seats:
            outcome = seat.outcome
            assert outcome is not None
            effects += self._groups.end(seat, self._view)
            if outcome.average is not None:
                travels = seat.allreduce is not None and seat.allreduce.named.sweep
                weight = outcome.weight / outcome.num_cells if travels else None
                self._cells.replace(seat.cells, outcome.average, weight)
                self._tag_along, self._needs_result, self._fruitless = False, False, 0
                if seat.grouped_at is not None:
                    self._rendezvous.group_s = now - seat.grouped_at
            elif outcome.lost_track:
                # What it brought is in the others' result: here it must not come in again.
                self._cells.drop(seat.cells)
                self._tag_along = self._cells.weight == 0
            else:
                # Nobody came to this line, but two cells of my own still average with each other.
                self._cells.pool(seat.cells)
                self._fruitless += not seat.later_round
                if len(self._view) <= 1 or self._fruitless > self._planner.num_axes:
                    self._tag_along = False
        later = max(seat.later_round for seat in self._seats)
        self._skip_training = later > 0
        if self._until is not None and self.round < self._until < later:
            # The sweep is what all have worked for: ask to take part from its first round.
            later = Round(self._until)
        self.round = Round(max(self.round + 1, later))
        self._seats = []
        self._num_examples = 0
        self._forget(now)
        return effects + self._begin_round(now)

    def _forget(self, now: float) -> None:
        """Groups and lobbies that nobody can ask about any more."""
        oldest = self.round - KEPT_ROUNDS
        self._groups.forget(oldest, self.round, now)
        self._rendezvous.forget_before(min(oldest, self._rendezvous.latest_round - KEPT_ROUNDS))
        self._donor.forget_idle(now)

    # Messages

    def _on_message(self, src: PeerId, message: Message, now: float) -> list[Effect]:
        match message:
            case (
                Part()
                | Average()
                | Ask()
                | Fetch()
                | Query()
                | Accuse()
                | Answer()
                | Waiting()
                | Stands()
            ):
                return self._groups.on_message(
                    src, message.group, message, self._seats, self.round, now
                )
            case GroupNamed():
                return self._on_group_named(src, message, now)
            case Gone():
                return self._groups.on_gone(src, message, self.round, now)
            case NewerPlan():
                return self._on_newer_plan(src, message.plan, now)
            case WhichPlan():
                newest = self._planner.newest
                return [Send(src, NewerPlan(newest))] if newest else []
            case Announce() | Arrive() | Call() | Hold() | Late() | Refused():
                return self._on_lobby_message(src, message, now)
            case StateWanted():
                return self._on_state_wanted(src, message, now)
            case StateAsk():
                return self._donor.on_ask(src, message, now)
            case StateOffer():
                return self._on_state_offer(src, message, now)
            case StateDenied():
                return self._joiner.on_denied(src, message, now) if self._joiner else []
            case StateChunk():
                return self._joiner.on_chunk(src, message, now) if self._joiner else []
        return [refused(src, type(message).__name__, "unknown message")]

    def _on_lobby_message(
        self,
        src: PeerId,
        message: Announce | Arrive | Call | Hold | Late | Refused,
        now: float,
    ) -> list[Effect]:
        key = message.key
        last = max(key.round, message.round if isinstance(message, Late) else 0)
        grid = self._planner.grid_of(key.plan)
        astray = grid is not None and key.axis != key.round % grid.num_axes
        if not 0 <= key.round <= last < ROUND_MAX or astray:
            reason = "impossible round"
            what = type(message).__name__.lower()
            return [refused(src, what, reason)]
        newest = self._planner.newest
        if grid is None and (newest is None or key.plan > newest.id):
            return [Send(src, WhichPlan())]
        if newest is not None and key.plan < newest.id and newest.from_round <= key.round:
            late = [expired(src, message)] if key.round < self.round else []
            return [*late, Send(src, NewerPlan(newest))]
        if grid is None:
            # It goes by a plan that was given up long ago, in rounds that are over.
            later = Round(max(self._rendezvous.latest_round, key.round + 1))
            answers = [Send(src, Late(key, later))] if isinstance(message, Arrive | Call) else []
            return [expired(src, message), *answers]
        seat = next((seat for seat in self._seats if seat.key == key), None)
        match message:
            case Announce():
                return self._rendezvous.on_announce(src, message, grid, self._view, now)
            case Arrive():
                return self._rendezvous.on_arrive(src, message, grid, self._view, now)
            case Call():
                return self._on_call(src, message, grid, seat, now)
            case Hold():
                if seat is not None and seat.leader == src:
                    seat.held()
            case Late():
                if seat is not None and seat.waits and seat.leader == src:
                    if message.round > key.round:
                        seat.end("too late")
                        seat.later_round = Round(min(message.round, key.round + SKIPPED_MAX))
                elif self._rendezvous.leads(key):
                    return self._rendezvous.on_late(src, message, self._view, now)
            case Refused():
                if seat is not None and seat.waits and seat.leader == src:
                    seat.end(f"refused: {message.reason}")
        return [expired(src, message)] if key.round < self.round else []

    def _on_call(
        self, src: PeerId, message: Call, grid: Grid, seat: Seat | None, now: float
    ) -> list[Effect]:
        """A leader has heard nothing of me: come, or say when, or that I am elsewhere."""
        key = message.key
        if not {src, self.me} <= {*grid.line(key)}:
            return [refused(src, "call", "no call of his")]
        if key.round < self.round:
            return [expired(src, message), Send(src, Late(key, self.round))]
        if seat is not None:
            if seat.waits:
                return [Send(src, self._arrival(seat))]
            return [Send(src, Late(key, Round(self.round + 1)))]
        in_sweep = self._until is not None and 0 <= key.round - self._until < grid.num_axes
        drop = message.sweep and in_sweep and self.phase is Phase.TRAINING
        if drop and self._training is not None:
            # The others have stopped training: what this job would bring is of no use any more.
            effects: list[Effect] = [Cancel(self._drop_training())]
            # The sweep is exact for those who take part from its first round.
            begin = max(self.round, self._until or 0)
            if begin < key.round:
                eta_s = self._rendezvous.group_s or GUESS_S
                effects.append(Send(src, Announce(key, eta_s, self._local_s)))
            self.round = Round(min(begin, key.round))
            return effects + self._meet(now)
        if self.phase is Phase.IDLE:
            # Either I have done all my rounds, or I have not been told to begin.
            over = Round(max(key.round + 1, self.round))
            return [Send(src, Late(key, over))] if self._has_finished else []
        return [Send(src, Announce(key, self._left_s(now), self._local_s))]

    def _left_s(self, now: float) -> float:
        """My best guess, in seconds, of when I shall be free for another group."""
        training = self._training
        if training is None:
            return self._local_s + self._averaging_left_s(now)
        passed_s = now - training.began_at
        late_s = passed_s - self._local_s
        if late_s < 0:
            return -late_s
        # Half as late again as it is already: a guess of half of all that it took would make of
        # everybody who is late by a twentieth a straggler, whom nobody waits for.
        left_s = max(late_s / 2, LATE_S if self._local_s > 0 else GUESS_S)
        training.slip_at = now + left_s
        return left_s

    def _averaging_left_s(self, now: float) -> float:
        """Until my groups are through, if they take as long as the last one did."""
        group_s = self._rendezvous.group_s
        began = [seat.grouped_at for seat in self._seats if seat.grouped_at is not None]
        late_s = now - max(began, default=now) - group_s
        if late_s < 0 or not group_s:
            return max(-late_s, 0.0)
        return max(late_s / 2, LATE_S)

    def _on_group_named(self, src: PeerId, named: GroupNamed, now: float) -> list[Effect]:
        seat, effects = self._groups.on_named(src, named, self._seats, self.round, now)
        if seat is None or self._trains_in(self.round + 1):
            return effects
        # Nothing lies between this group and the next one: say so before others wonder.
        next_s = self._rendezvous.group_s or named.stall_s / 4
        return self._announce(Round(self.round + 1), next_s) + effects

    # Time, membership, plans

    def _on_timer(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._replan_at is not None and self._replan_at <= now:
            next_round = Round(max(self.round, self._rendezvous.latest_round) + 1)
            if self._joiner is not None:
                # A newcomer knows of others what its donor was at a while ago.
                next_round = Round(max(next_round, (self._joiner.round or 0) + 2))
            plan, effects = self._planner.replan(self._view, next_round, now)
            effects += self._take_up(plan, now)
        training = self._training
        if training is not None and training.slip_at is not None and training.slip_at <= now:
            effects += self._announce(Round(training.round), self._left_s(now))
        effects += self._rendezvous.on_timer(self._view, now)
        if self._joiner is not None:
            effects += self._joiner.on_timer(now)
        for seat in list(self._seats):
            if seat.allreduce is not None:
                effects += seat.allreduce.on_timer(now)
            elif seat.waits and seat.retry_at is not None and seat.retry_at <= now:
                seat.unheard()
                effects += self._arrive(seat, now)
        return effects

    def _on_view(self, event: ViewChanged, now: float) -> list[Effect]:
        self._view = event.view
        self._groups.see_dead(event.lost)
        effects: list[Effect] = []
        for peer in event.joined:
            effects += self._groups.on_joined(peer, event.view.peers[peer].incarnation)
        for peer in event.lost:
            effects += self._rendezvous.on_lost(peer, self._view, now)
            effects += self._groups.on_lost(peer, now)
            effects += self._leave_leader(peer, now)
            if self._joiner is not None:
                effects += self._joiner.on_lost(peer, now)
        self._planner.on_view(self._view, now)
        return effects

    def _on_link_lost(self, peer: PeerId, now: float) -> list[Effect]:
        effects = self._groups.on_link_lost(peer, now)
        for seat in self._seats:
            if seat.waits and seat.leader == peer and peer in self._view:
                seat.cut_off()
                effects += self._arrive(seat, now)
        if self._joiner is not None:
            effects += self._joiner.on_lost(peer, now)
        return effects

    def _leave_leader(self, leader: PeerId, now: float) -> list[Effect]:
        """Turn to the next leader, and tell the lost one's group that it has to do without me."""
        effects: list[Effect] = []
        for seat in self._seats:
            if seat.waits and seat.leader == leader:
                effects += self._groups.leave(seat.key, leader)
                effects += self._arrive(seat, now)
        return effects

    def _on_learned(self, record: Record, now: float) -> list[Effect]:
        if record.key != PLAN_KEY or not isinstance(record.value, Plan):
            return []
        if record.rank != tuple(record.value.id):
            return [refused(record.value.id.coordinator, "plan", "forged rank")]
        effects = self._on_plan(record.value.id.coordinator, record.value, now, gossiped=True)
        self._planner.on_view(self._view, now)
        return effects

    def _on_newer_plan(self, leader: PeerId, plan: Plan, now: float) -> list[Effect]:
        known = self._planner.newest
        effects = self._on_plan(leader, plan, now, gossiped=False)
        if self._planner.newest not in (known, None):
            # Whoever plans may not know it: then I could wait for ever for a cell in it.
            effects.append(Publish(Record(PLAN_KEY, tuple(plan.id), plan)))
        for seat in self._seats:
            if seat.waits and seat.leader == leader and seat.key.plan < plan.id:
                # Another seat of mine is in a group already: this one has to wait for next round.
                seat.end("the plan changed", (self.me,))
        return effects

    def _on_plan(self, src: PeerId, plan: Plan, now: float, gossiped: bool) -> list[Effect]:
        """`src`: who says so, or where that is not known whoever is said to have made it."""
        reason = unsound(plan)
        if reason:
            return [refused(src, "plan", reason)]
        if not self._planner.learn(plan, gossiped):
            return []
        is_new = self.round == 0 and self.phase in (Phase.TRAINING, Phase.WAITING)
        if is_new and self.me not in grid_of(plan).cells_of:
            # The swarm began without me: it has a model that I do not have.
            return self._join(now)
        return self._take_up(plan, now)

    def _take_up(self, plan: Plan, now: float) -> list[Effect]:
        """Send on who waits under an older plan, myself included."""
        if self.phase is Phase.WAITING:
            return self._meet(now)
        if plan.from_round > self.round:
            return []
        effects = self._rendezvous.on_new_plan(grid_of(plan))
        waiting = self.phase is Phase.MEETING and all(seat.waits for seat in self._seats)
        return effects + (self._meet(now) if waiting else [])

    def _restore(self, state: State) -> None:
        self.round = Round(state["round"])
        self._cells.restore(state["cells"])
        self._tag_along = state["tag_along"]
        self._local_s = state["local_s"]
