"""Delay and loss on a line between two network namespaces: real packets, real TCP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest

from flwr_moshpit.testing.lan import Lan, reason_against

CAP_S = 50.0
PORT = 9000

ECHO = """
import socket, sys
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((sys.argv[1], 9000))
print("ready", flush=True)
while True:
    data, whence = udp.recvfrom(2048)
    udp.sendto(data, whence)
"""

PING = """
import socket, sys, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(0.5)
for _ in range(40):
    began_at = time.monotonic()
    udp.sendto(b"ping", (sys.argv[1], 9000))
    try:
        udp.recv(2048)
    except socket.timeout:
        continue
    print(time.monotonic() - began_at)
    break
"""

SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 9000))
print("ready", flush=True)
connection, _ = server.accept()
total = 0
while data := connection.recv(1 << 16):
    total += len(data)
connection.sendall(str(total).encode())
connection.close()
"""

SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000), timeout=45) as connection:
    connection.sendall(bytes(1_000_000))
    connection.shutdown(socket.SHUT_WR)
    print(connection.recv(100).decode())
"""


@pytest.fixture
def lan() -> Generator[Lan, None, None]:
    reason = reason_against(impaired=True)
    if reason is not None:
        pytest.skip(reason)
    with Lan() as lan:
        yield lan


def exchange(lan: Lan, server: str, client: str) -> str:
    """What `client`, run at "b", prints of its talk with `server`, run at "a"."""
    host = lan.addresses["a"]
    at_a = lan.command("a", sys.executable, "-c", server, host)
    with subprocess.Popen(at_a, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            assert serving.stdout.readline() == "ready\n"
            at_b = lan.command("b", sys.executable, "-c", client, host)
            return subprocess.run(
                at_b, capture_output=True, text=True, timeout=CAP_S, check=True
            ).stdout
        finally:
            serving.kill()


def test_a_round_trip_takes_twice_the_delays_of_both_lines(lan: Lan) -> None:
    lan.add("a", delay_s=0.04)
    lan.add("b", delay_s=0.02)
    assert float(exchange(lan, ECHO, PING)) >= 2 * (0.04 + 0.02)
    assert lan.count("b")["dropped"] == 0


def test_tcp_makes_good_what_a_line_loses(lan: Lan) -> None:
    lan.add("a", bytes_per_s=12.5e6)
    lan.add("b", bytes_per_s=12.5e6, loss=0.03)
    assert exchange(lan, SINK, SOURCE) == "1000000\n"
    counted = lan.count("b")
    # 700 segments at least, and 3 % of them would be 21.
    assert counted["carried"] >= 700
    assert counted["dropped"] >= 5
