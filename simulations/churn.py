"""Peers come and go all the time: what does it cost each method?

Sixteen Jetsons train `watch` at the cost of ResNet-50 on 1 Gbit/s, for the same virtual time at
every rate of churn. A peer crashes without a word, at random, and is back two minutes later with
nothing. Claims tested, of this package's Moshpit and R-FAST:

- nobody waits for the dead: at the highest rate they still make at least 60 % of the local steps
  that they make without churn, where the methods that need everybody make fewer;
- nothing is poisoned: their final accuracy is within 5 points of that without churn, which in turn
  is at least 0.4, where guessing gives 0.14.
"""

from __future__ import annotations

import sys

from common import AppTrainer, parser, ran

from flwr_moshpit.config import FedAvg, Moshpit, RandomGroups, RFast, Ring
from flwr_moshpit.simulation.comparison import Row
from flwr_moshpit.simulation.contest import Contest
from flwr_moshpit.simulation.intervals import mean_interval
from flwr_moshpit.simulation.network import Network

FLEET = "jetson-orin-nano:0.7,jetson-orin-nx-16gb:0.3"
GIGABIT = Network.uniform(latency_s=0.0005, uplink_bytes_per_s=117.5e6)
RATES = (0, 600)
"""Crashes in an hour, in percent of the peers."""
CLAIMED = ("moshpit", "rfast")
STEPS_SHARE, POINTS, LEARNED = 0.6, 5.0, 0.4


def main() -> int:
    arguments = parser(__doc__, seeds=3, tries=1)
    arguments.add_argument("--local-steps", type=int, default=5)
    arguments.add_argument("--until-s", type=float, default=800.0, help="virtual time (800 s)")
    args = arguments.parse_args()
    steps = args.local_steps
    algorithms = {
        "moshpit": Moshpit(local_steps=steps),
        "rfast": RFast(local_steps=steps, learning_rate=0.1),
        "ring": Ring(local_steps=steps),
        "random-groups": RandomGroups(local_steps=steps),
        "fedavg": FedAvg(local_steps=steps),
    }
    comparisons = {}
    for rate in RATES:
        contest = Contest(
            algorithms=algorithms,
            make_trainer=AppTrainer("watch"),
            peers=16,
            fleet=FLEET,
            network=GIGABIT,
            faults=(f"churn {rate}% per hour, back after 2 min",) if rate else (),
            cost_as="resnet50",
            seeds=tuple(range(args.seeds)),
            tries=args.tries,
            until_s=args.until_s,
        )
        comparisons[rate] = ran(f"churn {rate} % per hour: {args.until_s:g} s", contest, args)

    rows = {rate: {row.algorithm: row for row in c.rows()} for rate, c in comparisons.items()}
    print("Local steps of the mean peer, and final accuracy, by crashes per hour and peer:")
    print(f"{'':14}" + "".join(f"{rate / 100:18g}" for rate in RATES))
    for name in algorithms:
        print(f"{name:14}" + "".join(_cell(rows[rate][name]) for rate in RATES))
    print()
    holds = True
    calm, worst = RATES[0], RATES[-1]
    for name in CLAIMED:
        share = rows[worst][name].steps.mean / rows[calm][name].steps.mean
        before = [run.points[-1].accuracy or 0.0 for run in comparisons[calm].of(name)]
        after = [run.points[-1].accuracy or 0.0 for run in comparisons[worst].of(name)]
        lost = mean_interval([100 * (b - a) for b, a in zip(before, after, strict=True)])
        kept = share >= STEPS_SHARE and lost.mean <= POINTS and min(before) >= LEARNED
        holds &= kept
        print(
            f"{name} at {worst / 100:g} crashes an hour and peer: {100 * share:.0f} % of the steps "
            f"({100 * STEPS_SHARE:g} % wanted), {lost.mean:+.1f} points of accuracy lost, 95 % "
            f"interval [{lost.low:+.1f}, {lost.high:+.1f}] (at most {POINTS:g} wanted): "
            f"{'holds' if kept else 'DOES NOT HOLD'}"
        )
    return 0 if holds else 1


def _cell(row: Row) -> str:
    accuracy = "-" if row.final is None else f"{row.final.mean:.3f}"
    return f"{row.steps.mean:8.0f} {accuracy:>9}"


if __name__ == "__main__":
    sys.exit(main())
