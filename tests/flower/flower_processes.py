"""Flower's own programs, in a home of their own, and none of them left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FLWR_BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    """Offline, and away from the Flower that the user of this machine may run."""
    return {
        **os.environ,
        "PATH": f"{FLWR_BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        # What a test has on its path, such as pytest's own modules, is not the app's.
        "PYTHONPATH": "",
    }


@contextlib.contextmanager
def flower_home(home: Path) -> Iterator[dict[str, str]]:
    """The environment for programs of Flower; whatever was started with it is killed at the end."""
    home.mkdir(parents=True, exist_ok=True)
    try:
        yield environment(home)
    finally:
        for _ in range(100):
            pids = list(processes_of(home))
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(home: Path) -> Iterator[int]:
    """Living processes that were started with this home."""
    mark = f"FLWR_HOME={home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if mark in variables and state != "Z" and int(folder.name) != os.getpid():
                yield int(folder.name)


def flwr(env: dict[str, str], *arguments: str, cwd: Path, timeout_s: float) -> str:
    """What the command `flwr` says. It may fail: what it says then is what counts."""
    done = subprocess.run(
        [str(FLWR_BIN / "flwr"), *arguments],
        env=env,
        cwd=cwd,
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout
