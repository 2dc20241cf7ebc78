"""What does it cost that clients train among themselves, in Flower's own simulation engine?

`flwr run` on the same app, clients, model (100,090 parameters), local steps and rounds: once with
Flower's FedAvg, once with Moshpit. Timed from when Flower's actors have loaded the app, without
evaluation, the two in turn. Needs Linux and the extra `simulation`. Claims tested:

- 100 clients take at most 1.1 times as long as under FedAvg (median of the pairs);
- 500 clients run in under 6 GB, all of Flower's processes together (PSS);
- a call has at least 10 times less overhead in one process (`simulate`). The same app does the same
  rounds and trains nothing, so that all of a call is overhead: the wall time for each call on
  `flwr run`, whose two actors share them, and in process what the engine spends in its trainer.
  What the engine itself does for a call, the virtual network and the sums of the models, is the
  same in both; it is taken off both, and printed.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from flower_home import FlowerHome

from flwr_moshpit.bench.trainers import Stopwatch
from flwr_moshpit.flower import load_app
from flwr_moshpit.observe.text import scaled
from flwr_moshpit.settings import gather
from flwr_moshpit.simulation.plan import Plan

APP = Path(__file__).parent / "overhead"
RATIO, MEMORY_BYTES, LESS = 1.1, 6e9, 10.0


def in_process_ms(num_nodes: int, rounds: int) -> tuple[float, float]:
    """Milliseconds of wall time for each call of the ClientApp in this process, where it trains
    nothing: (of the engine, of the call)."""
    app = load_app(APP)
    settings = gather({**app.config, "trains": False}, {}, {"peers": num_nodes, "rounds": rounds})
    trainer = Stopwatch(app.trainer(settings.app), clock=time.perf_counter)
    simulation = Plan.of(settings).simulation(trainer)
    trainer.spent_s = 0.0
    began_at = time.perf_counter()
    simulation.run(rounds=rounds)
    whole_s = time.perf_counter() - began_at
    factor = 1e3 / (num_nodes * rounds)
    return factor * (whole_s - trainer.spent_s), factor * trainer.spent_s


def ratio_to_fedavg(flower: FlowerHome, pairs: int, **config: object) -> float:
    """Of the time that 100 clients take under Moshpit to that under FedAvg, median of the pairs."""
    ratios = []
    print("100 clients, ms a call   FedAvg  Moshpit")
    for _ in range(pairs):
        times = [flower.run(100, server=server, **config) for server in ("fedavg", "moshpit")]
        ratios.append(times[1] / times[0])
        print(f"{'':24}{times[0]:7.2f}  {times[1]:7.2f}  {ratios[-1]:.2f}x", flush=True)
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="of runs to compare (3)")
    parser.add_argument("--rounds", type=int, default=10, help="of each run (10)")
    parser.add_argument("--local-steps", type=int, default=20, help="of each call (20)")
    parser.add_argument("--only", choices=("ratio", "memory", "calls"), help="one of the claims")
    args = parser.parse_args()
    # So that the block below ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[tuple[str, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder, FlowerHome(Path(folder), APP) as flower:
        if args.only in (None, "ratio"):
            config = {"rounds": args.rounds, "local_steps": args.local_steps}
            ratio = ratio_to_fedavg(flower, args.pairs, **config)
            what = "100 clients over Flower's FedAvg"
            rows.append((what, f"{ratio:.2f} x", f"{RATIO} x", ratio <= RATIO))
        if args.only in (None, "memory"):
            peak_bytes = flower.peak_bytes(500, rounds=2)
            is_kept = peak_bytes < MEMORY_BYTES
            rows.append(("500 clients, memory", scaled(peak_bytes, "B"), "6 GB", is_kept))
        if args.only in (None, "calls"):
            there_ms = flower.run(100, trains=False, rounds=args.rounds)
            engine_ms, here_ms = in_process_ms(100, args.rounds)
            carried_ms = there_ms - engine_ms
            print(
                f"a call that trains nothing: {here_ms:.2f} ms in process, {carried_ms:.2f} ms on "
                f"`flwr run`; the engine beside it {engine_ms:.2f} ms"
            )
            less = carried_ms / here_ms
            what = "overhead of a call, `flwr run` over in process"
            rows.append((what, f"{less:.1f} x", f"at least {LESS:g} x", less >= LESS))
    print("\n| | measured | bound |\n|---|---|---|")
    for what, measured, bound, is_kept in rows:
        print(f"| {what} | {measured} | {bound}{'' if is_kept else ', **not kept**'} |")
    return 0 if all(is_kept for *_, is_kept in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
