"""The settings of a run that Flower starts: all of them in the app's run config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from flwr_moshpit.config import ALGORITHMS, Algorithm, RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import TRAINER_KEYS
from flwr_moshpit.settings import RUN_KEYS, RunSettings, algorithm_keys, gather

OWN_KEYS = ("out",)
"""Keys that only a run on Flower has."""
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


def all_algorithm_keys() -> list[str]:
    return [key for name in ALGORITHMS for key in algorithm_keys(name)]


def _takes_epochs(run_config: Mapping[str, Any]) -> bool:
    return run_config.get("topology") not in RFast.GRAPHS


def steps_of(algorithm: Algorithm) -> int:
    """Local steps between two exchanges."""
    return int(getattr(algorithm, "local_steps", None) or getattr(algorithm, "steps", None) or 1)
