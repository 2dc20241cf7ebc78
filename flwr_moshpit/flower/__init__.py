"""Flower: existing apps as clients of the swarm. The only folder that imports flwr.

Names are resolved when they are asked for: Flower takes seconds to import, and on Python 3.10 it
does not exist.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_moshpit.flower.actions import serverless
    from flwr_moshpit.flower.app import App, load_app
    from flwr_moshpit.flower.bootstrap import bootstrap_app
    from flwr_moshpit.flower.client import FlowerTrainer

__all__ = ["App", "FlowerTrainer", "bootstrap_app", "load_app", "serverless"]

_HOMES = {
    "App": "flwr_moshpit.flower.app",
    "FlowerTrainer": "flwr_moshpit.flower.client",
    "bootstrap_app": "flwr_moshpit.flower.bootstrap",
    "load_app": "flwr_moshpit.flower.app",
    "serverless": "flwr_moshpit.flower.actions",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
