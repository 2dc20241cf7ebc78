"""From an algorithm's settings to the machine that runs it on one peer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import numpy as np

from flwr_moshpit.config import ALGORITHMS
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import Machine, PeerInfo, State, Vector, View

# By name, imported when asked for: a device loads the one algorithm that it runs.
_MACHINES = {
    "Moshpit": "moshpit:MoshpitPeer",
    "RFast": "rfast:RFastPeer",
    "FedAvg": "baselines.fedavg:FedAvgPeer",
    "Local": "baselines.local:LocalPeer",
    "Ring": "baselines.ring:RingPeer",
    "RandomGroups": "baselines.random_groups:RandomGroupsPeer",
    "DPSGD": "baselines.dpsgd:DPSGDPeer",
    "ADPSGD": "baselines.adpsgd:ADPSGDPeer",
    "SGP": "baselines.sgp:SGPPeer",
    "OSGP": "baselines.sgp:SGPPeer",
}


def build_machine(
    algorithm: Any,
    me: PeerInfo,
    params: Vector,
    view: View,
    rng: np.random.Generator,
    incarnation: int = 0,
    schema: bytes = b"",
    state: State | None = None,
) -> Machine:
    """The machine of peer `me` under `algorithm`, one of the settings in `config.ALGORITHMS`.

    params: (d,), the common initial model; `state`, a snapshot of an earlier incarnation, overrides
    it. `schema` is the hash of the model's layout: peers with another one are refused. Raises
    ConfigError for settings that no machine belongs to, and for the state of another algorithm or
    another model.
    """
    make = machine_type(algorithm)
    try:
        machine = make(
            algorithm, me, params, view, rng, incarnation=incarnation, schema=schema, state=state
        )
    except KeyError as error:
        if state is None:
            raise
        raise ConfigError(
            f"state: what was saved is not of this version's {type(algorithm).__name__}, it has no "
            f"{error}: give this peer another folder"
        ) from error
    if machine.params.shape != params.shape:
        raise ConfigError(
            f"state: the saved model has {machine.params.size} parameters, this one {params.size}: "
            "give this peer another folder"
        )
    return machine


def machine_type(algorithm: Any) -> Callable[..., Machine]:
    """The class of the machines that run under `algorithm`. Raises ConfigError if there is none."""
    name = type(algorithm).__name__
    if name not in _MACHINES:
        raise ConfigError(
            f"algorithm must be one of the settings for {', '.join(ALGORITHMS)}, not {algorithm!r}"
        )
    module, _, kind = _MACHINES[name].partition(":")
    path = f"flwr_moshpit.protocol.{module}"
    try:
        return cast(Callable[..., Machine], getattr(import_module(path), kind))
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise ConfigError(f"algorithm {name}: this installation has no {path}") from error
