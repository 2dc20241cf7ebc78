"""What suits a kind of device, by its profile; each rule is overridden by the setting it names.

batch    (batch-size) the largest power of two, at most 64, whose activations, beside parameters,
         gradients and optimizer state, fill half of the memory: the rest is the system's
wire     (compression) float16 where sending the vector once takes longer than the local steps,
         int8 where it takes twice as long in float16 still; else it costs precision for nothing
tree     (topology, fan-out) the higher, the more a device computes, times the root of what the
         slower direction of its line carries, as in `protocol.topology.fitness`
threads  (OMP_NUM_THREADS) of a peer: all processors but one, which answers others

`simulate --explain` tells what would suit. A real peer that is given its own device's profile
(`peer --profile FILE`, or `device-profile` in a SuperNode's `--node-config`) is set so, but for
what is set already: see `own_settings`. The batch is set for a ClientApp whose config has
`batch-size` and leaves it open, as "" or 0. Without a profile nothing but the threads of a peer on
a SuperNode is derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from flwr_moshpit.config import RFast
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.trainer import Cost

BATCH_KEY = "batch-size"
BATCH_MAX = 64
"""With more examples in a step an app's learning rate would not fit any more."""
TRIAL_BATCH = 8
"""Examples of the step by which the memory of one is found out."""
SPEED_1_FLOPS_PER_S = 2e11
"""An Orin Nano's: a peer without a profile counts as one."""
MEMORY_PART = 0.5
STATE_VECTORS = 3
"""Parameters, gradients and optimizer state, in vectors of the model's size."""


def batch_max(device: DeviceProfile, cost: Cost, model_bytes: float) -> int | None:
    """Examples a step that fit; None where activations are not known."""
    state_bytes = STATE_VECTORS * model_bytes
    example_bytes = (cost.memory_bytes - state_bytes) / max(1, cost.examples_per_step)
    room_bytes = MEMORY_PART * device.memory_bytes - state_bytes
    if example_bytes <= 0 or room_bytes < example_bytes:
        return None
    return 1 << int(math.log2(room_bytes / example_bytes))


def leaves_batch_open(config: Mapping[str, Any]) -> bool:
    """Whether an app's config has a batch size that is to be derived."""
    value = config.get(BATCH_KEY)
    return value == "" or (type(value) is int and value == 0)


def batch_for(device: DeviceProfile, cost: Cost, model_bytes: float) -> int:
    """Examples a step, from the `cost` of a step of another number; at least 1."""
    return max(1, min(BATCH_MAX, batch_max(device, cost, model_bytes) or TRIAL_BATCH))


def wire(uplink_bytes_per_s: float, vector_bytes: float, local_s: float) -> str:
    """`compression` for a device that trains for `local_s` between two rounds."""
    sends_s = vector_bytes / uplink_bytes_per_s
    if sends_s <= local_s:
        return "none"
    return "float16" if sends_s / 2 <= 2 * local_s else "int8"


def advice(
    name: str, device: DeviceProfile, cost: Cost, model_bytes: float, local_s: float
) -> list[tuple[str, str, str]]:
    """Rows (what, value, why) about one kind of device."""
    rows = []
    batch = batch_max(device, cost, model_bytes)
    if batch is not None:
        why = f"half of {scaled(device.memory_bytes, 'B')}; set by the app, or batch-size"
        rows.append((f"batch, {name}", f"up to {batch:,} examples", why))
    uplink = device.link.uplink_bytes_per_s
    fits = wire(uplink, model_bytes, local_s)
    told = "as it is" if fits == "none" else f"{fits} would pay"
    why = f"{scaled(model_bytes, 'B')} take {duration(model_bytes / uplink)} to send, training "
    rows.append((f"wire, {name}", told, f"{why}{duration(local_s)}; set by compression"))
    return rows


def tree_order(algorithm: RFast, fleet: Iterable[DeviceProfile]) -> tuple[str, str, str] | None:
    """The kinds of devices from the root downwards; None for a graph, which has no root."""
    if algorithm.topology in RFast.GRAPHS:
        return None

    def fitness(device: DeviceProfile) -> float:
        link = device.link
        return -device.flops_per_s * math.sqrt(
            min(link.uplink_bytes_per_s, link.downlink_bytes_per_s)
        )

    kinds = dict.fromkeys(device.name for device in sorted(fleet, key=fitness))
    why = "by what it computes and its line carries; set by topology and fan-out"
    return "from the root down", ", ".join(kinds), why
