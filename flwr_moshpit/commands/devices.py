"""`flwr-moshpit devices`: the catalogue as a table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flwr_moshpit.observe.text import scaled
from flwr_moshpit.simulation import device as device_module
from flwr_moshpit.simulation.device import Catalogue, DeviceProfile, load_catalogue

_NARROWEST = 100


def devices(*, sources: bool, catalogue: str | None) -> None:
    """Print the devices of the built-in catalogue, and of the file `catalogue` over it."""
    known = load_catalogue(*([Path(catalogue)] if catalogue else []))
    console = Console()
    if not console.is_terminal:
        # In a pipe the width is unknown; a row stays a row.
        console = Console(width=2 * _NARROWEST)
    console.print(_device_table(known, sources=sources))
    console.print(_link_table(known))
    console.print("* estimated, or one end of a range", style="dim")
    if sources:
        path = Path(device_module.__file__).with_name("catalogue.toml")
        console.print(f"Each figure's source: {path}", style="dim", soft_wrap=True)


def _device_table(catalogue: Catalogue, *, sources: bool) -> Table:
    table = _table("device", "FP32", "MFU", "trains at", "memory", "bandwidth", "power", "idle")
    table.add_column("link")
    if sources:
        table.add_column("sources")
    for name, device in catalogue.devices.items():
        row = [
            name,
            scaled(device.fp32_tflops * 1e12, "FLOP/s"),
            f"{device.mfu:g}{_mark(device, 'mfu')}",
            scaled(device.flops_per_s, "FLOP/s"),
            scaled(device.memory_bytes, "B"),
            scaled(device.memory_bytes_per_s, "B/s") + _mark(device, "memory_gb_per_s"),
            f"{device.power_w:g} W{_mark(device, 'power_w')}",
            f"{device.idle_w:g} W{_mark(device, 'idle_w')}",
            device.link_name,
        ]
        if sources:
            row.append(device.sources)
        table.add_row(*map(Text, row))
    return table


def _link_table(catalogue: Catalogue) -> Table:
    table = _table("link", "downlink", "uplink", "round trip", "jitter", "loss")
    for name, link in catalogue.links.items():
        table.add_row(
            Text(name),
            scaled(8 * link.downlink_bytes_per_s, "bit/s"),
            scaled(8 * link.uplink_bytes_per_s, "bit/s"),
            f"{2e3 * link.latency_s:g} ms",
            f"{1e3 * link.jitter_s:g} ms",
            f"{100 * link.loss:g} %",
        )
    return table


def _table(name: str, *figures: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def _mark(device: DeviceProfile, key: str) -> str:
    return "*" if key in device.unverified else ""
