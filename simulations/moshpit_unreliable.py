"""Moshpit averaging on devices that are unequal, and on devices that are taken away.

Claims (arXiv 2103.03239, abstract): 1.3 times faster than gossip for ResNet-50 on unequal devices
at equal accuracy; 1.5 times faster for ALBERT-large on preemptible ones. The small model of `watch`
really trains; ResNet-50 or ALBERT-large is on clock and links (1 Gbit/s).

unequal: Jetsons of four kinds, 16 in all, the slowest with a 23rd of the fastest one's rate. Every
method exchanges after `--local-steps` steps, except that Moshpit lets all peers train for the time
that this takes the median device. Its rivals are the gossip methods.

preemptible: 16 cloud T4s, each of which is taken away twice an hour and is back, with nothing, ten
minutes later. Its rival is all-reduce over everybody around a ring.
"""

from __future__ import annotations

import sys

from common import AppTrainer, parser, ran, verdict

from flwr_moshpit.config import ADPSGD, DPSGD, OSGP, SGP, Moshpit, Ring
from flwr_moshpit.simulation.contest import Contest
from flwr_moshpit.simulation.cost import COST_MODELS
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.network import Network

PEERS = 16
UNEQUAL = "jetson-nano:0.25,jetson-tx2:0.25,jetson-orin-nano:0.25,jetson-agx-orin-64gb:0.25"
PREEMPTIBLE = "cloud-t4"
TAKEN_AWAY = "churn 200% per hour, back after 10 min"
GIGABIT = Network.uniform(latency_s=0.0005, uplink_bytes_per_s=117.5e6)
GOSSIP = ("dpsgd", "adpsgd", "sgp", "osgp")


def local_s(steps: int) -> float:
    """How long so many steps of ResNet-50 take the median device."""
    rates = sorted(device.flops_per_s for device in Fleet.parse(UNEQUAL, PEERS))
    cost = COST_MODELS["resnet50"]
    return steps * cost.examples_per_step * cost.flops_per_example / rates[PEERS // 2]


def main() -> int:
    arguments = parser(__doc__, seeds=3, tries=5)
    arguments.add_argument("--local-steps", type=int, default=5)
    arguments.add_argument("--until-s", type=float, default=1500.0, help="virtual time of each run")
    args = arguments.parse_args()
    steps = args.local_steps
    common = {
        "make_trainer": AppTrainer("watch"),
        "peers": PEERS,
        "network": GIGABIT,
        "seeds": tuple(range(args.seeds)),
        "tries": args.tries,
        "until_s": args.until_s,
    }
    unequal = Contest(
        algorithms={
            "moshpit": Moshpit(local_s=local_s(steps)),
            "dpsgd": DPSGD(local_steps=steps),
            "adpsgd": ADPSGD(local_steps=steps),
            "sgp": SGP(local_steps=steps),
            "osgp": OSGP(local_steps=steps),
        },
        fleet=UNEQUAL,
        cost_as="resnet50",
        **common,
    )
    result = ran("unequal: devices of four speeds, at the cost of ResNet-50", unequal, args)
    holds = True
    for rival in GOSSIP:
        claim = f"moshpit's time to the target beats {rival}'s on unequal devices"
        holds &= verdict(claim, result.ratio(rival, "moshpit"), 1.3)
    preemptible = Contest(
        algorithms={
            "moshpit": Moshpit(local_steps=steps),
            "ring": Ring(local_steps=steps),
        },
        fleet=PREEMPTIBLE,
        faults=(TAKEN_AWAY,),
        cost_as="albert-large",
        **common,
    )
    result = ran(f"preemptible: {TAKEN_AWAY}, at the cost of ALBERT-large", preemptible, args)
    claim = "moshpit's time to the target beats ring all-reduce's on preemptible peers"
    holds &= verdict(claim, result.ratio("ring", "moshpit"), 1.5)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
