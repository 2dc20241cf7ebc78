"""`flwr-moshpit doctor`: what is missing on this device, and the cure."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import grpc
from rich.console import Console

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.runtime.whereabouts import host_and_port

HANDSHAKE_S = 20.0
_RELEASED_AT = 1_767_225_600.0
"""2026-01-01: a clock that shows less has been reset, and every certificate looks unborn to it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what was found."""

    what: str
    is_well: bool
    told: str
    cure: str = ""
    is_needed: bool = True
    """Whether a peer cannot run without it."""


def doctor(*, bind: str = "0.0.0.0:0") -> bool:
    """Print what was found; whether a peer can run here. `bind`: where it shall listen."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    can_run = True
    for finding in findings(bind):
        mark = "ok  " if finding.is_well else "NO  " if finding.is_needed else "-   "
        cure = f": {finding.cure}" if finding.cure and not finding.is_well else ""
        console.print(f"{mark}{finding.what:12} {finding.told}{cure}")
        can_run = can_run and (finding.is_well or not finding.is_needed)
    return can_run


def findings(bind: str) -> Iterator[Finding]:
    yield _python()
    for package, least, cure, is_needed in (
        ("numpy", "1.26", "pip install 'numpy>=1.26,<3'", True),
        ("grpcio", "1.70", "pip install 'grpcio>=1.70,<2'", True),
        ("cryptography", "42", "pip install 'cryptography>=42'", True),
        ("torch", "", "pip install torch; on a Jetson the vendor's wheel for its JetPack", False),
        ("flwr", "1.42", "pip install 'flwr>=1.42,<2', on Python 3.11 or newer", False),
        ("ray", "", "pip install 'flwr-moshpit[simulation]', for `flwr run` in simulation", False),
    ):
        yield _package(package, least, cure, is_needed)
    yield _cuda()
    yield _port(bind)
    yield _clock()
    yield _tls()
    yield _home()


def _python() -> Finding:
    told = ".".join(str(number) for number in sys.version_info[:3])
    if sys.version_info < (3, 11):
        # `peer` and `simulate` with a TorchTrainer run here; Flower does not.
        told += " (a SuperNode needs 3.11: run it in an environment of its own beside this peer)"
    return Finding("Python", sys.version_info >= (3, 10), told, "install Python 3.10 or newer")


def _package(name: str, least: str, cure: str, is_needed: bool) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, False, "is missing", cure, is_needed)
    return Finding(name, _numbers(found) >= _numbers(least), found, cure, is_needed)


def _numbers(text: str) -> list[int]:
    digits = ["".join(c for c in part if c.isdigit()) for part in text.split("+")[0].split(".")]
    return [int(part) for part in digits[:2] if part]


def _cuda() -> Finding:
    try:
        from flwr_moshpit.torch_probe import cuda_name
    except (ImportError, OSError) as error:
        return Finding("CUDA", False, f"torch cannot be loaded ({error})", "", is_needed=False)
    name = cuda_name()
    if name is not None:
        return Finding("CUDA", True, f"torch uses {name}")
    has_gpu = shutil.which("nvidia-smi") is not None or Path("/etc/nv_tegra_release").exists()
    if not has_gpu:
        return Finding("CUDA", True, "no NVIDIA GPU here; torch trains on the processor")
    cure = "this build of torch is not for this driver or JetPack: install the vendor's"
    return Finding("CUDA", False, "there is a GPU that torch does not see", cure, is_needed=False)


def _port(bind: str) -> Finding:
    host, port = host_and_port(bind, "bind")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, port))
            told = f"can listen on {bind.rpartition(':')[0]}:{probe.getsockname()[1]}"
    except OSError as error:
        return Finding("port", False, f"{bind}: {error.strerror}", "choose another with --bind")
    return Finding("port", True, told)


def _clock() -> Finding:
    now = time.time()
    told = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    cure = "set the clock (timedatectl set-ntp true): certificates are checked against it"
    if now < _RELEASED_AT:
        return Finding("clock", False, told, cure)
    synchronized = _synchronized()
    if synchronized is False:
        return Finding("clock", False, f"{told}, not synchronized", cure, is_needed=False)
    return Finding("clock", True, told)


def _synchronized() -> bool | None:
    """None where nobody tells."""
    if shutil.which("timedatectl") is None:
        return None
    command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"yes": True, "no": False}.get(done.stdout.strip())


def _tls() -> Finding:
    """A handshake with certificates as peers have them, over loopback."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    authority = Authority.create("doctor", valid_s=600.0)
    server_id, client_id = (authority.issue(PeerId(name), 600.0) for name in ("one", "two"))
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        port = server.add_secure_port("127.0.0.1:0", server_id.server_credentials())
        server.start()
        options = [
            *client_id.channel_options(server_id.peer),
            ("grpc.enable_http_proxy", 0),
        ]
        target = f"127.0.0.1:{port}"
        with grpc.secure_channel(target, client_id.channel_credentials(), options) as channel:
            grpc.channel_ready_future(channel).result(timeout=HANDSHAKE_S)
    except (RuntimeError, grpc.FutureTimeoutError) as error:
        return Finding("TLS", False, f"no handshake over loopback: {error!r}", "reinstall grpcio")
    finally:
        server.stop(None)
    return Finding("TLS", True, "mutual TLS over loopback")


def _home() -> Finding:
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    existing = next(path for path in (home, *home.parents) if path.exists())
    cure = "give FLWR_HOME a folder that can be written to: peers keep their state there"
    return Finding("FLWR_HOME", os.access(existing, os.W_OK), str(home), cure)
