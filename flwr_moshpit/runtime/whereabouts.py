"""Addresses: how they are written, and at which of this device's others reach it, which is the one
from which it reaches them."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from flwr_moshpit.errors import ConfigError

ANYWHERE = ("0.0.0.0", "[::]")
"""Hosts to listen on that are no address to be dialled at."""
PORT_MAX = 65_535


def host_and_port(address: str, setting: str) -> tuple[str, int]:
    """Of "host:port", without the brackets around IPv6. Raises ConfigError, which names `setting`,
    for anything else."""
    host, _, port = address.rpartition(":")
    # gRPC takes a larger port modulo 65,536, and an IPv6 address without brackets for a port short.
    is_bare = not (host.startswith("[") and host.endswith("]"))
    if not host or (is_bare and ":" in host) or not (port.isascii() and port.isdigit()):
        raise ConfigError(
            f"{setting}: an address must be written as HOST:PORT, or [HOST]:PORT for IPv6, "
            f"not {address!r}"
        )
    if len(port) > 5 or int(port) > PORT_MAX:
        raise ConfigError(f"{setting}: a port must be at most {PORT_MAX}, not {address!r}")
    return host.strip("[]"), int(port)


def why_unreachable(address: str, within_s: float) -> str:
    """Why nobody takes a connection there; "" if somebody does."""
    try:
        socket.create_connection(host_and_port(address, "address"), within_s).close()
    except (OSError, ConfigError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def source_towards(addresses: Iterable[str]) -> str | None:
    """The host, as in "host:port", from which packets to one of `addresses` would be sent; None if
    there is no way to any. Sends nothing."""
    for address in addresses:
        host, _, port = address.rpartition("@")[2].rpartition(":")
        try:
            # Of a name the first address will do: only the way there is looked up.
            family, *_, target = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                source = str(probe.getsockname()[0])
        except (OSError, ValueError):
            continue
        return f"[{source}]" if family == socket.AF_INET6 else source
    return None
