"""One member's pieces in a group: which goes to whom, and what comes back averaged.

What a reducer was sent is kept until the group is done, because a new version sums the same pieces
over fewer contributors: nothing is sent twice for it, except to the reducers that take over. This
costs up to one vector of memory at equal shares; the alternative, running sums, costs a second
round trip of the whole vector when somebody dies late.
"""

from __future__ import annotations

import numpy as np

from flwr_moshpit.protocol.group_checks import unusable
from flwr_moshpit.protocol.machine import Effect, PeerId, Send, Vector
from flwr_moshpit.protocol.messages import Ask, Average, Fetch, GroupNamed, Part, Version, Waiting
from flwr_moshpit.protocol.packing import Packing, unpacked
from flwr_moshpit.protocol.parts import Parts

EARLY_VERSIONS_MAX = 2
"""Versions whose averages are kept before they are named to me: at most a vector of each."""


class Reduction:
    """`vector` (d,) of `me` in the group `named`. `parts` and `packing` as for `AllReduce`."""

    def __init__(
        self, me: PeerId, named: GroupNamed, vector: Vector, parts: Parts, packing: Packing | None
    ) -> None:
        self.parts = parts
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
        self._averages: dict[int, Vector] = {}
        """Pieces of this version's mean: views of `_mean`, unless one piece is all of it."""
        self._mean = self._term = np.empty(0, vector.dtype)
        self._early: dict[Version, dict[int, tuple[PeerId, Average]]] = {}
        self._sent_to: dict[int, PeerId] = {}
        self._asks: dict[tuple[bool, int, PeerId], int] = {}
        """How often a part or an average that I have sent was asked for since, by whom."""
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

    def expect_parts(self) -> None:
        """Make room for what a reducer is sent, and for its sums."""
        mine = {at: end for at, (end, reducer) in self._pieces.items() if reducer == self._me}
        if mine:
            senders = [p for p, weight in self._weights.items() if weight > 0 and p != self._me]
            self.parts.expect(mine, senders, self._vector.dtype)
            self._term = np.empty(max(end - at for at, end in mine.items()), self._vector.dtype)

    def go(self) -> list[Effect]:
        """Send what is not with its reducer yet, and average what is here already."""
        # A new one for each version: pieces of an earlier one may still be on their way to others.
        self._mean = np.empty_like(self._vector)
        if self._packing is not None:
            self._packing.begin_version()
        effects: list[Effect] = []
        for offset, (_, reducer) in self._pieces.items():
            if reducer == self._me:
                effects += self._reduce(offset)
            elif self._sent_to.get(offset) != reducer:
                effects += self._send_part(offset, reducer)
        return effects

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
        self.parts.clear()
        if self._packing is not None:
            self._packing.end(contributed, averaged)
        self._averages = {}
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
            asked.setdefault(peer, []).extend(Send(peer, Ask(group, at)) for at in offsets)
        for peer, offsets in self.missing_averages().items():
            fetches = [Send(peer, Fetch(group, version, offset)) for offset in offsets]
            asked.setdefault(peer, []).extend(fetches)
        return asked

    # Parts

    def _send_part(self, offset: int, to: PeerId) -> list[Effect]:
        if offset not in self._pieces or self._weights.get(self._me, 0.0) <= 0:
            return []
        data = self._vector[offset : self._pieces[offset][0]]
        if self._packing is not None:
            data = self._packing.part(offset, data)
        self._sent_to[offset] = to
        self.bytes_sent += data.nbytes
        self._asks.setdefault((True, offset, to), 0)
        return [Send(to, Part(self._named.group, offset, data))]

    def send_again(self, to: PeerId) -> list[Effect]:
        """Everything that I have sent to `to` in this version: some of it was lost."""
        effects: list[Effect] = []
        for offset in [offset for offset, peer in self._sent_to.items() if peer == to]:
            effects += self._send_part(offset, to)
        for offset, average in self._averages.items():
            if self._pieces[offset][1] == self._me:
                effects += self._send_average(offset, average, [to])
        return effects

    def on_ask(self, src: PeerId, message: Ask) -> list[Effect]:
        if self._is_under_way(True, message.offset, src):
            return [Send(src, Waiting(self._named.group))]
        return self._send_part(message.offset, src)

    def _is_under_way(self, is_part: bool, offset: int, to: PeerId) -> bool:
        """Whether this was sent and is to be waited for, until it is asked for 2, 4, 8 ... times.

        What was sent is lost only with its link, of which I hear. That may be slower than anybody
        knew, so that even the first question came after what it asks for: copies would fill it.
        """
        key = is_part, offset, to
        if key not in self._asks:
            return False
        self._asks[key] = count = self._asks[key] + 1
        return count == 1 or count & (count - 1) != 0

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
        self.parts.put(part.offset, src, data)
        return "", self._reduce(part.offset) if piece[1] == self._me else []

    def _missing(self, offset: int) -> list[PeerId]:
        here = self.parts.of(offset)
        return [
            peer
            for peer, weight in self._weights.items()
            if weight > 0 and peer != self._me and peer not in here
        ]

    # Averages

    def _reduce(self, offset: int) -> list[Effect]:
        """Average a piece of mine once all its parts are here; in group order, for equal bits."""
        if offset in self._averages or self._missing(offset):
            return []
        end = self._pieces[offset][0]
        parts = self.parts.of(offset)
        total = sum(self._weights.values())
        average, begun = self._mean[offset:end], False
        if len(self._term) < len(average):
            self._term = np.empty_like(average)
        for peer, weight in self._weights.items():
            if weight > 0:
                data = self._vector[offset:end] if peer == self._me else parts[peer]
                share = average.dtype.type(weight / total)
                out = self._term[: len(average)] if begun else average
                np.multiply(data, share, out=out)
                if begun:
                    average += out
                begun = True
        data = average if self._packing is None else self._packing.mean(offset, average)
        average.setflags(write=False)
        self._averages[offset] = average
        others = [peer for peer in self._weights if peer != self._me]
        return self._send_average(offset, data, others)

    def _send_average(self, offset: int, data: Vector, to: list[PeerId]) -> list[Effect]:
        message = Average(self._named.group, self._named.version, offset, data)
        self.bytes_sent += data.nbytes * len(to)
        for peer in to:
            self._asks.setdefault((False, offset, peer), 0)
        return [Send(peer, message) for peer in to]

    def on_average(self, src: PeerId, message: Average) -> str | None:
        """Why it is unusable, or "". None: I do not want it."""
        version = self._named.version
        piece = self._pieces.get(message.offset)
        if message.version > version and piece is not None:
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
        if not is_mine or self._is_under_way(False, offset, src):
            return [Send(src, Waiting(self._named.group))]
        assert average is not None
        return self._send_average(offset, average, [src])
