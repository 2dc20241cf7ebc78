"""logreg: A Flower / scikit-learn app."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from logreg.task import create_log_reg_and_instantiate_parameters, get_model_parameters

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""

    # Read run config
    num_rounds: int = context.run_config["num-server-rounds"]

    # Create LogisticRegression Model
    model = create_log_reg_and_instantiate_parameters(context.run_config["penalty"])
    # Construct ArrayRecord representation
    arrays = ArrayRecord(get_model_parameters(model))

    # Initialize FedAvg strategy
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)

    # Start strategy, run FedAvg for `num_rounds`
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
