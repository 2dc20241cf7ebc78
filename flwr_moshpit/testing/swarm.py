"""A swarm inside a test: real machines and real clients on one virtual network.

Everything happens in virtual time, so a test neither sleeps nor depends on the machine it runs on;
what a test does to the network is drawn from the swarm's own seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.build import build_machine
from flwr_moshpit.protocol.machine import Machine, PeerId, PeerInfo, Report, Start, Vector
from flwr_moshpit.protocol.rfast import RFastPeer
from flwr_moshpit.simulation.backend import trainer_backend
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.simulation.engine import Engine
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.history import RoundRecord
from flwr_moshpit.simulation.membership import Delays
from flwr_moshpit.simulation.meter import consensus_distance, swarm_mean
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.testing.books import BookedPeer, Books
from flwr_moshpit.testing.rules import Peer, RuledNetwork
from flwr_moshpit.testing.stages import LeaderOf, Trigger
from flwr_moshpit.trainer import Trainer

DEVICE = "jetson-orin-nano"
"""What every peer of a test is, unless the test says otherwise."""

STALLED_AFTER_S = 1e6
"""Virtual seconds after which a swarm that has not finished counts as hanging."""


class SwarmStalled(AssertionError):
    """A swarm did not come to an end; the message says who waits for whom."""


@dataclass(frozen=True)
class SwarmHistory:
    """What the peers reported so far."""

    rounds: list[RoundRecord]
    reports: list[tuple[float, PeerId | None, Report]]
    digest: str

    def named(self, name: str) -> list[tuple[float, PeerId | None, Report]]:
        """The reports called `name`, such as "refused" or "group"."""
        return [entry for entry in self.reports if entry[2].name == name]


class Swarm(RuledNetwork):
    """`peers` clients of one trainer under one algorithm; made by the `swarm` fixture.

    Peers are named by index or id. Nothing happens before `run`, `step` or `advance`.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        peers: int,
        algorithm: Any,
        seed: int = 0,
        dtype: str | None = None,
        fleet: Fleet | None = None,
        network: Network | None = None,
        delays: Delays | None = None,
        on_trainer_error: str = "raise",
    ) -> None:
        if peers < 1:
            raise ConfigError(f"peers must be at least 1, not {peers}")
        trainer.prepare(peers, dtype)
        self.seed = seed
        self.trainer = trainer
        self.algorithm = algorithm
        fleet = fleet or Fleet.mix({DEVICE: 1.0}, peers)
        if len(fleet) != peers:
            raise ConfigError(f"the fleet has {len(fleet)} devices for {peers} peers")
        params = trainer.initial_params(seed)
        schema = trainer.layout.schema
        self.engine = Engine(
            seed=seed,
            network=network or Network.uniform(),
            backend=trainer_backend(trainer),
            cost=trainer.cost(),
            start=Start(0, sweep=False),
            delays=delays,
            on_trainer_error="report" if on_trainer_error == "report" else "raise",
        )
        width = len(str(peers - 1))
        ids = [PeerId(f"peer-{index:0{width}}") for index in range(peers)]
        super().__init__(ids, self.engine.interceptors, seed)
        self._reports: list[tuple[float, PeerId | None, Report]] = []
        self._round = 0
        self._begun = False
        self.engine.observe.append(
            lambda now, peer, report: self._reports.append((now, peer, report))
        )

        def factory(
            info: PeerInfo, view: Any, rng: np.random.Generator, incarnation: int
        ) -> Machine:
            machine = build_machine(algorithm, info, params, view, rng, incarnation, schema)
            if isinstance(machine, RFastPeer):
                return BookedPeer(machine, algorithm)
            return machine

        self._factory = factory
        self._network = network or Network.uniform()
        for peer, device in zip(self.peers, fleet, strict=True):
            self._add_peer(peer, device)

    def _add_peer(self, peer: PeerId, device: DeviceProfile, client: int | None = None) -> None:
        link = self._network.link_of(device)
        info = PeerInfo(
            peer,
            speed=device.flops_per_s,
            uplink_bytes_per_s=link.uplink_bytes_per_s,
            downlink_bytes_per_s=link.downlink_bytes_per_s,
        )
        self.engine.add(peer, self._factory, info, device, client)

    # Letting time pass

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.engine.now

    @property
    def history(self) -> SwarmHistory:
        rounds = [
            RoundRecord.of(now, peer, report.values)
            for now, peer, report in self._reports
            if report.name == "round" and peer is not None
        ]
        return SwarmHistory(rounds, list(self._reports), self.engine.digest)

    def run(self, rounds: int, *, sweep: bool = False) -> SwarmHistory:
        """Train until every living peer has been through `rounds` more rounds.

        Raises SwarmStalled, saying who waits for whom, if that never happens.
        """
        self._catch_up()
        self._round += rounds
        return self._start(sweep)

    def average(self) -> SwarmHistory:
        """One sweep without training: all peers then hold the swarm's weighted mean."""
        self._catch_up()
        return self._start(True)

    def advance(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass."""
        self.engine.run(until_s=self.now + seconds)

    def step(self) -> bool:
        """Deliver one event; False if there is none. Peers that nothing has started yet train
        without end."""
        if not self._begun:
            self.begin()
        return self.engine.step()

    def begin(self, rounds: int | None = None) -> None:
        """Let all peers start, without letting time pass: for tests that use `step`."""
        self._catch_up()
        self._tell_start(None if rounds is None else self._round + rounds, False)

    def _catch_up(self) -> None:
        self._round = max(
            [self._round, *(getattr(m, "round", 0) for m in self.engine.machines.values())]
        )

    def _tell_start(self, until_round: int | None, sweep: bool) -> None:
        self._begun = True
        self.engine.start_event = Start(until_round, sweep)
        for peer in self.engine.machines:
            self.engine.tell(peer, self.engine.start_event)

    def _start(self, sweep: bool) -> SwarmHistory:
        self.engine.run(until_s=self.now)
        self.engine.finished.clear()
        self._tell_start(self._round, sweep)
        self.engine.run(until_s=self.now + STALLED_AFTER_S, stop=self._is_done)
        if not self._is_done():
            waits = {
                peer: machine.snapshot()
                for peer, machine in self.engine.machines.items()
                if peer not in self.engine.finished
            }
            lines = [
                f"{peer}: {state.get('phase')} {state.get('waits_for')}"
                for peer, state in waits.items()
            ]
            raise SwarmStalled("these peers never finished:\n" + "\n".join(lines))
        return self.history

    def _is_done(self) -> bool:
        return self.engine.num_alive == 0 or self.engine.all_finished

    # Looking at peers

    def machine(self, peer: Peer) -> Machine:
        """The machine of a living peer: look, do not touch."""
        return self.engine.machines[self.peer(peer)]

    @property
    def alive(self) -> list[PeerId]:
        return list(self.engine.machines)

    def vector(self, peer: Peer) -> Vector:
        """(d,), a living peer's parameters of the moment."""
        return self.machine(peer).params

    def weight(self, peer: Peer) -> float:
        return self.machine(peer).weight

    def mean(self) -> Vector:
        """(d,), the living peers' mean by weight."""
        machines = list(self.engine.machines.values())
        mean = swarm_mean(machines)
        return machines[0].params if mean is None else mean

    def consensus_distance(self) -> float:
        """Root mean square over the living peers of ||params - mean||."""
        return consensus_distance(list(self.engine.machines.values()), self.mean())

    def tracked_mass(self) -> Vector:
        """(d,), R-FAST's sum z + sum (rho - rho_buf) over the living peers: equal to
        `gradient_sum()` at every instant, whatever happened.

        `rho` and `rho_buf` are what this network has seen the peers send and receive, see
        `testing/books.py`. Raises ConfigError where the algorithm is another one.
        """
        return np.asarray(sum(book.mass for book in self._books()))

    def gradient_sum(self) -> Vector:
        """(d,), the sum of what the living peers' trainer last returned as their gradients, times
        their examples if R-FAST weighs by them. Raises ConfigError as `tracked_mass` does."""
        return np.asarray(sum(book.gradient for book in self._books()))

    def _books(self) -> list[Books]:
        machines = list(self.engine.machines.values())
        books = [machine.books for machine in machines if isinstance(machine, BookedPeer)]
        if len(books) < len(machines):
            name = type(self.algorithm).__name__
            raise ConfigError(f"{name} tracks no gradients: algorithm must be RFast(...) for that")
        return books

    def evaluate(self) -> dict[str, float]:
        """The metrics of the mean model."""
        return dict(self.trainer.evaluate(self.mean()).metrics)

    # Faults

    def leader(self, round: int) -> LeaderOf:
        """Whoever leads the first group of `round`, to be given to `kill`."""
        return LeaderOf(round)

    def kill(
        self, peer: Peer | LeaderOf, during: str | None = None, round: int | None = None
    ) -> Trigger:
        """Crash a peer: now, or at a stage of its (next) round.

        during: "training" (it has just begun its local steps), "matchmaking" (it is about to come,
        or a leader has its first member), "allreduce" (parts are under way) or "naming" (a new
        version of a group is being agreed on). Returns the trigger; its `fired_at` is the virtual
        time of the crash, None while it has not happened.
        """
        target = peer if isinstance(peer, LeaderOf) else self.peer(peer)
        trigger = Trigger(self.engine, target, during, round)
        if during is None and not isinstance(target, LeaderOf):
            trigger.fire(target)
        else:
            self.engine.interceptors.append(trigger)
        return trigger

    def restart(self, peer: Peer) -> None:
        """A crashed peer comes back and remembers nothing."""
        self.engine.restart(self.peer(peer))

    def join(self, name: str, client: int = 0) -> PeerId:
        """A peer that was never there before joins now; it trains on the data of `client`."""
        peer = PeerId(name)
        self.peers.append(peer)
        self._add_peer(peer, Fleet.mix({DEVICE: 1.0}, 1)[0], client)
        return peer

    def slow_down(self, peer: Peer, factor: float) -> None:
        """Its training takes `factor` times as long from now on."""
        self.engine.slow_down(self.peer(peer), factor)

    def partition(self, *sides: Sequence[Peer]) -> None:
        """Only peers on one side reach each other; those on no side are one more."""
        self.engine.partition([[self.peer(peer) for peer in side] for side in sides])

    def heal(self) -> None:
        self.engine.heal()

    def close(self) -> None:
        self.engine.close()
