"""Profiles of devices, and the catalogue: devices and links by name, ours and the user's."""

from __future__ import annotations

import difflib
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.simulation.network import Link

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Figures of one kind of device. Each one's source stands beside it in `catalogue.toml`."""

    name: str
    fp32_tflops: float
    """Peak."""
    fp16_tflops: float | None
    """Peak; None where the device has no faster float16."""
    mfu: float
    """Model FLOPs utilization: the part of the peak that training reaches, in (0, 1]."""
    memory_bytes: int
    memory_bytes_per_s: float
    power_w: float
    """While it trains."""
    idle_w: float
    link: Link
    link_name: str = ""
    sources: str = ""
    unverified: tuple[str, ...] = ()
    """Keys of figures that no source states."""

    @property
    def flops_per_s(self) -> float:
        """Of training in float32: the peak times `mfu`."""
        return self.fp32_tflops * 1e12 * self.mfu


@dataclass(frozen=True)
class Catalogue:
    """Devices and links by name, in the order of their files."""

    devices: Mapping[str, DeviceProfile]
    links: Mapping[str, Link]

    def device(self, name: str) -> DeviceProfile:
        """The device called `name`, or "device@link" to put it on another link of the catalogue.

        Raises ConfigError with near matches for a name that the catalogue does not have.
        """
        kind, at, link_name = name.partition("@")
        if kind not in self.devices:
            raise ConfigError(_unknown("device", kind, self.devices))
        device = self.devices[kind]
        if at:
            device = replace(device, name=name, link=self.link(link_name), link_name=link_name)
        return device

    def link(self, name: str) -> Link:
        """Raises ConfigError with near matches for a name that the catalogue does not have."""
        if name not in self.links:
            raise ConfigError(_unknown("link", name, self.links))
        return self.links[name]


def load_catalogue(*paths: str | Path) -> Catalogue:
    """The built-in catalogue with the figures of `paths` merged over it, the last one winning.

    Raises ConfigError naming file, device and key for a figure that is missing, unknown or
    impossible.
    """
    return _build([_builtin_tables(), *(_read(Path(path)) for path in paths)])


def own_device(path: Path) -> DeviceProfile:
    """The device that the file `path` is the profile of, as `flwr-moshpit probe` writes it.

    Raises ConfigError for a file that holds no device or several, and as `load_catalogue` does.
    """
    names = list(_read(path).section("device"))
    if len(names) != 1:
        raise ConfigError(
            f"the profile {path} must hold one device, not {len(names)}: `flwr-moshpit probe "
            "--out FILE` writes one"
        )
    return load_catalogue(path).device(names[0])


@functools.cache
def builtin_catalogue() -> Catalogue:
    """The devices and links that the package brings."""
    return load_catalogue()


_LINK_KEYS = ("downlink_mbit_per_s", "uplink_mbit_per_s", "rtt_ms", "jitter_ms", "loss")
_DEVICE_KEYS = (
    "fp32_tflops",
    "fp16_tflops",
    "mfu",
    "memory_gb",
    "memory_gb_per_s",
    "power_w",
    "idle_w",
)
_MAY_BE_ZERO = ("idle_w", "rtt_ms", "jitter_ms", "loss")
_OPTIONAL = {"jitter_ms": 0.0, "loss": 0.0}


@dataclass(frozen=True, slots=True)
class _Table:
    """One file's contents, and its name for messages."""

    file: str
    tables: Mapping[str, Any]

    def section(self, kind: str) -> Mapping[str, Any]:
        section = self.tables.get(kind, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{self.file}: {kind!r} must be a table, not {section!r}")
        return section


def _builtin_tables() -> _Table:
    return _read(Path(__file__).with_name("catalogue.toml"))


def _read(path: Path) -> _Table:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the catalogue {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for kind in tables:
        if kind not in ("default", "device", "link"):
            raise ConfigError(f"{path}: {_unknown('table', kind, ('default', 'device', 'link'))}")
    return _Table(path.name, tables)


def _build(files: list[_Table]) -> Catalogue:
    defaults: dict[str, Any] = {}
    for file in files:
        defaults |= file.section("default")
    links = {name: _link(at, name, entry) for name, (at, entry) in _merged(files, "link").items()}
    devices = {
        name: _device(at, name, {**defaults, **entry}, links)
        for name, (at, entry) in _merged(files, "device").items()
    }
    return Catalogue(devices, links)


def _merged(files: list[_Table], kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each entry's figures, and the last file that set any of them, which is blamed for errors."""
    merged: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in files:
        for name, entry in file.section(kind).items():
            where = f"{file.file}: {kind} {name!r}"
            if not isinstance(entry, dict):
                raise ConfigError(f"{where} must be a table, not {entry!r}")
            if "@" in name or ":" in name or "," in name:
                raise ConfigError(f"{where}: a name holds none of the signs '@', ':' and ','")
            before = merged[name][1] if name in merged else {}
            # A figure that the user gives is no longer an estimate of ours.
            unverified = [key for key in before.get("unverified", ()) if key not in entry]
            merged[name] = (file.file, {**before, "unverified": unverified, **entry})
    return merged


def _device(
    file: str, name: str, entry: Mapping[str, Any], links: Mapping[str, Link]
) -> DeviceProfile:
    where = f"{file}: device {name!r}"
    sources, unverified = _texts(where, entry, (*_DEVICE_KEYS, "link"))
    figure = functools.partial(_figure, where, entry)
    link_name = entry.get("link", "")
    if link_name not in links:
        raise ConfigError(f"{where}: {_unknown('link', str(link_name), links)}")
    return DeviceProfile(
        name=name,
        fp32_tflops=figure("fp32_tflops"),
        fp16_tflops=figure("fp16_tflops") if "fp16_tflops" in entry else None,
        mfu=figure("mfu"),
        memory_bytes=round(figure("memory_gb") * 1e9),
        memory_bytes_per_s=figure("memory_gb_per_s") * 1e9,
        power_w=figure("power_w"),
        idle_w=figure("idle_w"),
        link=links[link_name],
        link_name=link_name,
        sources=sources,
        unverified=unverified,
    )


def _link(file: str, name: str, entry: Mapping[str, Any]) -> Link:
    where = f"{file}: link {name!r}"
    _texts(where, entry, _LINK_KEYS)
    figure = functools.partial(_figure, where, entry)
    return Link(
        uplink_bytes_per_s=figure("uplink_mbit_per_s") * 1e6 / 8,
        downlink_bytes_per_s=figure("downlink_mbit_per_s") * 1e6 / 8,
        latency_s=figure("rtt_ms") / 2 / 1e3,
        jitter_s=figure("jitter_ms") / 1e3,
        loss=figure("loss"),
    )


def _figure(where: str, entry: Mapping[str, Any], key: str) -> float:
    if key not in entry:
        if key in _OPTIONAL:
            return _OPTIONAL[key]
        raise ConfigError(f"{where} lacks {key!r}")
    value = entry[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        least = "at least 0" if key in _MAY_BE_ZERO else "above 0"
        raise ConfigError(f"{where}: {key} must be {least}, not {value!r}")
    if key == "mfu" and value > 1:
        raise ConfigError(f"{where}: {key} must be at most 1, not {value!r}")
    if key == "loss" and value >= 1:
        raise ConfigError(f"{where}: {key} must be below 1, not {value!r}")
    return float(value)


def _texts(
    where: str, entry: Mapping[str, Any], keys: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """(sources, unverified) of an entry, all of whose keys are known."""
    for key in entry:
        if key not in (*keys, "sources", "unverified"):
            raise ConfigError(f"{where}: {_unknown('key', key, keys)}")
    sources, unverified = entry.get("sources", ""), entry.get("unverified", [])
    if not isinstance(sources, str):
        raise ConfigError(f"{where}: sources must be text, not {sources!r}")
    if not isinstance(unverified, list) or not all(key in keys for key in unverified):
        raise ConfigError(f"{where}: unverified must list keys of figures, not {unverified!r}")
    return sources, tuple(unverified)


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A message about a name that is not among `known`, with the nearest ones or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"{kind} {name!r} is unknown; did you mean {' or '.join(near)}?"
    return f"{kind} {name!r} is unknown; there are: {', '.join(names)}"
