"""What was chosen from peers, model and profiles, and why: `simulate --explain`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.observe.text import duration, scaled
from flwr_moshpit.protocol.grid import radices_for
from flwr_moshpit.protocol.lobby import PATIENCE_S
from flwr_moshpit.protocol.partition import shares
from flwr_moshpit.simulation.advice import advice, tree_order
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.trainer import Cost
from flwr_moshpit.vector import Layout

Row = tuple[str, str, str]
"""(setting, value, why)."""


def explain(
    algorithm: Any,
    fleet: Fleet,
    network: Network,
    layout: Layout,
    cost: Cost,
    vector_bytes: float,
    *,
    takes_steps: bool = True,
) -> list[Row]:
    """Rows about the model, each kind of device and the algorithm.

    `vector_bytes`: of one peer's whole vector on the wire. `takes_steps`: whether clients train for
    as many steps as they are told; otherwise a step of `cost` is all that they do in a round.
    """
    rows: list[Row] = [
        (
            "peers",
            f"{len(fleet):,}",
            ", ".join(f"{n} {kind}" for kind, n in fleet.counts().items()),
        ),
        (
            "model",
            f"{layout.dim:,} parameters",
            f"{layout.dtype.name}, {scaled(vector_bytes, 'B')} on the wire",
        ),
        (
            "memory",
            scaled(cost.memory_bytes, "B"),
            "parameters, gradients, optimizer state and one batch; the smallest device has "
            f"{scaled(min(device.memory_bytes for device in fleet), 'B')}",
        ),
    ]
    steps, local_s = _local_work(algorithm) if takes_steps else (None, None)
    kinds = {device.name: device for device in fleet}
    for name, device in kinds.items():
        rows.append(_training(name, device, cost, steps, local_s))
        busy_s = local_s or _steps_s(device, cost, steps or 1)
        rows += advice(name, device, cost, vector_bytes, busy_s)
    if isinstance(algorithm, Moshpit):
        rows += _moshpit(algorithm, fleet, network, layout, vector_bytes)
        typical_s = local_s or median(_steps_s(device, cost, steps or 1) for device in fleet)
        rows.append(
            (
                "deadline",
                f"{duration(max(algorithm.patience * typical_s, PATIENCE_S))} for a silent member",
                f"patience {algorithm.patience:g} of the median local time, at least "
                f"{PATIENCE_S:g} s; who is announced is "
                "waited for while that brings more contributions a second",
            )
        )
    else:
        rows += [
            (field.name.replace("_", "-"), str(getattr(algorithm, field.name)), "as set")
            for field in fields(algorithm)
        ]
    if isinstance(algorithm, RFast) and (order := tree_order(algorithm, fleet)) is not None:
        rows.append(order)
    return rows


def _local_work(algorithm: Any) -> tuple[int, float | None]:
    """(optimizer steps, or the seconds that rule instead)."""
    if isinstance(algorithm, Moshpit):
        return algorithm.steps or 1, algorithm.local_s
    return getattr(algorithm, "local_steps", 1), None


def _steps_s(device: DeviceProfile, cost: Cost, steps: int) -> float:
    flops = cost.flops_per_example * cost.examples_per_step * steps
    return flops / device.flops_per_s


def _training(
    name: str, device: DeviceProfile, cost: Cost, steps: int | None, local_s: float | None
) -> Row:
    rate = (
        f"{scaled(device.flops_per_s, 'FLOP/s')} ({device.fp32_tflops:g} TFLOPS x {device.mfu:g})"
    )
    if local_s is not None:
        num_steps = max(1, int(local_s / _steps_s(device, cost, 1)))
        return (f"local time, {name}", duration(local_s), f"local-s; {num_steps:,} steps at {rate}")
    work = scaled(cost.flops_per_example * cost.examples_per_step, "FLOP")
    return (
        f"local time, {name}",
        duration(_steps_s(device, cost, steps or 1)),
        f"the app's own epochs, {work}, at {rate}"
        if steps is None
        else f"{steps} steps of {work} at {rate}",
    )


def _moshpit(
    algorithm: Moshpit, fleet: Fleet, network: Network, layout: Layout, vector_bytes: float
) -> list[Row]:
    num_peers = len(fleet)
    size = algorithm.group_size_for(num_peers)
    radices = radices_for(num_peers, size)
    num_cells = math.prod(radices)
    why = "as set" if algorithm.group_size is not None else _group_size_rule(num_peers)
    spare = num_cells - num_peers
    stand_ins = "every cell has a peer"
    if spare:
        peers = "the fastest peer stands" if spare == 1 else f"the {spare} fastest peers stand"
        stand_ins = (
            f"{peers} in for the empty: for each cell more {scaled(vector_bytes, 'B')} of memory "
            "and as much again to send in a round"
        )
    uplinks, seconds = _slowest_group(fleet, network, radices[0], vector_bytes)
    counts = shares(
        layout.dim,
        uplinks,
        [True] * len(uplinks),
        algorithm.share_bytes_min // layout.dtype.itemsize,
    )
    low, high = min(counts) / layout.dim, max(counts) / layout.dim
    part = min(algorithm.part_bytes, layout.dim * layout.dtype.itemsize)
    return [
        ("group-size", str(size), why),
        (
            "grid",
            " x ".join(map(str, radices)),
            f"averages through all peers in {len(radices)} "
            f"{'round' if len(radices) == 1 else 'rounds'}; {stand_ins}",
        ),
        (
            "shares",
            f"{100 * low:.0f} % to {100 * high:.0f} % of the vector",
            "what a member of a group with the slowest uplinks reduces, by bandwidth",
        ),
        ("part-bytes", scaled(part, "B"), "a piece of the vector in one message"),
        (
            "all-reduce",
            f"{duration(seconds)} at most",
            f"a group of {radices[0]} with the slowest uplinks ({scaled(8 * uplinks[0], 'bit/s')})",
        ),
    ]


def _group_size_rule(num_peers: int) -> str:
    if num_peers <= 16:
        return "up to 16 peers are one group"
    return "the square root of the number of peers, at most 32"


def _slowest_group(
    fleet: Fleet, network: Network, size: int, vector_bytes: float
) -> tuple[Sequence[float], float]:
    """(uplinks in bytes per second, seconds of an all-reduce) of the `size` slowest peers.

    A member with share w sends s (1 - w) as a sender and s (M - 1) w as a reducer; the three
    steps of naming, parts and averages each add a one-way trip.
    """
    links = sorted(
        (network.link_of(device) for device in fleet), key=lambda link: link.uplink_bytes_per_s
    )[:size]
    uplinks = [link.uplink_bytes_per_s for link in links]
    resolution = 1_000_000
    counts = shares(resolution, uplinks, [True] * len(uplinks), 0)
    trip_s = 2 * max(link.latency_s for link in links)
    slowest_s = max(
        vector_bytes * (1 + (len(uplinks) - 2) * count / resolution) / uplink
        for count, uplink in zip(counts, uplinks, strict=True)
    )
    return uplinks, (slowest_s if len(uplinks) > 1 else 0.0) + 3 * trip_s
