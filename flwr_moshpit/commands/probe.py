"""`flwr-moshpit probe`: measure this device, and write a profile that a simulated fleet takes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flwr_moshpit.commands.line_probe import Line, Waiting, measure_line
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.text import scaled
from flwr_moshpit.simulation.device import load_catalogue

if TYPE_CHECKING:
    from flwr_moshpit.torch_probe import Rates

POWER_W, IDLE_W = 15.0, 5.0
"""Where nothing tells: an Orin Nano's. Marked as unverified in the profile."""
LINK = "fixed-us"


def probe(
    *,
    name: str | None = None,
    out: Path | None = None,
    link: str | None = None,
    to: str | None = None,
    power_w: float | None = None,
    idle_w: float | None = None,
) -> Path:
    """Measure for some seconds and write the profile of a device called `name`.

    `to`: where another device waits, as `wait` does, so that the line to it is measured too.
    Otherwise `link` names one of the catalogue. Raises ConfigError for a name that cannot be, an
    unknown link, and where torch is missing; TransportError where nobody waits.
    """
    name = name or re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "device"
    try:
        from flwr_moshpit.torch_probe import measure
    except ModuleNotFoundError as error:
        raise ConfigError(f"probe needs torch: {error}") from error
    if to is not None and link is not None:
        raise ConfigError("link: it is measured, since `to` is given; leave one of them out")
    line = None if to is None else measure_line(to)
    rates = measure()
    power = {"power_w": power_w or _drawn_w(), "idle_w": idle_w}
    text = profile(name, rates, _memory_bytes(rates), line or link or LINK, power)
    out = out or Path(f"{name}.toml")
    out.write_text(text, encoding="utf-8")
    try:
        load_catalogue(out).device(name)
    except ConfigError:
        out.unlink()
        raise
    console = Console(highlight=False, markup=False, soft_wrap=True)
    half = (
        ""
        if rates.fp16_flops_per_s is None
        else (f", {scaled(rates.fp16_flops_per_s, 'FLOP/s')} in float16")
    )
    console.print(f"{rates.name}: {scaled(rates.fp32_flops_per_s, 'FLOP/s')} in float32{half}")
    console.print(
        f"trains at {scaled(rates.training_flops_per_s, 'FLOP/s')}, "
        f"copies {scaled(rates.memory_bytes_per_s, 'B/s')}"
    )
    if line is not None:
        console.print(
            f"sends {scaled(8 * line.uplink_bytes_per_s, 'bit/s')} to {to}, takes "
            f"{scaled(8 * line.downlink_bytes_per_s, 'bit/s')}, {1e3 * line.rtt_s:.3g} ms there "
            "and back"
        )
    console.print(f"{out}: flwr-moshpit simulate watch --fleet {name} --catalogue {out}")
    console.print(
        f"to set a peer of this device by it: flwr-moshpit peer --profile {out}, or on a SuperNode "
        f"--node-config 'device-profile=\"{out.resolve()}\"'"
    )
    return out


def wait(bind: str) -> None:
    """Be the other end of a line that another device measures, until Ctrl-C."""
    waiting = Waiting(bind)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"waits on {waiting.address}; there: flwr-moshpit probe --to {waiting.address}")
    try:
        waiting.serve()
    finally:
        waiting.close()


def profile(
    name: str,
    rates: Rates,
    memory_bytes: int,
    link: str | Line,
    power: dict[str, float | None],
) -> str:
    """The entries of a catalogue. What was not measured is `unverified` there."""
    assumed = {"power_w": POWER_W, "idle_w": IDLE_W}
    unverified = [key for key, value in power.items() if value is None]
    lines = [f"# Measured by `flwr-moshpit probe` on {rates.name}, but for what is unverified."]
    if isinstance(link, str):
        unverified.append("link")
    else:
        lines += _link_entry(f"{name}-line", link)
        link = f"{name}-line"
    lines += [
        f'[device."{name}"]',
        f"fp32_tflops = {rates.fp32_flops_per_s / 1e12:.4g}",
    ]
    if rates.fp16_flops_per_s is not None:
        lines.append(f"fp16_tflops = {rates.fp16_flops_per_s / 1e12:.4g}")
    mfu = min(1.0, rates.training_flops_per_s / rates.fp32_flops_per_s)
    lines += [
        f"mfu = {mfu:.3g}",
        f"memory_gb = {memory_bytes / 1e9:.3g}",
        f"memory_gb_per_s = {rates.memory_bytes_per_s / 1e9:.3g}",
        *(f"{key} = {value or assumed[key]:g}" for key, value in power.items()),
        f'link = "{link}"',
        'sources = "probe"',
        f"unverified = [{', '.join(repr(key) for key in unverified)}]".replace("'", '"'),
    ]
    return "\n".join(lines) + "\n"


def _link_entry(name: str, line: Line) -> list[str]:
    return [
        f'[link."{name}"]',
        f"downlink_mbit_per_s = {8e-6 * line.downlink_bytes_per_s:.4g}",
        f"uplink_mbit_per_s = {8e-6 * line.uplink_bytes_per_s:.4g}",
        f"rtt_ms = {1e3 * line.rtt_s:.3g}",
        f"jitter_ms = {1e3 * line.jitter_s:.3g}",
        'sources = "probe"',
        "",
    ]


def _memory_bytes(rates: Rates) -> int:
    """What training may use: the GPU's own, or this device's."""
    if rates.gpu_memory_bytes is not None and not rates.gpu_memory_is_shared:
        return rates.gpu_memory_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _drawn_w() -> float | None:
    """The limit of the power mode, as NVIDIA's tools tell it: what a training device draws."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=20.0, check=True)
        return float(done.stdout.splitlines()[0])
    return None
