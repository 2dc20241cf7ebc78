"""What follows for a real peer from the profile of its own device: the rules are `advice.py`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr_moshpit.config import Moshpit
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.simulation.advice import (
    BATCH_KEY,
    BATCH_MAX,
    SPEED_1_FLOPS_PER_S,
    leaves_batch_open,
    wire,
)
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.trainer import Cost


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """Of one peer, derived where nobody has set them."""

    algorithm: Any
    speed: float
    uplink_bytes_per_s: float | None
    """None, as for the downlink, where the profile's line was not measured."""
    downlink_bytes_per_s: float | None
    remarks: tuple[str, ...]
    """A line for each that was derived, with its reason."""


def own_settings(
    algorithm: Any,
    config: Mapping[str, Any],
    device: DeviceProfile,
    cost: Cost,
    vector_bytes: float,
    *,
    trains_by_flower: bool = True,
) -> OwnSettings:
    """What `device` sets in `algorithm` and in what a peer says of itself.

    `config` holds the kebab-case settings that were made, with "" for those that were not: what is
    there stays as it is. `cost` is that of the trainer, whose batch follows from the profile by
    itself; `vector_bytes` that of the whole vector, as float32 or float64.
    """
    remarks = []
    speed = device.flops_per_s / SPEED_1_FLOPS_PER_S
    if trains_by_flower and leaves_batch_open(config):
        remarks.append(
            f"{BATCH_KEY} = {cost.examples_per_step}: a power of two, at most {BATCH_MAX}, that "
            f"half of {scaled(device.memory_bytes, 'B')} holds"
        )
    line = None if "link" in device.unverified else device.link
    if line is not None and isinstance(algorithm, Moshpit) and not config.get("compression"):
        uplink = line.uplink_bytes_per_s
        local_s = _local_s(algorithm, device, cost)
        algorithm = replace(algorithm, compression=wire(uplink, vector_bytes, local_s))
        remarks.append(
            f"compression = {algorithm.compression}: {scaled(vector_bytes, 'B')} take "
            f"{duration(vector_bytes / uplink)} to send, training {duration(local_s)}"
        )
    told = "" if line is None else f", a line of {scaled(8 * line.uplink_bytes_per_s, 'bit/s')} up"
    remarks.append(
        f"speed = {speed:.3g}, by which it finds its place in trees and grids: trains at "
        f"{scaled(device.flops_per_s, 'FLOP/s')}{told}"
    )
    return OwnSettings(
        algorithm,
        speed,
        None if line is None else line.uplink_bytes_per_s,
        None if line is None else line.downlink_bytes_per_s,
        tuple(remarks),
    )


def _local_s(algorithm: Moshpit, device: DeviceProfile, cost: Cost) -> float:
    if algorithm.local_s is not None:
        return algorithm.local_s
    flops = cost.flops_per_example * cost.examples_per_step * (algorithm.steps or 1)
    return flops / device.flops_per_s
