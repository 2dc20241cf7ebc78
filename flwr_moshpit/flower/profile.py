"""A peer set by the profile of its own device, which `flwr-moshpit probe` writes. Needs no flwr."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from flwr_moshpit.runtime.compute import Offer
from flwr_moshpit.runtime.peer import PeerSettings
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.simulation.own_device import own_settings

PROFILE_KEY = "device-profile"
"""In a SuperNode's `--node-config`: the path of its device's profile."""


def suited(
    settings: PeerSettings, config: Mapping[str, Any], device: DeviceProfile, offer: Offer
) -> tuple[PeerSettings, Sequence[str]]:
    """(`settings` as `device` suggests, what was derived and why, a line each).

    `config` holds what was set, which rules. `offer` is of a task that tells its cost.
    """
    assert offer.cost is not None
    derived = own_settings(
        settings.algorithm,
        config,
        device,
        offer.cost,
        offer.params.nbytes,
        trains_by_flower=importlib.util.find_spec("flwr") is not None,
    )
    suited = dataclasses.replace(
        settings,
        algorithm=derived.algorithm,
        speed=derived.speed,
        uplink_bytes_per_s=derived.uplink_bytes_per_s,
        downlink_bytes_per_s=derived.downlink_bytes_per_s,
    )
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return suited, [
        *derived.remarks,
        f"OMP_NUM_THREADS = {threads}: what trains, of the processors",
    ]


def trainer_threads() -> int:
    """For the trainer of a peer: one processor is left to answer others."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)) - 1)
    return max(1, (os.cpu_count() or 1) - 1)
