"""Who is alive, as the simulation hands it out, and the records that all peers should know.

It stands where a gossiping membership will: peers learn of changes late, each at its own time, and
of records likewise. What it leaves out is the gossip's own messages and mistaken suspicion.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_moshpit.protocol.machine import (
    Event,
    Learned,
    PeerId,
    PeerInfo,
    Record,
    View,
    ViewChanged,
)
from flwr_moshpit.simulation.agenda import Agenda

_DIFFERENCES_KEPT = 32


@dataclass(frozen=True, slots=True)
class Delays:
    """How late peers learn of things, in seconds: uniformly between the two."""

    loss_s: tuple[float, float] = (1.0, 3.0)
    """That a peer has died, or cannot be reached any more."""
    join_s: tuple[float, float] = (0.1, 0.5)
    """That a peer is there, or can be reached again."""
    record_s: tuple[float, float] = (0.05, 0.5)
    """A record, by everybody but its publisher."""


class _Version:
    """A view, with a number that no other has."""

    __slots__ = ("number", "view")

    def __init__(self, number: int, view: View) -> None:
        self.number = number
        self.view = view


class _Seat:
    """What one living peer knows."""

    __slots__ = ("coming", "due_s", "index", "info", "known", "seen", "side")

    def __init__(self, index: int, info: PeerInfo, side: int, seen: _Version) -> None:
        self.index = index
        self.info = info
        self.side = side
        self.seen = seen
        self.coming = seen
        """The newest view on its way to this peer, where it is due at `due_s`."""
        self.due_s = 0.0
        self.known: dict[tuple[str, ...], Record] = {}


class _Side:
    """One side of a partition, or all peers where there is none."""

    __slots__ = ("changed", "ids", "records", "version")

    def __init__(self, version: _Version) -> None:
        self.ids: list[PeerId] = []
        self.version = version
        self.changed = False
        """Whether `ids` have changed since `version`."""
        self.records: dict[tuple[str, ...], Record] = {}
        """The record of the highest rank for each key."""


class SimulatedMembership:
    """Spreads views and records among the peers that it is told of.

    Changes at one instant make one view, which all peers share. A peer gets views in order; each
    tells what it adds to the peer's previous one, so a peer that was away for less than it takes
    to notice can be in `lost` and in `joined` at once. Events go to `tell(index, event)`.
    """

    def __init__(
        self,
        agenda: Agenda,
        rng: np.random.Generator,
        delays: Delays,
        tell: Callable[[int, Event], None],
    ) -> None:
        self._agenda = agenda
        self._rng = rng
        self._delays = delays
        self._tell = tell
        self._seats: dict[PeerId, _Seat] = {}
        self._number = itertools.count()
        self._sides = {0: self._new_side()}
        self._differences: dict[tuple[int, int], ViewChanged] = {}

    def join(self, members: Sequence[tuple[int, PeerInfo]], side: int = 0) -> View:
        """Let peers in, given with their indices, all of them alive from now; returns the view
        that they start with. Peers that were there before learn of them later."""
        place = self._sides.setdefault(side, self._new_side())
        for index, info in members:
            insort(place.ids, info.peer)
            self._seats[info.peer] = _Seat(index, info, side, place.version)
        self._change(side)
        version = self._current(place)
        for _, info in members:
            seat = self._seats[info.peer]
            seat.seen = seat.coming = version
        return version.view

    def welcome(self, peer: PeerId) -> None:
        """Tell a peer that has just started all records there are."""
        seat = self._seats[peer]
        for record in self._sides[seat.side].records.values():
            self._agenda.at(self._agenda.now, self._learn, peer, seat, record)

    def leave(self, peer: PeerId) -> None:
        """A peer has died."""
        seat = self._seats.pop(peer)
        ids = self._sides[seat.side].ids
        del ids[bisect_left(ids, peer)]
        self._change(seat.side)

    def divide(self, sides: Mapping[PeerId, int]) -> None:
        """From now each living peer is on its side, 0 where `sides` has none for it. A side knows
        the records of all sides that its peers come from, and its peers exchange them."""
        before = self._sides
        self._sides = {0: self._new_side()}
        merged: dict[tuple[int, int], None] = {}
        for peer, seat in self._seats.items():
            side = sides.get(peer, 0)
            if side not in self._sides:
                self._sides[side] = self._new_side()
            place = self._sides[side]
            place.ids.append(peer)
            if (seat.side, side) not in merged:
                merged[seat.side, side] = None
                _merge(place.records, before[seat.side].records)
            seat.side = side
        for side, place in self._sides.items():
            place.ids.sort()
            self._change(side)
        for (peer, seat), delay_s in zip(
            self._seats.items(), self._draw(self._delays.join_s, len(self._seats)), strict=True
        ):
            self._agenda.at(self._agenda.now + delay_s, self._exchange, peer, seat)

    def publish(self, peer: PeerId, record: Record) -> None:
        """Spread `record` from `peer`, unless one that it does not outrank is there already."""
        publisher = self._seats[peer]
        records = self._sides[publisher.side].records
        best = records.get(record.key)
        if best is not None and not record.rank > best.rank:
            return
        records[record.key] = record
        now = self._agenda.now
        self._agenda.at(now, self._learn, peer, publisher, record)
        delays_s = self._draw(self._delays.record_s, len(self._seats))
        for (other, seat), delay_s in zip(self._seats.items(), delays_s, strict=True):
            if seat.side == publisher.side and seat is not publisher:
                self._agenda.at(now + delay_s, self._learn, other, seat, record)

    def _draw(self, bounds: tuple[float, float], count: int) -> list[float]:
        drawn: list[float] = self._rng.uniform(*bounds, count).tolist()
        return drawn

    def _exchange(self, peer: PeerId, seat: _Seat) -> None:
        if self._seats.get(peer) is seat:
            for record in list(self._sides[seat.side].records.values()):
                self._learn(peer, seat, record)

    def _learn(self, peer: PeerId, seat: _Seat, record: Record) -> None:
        known = seat.known.get(record.key)
        if self._seats.get(peer) is seat and (known is None or record.rank > known.rank):
            seat.known[record.key] = record
            self._tell(seat.index, Learned(record))

    def _new_side(self) -> _Side:
        return _Side(_Version(next(self._number), View({})))

    def _change(self, side: int) -> None:
        place = self._sides[side]
        place.changed = True
        self._agenda.at(self._agenda.now, self._spread, side, place)

    def _current(self, place: _Side) -> _Version:
        if place.changed:
            place.changed = False
            view = View({peer: self._seats[peer].info for peer in place.ids})
            place.version = _Version(next(self._number), view)
        return place.version

    def _spread(self, side: int, place: _Side) -> None:
        """Send the view of this instant on its way to each peer."""
        if self._sides.get(side) is not place:
            return
        version = self._current(place)
        now = self._agenda.now
        draws = self._rng.random(len(place.ids)).tolist()
        for peer, draw in zip(place.ids, draws, strict=True):
            seat = self._seats[peer]
            if seat.coming is version:
                continue
            lost = self._difference(seat.coming, version).lost
            low, high = self._delays.loss_s if lost else self._delays.join_s
            # Never before an older view: a loss is not noticed sooner because somebody joined.
            seat.due_s = max(seat.due_s, now + low + (high - low) * draw)
            seat.coming = version
            self._agenda.at(seat.due_s, self._see, peer, seat, version)

    def _see(self, peer: PeerId, seat: _Seat, version: _Version) -> None:
        superseded = seat.coming is not version and seat.due_s <= self._agenda.now
        # A newer view due at this very instant tells of both changes in one event.
        if superseded or self._seats.get(peer) is not seat:
            return
        changed = self._difference(seat.seen, version)
        seat.seen = version
        if changed.joined or changed.lost:
            self._tell(seat.index, changed)

    def _difference(self, old: _Version, new: _Version) -> ViewChanged:
        """Most peers go from one view to the next together: worked out once for all of them."""
        key = (old.number, new.number)
        found = self._differences.get(key)
        if found is None:
            if len(self._differences) >= _DIFFERENCES_KEPT:
                del self._differences[next(iter(self._differences))]
            joined = _missing(new.view, old.view)
            lost = _missing(old.view, new.view)
            found = self._differences[key] = ViewChanged(new.view, joined, lost)
        return found


def _missing(here: View, there: View) -> tuple[PeerId, ...]:
    """The peers of `here` that `there` does not have, or has in another incarnation."""
    infos = there.peers
    return tuple(
        peer
        for peer, info in here.peers.items()
        if peer not in infos or infos[peer].incarnation != info.incarnation
    )


def _merge(
    records: dict[tuple[str, ...], Record], others: Mapping[tuple[str, ...], Record]
) -> None:
    for key, record in others.items():
        if key not in records or record.rank > records[key].rank:
            records[key] = record
