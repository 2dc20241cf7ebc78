"""Flower's own server, to compare with: FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from watch.client_app import evaluate_unseen
from watch.task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=int(config["rounds"]),
        train_config=ConfigRecord({"local-steps": int(config["local-steps"])}),
        evaluate_fn=evaluate_unseen,
    )
