"""How fast this device really is, measured with torch: what a profile of the fleet is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from flwr_moshpit.torch_model import Meter

_MATMUL = {"cpu": 1024, "cuda": 4096}
"""Side of the matrices: large enough that starting the multiplication costs nothing beside it."""
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
_MEASURED_S = 1.0


@dataclass(frozen=True, slots=True)
class Rates:
    """All measured, none of them from a data sheet."""

    device: str
    """ "cpu" or "cuda"."""
    name: str
    fp32_flops_per_s: float
    """Of a large matrix product."""
    fp16_flops_per_s: float | None
    """None on a processor, which has no faster float16."""
    training_flops_per_s: float
    """Of a small convolutional network in float32, forward, backward and step."""
    memory_bytes_per_s: float
    """Read and written, of a large copy."""
    gpu_memory_bytes: int | None
    gpu_memory_is_shared: bool


def cuda_name() -> str | None:
    """The GPU that torch uses, if it sees one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def measure(measured_s: float = _MEASURED_S) -> Rates:
    """Takes about five times `measured_s`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = _MATMUL[device]
    properties = torch.cuda.get_device_properties(0) if device == "cuda" else None
    fp16 = None
    if device == "cuda":
        fp16 = _matmul_flops_per_s(device, side, torch.float16, measured_s)
    return Rates(
        device=device,
        name=cuda_name() or f"{torch.get_num_threads()} threads of the processor",
        fp32_flops_per_s=_matmul_flops_per_s(device, side, torch.float32, measured_s),
        fp16_flops_per_s=fp16,
        training_flops_per_s=_training_flops_per_s(device, measured_s),
        memory_bytes_per_s=_copy_bytes_per_s(device, measured_s),
        gpu_memory_bytes=None if properties is None else int(properties.total_memory),
        # A Jetson's GPU has no memory of its own.
        gpu_memory_is_shared=bool(properties is not None and properties.is_integrated),
    )


def _matmul_flops_per_s(device: str, side: int, dtype: torch.dtype, measured_s: float) -> float:
    a = torch.rand(side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2.0 * side**3 / _seconds(lambda: torch.mm(a, a, out=out), device, measured_s)


def _copy_bytes_per_s(device: str, measured_s: float) -> float:
    source = torch.zeros(_COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * len(source) / _seconds(lambda: target.copy_(source), device, measured_s)


def _training_flops_per_s(device: str, measured_s: float) -> float:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(32, 3, 32, 32, device=device)
    y = torch.zeros(32, dtype=torch.long, device=device)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    with Meter() as meter:
        step()
    return meter.flops / _seconds(step, device, measured_s)


def _seconds(act: Callable[[], object], device: str, measured_s: float) -> float:
    """Of one `act()`, the median, after a few that warm up caches and clocks."""

    def timed() -> float:
        began_at = time.perf_counter()
        act()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_at

    for _ in range(3):
        timed()
    times: list[float] = []
    while sum(times) < measured_s or len(times) < 3:
        times.append(timed())
    return median(times)
