"""Does the simulator tell the truth? The same swarm in virtual time and as real processes.

Real peers are processes with gRPC and mutual TLS, each in a network namespace of its own, whose
line is held to a rate by `tc tbf`. The simulator is given the same rates, and nothing that was
measured here. A training step takes as long as it is said to on both sides, since a real peer
waits: what is compared is the network. Needs Linux, root and iproute2. Claims tested, for Moshpit
and R-FAST in each setting:

- a round takes what the simulator says, within 25 %;
- the swarm's model is as good as the simulator's, within 3 points of accuracy.

Lines carry packets whole or not at all: where one more packet waits than a router has room for, it
is lost, and TCP sends it again. The simulator's lines are fluid. So real rounds of Moshpit, which
end with the last packet, take longer than simulated: 9 to 25 %, the most where there is delay and
loss or the machine has no processor to spare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from paced_peer import DEVICE, LEARNING_RATE, PacedTrainer, Words

from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.simulation.run import Simulation
from flwr_moshpit.testing.lan import Lan, reason_against

GOODPUT = 0.94
"""Of a line's bytes: the rest are headers of Ethernet, IP and TCP (4.4 %) and acknowledgements."""
WITHIN, POINTS = 0.25, 3.0
HANG_S = 300.0


@dataclass(frozen=True)
class Setting:
    name: str
    peers: int
    mbit_per_s: float
    width: dict[str, int]
    """Of the perceptron's hidden layer: 75 parameters for each of it. R-FAST sends a model at every
    step, so it is given a smaller one."""
    rounds: dict[str, int]
    latency_s: float = 0.0
    """Between two peers, one way."""
    loss: float = 0.0
    """Of packets, between two peers."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 4
    step_s: float = 0.05

    def words(self, algorithm: str, folder: Path) -> Words:
        own = {"moshpit": {"local_steps": self.steps}, "rfast": {"learning_rate": LEARNING_RATE}}
        return Words(
            str(folder),
            0,
            self.peers,
            "",
            {},
            algorithm,
            {**own[algorithm], **self.settings.get(algorithm, {})},
            self.rounds[algorithm],
            self.width[algorithm],
            self.step_s,
        )


SETTINGS = [
    Setting(
        "4 peers, 5 Mbit/s",
        4,
        5.0,
        width={"moshpit": 4_000, "rfast": 300},
        rounds={"moshpit": 10, "rfast": 120},
    ),
    Setting(
        "6 peers, 20 Mbit/s, groups of 3",
        6,
        20.0,
        width={"moshpit": 8_000, "rfast": 600},
        rounds={"moshpit": 16, "rfast": 300},
        settings={"moshpit": {"group_size": 3}, "rfast": {"fan_out": 2}},
    ),
    Setting(
        "4 peers, 50 Mbit/s",
        4,
        50.0,
        width={"moshpit": 12_000, "rfast": 1_500},
        rounds={"moshpit": 20, "rfast": 300},
    ),
    Setting(
        "4 peers, 10 Mbit/s, 30 ms, 0.2 % lost",
        4,
        10.0,
        width={"moshpit": 6_000, "rfast": 300},
        rounds={"moshpit": 10, "rfast": 120},
        latency_s=0.03,
        loss=0.002,
    ),
]


@dataclass(frozen=True)
class Outcome:
    round_s: float
    """Median, over peers and rounds, of the time between two rounds of a peer."""
    accuracy: float


def simulated(setting: Setting, words: Words) -> Outcome:
    network = Network.uniform(
        latency_s=max(setting.latency_s, 0.0002),
        uplink_bytes_per_s=GOODPUT * setting.mbit_per_s * 1e6 / 8,
        loss=setting.loss,
    )
    trainer = PacedTrainer(words.width, words.step_s, waits=False)
    run = Simulation(
        words.make_algorithm(),
        trainer,
        fleet=Fleet.mix({DEVICE: 1.0}, setting.peers),
        network=network,
        seed=0,
    )
    history = run.run(rounds=words.rounds)
    times: dict[str, list[float]] = {}
    for at, peer, report in history.events:
        if report.name == "round" and peer is not None and report.values["round"] <= words.rounds:
            times.setdefault(peer, []).append(at)
    return Outcome(round_s_of(times), history.points[-1].accuracy or 0.0)


def round_s_of(times: dict[str, list[float]]) -> float:
    """The median of all times between two rounds of one peer."""
    return statistics.median(b - a for each in times.values() for a, b in pairwise(each))


def real(setting: Setting, words: Words) -> Outcome:
    times: dict[str, list[float]] = {}
    finished: dict[str, None] = {}
    folder = Path(words.folder)
    with Lan() as lan, processes(setting, words, lan) as (lines, running):
        while len(finished) < setting.peers:
            name, line = lines.get(timeout=HANG_S)
            if line["name"] == "ended" and name not in finished:
                raise SystemExit(f"sim_to_real: {name} has ended before it had finished")
            if line["name"] == "round":
                times.setdefault(name, []).append(line["at"])
            elif line["name"] == "finished":
                finished[name] = None
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait(HANG_S)
    models = [np.load(path) for path in sorted(folder.glob("model*.npz"))]
    weights = np.array([float(model["weight"]) for model in models])
    mean = np.average([model["params"] for model in models], axis=0, weights=weights)
    trainer = PacedTrainer(words.width, words.step_s, waits=False)
    trainer.prepare(setting.peers)
    evaluated = trainer.evaluate(mean.astype(np.float32))
    return Outcome(round_s_of(times), float(evaluated.metrics["accuracy"]))


Lines = queue.SimpleQueue[tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def processes(
    setting: Setting, words: Words, lan: Lan
) -> Iterator[tuple[Lines, list[subprocess.Popen[str]]]]:
    """All peers, each at its place; the first one is the others' contact."""
    authority = Authority.create("sim-to-real")
    lines: Lines = queue.SimpleQueue()
    running: list[subprocess.Popen[str]] = []
    contacts: dict[PeerId, str] = {}
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    try:
        for index in range(setting.peers):
            name = f"p{index:02}"
            # Two lines lie between two peers.
            host = lan.add(
                name,
                bytes_per_s=setting.mbit_per_s * 1e6 / 8,
                delay_s=setting.latency_s / 2,
                loss=1 - (1 - setting.loss) ** 0.5,
            )
            authority.issue(PeerId(name)).save(Path(words.folder) / name)
            own = {**asdict(words), "index": index, "host": host, "contacts": contacts}
            command = [sys.executable, str(here / "paced_peer.py"), json.dumps(own)]
            process = subprocess.Popen(
                lan.command(name, *command), stdout=subprocess.PIPE, text=True, env=env
            )
            running.append(process)
            threading.Thread(target=_read, args=(name, process, lines), daemon=True).start()
            while not contacts:
                _, line = lines.get(timeout=HANG_S)
                if line["name"] == "address":
                    contacts = {PeerId(name): line["address"]}
        yield lines, running
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _read(name: str, process: subprocess.Popen[str], lines: Lines) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put((name, json.loads(line)))
    lines.put((name, {"name": "ended"}))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", type=int, action="append", help="only these, from 0")
    parser.add_argument("--algorithm", action="append", choices=("moshpit", "rfast"))
    args = parser.parse_args()
    # Whoever ends it, the namespaces and the processes in them must go.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    reason = reason_against(impaired=True)
    if reason is not None:
        print(f"sim_to_real: {reason}", file=sys.stderr)
        return 2
    print("| setting | algorithm | round, simulated | real | | accuracy, simulated | real | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    holds = True
    for number in args.setting or range(len(SETTINGS)):
        for algorithm in args.algorithm or ("moshpit", "rfast"):
            holds &= compared(SETTINGS[number], algorithm)
    return 0 if holds else 1


def compared(setting: Setting, algorithm: str) -> bool:
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flwr-moshpit-") as folder:
        words = setting.words(algorithm, Path(folder))
        told = simulated(setting, words)
        measured = real(setting, words)
    error = told.round_s / measured.round_s - 1
    points = 100 * (measured.accuracy - told.accuracy)
    print(
        f"| {setting.name} | {algorithm} | {told.round_s:.2f} s | {measured.round_s:.2f} s "
        f"| {100 * error:+.0f} % | {100 * told.accuracy:.1f} % | {100 * measured.accuracy:.1f} % "
        f"| {points:+.1f} |",
        flush=True,
    )
    print(f"({time.monotonic() - began_at:.0f} s)", file=sys.stderr)
    return abs(error) <= WITHIN and abs(points) <= POINTS


if __name__ == "__main__":
    sys.exit(main())
