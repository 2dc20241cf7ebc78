"""private: A Flower / PyTorch app with a personal head and local differential privacy."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from private.task import Net, get_body

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord(get_body(Net()))
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    strategy.start(
        grid=grid, initial_arrays=arrays, num_rounds=context.run_config["num-server-rounds"]
    )
