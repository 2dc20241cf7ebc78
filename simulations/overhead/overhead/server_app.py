"""The same clients under Flower's own FedAvg, or among themselves."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_moshpit.flower import bootstrap_app
from flwr_moshpit.flower.compat import log
from overhead.client_app import make_model

app = ServerApp()
serverless_app = bootstrap_app(Path(__file__).parents[1])


@app.main()
def main(grid: Grid, context: Context) -> None:
    if context.run_config["server"] == "moshpit":
        serverless_app(grid, context)
    else:
        fedavg(grid, context)


def fedavg(grid: Grid, context: Context) -> None:
    """Without evaluation. Timed from when Flower's actors have loaded the app, as is the other."""
    num_nodes, nodes = int(context.run_config["nodes"]), []
    while len(nodes) < num_nodes:
        time.sleep(0.02)
        nodes = list(grid.get_node_ids())
    list(grid.send_and_receive(Message(RecordDict(), node, "query.partition") for node in nodes))
    torch.manual_seed(0)
    initial, rounds = ArrayRecord(make_model().state_dict()), int(context.run_config["rounds"])
    steps = ConfigRecord({"local-steps": int(context.run_config["local-steps"])})
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=num_nodes)
    began_at = time.monotonic()
    strategy.start(grid, initial, num_rounds=rounds, train_config=steps)
    took_s, num_calls = time.monotonic() - began_at, num_nodes * rounds
    log().info("%d calls of the ClientApp, %.2f ms for each", num_calls, 1e3 * took_s / num_calls)
