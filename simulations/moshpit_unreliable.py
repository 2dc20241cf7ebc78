"""Moshpit averaging on devices that are unequal, and on devices that are taken away.

Claims (arXiv 2103.03239, abstract): 1.3 times faster than gossip for ResNet-50 on unequal devices
at equal accuracy; 1.5 times faster for ALBERT-large on preemptible ones. The small model of `watch`
really trains; ResNet-50 or ALBERT-large is on clock and links (1 Gbit/s). 16 peers.

unequal: Jetsons of four kinds, the slowest at a 23rd of the fastest one's rate, and one of them a
straggler, ten times slower than its kind. Moshpit's peers train for the same time between two
rounds, and wait for each other while they average or (delayed) go on; the rivals are the gossip
methods, AD-PSGD, the only one that waits for nobody, with an exchange after 2 and after 5 steps.
Equal accuracy is 0.7: FedAvg ends at 0.76 (`watch_accuracy.py`), and several gossip methods never
get near it, so that 95 % of the median method's accuracy would be too little to tell anything.

preemptible: T4s and two kinds of laptop GPUs, each of which is taken away twice an hour and is
back, with nothing, ten minutes later. The rival is all-reduce over everybody around a ring, which
goes on without the dead as soon as it knows of them.
"""

from __future__ import annotations

import sys

from common import AppTrainer, parser, ran, verdict

from flwr_moshpit.config import ADPSGD, DPSGD, OSGP, SGP, Moshpit, Ring
from flwr_moshpit.simulation.contest import Contest
from flwr_moshpit.simulation.network import Network

UNEQUAL = "jetson-nano:0.25,jetson-tx2:0.25,jetson-orin-nano:0.25,jetson-agx-orin-64gb:0.25"
PREEMPTIBLE = "cloud-t4:0.5,laptop-rtx-2060:0.25,laptop-rtx-3070-ti:0.25"
TAKEN_AWAY = "churn 200% per hour, back after 10 min"
STRAGGLER = "slow 10x peer=3"
GIGABIT = Network.uniform(latency_s=0.0005, uplink_bytes_per_s=117.5e6)
GOSSIP = {
    "adpsgd-2": ADPSGD(local_steps=2),
    "adpsgd-5": ADPSGD(local_steps=5),
    "dpsgd": DPSGD(local_steps=5),
    "sgp": SGP(local_steps=5),
    "osgp": OSGP(local_steps=5),
}


def main() -> int:
    arguments = parser(__doc__, seeds=5, tries=5)
    arguments.add_argument("--until-s", type=float, default=450.0, help="end of unequal (450 s)")
    args = arguments.parse_args()
    common = {
        "make_trainer": AppTrainer("watch"),
        "peers": 16,
        "network": GIGABIT,
        "seeds": tuple(range(args.seeds)),
        "tries": args.tries,
    }
    # Nine seconds are two and a half steps of the second fastest kind of device.
    unequal = Contest(
        algorithms={
            "moshpit": Moshpit(local_s=9.0),
            "delayed": Moshpit(local_s=9.0, delayed=True),
            **GOSSIP,
        },
        target=0.7,
        fleet=UNEQUAL,
        faults=(STRAGGLER,),
        cost_as="resnet50",
        until_s=args.until_s,
        **common,
    )
    result = ran("unequal: devices of four speeds, at the cost of ResNet-50", unequal, args)
    holds = True
    for rival in GOSSIP:
        claim = f"moshpit's time to the target beats {rival}'s on unequal devices"
        holds &= verdict(claim, result.ratio(rival, "moshpit"), 1.3)
    # Thirty seconds are five steps of a T4.
    preemptible = Contest(
        algorithms={
            "moshpit": Moshpit(local_s=30.0),
            "delayed": Moshpit(local_s=30.0, delayed=True),
            "ring": Ring(local_steps=5),
        },
        fleet=PREEMPTIBLE,
        faults=(TAKEN_AWAY,),
        cost_as="albert-large",
        until_s=2 * args.until_s,
        **common,
    )
    result = ran(f"preemptible: {TAKEN_AWAY}, at the cost of ALBERT-large", preemptible, args)
    claim = "moshpit's time to the target beats ring all-reduce's on preemptible peers"
    holds &= verdict(claim, result.ratio("ring", "moshpit"), 1.5)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
