"""Memberships of many peers in virtual time, with loss, crashes, stalls and partitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from flwr_moshpit.protocol.machine import (
    Learned,
    LinkLost,
    PeerId,
    PeerInfo,
    Publish,
    Received,
    Record,
    Report,
    Send,
    Start,
    Stop,
    TimerFired,
    ViewChanged,
)
from flwr_moshpit.protocol.membership import Membership, Timing
from flwr_moshpit.protocol.membership_messages import Claim


def peer_id(index: int) -> PeerId:
    return PeerId(f"p{index:04d}")


class Seat:
    """One life of one peer, and all that its membership told."""

    def __init__(self, machine: Membership) -> None:
        self.machine = machine
        self.alive = True
        self.paused = False
        self.waiting: list[Any] = []
        self.armed = math.inf
        self.learned: dict[tuple[str, ...], Record] = {}
        self.joined: Counter[PeerId] = Counter()
        self.lost: Counter[PeerId] = Counter()
        self.lost_at: dict[PeerId, float] = {}
        self.reports: Counter[str] = Counter()
        self.reported: list[Report] = []


class MembershipSwarm:
    """`contacts` is what each peer knows at its start: the first peers' addresses."""

    def __init__(
        self,
        seed: int = 0,
        *,
        loss: float = 0.0,
        latency_s: tuple[float, float] = (0.002, 0.08),
        duplicates: float = 0.0,
        timing: Timing | None = None,
        num_contacts: int = 3,
    ) -> None:
        self.now = 0.0
        self.loss = loss
        self.duplicates = duplicates
        self.latency_s = latency_s
        self.timing = timing
        self.seats: dict[PeerId, Seat] = {}
        self.sides: dict[PeerId, int] = {}
        self.sent: Counter[PeerId] = Counter()
        self.kinds: Counter[str] = Counter()
        self.claims_sent = 0
        self._num_contacts = num_contacts
        self._rng = np.random.default_rng([seed, 0])
        self._seed = seed
        self._draws: list[float] = []
        self._heap: list[Any] = []
        self._ticket = count().__next__
        self._lives: Counter[PeerId] = Counter()

    # Who is there

    def begin_complete(self, num_peers: int) -> None:
        """All peers at once, each of which knows all others."""
        peers = [peer_id(index) for index in range(num_peers)]
        claims = [self._machine(peer, 0, 0, ()).claim for peer in peers]
        for peer in peers:
            self.start(peer, known=claims)

    def begin(self, num_peers: int) -> None:
        """All peers at once, each of which knows the contacts."""
        for index in range(num_peers):
            self.start(peer_id(index))

    def start(
        self, peer: PeerId, *, incarnation: int | None = None, known: Iterable[Claim] = ()
    ) -> Seat:
        life = self._lives[peer]
        self._lives[peer] += 1
        machine = self._machine(peer, life, life if incarnation is None else incarnation, known)
        seat = self.seats[peer] = Seat(machine)
        self.sides.setdefault(peer, 0)
        self.tell(peer, Start())
        return seat

    def _machine(
        self, peer: PeerId, life: int, incarnation: int, known: Iterable[Claim]
    ) -> Membership:
        contacts = {}
        if not known:
            contacts = {peer_id(k): f"{peer_id(k)}:1" for k in range(self._num_contacts)}
        return Membership(
            PeerInfo(peer, incarnation=incarnation),
            f"{peer}:1",
            contacts,
            np.random.default_rng([self._seed, 1, *peer.encode(), life]),
            self.timing,
            known,
        )

    def crash(self, peer: PeerId) -> None:
        self.seats[peer].alive = False

    def leave(self, peer: PeerId) -> None:
        self.tell(peer, Stop())
        self.crash(peer)

    def pause(self, peer: PeerId) -> None:
        """As SIGSTOP does: it neither hears nor says anything, and hears all of it later."""
        self.seats[peer].paused = True

    def resume(self, peer: PeerId) -> None:
        seat = self.seats[peer]
        seat.paused = False
        waiting, seat.waiting = seat.waiting, []
        for event in waiting:
            self._tell(seat, peer, event)

    def divide(self, *sides: Sequence[PeerId]) -> None:
        self.sides = dict.fromkeys(self.seats, 0)
        for number, side in enumerate(sides, 1):
            self.sides.update(dict.fromkeys(side, number))

    def tell(self, peer: PeerId, event: Any) -> None:
        self._tell(self.seats[peer], peer, event)

    def publish(self, peer: PeerId, record: Record) -> None:
        self.tell(peer, Publish(record))

    def break_links(self, peer: PeerId) -> None:
        """Everybody's connection to `peer` is reset."""
        for other in self.living:
            if other != peer:
                self.tell(other, LinkLost(peer))

    # What is seen

    @property
    def living(self) -> list[PeerId]:
        return [peer for peer, seat in sorted(self.seats.items()) if seat.alive]

    def view_of(self, peer: PeerId) -> list[PeerId]:
        return list(self.seats[peer].machine.view)

    def agree(self, peers: Sequence[PeerId] | None = None) -> bool:
        """Whether the views of `peers` (all that live) are exactly these peers."""
        wanted = self.living if peers is None else sorted(peers)
        return all(self.view_of(peer) == wanted for peer in wanted)

    def lost_by(self, dead: PeerId) -> list[float]:
        """When each living peer lost `dead`; infinite for those who have not."""
        return [self.seats[peer].lost_at.get(dead, math.inf) for peer in self.living]

    # Time

    def run(self, for_s: float) -> None:
        end = self.now + for_s
        while self._heap and self._heap[0][0] <= end:
            self._next()
        self.now = end

    def run_until_agreed(self, within_s: float, peers: Sequence[PeerId] | None = None) -> float:
        """Returns how long it took; raises TimeoutError if it takes longer."""
        begin = self.now
        while not self.agree(peers):
            if self.now - begin > within_s:
                raise TimeoutError(f"the views still differ after {within_s} s")
            self.run(0.1)
        return self.now - begin

    def _next(self) -> None:
        self.now, _, seat, peer, event = heappop(self._heap)
        if isinstance(event, TimerFired):
            if seat.armed != self.now or seat.paused:
                seat.waiting += [event] if seat.paused else []
                return
            seat.armed = math.inf
        self._tell(seat, peer, event)

    def _tell(self, seat: Seat, peer: PeerId, event: Any) -> None:
        if not seat.alive:
            return
        if seat.paused:
            seat.waiting.append(event)
            return
        for effect in seat.machine.handle(event, self.now):
            match effect:
                case Send():
                    self._send(peer, effect)
                case ViewChanged():
                    self._see(seat, effect)
                case Learned(record):
                    seat.learned[record.key] = record
                case Report():
                    seat.reports[effect.name] += 1
                    seat.reported.append(effect)
        deadline = seat.machine.deadline
        if deadline is not None and deadline < seat.armed:
            assert deadline >= self.now
            seat.armed = deadline
            heappush(self._heap, (deadline, self._ticket(), seat, peer, TimerFired()))

    def _see(self, seat: Seat, changed: ViewChanged) -> None:
        seat.joined.update(changed.joined)
        seat.lost.update(changed.lost)
        for peer in changed.lost:
            seat.lost_at[peer] = self.now

    def _send(self, src: PeerId, effect: Send) -> None:
        dst = effect.dst
        self.sent[src] += 1
        self.kinds[type(effect.message).__name__] += 1
        seat = self.seats.get(dst)
        if seat is None or self.sides[src] != self.sides[dst]:
            return
        copies = (self._draw() >= self.loss) + (self._draw() < self.duplicates)
        low, high = self.latency_s
        for _ in range(copies):
            at = self.now + low + (high - low) * self._draw()
            event = Received(src, effect.message)
            heappush(self._heap, (at, self._ticket(), seat, dst, event))

    def _draw(self) -> float:
        if not self._draws:
            self._draws = self._rng.random(4096).tolist()
        return self._draws.pop()
