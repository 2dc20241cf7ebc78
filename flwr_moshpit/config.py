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
from typing import Any, ClassVar

from flwr_moshpit.errors import ConfigError


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moshpit:
    """Moshpit averaging: local steps, then one all-reduce inside a small group, again and again."""

    needs_server: ClassVar[bool] = False
    COMPRESSIONS: ClassVar[tuple[str, ...]] = ("none", "float16", "int8")
    PART_BYTES_MAX: ClassVar[int] = 1 << 30

    group_size: int | None = None
    """M, the most peers that average together; at least 2. Derived: everybody up to 16 peers, else
    the square root of their number, at most 32. Larger groups mix faster and fail more often."""

    local_steps: int | None = None
    """Optimizer steps between two rounds, the same for all peers. 20 if `local_s` is None too."""

    local_s: float | None = None
    """Seconds of training between two rounds instead: fast devices do more steps."""

    delayed: bool = False
    """Go on training while a round is under way; only the difference that it made is added."""

    patience: float = 0.2
    """How long, as a fraction of the median local time, a group waits for a member that says
    nothing. Above 0; a larger one loses less of the stragglers' work, more of everyone's time."""

    part_bytes: int = 1 << 20
    """Largest piece of a vector in one message. Smaller pieces overlap better and cost more; where
    a member's line is known to be slow they are smaller, down to 64 KiB."""

    compression: str = "none"
    """How parts travel in rounds with training: "none", "float16", or "int8", in blocks with a
    scale each. What that leaves out is sent in later rounds, so that no mean is biased. A group
    does what the most exact of its members wants."""

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
        _need(
            self.patience > 0 and math.isfinite(self.patience),
            f"patience must be above 0, not {self.patience}",
        )
        _need(
            self.compression in self.COMPRESSIONS,
            f"compression must be one of {', '.join(self.COMPRESSIONS)}, not {self.compression!r}",
        )
        _need(
            1024 <= self.part_bytes <= self.PART_BYTES_MAX,
            f"part-bytes must be at least 1024 and at most {self.PART_BYTES_MAX}, "
            f"not {self.part_bytes}",
        )
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
class RFast:
    """R-FAST: gradient tracking at everybody's own pace, no round, no barrier."""

    needs_server: ClassVar[bool] = False
    TREES: ClassVar[tuple[str, ...]] = ("fleet", "binary", "star", "line")
    GRAPHS: ClassVar[tuple[str, ...]] = ("ring", "exponential", "complete")

    topology: str = "fleet"
    """Who talks to whom. Trees, which repair themselves: "fleet" (fast devices at and near the
    root), "binary", "star", "line". Graphs in which every peer is a root: "ring", "exponential",
    "complete"; they run at the pace of the slowest peer."""

    fan_out: int | None = None
    """Children of a peer in "fleet". Derived: the fewest that keep the tree shallow, from 4 to 8 up
    to 585 peers, then as many as three levels need."""

    local_steps: int = 1
    """1: one gradient a step. More: corrected local epochs of so many optimizer steps."""

    learning_rate: float = 0.05
    """The trainer's, for the mean gradient. The step on the sum of all gradients follows from it
    and from the measured round trip."""

    optimizer: str = "sgd"
    """What the root of a tree does with the tracked gradient: "sgd", "momentum" or "adam"."""

    momentum: float = 0.9
    """For "momentum" and "adam", in [0, 1). The gradients are averaged, m <- momentum m +
    (1 - momentum) z, so that the learning rate means what it means without."""

    weigh_examples: bool = False
    """Weigh a peer's gradient by the examples it was taken over; otherwise all peers count alike.
    Costs nothing; right if the loss of all examples matters, not that of all peers."""

    lease_s: float = 2.5
    """How long a peer keeps what a silent neighbour has pushed to it. A cut-off peer looks for
    another parent a tenth after this time, so by default a dead root is replaced within 3 s, as
    soon as all know of its death; a shorter lease repairs faster and gives up links sooner."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        known = (*self.TREES, *self.GRAPHS)
        _need(
            self.topology in known,
            f"topology must be one of {', '.join(known)}, not {self.topology!r}",
        )
        fan_out = self.fan_out
        _need(fan_out is None or fan_out >= 1, f"fan-out must be at least 1, not {fan_out}")
        _check_rival(self.local_steps, self.weight_max)
        _need(
            self.learning_rate > 0 and math.isfinite(self.learning_rate),
            f"learning-rate must be above 0, not {self.learning_rate}",
        )
        _need(
            self.optimizer in ("sgd", "momentum", "adam"),
            f"optimizer must be one of sgd, momentum, adam, not {self.optimizer!r}",
        )
        _need(0 <= self.momentum < 1, f"momentum must be in [0, 1), not {self.momentum}")
        _need(
            self.lease_s > 0 and math.isfinite(self.lease_s),
            f"lease-s must be above 0, not {self.lease_s}",
        )
        if self.topology in self.GRAPHS:
            _need(
                self.local_steps == 1,
                f"local-steps must be 1 on a {self.topology}, not {self.local_steps}: corrected "
                f'local epochs need a tree, such as topology = "fleet"',
            )
            _need(
                self.optimizer == "sgd",
                f"optimizer must be sgd on a {self.topology}, not {self.optimizer!r}: only the "
                f'root of a tree can run another, such as with topology = "fleet"',
            )

    @property
    def is_tree(self) -> bool:
        return self.topology in self.TREES


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """The server's way, to compare with: everybody trains, one server averages."""

    needs_server: ClassVar[bool] = True
    """The swarm has one more peer, called "server", that trains nothing."""

    local_steps: int = 20
    """Optimizer steps between two rounds, the same for all clients."""

    fraction: float = 1.0
    """Share of the living clients that train in a round, above 0 and at most 1."""

    weight_max: float = 1e9
    """Most examples that a client may claim."""

    def __post_init__(self) -> None:
        _check_rival(self.local_steps, self.weight_max)
        _need(0 < self.fraction <= 1, f"fraction must be in (0, 1], not {self.fraction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Everybody trains alone, nobody averages: what a peer reaches without the others."""

    needs_server: ClassVar[bool] = False

    local_steps: int = 20
    """Optimizer steps in a round."""

    def __post_init__(self) -> None:
        _check_rival(self.local_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ring all-reduce SGD: local steps, then everybody averages with everybody around a ring."""

    needs_server: ClassVar[bool] = False

    local_steps: int = 20
    """Optimizer steps between two all-reduces, the same for all peers. With 1, averaging the models
    is averaging the gradients."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        _check_rival(self.local_steps, self.weight_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGroups:
    """Every round the peers are shuffled into groups, each of which averages around a ring."""

    needs_server: ClassVar[bool] = False

    group_size: int | None = None
    """Most peers in a group, at least 2. Derived as Moshpit's."""

    local_steps: int = 20
    """Optimizer steps between two rounds, the same for all peers."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        size = self.group_size
        _need(size is None or size >= 2, f"group-size must be at least 2, not {size}")
        _check_rival(self.local_steps, self.weight_max)

    def group_size_for(self, num_peers: int) -> int:
        """The largest group in a swarm of `num_peers`: the setting, or Moshpit's rule."""
        return Moshpit(group_size=self.group_size).group_size_for(num_peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DPSGD:
    """D-PSGD: local steps, then everybody averages with its neighbours in a graph, in step."""

    needs_server: ClassVar[bool] = False

    topology: str = "exponential"
    """The graph: "ring", "exponential" (neighbours 1, 2, 4, ... places away) or "complete"."""

    local_steps: int = 20
    """Optimizer steps between two exchanges, the same for all peers."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        _check_topology(self.topology)
        _check_rival(self.local_steps, self.weight_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class ADPSGD:
    """AD-PSGD: local steps at one's own pace, averaging with a random neighbour meanwhile."""

    needs_server: ClassVar[bool] = False

    topology: str = "complete"
    """Whom a peer may average with: "ring", "exponential" or "complete"."""

    local_steps: int = 20
    """Optimizer steps for every average that a peer asks for."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        _check_topology(self.topology)
        _check_rival(self.local_steps, self.weight_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGP:
    """Stochastic gradient push: push-sum along a directed exponential graph, in step."""

    needs_server: ClassVar[bool] = False

    local_steps: int = 20
    """Optimizer steps between two pushes, the same for all peers."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        _check_rival(self.local_steps, self.weight_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class OSGP:
    """Overlap SGP: pushes travel while their receivers train on, for at most `overlap` rounds."""

    needs_server: ClassVar[bool] = False

    overlap: int = 1
    """How many rounds late a push may be before its receiver waits for it, at least 1."""

    local_steps: int = 20
    """Optimizer steps between two pushes, the same for all peers."""

    weight_max: float = 1e9
    """Most examples that a peer may claim."""

    def __post_init__(self) -> None:
        _need(self.overlap >= 1, f"overlap must be at least 1, not {self.overlap}")
        _check_rival(self.local_steps, self.weight_max)


def _check_rival(local_steps: int, weight_max: float = 1.0) -> None:
    _need(local_steps >= 1, f"local-steps must be at least 1, not {local_steps}")
    _need(weight_max > 0, f"weight-max must be above 0, not {weight_max}")


def _check_topology(topology: str) -> None:
    known = ("ring", "exponential", "complete")
    _need(topology in known, f"topology must be one of {', '.join(known)}, not {topology!r}")


Algorithm = Moshpit | RFast | FedAvg | Local | Ring | RandomGroups | DPSGD | ADPSGD | SGP | OSGP

ALGORITHMS: dict[str, type[Any]] = {
    "moshpit": Moshpit,
    "rfast": RFast,
    "fedavg": FedAvg,
    "ring": Ring,
    "dpsgd": DPSGD,
    "adpsgd": ADPSGD,
    "sgp": SGP,
    "osgp": OSGP,
    "random-groups": RandomGroups,
    "local": Local,
}


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
            raise ConfigError(f"{name} has no setting {key!r}; it has: {', '.join(sorted(fields))}")
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
