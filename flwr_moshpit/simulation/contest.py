"""What a comparison compares, and under which conditions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.build import machine_type
from flwr_moshpit.simulation.cost import CostModel
from flwr_moshpit.simulation.device import Catalogue
from flwr_moshpit.simulation.fault_grammar import parse_faults
from flwr_moshpit.simulation.faults import AfterRounds, AtRound, Crash, Fault
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.simulation.run import DEFAULT_DEVICE
from flwr_moshpit.trainer import Trainer

DEFAULT_STEPS = 20
"""Local steps in a round of an algorithm that leaves them to the default."""

EVALUATIONS = 60
"""Of each run that a time ends."""

LR_FACTORS = (1.0, 2.0, 4.0, 0.5, 8.0, 0.25, 16.0, 0.125, 32.0)
"""What the learning rate is multiplied by in a method's tries, in the order of their use."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is compared, and under which conditions. Raises ConfigError for what cannot be."""

    algorithms: Mapping[str, Any]
    """Settings of `flwr_moshpit.config` by the name that each has in the results. Times are put in
    relation to those of the first."""
    make_trainer: Callable[[float], Trainer]
    """What a run trains, with the learning rate multiplied by the argument. A learning rate among
    an algorithm's own settings is multiplied as well. With `workers` it must be picklable."""
    peers: int
    fleet: str | Fleet = DEFAULT_DEVICE
    catalogue: Catalogue | None = None
    network: Network | None = None
    faults: tuple[str | Fault, ...] = ()
    seeds: tuple[int, ...] = (0,)
    until_s: float | None = None
    """All runs end at this virtual time."""
    steps: int | None = None
    """Or each peer takes so many local steps, or the next multiple of a round's."""
    takes_steps: bool = True
    """Whether clients train for as many local steps as they are told; see `asked_of_the_app`."""
    target: float | None = None
    """Accuracy, or loss where the task has no accuracy; see `reach.derived_target`."""
    tries: int = 1
    """Learning rates that each method may try."""
    dtype: str | None = None
    cost_as: str | CostModel | None = None
    evaluate_every: int | None = None
    """Rounds between two evaluations. By default all are evaluated at the same 60 instants where
    time ends the runs, and else as `Simulation` does."""

    def __post_init__(self) -> None:
        if not self.algorithms:
            raise ConfigError("algorithms: there is none to compare")
        for algorithm in self.algorithms.values():
            machine_type(algorithm)
        if not self.seeds or min(self.seeds) < 0 or len({*self.seeds}) < len(self.seeds):
            raise ConfigError(f"seeds must be different numbers from 0 up, not {self.seeds}")
        if (self.until_s is None) == (self.steps is None):
            raise ConfigError("a comparison ends at a virtual time or after local steps: set one")
        if self.until_s is not None and not self.until_s > 0:
            raise ConfigError(f"until must be above 0, not {self.until_s}")
        if self.steps is not None:
            if self.steps < 1:
                raise ConfigError(f"steps must be at least 1, not {self.steps}")
            for name, algorithm in self.algorithms.items():
                _check_steps(name, algorithm)
        if self.target is not None and not math.isfinite(self.target):
            raise ConfigError(f"target must be a number, not {self.target}")
        if not 1 <= self.tries <= len(LR_FACTORS):
            raise ConfigError(f"tune must be from 1 to {len(LR_FACTORS)} tries, not {self.tries}")

    @property
    def lr_factors(self) -> tuple[float, ...]:
        return LR_FACTORS[: self.tries]

    @property
    def tuning_seed(self) -> int:
        return max(self.seeds) + 1

    @property
    def evaluate_every_s(self) -> float | None:
        """A method that does few rounds must not look slow because it is seldom looked at."""
        if self.until_s is None or self.evaluate_every is not None:
            return None
        return self.until_s / EVALUATIONS

    @property
    def num_runs(self) -> int:
        """Tries included."""
        tuning = self.tries if self.tries > 1 else 0
        return len(self.algorithms) * (len(self.seeds) + tuning)

    @property
    def has_round_faults(self) -> bool:
        """Whether a fault waits for a round, which methods reach at times of their own."""
        return any(
            isinstance(fault.when, AtRound)
            or (isinstance(fault, Crash) and isinstance(fault.back, AfterRounds))
            for fault in parse_faults(self.faults)
        )

    @property
    def ends(self) -> str:
        """Where a run ends, in words."""
        if self.until_s is not None:
            return f"all runs end at {self.until_s:g} s of virtual time"
        if self.takes_steps:
            return f"each peer takes {self.steps} local steps"
        times: dict[int | None, list[str]] = {}
        for name in self.algorithms:
            times.setdefault(self.rounds_of(name), []).append(name)
        told = [f"{number} times" for number in times]
        if len(times) > 1:
            told = [f"{number} times under {', '.join(who)}" for number, who in times.items()]
        return f"each peer trains {'; '.join(told)}, for the app's own number of local steps"

    def asked_of_the_app(self) -> Contest:
        """With `takes_steps` as a client shows it on trial. Raises TrainerError where it fails."""
        if self.steps is None:
            return self
        trainer = self.make_trainer(1.0)
        trainer.prepare(self.peers, self.dtype)
        trainer.cost()
        return dataclasses.replace(self, takes_steps=getattr(trainer, "takes_steps", True))

    def rounds_of(self, name: str) -> int | None:
        """How many rounds of an algorithm make `steps`; None if time ends the runs."""
        if self.steps is None:
            return None
        return -(-self.steps // steps_per_round(self.algorithms[name]))


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a contest."""

    algorithm: str
    seed: int
    lr_factor: float
    is_try: bool = False


def steps_per_round(algorithm: Any) -> int:
    """Local steps between two exchanges."""
    steps = getattr(algorithm, "steps", None) or getattr(algorithm, "local_steps", None)
    return DEFAULT_STEPS if steps is None else int(steps)


def settings_of(contest: Contest) -> dict[str, Any]:
    """What was compared, as in compare.json."""
    fleet = contest.fleet
    return {
        "algorithms": {
            name: {"algorithm": type(settings).__name__, **dataclasses.asdict(settings)}
            for name, settings in contest.algorithms.items()
        },
        "peers": contest.peers,
        "fleet": fleet if isinstance(fleet, str) else fleet.counts(),
        "faults": [str(fault) for fault in contest.faults],
        "seeds": list(contest.seeds),
        "until_s": contest.until_s,
        "steps": contest.steps,
        "lr_factors": list(contest.lr_factors),
        "cost_as": None if contest.cost_as is None else str(contest.cost_as),
        "dtype": contest.dtype,
        "network": None if contest.network is None else str(contest.network),
    }


def _check_steps(name: str, algorithm: Any) -> None:
    if getattr(algorithm, "local_s", None) is not None:
        raise ConfigError(
            f"{name} trains for local-s = {algorithm.local_s:g} seconds a round, which are other "
            "numbers of steps on other devices: end the comparison by time (until)"
        )
