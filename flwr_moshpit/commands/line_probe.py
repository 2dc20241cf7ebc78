"""How fast the line between two devices is: bare TCP, one end waits and the other one measures.

The end that waits is asked for one thing a connection, by its first byte:

    r   give every byte back        a round trip
    u   take what comes             the other end's uplink; it is told the bytes a second
    d   send as long as I take it   the other end's downlink

It sends nothing but zeros and reads nothing but lengths, so it may stand open while one measures.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass
from statistics import median

from flwr_moshpit.errors import ConfigError, TransportError
from flwr_moshpit.runtime.whereabouts import host_and_port

WARMS_UP_S = 0.5
"""Not measured: until then TCP is still speeding up."""
MEASURED_S = 2.0
TRIPS = 21
SILENT_S = 10.0
_BLOCK = bytes(1 << 18)


@dataclass(frozen=True, slots=True)
class Line:
    """As this device sees it."""

    rtt_s: float
    """Median of the round trips."""
    jitter_s: float
    """Median of their distances to it."""
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float


class Waiting:
    """The end that waits, until it is closed. Raises ConfigError where it cannot listen."""

    def __init__(self, bind: str) -> None:
        host, port = host_and_port(bind, "wait")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"wait: cannot listen on {bind} ({error.strerror})") from error
        self.address = f"{bind.rpartition(':')[0]}:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        """Answer one connection after the other: two at a time would measure each other."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(SILENT_S)
                _answer(connection)

    def close(self) -> None:
        # A thread that accepts does not notice that its listener is closed.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _answer(connection: socket.socket) -> None:
    match connection.recv(1):
        case b"r":
            while connection.recv(1):
                connection.sendall(b"r")
        case b"u":
            connection.sendall(struct.pack("!d", _taken_bytes_per_s(connection)))
        case b"d":
            _send(connection)


def measure_line(address: str, measured_s: float = MEASURED_S) -> Line:
    """Of the line to the device that waits at `address`; takes three times `measured_s`.

    Raises TransportError when nobody answers there.
    """
    try:
        trips_s = _trips_s(address)
        with _asked(address, b"u") as connection:
            _send(connection, WARMS_UP_S + measured_s)
            connection.shutdown(socket.SHUT_WR)
            [uplink] = struct.unpack("!d", connection.recv(8, socket.MSG_WAITALL))
        with _asked(address, b"d") as connection:
            downlink = _taken_bytes_per_s(connection, WARMS_UP_S + measured_s)
    except (OSError, struct.error) as error:
        raise TransportError(
            f"to: {address} does not answer ({error}): run `flwr-moshpit probe --wait HOST:PORT` "
            "there, and open its port"
        ) from error
    rtt_s = median(trips_s)
    return Line(rtt_s, median(abs(trip_s - rtt_s) for trip_s in trips_s), uplink, downlink)


def _asked(address: str, what: bytes) -> socket.socket:
    connection = socket.create_connection(host_and_port(address, "to"), SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(what)
    return connection


def _trips_s(address: str) -> list[float]:
    trips_s = []
    with _asked(address, b"r") as connection:
        for _ in range(TRIPS):
            began_at = time.perf_counter()
            connection.sendall(b"r")
            if not connection.recv(1):
                raise ConnectionResetError("closed")
            trips_s.append(time.perf_counter() - began_at)
    return trips_s


def _send(connection: socket.socket, for_s: float = SILENT_S) -> None:
    ends_at = time.perf_counter() + for_s
    while time.perf_counter() < ends_at:
        connection.sendall(_BLOCK)


def _taken_bytes_per_s(connection: socket.socket, for_s: float = SILENT_S) -> float:
    """What comes in a second after the warm-up, until it ends or `for_s` is over."""
    began_at = counted_at = ended_at = time.perf_counter()
    num_bytes = 0
    while ended_at < began_at + for_s and (data := connection.recv(1 << 18)):
        ended_at = time.perf_counter()
        if ended_at < began_at + WARMS_UP_S:
            counted_at = ended_at
        else:
            num_bytes += len(data)
    return num_bytes / max(1e-9, ended_at - counted_at)
