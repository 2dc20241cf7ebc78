"""Settings of the algorithms: frozen, documented, validated when they are made.

Everything has a default that fits the swarm; `None` means "derived", and what was derived and why
is printed by `flwr-moshpit simulate --explain`. Names follow Python here and Flower's kebab-case in
an app's `[tool.flwr.app.config]`; `algorithm_from_config` maps one to the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr_moshpit.errors import ConfigError


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moshpit:
    """Moshpit averaging: local steps, then one all-reduce inside a small group, again and again."""

    group_size: int | None = None
    """M, the most peers that average together; at least 2. Derived: everybody up to 16 peers, else
    the square root of their number, at most 32. Larger groups mix faster and fail more often."""

    local_steps: int | None = None
    """Optimizer steps between two rounds, the same for all peers. 20 if `local_s` is None too."""

    local_s: float | None = None
    """Seconds of training between two rounds instead: fast devices do more steps."""

    delayed: bool = False
    """Go on training while a round is under way; only the difference that it made is added."""

    patience: float = 0.25
    """How long, as a fraction of the median local time, a group waits for a member that says
    nothing. Above 0; a larger one loses less of the stragglers' work and more of everyone's time."""

    part_bytes: int = 1 << 20
    """Largest piece of a vector in one message. Smaller pieces overlap better and cost more."""

    share_bytes_min: int = 1 << 14
    """A member that would reduce less than this reduces nothing: below about one round trip's worth
    of bytes another message costs more than it saves."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        size = self.group_size
        _need(size is None or size >= 2, f"group-size must be at least 2, not {size}")
        _need(
            self.local_steps is None or self.local_s is None,
            "local-steps and local-s exclude each other: set one of them",
        )
        steps = self.local_steps
        _need(steps is None or steps >= 1, f"local-steps must be at least 1, not {steps}")
        _need(
            self.local_s is None or (self.local_s > 0 and math.isfinite(self.local_s)),
            f"local-s must be above 0, not {self.local_s}",
        )
        _need(self.patience > 0, f"patience must be above 0, not {self.patience}")
        _need(self.part_bytes >= 1024, f"part-bytes must be at least 1024, not {self.part_bytes}")
        _need(
            self.share_bytes_min >= 0,
            f"share-bytes-min must not be negative, not {self.share_bytes_min}",
        )
        _need(self.weight_max > 0, f"weight-max must be above 0, not {self.weight_max}")

    def group_size_for(self, num_peers: int) -> int:
        """M for a swarm of `num_peers`: the setting, or the rule in its description."""
        if self.group_size is not None:
            return self.group_size
        if num_peers <= 16:
            return max(2, num_peers)
        return min(32, math.isqrt(num_peers - 1) + 1)

    @property
    def steps(self) -> int | None:
        """`local_steps` with its default, or None where `local_s` rules."""
        if self.local_s is not None:
            return None
        return self.local_steps if self.local_steps is not None else 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """The server's way, to compare with: everybody trains, one server averages."""

    local_steps: int = 20
    """Optimizer steps between two rounds, the same for all clients."""

    fraction: float = 1.0
    """Share of the living clients that train in a round, above 0 and at most 1."""

    weight_max: float = 1e9
    """Most examples that a client may claim."""

    def __post_init__(self) -> None:
        _need(self.local_steps >= 1, f"local-steps must be at least 1, not {self.local_steps}")
        _need(0 < self.fraction <= 1, f"fraction must be in (0, 1], not {self.fraction}")
        _need(self.weight_max > 0, f"weight-max must be above 0, not {self.weight_max}")


Algorithm = Moshpit | FedAvg

ALGORITHMS: dict[str, type[Any]] = {"moshpit": Moshpit, "fedavg": FedAvg}


def algorithm_from_config(name: str, settings: Mapping[str, Any]) -> Any:
    """The algorithm called `name` with kebab-case `settings`, as in `[tool.flwr.app.config]`.

    Raises ConfigError for an unknown algorithm, a key that the algorithm does not have, or a value
    of the wrong type, and names what would be accepted.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm {name!r} is unknown; there are: {', '.join(ALGORITHMS)}")
    kind = ALGORITHMS[name]
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in fields:
            raise ConfigError(
                f"{name} has no setting {key!r}; it has: {', '.join(sorted(fields))}"
            )
        values[fields[key].name] = _as_type(key, value, str(fields[key].type))
    return kind(**values)


def _as_type(key: str, value: Any, annotation: str) -> Any:
    """`value` as the field's annotated type: int, float, bool or str, possibly `| None`."""
    wanted = annotation.removesuffix(" | None")
    if value is None and annotation != wanted:
        return None
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    types = {"int": int, "float": float, "bool": bool, "str": str}
    if wanted in types and type(value) is not types[wanted]:
        raise ConfigError(f"{key} must be of type {wanted}, not {value!r}")
    return value
