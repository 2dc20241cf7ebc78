"""What does it cost that clients train among themselves, in Flower's own simulation engine?

`flwr run` on the same app, clients, model (100,090 parameters), local steps and rounds: once with
Flower's FedAvg, once with Moshpit. Timed from when Flower's actors have loaded the app, without
evaluation, the two in turn. Needs Linux and the extra `simulation`. Claims tested:

- 100 clients take at most 1.1 times as long as under FedAvg (median of the pairs);
- 500 clients run in under 6 GB, all of Flower's processes together (PSS);
- in one process (`flwr-moshpit simulate`) a call costs a tenth at most, where nothing is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from flwr_moshpit.bench.trainers import Stopwatch
from flwr_moshpit.flower import load_app
from flwr_moshpit.observe.text import scaled
from flwr_moshpit.settings import gather
from flwr_moshpit.simulation.plan import Plan

APP = Path(__file__).parent / "overhead"
RATIO, MEMORY_BYTES, LESS = 1.1, 6e9, 10.0


class FlowerHome:
    """A local SuperLink of its own, which ends with the block, as does all that it has started."""

    def __init__(self, home: Path) -> None:
        self.home = home
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
        command = ["flwr", "run", str(APP), "--stream", *federation, "-c", " ".join(words)]
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


def in_process_ms(num_nodes: int, rounds: int) -> tuple[float, float]:
    """Milliseconds for each call of the same ClientApp in this process, where it trains nothing:
    (with the engine, of the calls alone)."""
    app = load_app(APP)
    settings = gather({**app.config, "trains": False}, {}, {"peers": num_nodes, "rounds": rounds})
    trainer = Stopwatch(app.trainer(settings.app))
    simulation = Plan.of(settings).simulation(trainer)
    trainer.cpu_s = 0.0
    began_at = time.monotonic()
    simulation.run(rounds=rounds)
    factor = 1e3 / (num_nodes * rounds)
    return factor * (time.monotonic() - began_at), factor * trainer.cpu_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="of runs to compare (3)")
    parser.add_argument("--rounds", type=int, default=10, help="of each run (10)")
    parser.add_argument("--local-steps", type=int, default=20, help="of each call (20)")
    args = parser.parse_args()
    config = {"rounds": args.rounds, "local_steps": args.local_steps}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ratios = []
    with tempfile.TemporaryDirectory() as folder, FlowerHome(Path(folder)) as flower:
        print("100 clients, ms a call   FedAvg  Moshpit")
        for _ in range(args.pairs):
            times = [flower.run(100, server=server, **config) for server in ("fedavg", "moshpit")]
            print(
                f"{'':24}{times[0]:7.2f}  {times[1]:7.2f}  {times[1] / times[0]:.2f}x", flush=True
            )
            ratios.append(times[1] / times[0])
        peak_bytes = flower.peak_bytes(500, rounds=2)
        there_ms = flower.run(100, trains=False, rounds=args.rounds)
    whole_ms, call_ms = in_process_ms(100, args.rounds)
    carried_ms = there_ms - (whole_ms - call_ms)
    ratio = statistics.median(ratios)
    return _verdict(
        (f"100 clients take {ratio:.2f}x as long as under FedAvg", f"{RATIO}x", ratio <= RATIO),
        (f"500 clients need {scaled(peak_bytes, 'B')}", "6 GB", peak_bytes < MEMORY_BYTES),
        (
            f"a call costs {call_ms:.2f} ms in process, {carried_ms:.2f} ms on `flwr run`: "
            f"{carried_ms / call_ms:.1f}x",
            f"at least {LESS:g}x",
            carried_ms >= LESS * call_ms,
        ),
    )


def _verdict(*claims: tuple[str, str, bool]) -> int:
    for what, bound, holds in claims:
        print(f"{what} ({bound}): {'holds' if holds else 'DOES NOT HOLD'}")
    return 0 if all(holds for *_, holds in claims) else 1


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int | float) else f"'{value}'"


if __name__ == "__main__":
    sys.exit(main())
