"""logreg: A Flower / scikit-learn app."""

import warnings

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from logreg.task import (
    create_log_reg_and_instantiate_parameters,
    get_model_parameters,
    load_data,
    set_model_params,
)

# Flower ClientApp
app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""

    # Create LogisticRegression Model
    model = create_log_reg_and_instantiate_parameters(context.run_config["penalty"])
    ndarrays = msg.content["arrays"].to_numpy_ndarrays()
    set_model_params(model, ndarrays)

    # Load the data
    X_train, _, y_train, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )

    # Ignore convergence failure due to low local epochs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X_train, y_train)

    # Construct and return reply Message
    metrics = {
        "num-examples": len(X_train),
        "train_logloss": log_loss(y_train, model.predict_proba(X_train)),
    }
    content = RecordDict(
        {
            "arrays": ArrayRecord(get_model_parameters(model)),
            "metrics": MetricRecord(metrics),
        }
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on test data."""

    # Create LogisticRegression Model
    model = create_log_reg_and_instantiate_parameters(context.run_config["penalty"])
    ndarrays = msg.content["arrays"].to_numpy_ndarrays()
    set_model_params(model, ndarrays)

    # Load the data
    _, X_test, _, y_test = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )

    # Construct and return reply Message
    metrics = {
        "num-examples": len(X_test),
        "test_logloss": log_loss(y_test, model.predict_proba(X_test)),
        "accuracy": float((model.predict(X_test) == y_test).mean()),
    }
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
