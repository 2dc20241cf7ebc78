"""Who is alive, without a server, and records that every peer should know.

A sibling of the protocol's machine, under the same contract, with ends of its own: it takes
`Publish` in and gives `ViewChanged` and `Learned` out, for the driver to hand on.

SWIM (Das, Gupta, Motivala, DSN 2002, sections 3 and 4): probes, indirect probes, suspicion that
the suspect refutes with a newer version of itself, news that ride on the probes. Departs from it:

- Whom to probe is fixed by the view: each peer probes its successor in the order of ids and the
  one half way round, and one more at random. So each is probed by two peers in every period, for
  certain, whatever the number of peers. Where a neighbour is suspected the next one is probed too.
- Fresh news also travel alone, as in memberlist, so that they spread in tenths of a second.
- What news miss, digests find (`roster.py`): two peers compare them on each probe. This is also how
  a newcomer is told everything, and how the halves of a healed partition are.
- A claim that somebody is dead, about one who has not even been suspected here, is not believed but
  put to the one concerned. Otherwise the halves of a healed partition would first bury each other.
- The dead are called again now and then: the partition may be over.

A death is known to all within 3 s at the default `Timing`: at most `period_s` until a neighbour
probes, `probe_s` until it suspects, `suspicion_s` until that runs out, 2.4 s in all; the news take
about 0.1 s for each fourfold of the peers, 0.5 s for 1,000. Those who have heard of the suspicion
let it run out by themselves, so the news of the death need not even arrive.

A peer sends at most 6 pings a second while nobody fails to answer, and an ack for each ping that it
gets, 6 on average, whatever the number of peers; 30 gossips a second while there are news; a
summary every half second while digests differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from flwr_moshpit.protocol.beliefs import Beliefs
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
    State,
    Stop,
    TimerFired,
    View,
    ViewChanged,
)
from flwr_moshpit.protocol.membership_checks import flaw, is_record
from flwr_moshpit.protocol.membership_messages import (
    ALIVE,
    DEAD,
    LEFT,
    SUSPECT,
    Ack,
    Claim,
    Gossip,
    Listing,
    MembershipMessage,
    News,
    Ping,
    PingFor,
    RecordName,
    Summary,
    Update,
    Vouch,
    Want,
)
from flwr_moshpit.protocol.roster import NUM_BUCKETS

CLAIMS_PER_UPDATE = 64
RECORDS_PER_UPDATE = 8
DOUBTS_MAX = 16
"""Probes under way, above which peers that somebody holds for dead have to wait for theirs."""
ASKED_MAX = 4096
GOSSIP_TO = 3
HELPERS = 3
FAREWELLS = 8
CALLS_MAX = 8
"""Absent peers that are called at a time while this peer is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All in seconds. The defaults hold the bound in the module's docstring."""

    period_s: float = 0.5
    """Between two rounds of probes."""
    ack_s: float = 0.2
    """A probe without an answer is repeated each time that this has passed; the first time others
    are asked to probe as well."""
    probe_s: float = 0.6
    """Without an answer to any of these the peer is suspected."""
    suspicion_s: float = 1.3
    """How long a suspect has to refute."""
    gossip_s: float = 0.1
    """Between two gossips of fresh news."""
    sync_s: float = 0.5
    """Between two comparisons of digests that this peer begins."""
    again_s: float = 2.0
    """Between two calls to peers that are held for dead."""
    settle_s: float = 3.0
    """After this time without any contact the peer goes on alone; contacts are called on."""
    forget_s: float = 3600.0
    """A peer dead for this long is not called any more."""
    stall_s: float = 0.3
    """A timer that comes so late shows that this peer was not running: what it has not heard
    meanwhile is held against nobody."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """To the membership of a peer whose address or properties have changed."""

    info: PeerInfo
    """Its incarnation is ignored."""
    address: str


MembershipEvent: TypeAlias = Start | Received | TimerFired | LinkLost | Publish | Renewed | Stop
MembershipEffect: TypeAlias = Send | ViewChanged | Learned | Report


class _Probe:
    """A peer that has been pinged and has not answered."""

    __slots__ = ("accusation", "asked", "began", "due")

    def __init__(self, now: float, ack_s: float, accusation: Claim | None) -> None:
        self.began = now
        self.due = now + ack_s
        self.asked = False
        """Whether others have been asked to probe it."""
        self.accusation = accusation
        """The claim that it should refute, if somebody made one."""


class Membership:
    """One peer's membership; see the module's docstring."""

    def __init__(
        self,
        me: PeerInfo,
        address: str,
        contacts: Mapping[PeerId, str],
        rng: np.random.Generator,
        timing: Timing | None = None,
        known: Iterable[Claim] = (),
    ) -> None:
        """`contacts`: addresses of peers that may be there, from the bootstrap or from an earlier
        life. `known`: claims to begin with, for a swarm that starts complete.
        """
        self.me = me.peer
        self.settled = False
        """Whether this peer knows all that a contact knows, or has waited long enough for one."""
        self._timing = timing if timing is not None else Timing()
        self._rng = rng
        self._contacts = {peer: where for peer, where in contacts.items() if peer != me.peer}
        birth = int(rng.integers(1 << 62))
        self._beliefs = Beliefs(Claim(me, address, 0, birth, ALIVE), self._timing.suspicion_s)
        self._beliefs.begin_with(known)
        self._roster = self._beliefs.roster
        self._moved = dict(self._contacts)
        self._probes: dict[PeerId, _Probe] = {}
        self._asked: dict[tuple[str, ...], float] = {}
        """When each record was last asked for that is not here yet."""
        self._circle: list[PeerId] = []
        """Those who are still to be probed at random, before all have had their turn again."""
        self._running = False
        self._tick_at = self._gossip_at = self._sync_at = self._again_at = self._settle_at = 0.0
        self._out: list[MembershipEffect] = []

    # What a driver sees

    @property
    def deadline(self) -> float | None:
        if not self._running:
            return None
        times = [self._tick_at, *(probe.due for probe in self._probes.values())]
        if self._beliefs.deadline is not None:
            times.append(self._beliefs.deadline)
        if self._beliefs.has_news and len(self._roster.living) > 1:
            times.append(self._gossip_at)
        return min(times)

    @property
    def view(self) -> View:
        return self._beliefs.view

    @property
    def claim(self) -> Claim:
        """What this peer says about itself. Its incarnation is higher than the one given to the
        constructor where the swarm knows an earlier life of this peer."""
        return self._beliefs.mine

    @property
    def addresses(self) -> dict[PeerId, str]:
        """Of all that may be called: everybody who has not left, and the contacts."""
        claims = self._roster.claims.items()
        return self._contacts | {p: claim.address for p, claim in claims if claim.status != LEFT}

    def moved(self) -> dict[PeerId, str]:
        """Addresses that are new since the last call: to be taken up before effects are carried
        out."""
        moved, self._moved = self._moved | self._beliefs.moved(), {}
        return moved

    def snapshot(self) -> State:
        return {
            "peers": [
                [peer, claim.address, claim.status, *claim.stamp]
                for peer, claim in self._roster.claims.items()
            ],
            "records": [list(key) for key in self._roster.records],
        }

    def heard(self, peer: PeerId) -> None:
        """Something else came from `peer`, such as a part of a vector: it is alive."""
        self._probes.pop(peer, None)

    def handle(self, event: MembershipEvent, now: float) -> list[MembershipEffect]:
        """As a `Machine` does. Raises ValueError for a record that cannot be spread."""
        self._forgive_stall(now)
        match event:
            case Start():
                self._on_start(now)
            case Received() if self._running and isinstance(event.message, MembershipMessage):
                self._on_message(event.src, event.message, now)
            case LinkLost() if self._running and self._beliefs.status(event.peer) == ALIVE:
                self._probe(event.peer, now)
            case Publish():
                if not is_record(event.record):
                    raise ValueError(f"this cannot be spread as a record: {event.record}")
                self._beliefs.take_record(self.me, event.record)
            case Renewed():
                mine = self._beliefs.mine
                info = replace(event.info, incarnation=mine.info.incarnation)
                self._beliefs.say(replace(mine, info=info, address=event.address))
            case Stop() if self._running:
                self._on_stop()
        if self._running:
            self._run_due(now)
        out, self._out = self._out, []
        return out + self._beliefs.effects()

    # Time

    def _on_start(self, now: float) -> None:
        timing = self._timing
        self._running = True
        self.settled = not self._contacts
        self._tick_at = now + timing.period_s * float(self._rng.random())
        self._settle_at = now + timing.settle_s
        self._sync_at = self._gossip_at = self._again_at = now
        self._beliefs.spread(self.me)
        self._call_absent(now)

    def _on_stop(self) -> None:
        self._running = False
        gone = replace(self.claim, status=LEFT)
        farewell = Gossip(News((gone,), digest=self._roster.digest))
        self._out += [Send(peer, farewell) for peer in self._some(FAREWELLS)]

    def _forgive_stall(self, now: float) -> None:
        deadline = self.deadline
        late_s = 0.0 if deadline is None else now - deadline
        if late_s < self._timing.stall_s:
            return
        for probe in self._probes.values():
            probe.due += late_s
            probe.began += late_s
        self._beliefs.prolong(late_s)
        self._out.append(Report("stalled", {"late_s": late_s}))

    def _run_due(self, now: float) -> None:
        self._beliefs.run_out(now)
        for peer, probe in list(self._probes.items()):
            if self._beliefs.status(peer) not in (ALIVE, SUSPECT):
                del self._probes[peer]
            elif probe.due <= now:
                self._on_silence(peer, probe, now)
        if now >= self._tick_at:
            self._tick(now)
        if now >= self._gossip_at and self._beliefs.has_news:
            peers = self._some(GOSSIP_TO)
            if peers:
                gossip = Gossip(self._beliefs.news(None, copies=len(peers)))
                self._out += [Send(peer, gossip) for peer in peers]
                self._gossip_at = now + self._timing.gossip_s

    def _tick(self, now: float) -> None:
        self._tick_at += self._timing.period_s
        if self._tick_at <= now:
            self._tick_at = now + self._timing.period_s
        self.settled = self.settled or now >= self._settle_at
        for peer in self._due_for_probe():
            self._probe(peer, now)
        self._call_absent(now)
        self._beliefs.forget(now - self._timing.forget_s)

    # Probes

    def _due_for_probe(self) -> dict[PeerId, None]:
        """My two neighbours, those behind them as well where they are suspected, and one more."""
        living = self._roster.living
        count = len(living)
        here = bisect_left(living, self.me)
        found: dict[PeerId, None] = {}
        for start in (here + 1, here + 1 + count // 2):
            for step in range(min(4, count - 1)):
                peer = living[(start + step) % count]
                if peer != self.me:
                    found[peer] = None
                    if self._beliefs.status(peer) == ALIVE:
                        break
        while count > 1:
            if not self._circle:
                self._circle = [living[k] for k in self._rng.permutation(count).tolist()]
            peer = self._circle.pop()
            if peer != self.me and self._beliefs.status(peer) in (ALIVE, SUSPECT):
                found[peer] = None
                break
        return found

    def _probe(self, peer: PeerId, now: float, accusation: Claim | None = None) -> None:
        if peer not in self._probes:
            self._probes[peer] = _Probe(now, self._timing.ack_s, accusation)
            self._ping(peer, accusation)

    def _ping(self, peer: PeerId, about_it: Claim | None, behalf: PeerId | None = None) -> None:
        self._out.append(Send(peer, Ping(self._beliefs.news(peer, about_it), behalf)))

    def _on_silence(self, peer: PeerId, probe: _Probe, now: float) -> None:
        """No answer: probe again, through others too, and in the end suspect."""
        ends_at = probe.began + self._timing.probe_s
        if now >= ends_at:
            del self._probes[peer]
            if self._beliefs.status(peer) == ALIVE:
                self._beliefs.suspect(peer, now)
                self._ping(peer, None)
            return
        probe.due = min(now + self._timing.ack_s, ends_at)
        self._ping(peer, probe.accusation)
        for helper in () if probe.asked else self._some(HELPERS, without=peer):
            news = self._beliefs.news(helper, probe.accusation)
            self._out.append(Send(helper, PingFor(peer, news)))
        probe.asked = True

    def _call_absent(self, now: float) -> None:
        """Contacts that have not answered and peers that are held for dead may be there again."""
        alone = len(self._roster.living) == 1 or not self.settled
        if not alone and now < self._again_at:
            return
        self._again_at = now + self._timing.again_s
        absent = [peer for peer in self._contacts if self._beliefs.status(peer) is None]
        absent += [peer for peer in self._beliefs.buried if self._beliefs.status(peer) == DEAD]
        for k in self._rng.permutation(len(absent))[: CALLS_MAX if alone else 1].tolist():
            self._ping(absent[k], None)

    def _some(self, count: int, without: PeerId | None = None) -> list[PeerId]:
        """Up to `count` living peers at random, without me."""
        living = self._roster.living
        if len(living) <= 4 * count:
            order = self._rng.permutation(len(living)).tolist()
        else:
            order = self._rng.integers(len(living), size=3 * count).tolist()
        others = dict.fromkeys(living[k] for k in order if living[k] not in (self.me, without))
        return list(others)[:count]

    # Messages

    def _on_message(self, src: PeerId, message: MembershipMessage, now: float) -> None:
        wrong = flaw(message) if src != self.me else "it is my own"
        if wrong is not None:
            values = {"peer": src, "reason": wrong, "what": type(message).__name__}
            self._out.append(Report("refused", values))
            return
        self.heard(src)
        match message:
            case Ping():
                behind = self._take_news(src, message.news, now)
                self._out.append(Send(src, Ack(self._beliefs.news(src, behind), message.behalf)))
            case Ack():
                self._take_news(src, message.news, now)
                asker = message.behalf
                if asker is not None and asker != self.me and self._beliefs.status(asker):
                    self._out.append(Send(asker, Vouch(src)))
                self._sync(src, message.news.digest, now)
            case Gossip():
                self._take_news(src, message.news, now)
            case PingFor(target=target):
                self._take_news(src, message.news, now)
                if target != self.me and self._beliefs.status(target):
                    accused = [c for c in message.news.claims if c.info.peer == target]
                    self._ping(target, accused[0] if accused else None, behalf=src)
            case Vouch():
                self.heard(message.target)
            case Summary():
                first = int(self._rng.integers(NUM_BUCKETS))
                listing = self._roster.listing(message.digests, first)
                if listing is not None:
                    self._out.append(Send(src, listing))
            case Listing():
                self._on_listing(src, message, now)
            case Want():
                claims, records = self._roster.claims, self._roster.records
                self._send_updates(
                    src,
                    [claims[peer] for peer in message.peers if peer in claims],
                    [records[key] for key in message.keys if key in records],
                )
            case Update():
                self._on_update(src, message, now)

    def _take(self, claim: Claim, now: float) -> None:
        accusation = self._beliefs.take(claim, now)
        if accusation is None:
            return
        peer = accusation.info.peer
        if peer in self._probes:
            self._probes[peer].accusation = accusation
        elif len(self._probes) < DOUBTS_MAX:
            self._probe(peer, now, accusation)

    def _take_news(self, src: PeerId, news: News, now: float) -> Claim | None:
        """Returns what the sender should know about itself, if it does not."""
        behind: Claim | None = None
        for claim in news.claims:
            self._take(claim, now)
            if claim.info.peer == src:
                behind = self._beliefs.correction(claim)
        self._ask(src, news.names, now)
        return behind

    def _ask(self, src: PeerId, names: Sequence[RecordName], now: float) -> None:
        """Ask for records that are new to me, unless somebody was asked a moment ago."""
        retry_s = 3 * self._timing.gossip_s
        keys = [
            name.key
            for name in names
            if self._roster.lacks(name) and now - self._asked.get(name.key, -retry_s) >= retry_s
        ]
        if keys:
            if len(self._asked) > ASKED_MAX:
                self._asked.clear()
            self._asked.update(dict.fromkeys(keys, now))
            self._out.append(Send(src, Want(keys=tuple(keys))))

    def _sync(self, src: PeerId, digest: int, now: float) -> None:
        if digest == self._roster.digest:
            self.settled = True
        elif now >= self._sync_at:
            self._sync_at = now + self._timing.sync_s
            self._out.append(Send(src, Summary(self._roster.digests)))

    def _on_listing(self, src: PeerId, listing: Listing, now: float) -> None:
        found = self._roster.compare(listing)
        if found.wanted_peers:
            self._out.append(Send(src, Want(tuple(found.wanted_peers))))
        self._ask(src, found.wanted_records, now)
        self._send_updates(src, found.claims, found.records)

    def _send_updates(
        self, dst: PeerId, claims: Sequence[Claim], records: Sequence[Record]
    ) -> None:
        for begin in range(0, len(claims), CLAIMS_PER_UPDATE):
            some = tuple(claims[begin : begin + CLAIMS_PER_UPDATE])
            self._out.append(Send(dst, Update(some)))
        for begin in range(0, len(records), RECORDS_PER_UPDATE):
            part = tuple(records[begin : begin + RECORDS_PER_UPDATE])
            self._out.append(Send(dst, Update(records=part)))

    def _on_update(self, src: PeerId, update: Update, now: float) -> None:
        better: list[Claim] = []
        for claim in update.claims:
            known = self._roster.claims.get(claim.info.peer)
            if known is not None and known.order > claim.order:
                better.append(known)
            else:
                self._take(claim, now)
        self._send_updates(src, better, ())
        for record in update.records:
            self._asked.pop(record.key, None)
            self._beliefs.take_record(src, record)
