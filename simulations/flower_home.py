"""A local SuperLink of an experiment's own, `flwr run` on it, and what that takes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class FlowerHome:
    """`flwr run` of the app in a folder, with a home of its own. Whatever was started with it ends
    with the block. Needs Linux."""

    def __init__(self, home: Path, app: Path) -> None:
        self.home = home
        self._app = app
        ports = iter(_free_ports(2))
        self._env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(next(ports)),
            "FLWR_LOCAL_CONTROL_API_PORT": str(next(ports)),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> FlowerHome:
        return self

    def __exit__(self, *error: object) -> None:
        while pids := list(self.processes()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def run(self, num_nodes: int, **config: object) -> float:
        """Milliseconds for each call of the ClientApp in one `flwr run`."""
        config = {"nodes": num_nodes, "out": str(self.home / f"out-{time.time_ns()}"), **config}
        words = (f"{key.replace('_', '-')}={_toml(value)}" for key, value in config.items())
        federation = ("--federation-config", f"num-supernodes={num_nodes}")
        command = ["flwr", "run", str(self._app), "--stream", *federation, "-c", " ".join(words)]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        found = re.search(r"([\d.]+) ms for each", done.stdout)
        if found is None:
            sys.exit(f"flwr run failed:\n{done.stdout}{done.stderr}")
        return float(found[1])

    def processes(self) -> Iterator[int]:
        mark = f"FLWR_HOME={self.home}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

    def memory_bytes(self) -> int:
        """Of all processes now; what several share is counted once."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found = re.search(r"Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())
                total += 1024 * int(found[1]) if found else 0
        return total

    def peak_bytes(self, num_nodes: int, **config: object) -> int:
        """Of all processes together during one `flwr run`, looked at every second."""
        peaks, done = [0], threading.Event()

        def look() -> None:
            while not done.wait(1.0):
                peaks.append(self.memory_bytes())

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            self.run(num_nodes, **config)
        finally:
            done.set()
            watcher.join()
        return max(peaks)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int | float) else f"'{value}'"
