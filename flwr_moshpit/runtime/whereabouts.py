"""At which address of this device others reach it: the one from which it reaches them."""

from __future__ import annotations

import socket
from collections.abc import Iterable

ANYWHERE = ("0.0.0.0", "[::]")
"""Hosts to listen on that are no address to be dialled at."""


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
