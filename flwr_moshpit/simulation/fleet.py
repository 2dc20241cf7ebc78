"""A fleet: which device each peer of a simulation is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.simulation.device import Catalogue, DeviceProfile, builtin_catalogue


@dataclass(frozen=True, slots=True)
class Fleet:
    """One device per peer, in the order of the peers."""

    devices: tuple[DeviceProfile, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("a fleet needs at least one device")

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[DeviceProfile]:
        return iter(self.devices)

    def __getitem__(self, index: int) -> DeviceProfile:
        return self.devices[index]

    @classmethod
    def mix(
        cls,
        shares: Mapping[str, float],
        size: int,
        *,
        seed: int = 0,
        catalogue: Catalogue | None = None,
    ) -> Fleet:
        """`size` devices with the given share of each kind, in an order drawn by `seed`.

        The counts are the shares as nearly as whole devices allow (largest remainder); a device
        may be named "device@link" to give it another link of the catalogue.

        Raises ConfigError for an unknown device, a share below 0, and shares that do not sum to 1.
        """
        _check_size(size)
        catalogue = catalogue or builtin_catalogue()
        kinds = [catalogue.device(name) for name in shares]
        counts = _apportion(shares, size)
        devices = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        order = np.random.default_rng(np.random.SeedSequence([seed, 0xF1EE7])).permutation(size)
        return cls(tuple(devices[index] for index in order))

    @classmethod
    def parse(
        cls, text: str, size: int, *, seed: int = 0, catalogue: Catalogue | None = None
    ) -> Fleet:
        """`mix` from text: "jetson-nano:0.6,jetson-orin-nano:0.3,cloud-t4:0.1".

        A single name without a share stands for all devices.
        """
        shares: dict[str, float] = {}
        entries = [entry.strip() for entry in text.split(",")]
        for entry in entries:
            name, colon, share = entry.rpartition(":")
            if not colon and len(entries) == 1:
                name, share = entry, "1"
            try:
                value = float(share)
            except ValueError:
                value = math.nan
            if not name or math.isnan(value):
                raise ConfigError(
                    f"fleet: {entry!r} is not DEVICE:SHARE, as in jetson-nano:0.6,cloud-t4:0.4"
                )
            if name in shares:
                raise ConfigError(f"fleet: {name} is named twice")
            shares[name] = value
        return cls.mix(shares, size, seed=seed, catalogue=catalogue)

    @classmethod
    def uniform(cls, name: str, size: int, *, catalogue: Catalogue | None = None) -> Fleet:
        """`size` devices of one kind."""
        return cls.mix({name: 1.0}, size, catalogue=catalogue)

    def counts(self) -> dict[str, int]:
        """How many devices of each kind there are, in the order of their first appearance."""
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.name] = counts.get(device.name, 0) + 1
        return counts


def _check_size(size: int) -> None:
    if size < 1:
        raise ConfigError(f"peers must be at least 1, not {size}")


def _apportion(shares: Mapping[str, float], size: int) -> list[int]:
    """Whole numbers that sum to `size`, by largest remainder; ties go to the first named."""
    for name, share in shares.items():
        if not (math.isfinite(share) and share >= 0):
            raise ConfigError(f"fleet: the share of {name} must be in [0, 1], not {share}")
    total = math.fsum(shares.values())
    if abs(total - 1.0) > 1e-6:
        given = " + ".join(f"{share:g}" for share in shares.values()) or "nothing"
        raise ConfigError(f"fleet: the shares must sum to 1, but {given} = {total:g}")
    quotas = [share * size for share in shares.values()]
    # A share such as 0.3 of 10 is 2.9999999999999996 in floats and means 3.
    counts = [math.floor(quota + 1e-9 * size) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for step in range(size - sum(counts)):
        counts[by_remainder[step]] += 1
    return counts
