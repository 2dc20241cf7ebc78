"""Swarms in pytest; see `Swarm` and the `swarm` fixture of the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_moshpit.testing.rules import Rule
    from flwr_moshpit.testing.stages import LeaderOf, Trigger
    from flwr_moshpit.testing.swarm import Swarm, SwarmHistory, SwarmStalled

__all__ = ["LeaderOf", "Rule", "Swarm", "SwarmHistory", "SwarmStalled", "Trigger"]

_HOMES = {"LeaderOf": "stages", "Rule": "rules", "Trigger": "stages"}


def __getattr__(name: str) -> Any:
    """Loaded when they are used: pytest imports this package in every project."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'swarm')}"), name)
