"""Serverless federated learning: clients average among themselves, in simulation and on devices.

Simulation    a swarm of virtual devices that really trains, in virtual time
Moshpit       an algorithm's settings; RFast the other one's; FedAvg to compare with
Fleet         which device each peer is
Network       how they are connected
TorchTrainer  what they train
History       what came out
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_moshpit.config import FedAvg, Moshpit, RFast
    from flwr_moshpit.errors import (
        ConfigError,
        LocalProtocolError,
        MoshpitError,
        ProtocolError,
        RemoteProtocolError,
        SchemaError,
        TrainerError,
        TransportError,
    )
    from flwr_moshpit.simulation.fleet import Fleet
    from flwr_moshpit.simulation.history import History
    from flwr_moshpit.simulation.network import Network
    from flwr_moshpit.simulation.run import Simulation
    from flwr_moshpit.torch_trainer import TorchTrainer

    __version__: str

__all__ = [
    "ConfigError",
    "FedAvg",
    "Fleet",
    "History",
    "LocalProtocolError",
    "Moshpit",
    "MoshpitError",
    "Network",
    "ProtocolError",
    "RFast",
    "RemoteProtocolError",
    "SchemaError",
    "Simulation",
    "TorchTrainer",
    "TrainerError",
    "TransportError",
]

# Each is imported when it is first used: a device must not load the simulator, nor a simulation
# without torch models torch.
_MODULES = {
    "FedAvg": "config",
    "Moshpit": "config",
    "RFast": "config",
    "Fleet": "simulation.fleet",
    "History": "simulation.history",
    "Network": "simulation.network",
    "Simulation": "simulation.run",
    "TorchTrainer": "torch_trainer",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    return getattr(module, name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flwr-moshpit")
    except PackageNotFoundError:
        # A source tree that was never installed.
        return "unknown"


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
