"""The settings of a run that Flower starts: all of them in the app's run config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from flwr_moshpit.config import ALGORITHMS, RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import TRAINER_KEYS
from flwr_moshpit.settings import RUN_KEYS, RunSettings, algorithm_keys, gather

OWN_KEYS: dict[str, Any] = {
    "out": "",
    "min-supernodes": 2,
    "log-every-s": 60.0,
    "budget-h": 168.0,
    "resume": "",
}
"""Keys that only a run on Flower has, and their defaults.

min-supernodes   on devices: begin when so many have come; later ones join a swarm that runs
log-every-s      on devices: seconds between two looks at each peer; for each Flower starts a
                 process there that takes seconds of a processor
budget-h         on devices: hours after which a peer ends whom nobody has stopped
resume           on devices: the id of a swarm that runs already, whose ServerApp was lost
"""
RFAST_STEPS = 10
"""Local epochs of R-FAST where nothing is said: each job is a call of Flower's engine."""

_ALIKE = 0.85
"""How much a key must look like one of ours to be a slip of the pen: "num-rounds" does not."""


def flower_settings(run_config: Mapping[str, Any], num_nodes: int) -> RunSettings:
    """What `run_config` says of a run on `num_nodes` SuperNodes, kebab-case keys.

    An app's own keys are left alone. Raises ConfigError for a key that all but is one of ours, for
    one that Flower decides, and for a value that cannot be.
    """
    ours = sorted({*RUN_KEYS, *OWN_KEYS, *TRAINER_KEYS, *all_algorithm_keys()})
    for key in run_config:
        near = difflib.get_close_matches(key, ours, n=1, cutoff=_ALIKE)
        if key not in ours and near:
            raise ConfigError(f"setting {key!r} is unknown; did you mean {near[0]!r}?")
    peers = run_config.get("peers", "")
    if peers not in ("", num_nodes):
        raise ConfigError(
            f"peers is {peers}, but there are {num_nodes} SuperNodes: leave it out, or give "
            f'--federation-config "num-supernodes={peers}"'
        )
    if run_config.get("workers", "") not in ("", 0):
        raise ConfigError(
            f"workers is {run_config['workers']}, but Flower's engine trains here: leave it out, "
            'or give it processors with --federation-config "init-args-num-cpus=N"'
        )
    given = dict(run_config)
    if given.get("algorithm") == "rfast" and given.get("local-steps", "") == "":
        given["local-steps"] = RFAST_STEPS if _takes_epochs(given) else 1
    return gather(given, {}, {"peers": num_nodes})


def own(run_config: Mapping[str, Any], key: str) -> Any:
    """The value of one of `OWN_KEYS`. Raises ConfigError for one of the wrong kind."""
    default = OWN_KEYS[key]
    value = run_config.get(key, "")
    if value == "":
        return default
    if isinstance(default, str):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{key} must be a number above 0, not {value!r}")
    return type(default)(value)


def budget_s(run_config: Mapping[str, Any]) -> float:
    """How long a peer runs at most."""
    return float(own(run_config, "budget-h")) * 3600


def all_algorithm_keys() -> list[str]:
    return [key for name in ALGORITHMS for key in algorithm_keys(name)]


def _takes_epochs(run_config: Mapping[str, Any]) -> bool:
    return run_config.get("topology") not in RFast.GRAPHS
