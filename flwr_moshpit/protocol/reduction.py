"""One member's pieces in a group: which goes to whom, and what comes back averaged.

A reducer adds what it is sent to running sums and keeps none of it. A new version goes on with the
sums in which nobody is whom it leaves out; the others are begun anew, and their parts asked for
again. Who dies late so costs its group a second sending of the pieces that it was in; to keep all
parts until the group is done would cost every member a vector of memory in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flwr_moshpit.protocol.group_checks import unusable
from flwr_moshpit.protocol.machine import Effect, PeerId, Send, Vector
from flwr_moshpit.protocol.messages import Ask, Average, Fetch, GroupNamed, Part, Version, Waiting
from flwr_moshpit.protocol.packing import Packing, unpacked

EARLY_VERSIONS_MAX = 2
"""Versions whose averages are kept before they are named to me: at most a vector of each."""

UNUSED_VECTORS_MAX = 4
"""Vectors' worth of parts that are kept for versions not named to me yet. What is dropped is
asked for again."""


@dataclass(slots=True)
class _Sum:
    """A piece of mine: its place in `_mean` holds what those in `added` add to it."""

    begun: Version
    total: float
    """What it is over: each adds w x / total."""
    added: dict[PeerId, None] = field(default_factory=dict)
    is_packed: bool = False
    """Complete, and changed to what others make of its packed form."""


@dataclass(slots=True)
class _Sent:
    """A part or an average that has left."""

    version: Version
    """Of its reducer's sum, or of the average."""
    asked: int = 0
    """How often it was asked for since."""


class Reduction:
    """`vector` (d,) of `me` in the group `named`. `packing` as for `AllReduce`."""

    def __init__(
        self, me: PeerId, named: GroupNamed, vector: Vector, packing: Packing | None
    ) -> None:
        self.bytes_sent = 0
        self.holder: PeerId | None = None
        """Who has finished this version and gives all averages of it."""
        self._me = me
        self._named = named
        self._vector = vector
        self._packing = packing
        self._weights = {member.peer: member.weight for member in named.members}
        self._pieces: dict[int, tuple[int, PeerId]] = {}
        """End and reducer of each piece, by its offset."""
        self._sums: dict[int, _Sum] = {}
        """Of the pieces that are mine to reduce, by offset."""
        self._unused: dict[int, dict[PeerId, Vector]] = {}
        """Parts of pieces that will be mine in a version of which I have not heard yet."""
        self._unused_bytes = 0
        self._averages: dict[int, Vector] = {}
        """Pieces of this version's mean: views of `_mean`, unless one piece is all of it."""
        self._mean = self._term = np.empty(0, vector.dtype)
        self._early: dict[Version, dict[int, tuple[PeerId, Average]]] = {}
        self._sent_to: dict[int, PeerId] = {}
        self._sent: dict[tuple[bool, int, PeerId], _Sent] = {}
        """Whether it is a part, its offset, to whom."""
        if packing is not None:
            total = sum(self._weights.values())
            packing.begin(named.compression, self._weights.get(me, 0.0), total)

    def begin(self, named: GroupNamed) -> bool:
        """Drop the version before this one. Whether there is anything to average."""
        self._named = named
        self._weights = {member.peer: member.weight for member in named.members}
        self._averages = {}
        self.holder = None
        self._pieces = {
            begin: (min(share.end, begin + named.part_elems), share.reducer)
            for share in named.shares
            for begin in range(share.begin, share.end, named.part_elems)
        }
        return len(self._pieces) > 0

    def go(self) -> list[Effect]:
        """Send what is not with its reducer yet, and go on with my sums."""
        before, self._mean = self._mean, np.empty_like(self._vector)
        # A new one for each version: pieces of an earlier one may still be on their way to others.
        if self._packing is not None:
            self._packing.begin_version()
        effects: list[Effect] = []
        for offset, (_, reducer) in self._pieces.items():
            if reducer == self._me:
                effects += self._go_on(offset, before)
            elif self._sent_to.get(offset) != reducer:
                effects += self._send_part(offset, reducer, self._named.version)
        return effects

    def _go_on(self, offset: int, before: Vector) -> list[Effect]:
        """With a sum in `before`, the mean of the version before this one; or begin it."""
        end, known = self._pieces[offset][0], self._sums.get(offset)
        if known is not None and self._still_holds(known):
            self._mean[offset:end] = before[offset:end]
            return self._finish(offset)
        self._sums[offset] = _Sum(self._named.version, sum(self._weights.values()))
        again = Ask(self._named.group, self._named.version, offset)
        effects: list[Effect] = [
            Send(peer, again)
            for peer in (known.added if known is not None else ())
            if self._weights.get(peer, 0.0) > 0 and peer != self._me
        ]
        mine = {self._me: self._vector[offset:end]}
        for peer, data in (mine | self._unused.pop(offset, {})).items():
            if self._weights.get(peer, 0.0) > 0:
                self._add(offset, peer, data)
        return effects + self._finish(offset)

    def _still_holds(self, known: _Sum) -> bool:
        """Whether everybody in it still counts, and it is as it was added up: what was packed
        for others was changed to what they make of it."""
        all_count = all(self._weights.get(peer, 0.0) > 0 for peer in known.added)
        return all_count and (self._packing is None or not known.is_packed)

    def early_averages(self) -> list[tuple[PeerId, Average]]:
        """What has come for this version before its naming."""
        version = self._named.version
        early = self._early.pop(version, {})
        self._early = {v: kept for v, kept in self._early.items() if v > version}
        return list(early.values())

    @property
    def result(self) -> Vector | None:
        """(d,), or None while pieces of it are missing."""
        if len(self._averages) < len(self._pieces):
            return None
        average = self._averages[0] if len(self._averages) == 1 else self._mean
        average.setflags(write=False)
        return average

    def end(self, contributed: bool, averaged: bool) -> None:
        """Give the memory back. Whether `vector` is in the group's result, and I have one."""
        if self._packing is not None:
            self._packing.end(contributed, averaged)
        self._averages, self._unused = {}, {}
        self._early.clear()
        self._vector = self._mean = self._term = np.empty(0, self._vector.dtype)

    # What is missing

    def missing_parts(self) -> dict[PeerId, list[int]]:
        """Offsets of pieces that are mine to reduce, by the member whose part is not here."""
        missing: dict[PeerId, list[int]] = {}
        for offset, (_, reducer) in self._pieces.items():
            for peer in self._missing(offset) if reducer == self._me and not self.holder else []:
                missing.setdefault(peer, []).append(offset)
        return missing

    def missing_averages(self) -> dict[PeerId, list[int]]:
        """Offsets of pieces whose average is not here, by who gives it."""
        missing: dict[PeerId, list[int]] = {}
        for offset, (_, reducer) in self._pieces.items():
            source = self.holder or reducer
            if source != self._me and offset not in self._averages:
                missing.setdefault(source, []).append(offset)
        return missing

    def questions(self) -> dict[PeerId, list[Effect]]:
        """What to ask of whom."""
        group, version = self._named.group, self._named.version
        asked: dict[PeerId, list[Effect]] = {}
        for peer, offsets in self.missing_parts().items():
            asks = [Send(peer, Ask(group, self._sums[at].begun, at)) for at in offsets]
            asked.setdefault(peer, []).extend(asks)
        for peer, offsets in self.missing_averages().items():
            fetches = [Send(peer, Fetch(group, version, offset)) for offset in offsets]
            asked.setdefault(peer, []).extend(fetches)
        return asked

    # Parts

    def _send_part(self, offset: int, to: PeerId, version: Version) -> list[Effect]:
        """For the sum that was begun in `version`, or in one before it."""
        if offset not in self._pieces or self._weights.get(self._me, 0.0) <= 0:
            return []
        data = self._vector[offset : self._pieces[offset][0]]
        if self._packing is not None:
            data = self._packing.part(offset, data)
        self._sent_to[offset] = to
        self._leaves(True, offset, to, version, data)
        return [Send(to, Part(self._named.group, offset, data))]

    def send_again(self, to: PeerId) -> list[Effect]:
        """Everything that I have sent to `to` in this version: some of it was lost."""
        effects: list[Effect] = []
        for offset in [offset for offset, peer in self._sent_to.items() if peer == to]:
            effects += self._send_part(offset, to, self._named.version)
        for offset, average in self._averages.items():
            if self._pieces[offset][1] == self._me:
                effects += self._send_average(offset, average, [to])
        return effects

    def on_ask(self, src: PeerId, message: Ask) -> list[Effect]:
        if self._is_under_way(True, message.offset, src, message.version):
            return [Send(src, Waiting(self._named.group))]
        return self._send_part(message.offset, src, message.version)

    def _leaves(
        self, is_part: bool, offset: int, to: PeerId, version: Version, data: Vector
    ) -> None:
        self.bytes_sent += data.nbytes
        key = is_part, offset, to
        if key not in self._sent or self._sent[key].version < version:
            self._sent[key] = _Sent(version)

    def _is_under_way(self, is_part: bool, offset: int, to: PeerId, version: Version) -> bool:
        """Whether this was sent and is to be waited for, until it is asked for 2, 4, 8 ... times.

        What was sent is lost only with its link, of which I hear. That may be slower than anybody
        knew, so that even the first question came after what it asks for: copies would fill it. A
        sum that was begun anew in `version` needs what it had.
        """
        sent = self._sent.get((is_part, offset, to))
        if sent is None or sent.version < version:
            return False
        sent.asked += 1
        return sent.asked == 1 or sent.asked & (sent.asked - 1) != 0

    def on_part(self, src: PeerId, part: Part) -> tuple[str, list[Effect]] | None:
        """Why it is unusable, or "", and what follows. None: it is of no piece of this version."""
        piece = self._pieces.get(part.offset)
        if piece is None or src not in self._weights:
            return None
        size, dtype = piece[0] - part.offset, self._vector.dtype
        data = unpacked(part.data, self._named.compression, size, dtype)
        reason = unusable(data, size, dtype, self._weights[src])
        if reason:
            return reason, []
        assert data is not None
        if piece[1] != self._me:
            if self._unused_bytes + data.nbytes <= UNUSED_VECTORS_MAX * self._vector.nbytes:
                self._unused.setdefault(part.offset, {})[src] = data
                self._unused_bytes += data.nbytes
        elif src in self._missing(part.offset):
            self._add(part.offset, src, data)
        return "", self._finish(part.offset) if piece[1] == self._me else []

    def _add(self, offset: int, src: PeerId, data: Vector) -> None:
        known = self._sums[offset]
        place = self._mean[offset : offset + len(data)]
        share = place.dtype.type(self._weights[src] / known.total)
        if not known.added:
            np.multiply(data, share, out=place)
        else:
            if len(self._term) < len(data):
                self._term = np.empty_like(data)
            place += np.multiply(data, share, out=self._term[: len(data)])
        known.added[src] = None

    def _missing(self, offset: int) -> list[PeerId]:
        added = self._sums[offset].added
        return [p for p, weight in self._weights.items() if weight > 0 and p not in added]

    # Averages

    def _finish(self, offset: int) -> list[Effect]:
        """The mean of a piece of mine, for everybody, once all are in its sum."""
        if offset in self._averages or self._missing(offset):
            return []
        known, average = self._sums[offset], self._mean[offset : self._pieces[offset][0]]
        total = sum(self._weights.values())
        if total != known.total:
            # Somebody who was not in it yet is left out.
            average *= average.dtype.type(known.total / total)
            known.total = total
        data = average
        if self._packing is not None:
            data, known.is_packed = self._packing.mean(offset, average), True
        average.setflags(write=False)
        self._averages[offset] = average
        others = [peer for peer in self._weights if peer != self._me]
        return self._send_average(offset, data, others)

    def _send_average(self, offset: int, data: Vector, to: list[PeerId]) -> list[Effect]:
        message = Average(self._named.group, self._named.version, offset, data)
        for peer in to:
            self._leaves(False, offset, peer, message.version, data)
        return [Send(peer, message) for peer in to]

    def on_average(self, src: PeerId, message: Average) -> str | None:
        """Why it is unusable, or "". None: I do not want it."""
        version = self._named.version
        piece = self._pieces.get(message.offset)
        if message.version > version and self._can_be(message, piece):
            # Its GroupNamed is still under way, from another peer.
            self._early.setdefault(message.version, {})[message.offset] = (src, message)
            while len(self._early) > EARLY_VERSIONS_MAX:
                del self._early[min(self._early)]
        if message.version != version or message.offset in self._averages:
            return None
        if piece is None or src not in (piece[1], self.holder):
            return None
        size, dtype = piece[0] - message.offset, self._vector.dtype
        data = unpacked(message.data, self._named.compression, size, dtype)
        reason = unusable(data, size, dtype, 1.0)
        if reason:
            return reason
        assert data is not None
        self._averages[message.offset] = self._kept(message.offset, data)
        return ""

    def _can_be(self, message: Average, piece: tuple[int, PeerId] | None) -> bool:
        """Whether it is no longer than a piece may be in any form: what is kept has a bound."""
        return piece is not None and message.array_bytes <= 8 * (piece[0] - message.offset)

    def _kept(self, offset: int, data: Vector) -> Vector:
        """`data`, out of the buffer it came in, which is larger and not needed."""
        if len(data) == len(self._mean):
            return data
        piece = self._mean[offset : offset + len(data)]
        piece[:] = data
        piece.setflags(write=False)
        return piece

    def on_fetch(self, src: PeerId, message: Fetch, result: Vector | None) -> list[Effect]:
        """Give the average that `src` asks for, out of `result` if that is there."""
        piece, offset = self._pieces.get(message.offset), message.offset
        if piece is None or src not in self._weights:
            return []
        average = self._averages.get(offset) if result is None else result[offset : piece[0]]
        is_mine = message.version == self._named.version and average is not None
        if not is_mine or self._is_under_way(False, offset, src, message.version):
            return [Send(src, Waiting(self._named.group))]
        assert average is not None
        return self._send_average(offset, average, [src])
