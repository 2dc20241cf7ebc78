"""From the settings that a user makes to a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.settings import RunSettings
from flwr_moshpit.simulation.backend import ComputeBackend
from flwr_moshpit.simulation.device import load_catalogue
from flwr_moshpit.simulation.fault_grammar import parse_duration
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.run import Simulation
from flwr_moshpit.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be checked in `settings` before a trainer is there."""

    settings: RunSettings
    fleet: Fleet
    until_s: float | None

    @classmethod
    def of(cls, settings: RunSettings) -> Plan:
        """Raises ConfigError for devices and times that cannot be."""
        catalogue = load_catalogue(settings.catalogue) if settings.catalogue else None
        fleet = Fleet.parse(settings.fleet, settings.peers, seed=settings.seed, catalogue=catalogue)
        until = settings.until
        until_s = None if until is None else parse_duration(str(until), "until")
        return cls(settings, fleet, until_s)

    def simulation(
        self,
        trainer: Trainer,
        *,
        backend: ComputeBackend | None = None,
        observe: Observer | None = None,
    ) -> Simulation:
        """Raises ConfigError as `Simulation` does."""
        settings = self.settings
        return Simulation(
            settings.algorithm,
            trainer,
            fleet=self.fleet,
            faults=settings.faults,
            seed=settings.seed,
            workers=settings.workers,
            backend=backend,
            dtype=settings.dtype,
            cost_as=settings.cost_as,
            observe=observe,
        )
