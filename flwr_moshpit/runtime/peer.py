"""One peer put together: who it is, what it trains, whom it knows, and the driver that runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.json_lines import plain
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.protocol.machine import PeerId, PeerInfo, Record, View
from flwr_moshpit.protocol.membership import Membership
from flwr_moshpit.runtime.carrier import is_relayed
from flwr_moshpit.runtime.checkpoint import Checkpoints
from flwr_moshpit.runtime.compute import Compute, Offer, Task
from flwr_moshpit.runtime.control import STOP_KEY, Control, Stop
from flwr_moshpit.runtime.driver import Buildable, Driver, Schedule
from flwr_moshpit.runtime.failures import Failures, Outcast
from flwr_moshpit.runtime.grpc_transport import GrpcTransport
from flwr_moshpit.runtime.identity import Identity
from flwr_moshpit.runtime.relay import Relayed
from flwr_moshpit.runtime.trace import Recipe, Recorder
from flwr_moshpit.runtime.uplink import worth_telling
from flwr_moshpit.runtime.whereabouts import ANYWHERE, source_towards
from flwr_moshpit.runtime.wire import Limits

SPREAD_S = 1.0
"""How long a peer that has learned that the swarm is stopped stays to spread it: news take 0.1 s
for each fourfold of the peers."""

LOOK_S = 1.0
"""How often a peer looks at what its line carries and, if it listens anywhere, at which address of
its device others reach it."""
LOOKED_AT = 3
"""Ways to so many others are looked up for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """All that one peer of a swarm is made of."""

    identity: Identity
    algorithm: Any
    """Settings, such as `config.Moshpit()`."""
    task: Task
    contacts: Mapping[PeerId, str] = field(default_factory=dict)
    """Addresses, "host:port", of peers that may be there already."""
    bind: str = "127.0.0.1:0"
    advertised: str | None = None
    """Where others reach this peer, if that is not where it listens. None where it listens
    anywhere, such as on "0.0.0.0:0": at the address from which it reaches others, whatever that
    is at the time."""
    dialable: bool = True
    """Whether others can dial this peer. If not it is reached through another, and reduces
    nothing; `advertised` is of no use then."""
    speed: float = 1.0
    """As in `PeerInfo`, and so are the next two, until they are measured."""
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    state: Path | None = None
    """Where checkpoints are kept, and where an earlier life's are found."""
    trace: Path | None = None


class Peer:
    """A peer that is about to `run`: `driver`, over `transport`."""

    def __init__(
        self,
        settings: PeerSettings,
        compute: Compute,
        offer: Offer,
        *,
        observers: Sequence[Observer] = (),
        on_address: Callable[[str], None] = lambda address: None,
        wrap: Callable[[Recipe], Buildable] = lambda recipe: recipe,
    ) -> None:
        """`compute` has been started and has given `offer`. `on_address` is told where this peer
        listens, as soon as it does. `wrap`: puts something around the machine, to watch it. Raises
        ConfigError for a state of another peer or swarm, one that another process uses, or a folder
        or file that cannot be written."""
        self._settings = settings
        self._offer: Offer | None = offer
        self._on_address = on_address
        self._began_at = time.monotonic()
        self._wrap = wrap
        self._roams = (
            settings.dialable
            and settings.advertised is None
            and settings.bind.rpartition(":")[0] in ANYWHERE
        )
        self._address = ""
        self._following: asyncio.Task[None] | None = None
        self._checkpoints = None if settings.state is None else Checkpoints(settings.state)
        saved = self._saved()
        self._state = saved.get("machine")
        self.incarnation = int(saved.get("incarnation", -1)) + 1
        """How often this peer was started before, as far as its own state tells."""
        known = saved.get("addresses", {})
        self._contacts = {**known, **settings.contacts}
        if self._roams and source_towards(self._contacts.values()) is None:
            raise ConfigError(
                f"bind {settings.bind} says nothing about where others reach this peer, and there "
                "is no contact to find out with: give an address of this device"
            )
        self.stopped = False
        """Whether the swarm's authority has stopped it."""
        self._failures = Failures(lambda: self.driver.stop())
        self._outcast = Outcast(lambda: self.driver.stop())
        control = Control(settings.identity, self.status, self._on_stop)
        self.transport = GrpcTransport(
            settings.identity,
            settings.bind,
            Limits.of(offer.params),
            advertised=settings.advertised,
            incarnation=self.incarnation,
            services=[control.handler()],
            relayed=None if settings.dialable else Relayed(self._relays, self._on_relay),
            task=f"{type(settings.algorithm).__name__} with {len(offer.params):,} parameters of "
            f"layout {offer.schema[:4].hex()}",
        )
        self.driver = Driver(
            self.transport,
            self._join,
            self._make,
            compute,
            schedule=settings.schedule,
            observers=[*observers, self._failures],
            recorder=None if settings.trace is None else Recorder(settings.trace),
            checkpoints=self._checkpoints,
            swarm=settings.identity.swarm,
            on_record=self._on_record,
        )

    async def run(self, *, signals: bool = False) -> None:
        """To its end; `signals`: which SIGINT and SIGTERM bring about. Raises TrainerError where
        the client's training fails and fails, ConfigError where all others refuse this peer for
        good, and what ends the driver."""
        try:
            await self.driver.run(signals=signals)
        finally:
            if self._checkpoints is not None:
                self._checkpoints.release()
        self._failures.check()
        self._outcast.check()

    async def status(self) -> dict[str, Any]:
        """For people: who is there, what this peer is at, whom it waits for and since when."""
        driver, identity = self.driver, self._settings.identity
        known = driver.membership.snapshot()["peers"]
        state = await driver.snapshot() or {}
        began_at = state.get("phase_began_at")
        return {
            "peer": identity.peer,
            "swarm": identity.swarm,
            "address": self.transport.address,
            "up_s": time.monotonic() - self._began_at,
            "peers": [
                {"peer": peer, "address": address, "status": status}
                for peer, address, status, *_ in known
            ],
            "round": state.get("round"),
            "phase": state.get("phase"),
            "phase_s": None if not began_at else time.monotonic() - began_at,
            "waits_for": plain(state.get("waits_for", [])),
            "edges": plain(state.get("edges", {})),
            "uplink_bytes_per_s": self.transport.uplink_bytes_per_s,
            "refused": dict(driver.refused),
        }

    def _saved(self) -> dict[str, Any]:
        """What an earlier life of this peer left, whose folder is this one's alone from now on."""
        if self._checkpoints is None:
            return {}
        self._checkpoints.claim()
        loaded = self._checkpoints.load()
        if loaded is None:
            return {}
        saved, me = loaded.content, self._settings.identity
        for what, its, mine in (
            ("peer", saved["peer"], me.peer),
            ("swarm", saved.get("swarm", me.swarm), me.swarm),
        ):
            if its != mine:
                self._checkpoints.release()
                raise ConfigError(
                    f"state {self._checkpoints.folder} is of {what} {its!r}, not of {mine!r}: give "
                    f"each {what} a folder of its own"
                )
        return saved

    def _on_stop(self, text: str) -> None:
        stop = Stop(text)
        identity = self._settings.identity
        flaw = stop.flaw(identity.swarm, identity.authority_pem, time.time())
        if flaw is not None:
            raise ConfigError(flaw)
        self.driver.publish(stop.record())

    def _on_record(self, record: Record) -> None:
        if record.key[0] != STOP_KEY or not isinstance(record.value, str) or self.stopped:
            return
        identity = self._settings.identity
        if Stop(record.value).flaw(identity.swarm, identity.authority_pem, time.time()) is None:
            self.stopped = True
            # Not at once: the record has to get from here to others first.
            asyncio.get_running_loop().call_later(SPREAD_S, self.driver.stop)

    def _relays(self) -> Mapping[PeerId, str]:
        """Everybody alive who can be dialled; before anybody is known, the contacts."""
        membership = self.driver.membership
        living, addresses = membership.view.peers, membership.addresses
        can = [peer for peer, info in living.items() if info.dialable and peer in addresses]
        known = {peer: addresses[peer] for peer in can} or self._contacts
        return {
            peer: address
            for peer, address in known.items()
            if address and not is_relayed(address) and peer != self._settings.identity.peer
        }

    def _look_around(self) -> None:
        """What has changed about this device: tell others."""
        if self.driver.is_stopping:
            return
        asyncio.get_running_loop().call_later(LOOK_S, self._look_around)
        membership, measured = self.driver.membership, self.transport.uplink_bytes_per_s
        told = {peer: info.uplink_bytes_per_s for peer, info in membership.view.peers.items()}
        mine = told.pop(membership.me, None)
        uplink = None if measured is None else worth_telling(measured, mine, told.values())
        if uplink is not None:
            self.driver.set_uplink(uplink)
        self._outcast.look(len(membership.view) == 1, self.transport.useless)
        if self._roams and (self._following is None or self._following.done()):
            self._following = asyncio.ensure_future(self._follow_address())

    async def _follow_address(self) -> None:
        membership = self.driver.membership
        others = [at for peer, at in membership.addresses.items() if peer != membership.me and at]
        ways = [*others[:LOOKED_AT], *self._contacts.values()]
        # In a thread: to look a name up takes many seconds where the network is gone.
        address = await asyncio.to_thread(self._here, self._address, ways)
        if address != self._address and not self.driver.is_stopping:
            self._address = address
            self.transport.drop_links()
            self._on_address(address)
            self.driver.move(address)

    def _here(self, address: str, others: Iterable[str]) -> str:
        """Where this peer, which is at `address`, is reached now."""
        host = source_towards(others)
        return address if host is None else f"{host}:{address.rpartition(':')[2]}"

    def _on_relay(self, address: str) -> None:
        self._on_address(address)
        self.driver.move(address)

    def _join(self, address: str) -> Membership:
        if self._roams:
            address = self._address = self._here(address, self._contacts.values())
        asyncio.get_running_loop().call_later(LOOK_S, self._look_around)
        if address:
            self._on_address(address)
        settings = self._settings
        rng = np.random.default_rng([settings.seed, settings.task.client, self.incarnation])
        info = PeerInfo(
            settings.identity.peer,
            self.incarnation,
            settings.speed,
            settings.uplink_bytes_per_s,
            settings.downlink_bytes_per_s,
            settings.dialable,
        )
        return Membership(info, address, self._contacts, rng)

    def _make(self, info: PeerInfo, view: View) -> Buildable:
        settings, offer = self._settings, self._offer
        assert offer is not None
        recipe = Recipe(
            settings.algorithm,
            info,
            offer.params,
            view,
            (settings.seed, settings.task.client),
            offer.schema,
            self._state,
        )
        # Both hold a model that the machine will have moved on from.
        self._offer = self._state = None
        return self._wrap(recipe)
