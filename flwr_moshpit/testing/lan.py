"""A LAN inside this machine: network namespaces on a bridge, for tests of real peers.

Needs Linux, root and iproute2; a closed place needs iptables as well, a line that delays or loses
packets (`impaired_line.py`) /dev/net/tun. `reason_against` says what is missing. Everything is
removed when the `with` block ends, processes in the namespaces included.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from flwr_moshpit.testing import impaired_line

SUBNET = "10.77.0"
PREFIX = "fm"
BURST_BYTES = 16_384
QUEUE_S = 0.2
"""How long a packet may wait for its turn on a line whose rate is limited, as in home routers."""


def reason_against(*, closed: bool = False, impaired: bool = False) -> str | None:
    """Why no LAN can be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    for tool in ("ip", "tc", *(["iptables"] if closed else [])):
        if shutil.which(tool, path=_PATH) is None:
            return f"there is no {tool}"
    if impaired and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is missing or closed"
    name = f"{PREFIX}{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, env=_ENV)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True, env=_ENV)
    return None


class Lan:
    """`places` are namespaces, each with one address, that reach each other over a bridge."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._base = f"{PREFIX}{os.getpid()}"
        self._namespaces: list[str] = []
        self._lines: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Lan:
        self._bridge = self._make_namespace("lan")
        self._in(self._bridge, "ip link add br0 type bridge")
        self._in(self._bridge, "ip link set br0 up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for line in self._lines.values():
            line.kill()
            line.communicate()
        for name in self._namespaces:
            with contextlib.suppress(OSError):
                # What cannot be removed is no reason to leave the others behind.
                pids = _run(f"ip netns pids {name}").split()
                if pids:
                    subprocess.run(["kill", "-9", *pids], env=_ENV, capture_output=True)
                _run(f"ip netns del {name}")

    def add(
        self,
        place: str,
        *,
        closed: bool = False,
        bytes_per_s: float | None = None,
        delay_s: float = 0.0,
        loss: float = 0.0,
    ) -> str:
        """A new place; returns its address. closed: nobody can open a connection to it, as behind
        NAT. bytes_per_s: of its line, in either direction. delay_s: how long a packet takes over
        its line, one way; loss: how likely it never arrives."""
        name, number = self._make_namespace(place), len(self.addresses) + 1
        address = self.addresses[place] = f"{SUBNET}.{number}"
        port = self._port(place)
        if delay_s or loss:
            self._lines[place] = self._impaired(name, port, delay_s, loss, seed=number)
        else:
            _run(f"ip link add {port} netns {self._bridge} type veth peer name eth0 netns {name}")
        self._in(self._bridge, f"ip link set {port} master br0 up")
        self._in(name, f"ip addr add {address}/16 dev eth0")
        self._in(name, "ip link set eth0 up")
        # A machine may use BBR, under which the flows of one line share it very unequally.
        self._in(name, "sysctl -qw net.ipv4.tcp_congestion_control=reno")
        if closed:
            self._in(name, "iptables -A INPUT -i eth0 -p tcp --syn -j DROP")
        if bytes_per_s is not None:
            self.limit(place, bytes_per_s)
        return address

    def count(self, place: str) -> dict[str, int]:
        """How many frames an impaired line has "carried" and "dropped" so far."""
        line = self._lines[place]
        assert line.stdin is not None
        assert line.stdout is not None
        line.stdin.write("\n")
        line.stdin.flush()
        counted: dict[str, int] = json.loads(line.stdout.readline())
        return counted

    def limit(self, place: str, bytes_per_s: float) -> None:
        """Let no more through than `bytes_per_s`, packet headers included, each way."""
        bits = int(8 * bytes_per_s)
        queue = f"root tbf rate {bits}bit burst {BURST_BYTES} latency {1000 * QUEUE_S:.0f}ms"
        self._in(self._name(place), f"tc qdisc replace dev eth0 {queue}")
        self._in(self._bridge, f"tc qdisc replace dev {self._port(place)} {queue}")

    def cut(self, place: str) -> None:
        """The line is dead: nothing gets through, and nobody is told."""
        self._in(self._bridge, f"ip link set {self._port(place)} nomaster")

    def mend(self, place: str) -> None:
        self._in(self._bridge, f"ip link set {self._port(place)} master br0")

    def move(self, place: str) -> str:
        """The place has another address from now on; returns it. Its connections are dead."""
        name, old = self._name(place), self.addresses[place]
        host = int(old.rpartition(".")[2])
        new = self.addresses[place] = f"{SUBNET}.{host + 100}"
        self._in(name, f"ip addr del {old}/16 dev eth0")
        self._in(name, f"ip addr add {new}/16 dev eth0")
        return new

    def command(self, place: str, *arguments: str) -> list[str]:
        """`arguments` as a command that runs in `place`."""
        return ["ip", "netns", "exec", self._name(place), *arguments]

    def _name(self, place: str) -> str:
        return f"{self._base}{place}"

    def _port(self, place: str) -> str:
        # A device's name has at most 15 characters.
        return f"v{[*self.addresses].index(place)}"

    def _make_namespace(self, place: str) -> str:
        name = self._name(place)
        _run(f"ip netns add {name}")
        self._namespaces.append(name)
        self._in(name, "ip link set lo up")
        return name

    def _impaired(
        self, name: str, port: str, delay_s: float, loss: float, seed: int
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", str(Path(impaired_line.__file__))]
        ends = [self._bridge, port, name, "eth0"]
        line = subprocess.Popen(
            [*command, *ends, str(delay_s), str(loss), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert line.stdout is not None
        if not line.stdout.readline():
            line.communicate()
            raise OSError(f"no impaired line to {name}")
        return line

    def _in(self, namespace: str, command: str) -> None:
        _run(f"ip netns exec {namespace} {command}")


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_ENV = {**os.environ, "PATH": _PATH}


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, env=_ENV)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout
