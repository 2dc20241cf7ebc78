"""Joining late: the swarm's model of the moment, from one of several donors, piece by piece.

    Joiner   asks the living in random order, one at a time, and takes the snapshot of the first
             that has one, a few pieces under way at any time. It leaves a donor that is lost, slow
             or sends rubbish for the next one, and begins again there: snapshots differ.
    Donor    serves few at a time and asks the others to come again, which spreads many joiners.

Nobody changes a machine's parameters in place, so a snapshot is a reference: the donor trains and
averages on while it is read. A donor's patience costs it nothing either: it only ever answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flwr_moshpit.protocol.group_checks import unusable
from flwr_moshpit.protocol.machine import Effect, PeerId, Report, Round, Send, Vector, refused
from flwr_moshpit.protocol.messages import (
    ROUND_MAX,
    StateAsk,
    StateChunk,
    StateDenied,
    StateOffer,
    StateWanted,
)

SERVED_MAX = 2
"""Joiners that one donor serves at a time: it has a round of its own to get on with."""

IDLE_S = 10.0
"""After such a time without a word a joiner is taken to be served elsewhere."""

PIECES_UNDER_WAY = 4

PATIENCE_S = 2.0
"""How long a donor may take for its first answer or for a piece. Doubles with every donor that was
too slow, up to `PATIENCE_S_MAX`: it may be the joiner's own line."""

PATIENCE_S_MAX = 60.0

PAUSE_S = 0.5
"""Before those who are busy, or not there yet, are asked again."""

LAPS_MAX = 1200
"""So often everybody is asked, whatever they say, by one who could begin without a model, too."""

SILENT_LAPS_MAX = 3
"""So often everybody is asked in vain, without one saying that it is worth to ask again."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a joiner has been given."""

    params: Vector
    """(d,), read-only."""
    round: Round
    """The donor's, when the snapshot was taken."""
    donor: PeerId


@dataclass(slots=True)
class _Snapshot:
    serial: int
    params: Vector
    used_at: float


class Donor:
    """Serves snapshots of one peer's model."""

    def __init__(self) -> None:
        self._serial = 0
        self._snapshots: dict[PeerId, _Snapshot] = {}

    def on_wanted(
        self, src: PeerId, params: Vector, round: Round, denied: StateDenied | None, now: float
    ) -> list[Effect]:
        """Offer `params`, (d,), unless `denied` says why not."""
        self.forget_idle(now)
        if denied is None and src not in self._snapshots and len(self._snapshots) >= SERVED_MAX:
            denied = StateDenied("busy", again=True)
        if denied is not None:
            return [Send(src, denied)]
        self._serial += 1
        self._snapshots[src] = _Snapshot(self._serial, params, now)
        return [Send(src, StateOffer(self._serial, round))]

    def on_ask(self, src: PeerId, ask: StateAsk, now: float) -> list[Effect]:
        snapshot = self._snapshots.get(src)
        if snapshot is None or snapshot.serial != ask.serial:
            return [Send(src, StateDenied("no such snapshot", again=True))]
        end = ask.offset + ask.size
        if not (0 <= ask.offset < end <= len(snapshot.params)):
            return [refused(src, "ask", "impossible piece")]
        snapshot.used_at = now
        if end == len(snapshot.params):
            del self._snapshots[src]
        piece = snapshot.params[ask.offset : end]
        return [Send(src, StateChunk(ask.serial, ask.offset, piece))]

    def forget_idle(self, now: float) -> None:
        idle = [p for p, s in self._snapshots.items() if now - s.used_at >= IDLE_S]
        for peer in idle:
            del self._snapshots[peer]


class Joiner:
    """Takes one model. `is_over` with `given` None: nobody has any, or nobody answers."""

    def __init__(
        self,
        initial: Vector,
        schema: bytes,
        least_round: Round,
        piece_elems: int,
        donors: Callable[[], Sequence[PeerId]],
        rng: np.random.Generator,
    ) -> None:
        """initial: (d,), of the shape and type wanted. `donors()`: who may be asked, as of now.
        A model of an earlier round than `least_round` is of no use."""
        self.given: Given | None = None
        self.is_over = False
        self._dim = len(initial)
        self._dtype: npt.DTypeLike = initial.dtype
        self._wanted = StateWanted(self._dim, schema, least_round)
        self._piece_elems = min(piece_elems, self._dim)
        self._donors = donors
        self._rng = rng
        self._queue: list[PeerId] = []
        self._again = self._silent = False
        """Whether in this lap somebody asked to be asked again, or nobody heard of."""
        self._silent_laps = self._laps = 0
        self._patience_s = PATIENCE_S
        self._due: float | None = None
        self._donor: PeerId | None = None
        self._offer: StateOffer | None = None
        self._buffer = np.empty(0, self._dtype)
        self._next_offset = 0
        self._under_way: dict[int, int] = {}
        """Sizes of the pieces asked for, by offset."""

    @property
    def deadline(self) -> float | None:
        return None if self.is_over else self._due

    @property
    def round(self) -> Round | None:
        """The donor's, as soon as it is known."""
        return None if self._offer is None else self._offer.round

    @property
    def nobody_has_any(self) -> bool:
        """Everybody has said so: the swarm has not begun either."""
        return self.is_over and self.given is None and not self._silent

    def waits_for(self) -> dict[str, object]:
        """For people."""
        share = self._next_offset / self._dim if self._dim else 1.0
        return {"model from": self._donor, "asked for": f"{100 * share:.0f} %"}

    def begin(self, now: float) -> list[Effect]:
        donors = self._donors()
        self._queue = [donors[k] for k in self._rng.permutation(len(donors)).tolist()]
        self._again = self._silent = False
        return self._next_donor(now)

    def on_timer(self, now: float) -> list[Effect]:
        if self.is_over or self._due is None or now < self._due:
            return []
        if self._donor is None:
            return self.begin(now)
        self._patience_s = min(2 * self._patience_s, PATIENCE_S_MAX)
        return [*self._left("slow"), *self._next_donor(now)]

    def on_lost(self, peer: PeerId, now: float) -> list[Effect]:
        """`peer` is dead, or the link to it."""
        if self.is_over or peer != self._donor:
            return []
        return [*self._left("lost"), *self._next_donor(now)]

    def on_denied(self, src: PeerId, denied: StateDenied, now: float) -> list[Effect]:
        if self.is_over or src != self._donor:
            return []
        self._again = self._again or denied.again
        return self._next_donor(now)

    def on_offer(self, src: PeerId, offer: StateOffer, now: float) -> list[Effect]:
        if self.is_over or src != self._donor or self._offer is not None:
            return []
        if not self._wanted.least_round <= offer.round < ROUND_MAX:
            return [refused(src, "state", "impossible round"), *self._next_donor(now)]
        self._offer = offer
        self._buffer = np.empty(self._dim, self._dtype)
        self._next_offset = 0
        self._under_way = {}
        self._due = now + self._patience_s
        asks = [self._ask_next() for _ in range(PIECES_UNDER_WAY)]
        return [effect for ask in asks for effect in ask]

    def on_chunk(self, src: PeerId, chunk: StateChunk, now: float) -> list[Effect]:
        offer = self._offer
        if self.is_over or src != self._donor or offer is None or chunk.serial != offer.serial:
            return []
        size = self._under_way.pop(chunk.offset, None)
        if size is None:
            return []
        reason = unusable(chunk.data, size, self._buffer.dtype, 1.0)
        if reason is not None:
            self._silent = True
            return [refused(src, "state", reason), *self._next_donor(now)]
        self._buffer[chunk.offset : chunk.offset + size] = chunk.data
        self._due = now + self._patience_s
        if self._under_way or self._next_offset < self._dim:
            return self._ask_next()
        self._buffer.setflags(write=False)
        self.given = Given(self._buffer, offer.round, src)
        self.is_over = True
        return []

    def _ask_next(self) -> list[Effect]:
        if self._offer is None or self._donor is None or self._next_offset >= self._dim:
            return []
        offset = self._next_offset
        size = min(self._piece_elems, self._dim - offset)
        self._next_offset += size
        self._under_way[offset] = size
        return [Send(self._donor, StateAsk(self._offer.serial, offset, size))]

    def _left(self, why: str) -> list[Effect]:
        self._silent = True
        return [Report("donor_left", {"peer": self._donor, "reason": why})]

    def _next_donor(self, now: float) -> list[Effect]:
        self._donor, self._offer = None, None
        if self._queue:
            self._donor = self._queue.pop(0)
            self._due = now + self._patience_s
            return [Send(self._donor, self._wanted)]
        self._laps += 1
        self._silent_laps = 0 if self._again else self._silent_laps + 1
        if not self._again and (not self._silent or self._silent_laps >= SILENT_LAPS_MAX):
            self.is_over = True
        if self._laps >= LAPS_MAX and not self._wanted.least_round:
            self.is_over = self._silent = True
        self._due = now + PAUSE_S
        return []


def denial(
    wanted: StateWanted,
    dim: int,
    schema: bytes,
    round: Round,
    has_model: bool,
    has_finished: bool,
) -> StateDenied | None:
    """Why a peer in `round` does not give its model away, or None."""
    if wanted.dim != dim or wanted.schema != schema:
        return StateDenied("another schema", again=False)
    if not has_model:
        return StateDenied("nothing yet", again=False)
    if round < wanted.least_round:
        return StateDenied("not there yet", again=not has_finished)
    return None
