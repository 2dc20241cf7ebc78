"""What a client does: train, give a gradient, evaluate."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from digits.task import batches, load_partition, load_test, make_model, test, train
from flwr_moshpit.flower import serverless

# The model is small: more threads would wait for each other longer than they compute.
torch.set_num_threads(1)

app = ClientApp()


@app.train()
def train_steps(msg: Message, context: Context) -> Message:
    config, run_config = msg.content["config"], context.run_config
    num_steps = int(config.get("local-steps", run_config["local-steps"]))
    size = int(run_config["examples-per-step"])
    model = _model(msg.content["arrays"])
    x, y = _partition(context)
    loss = train(model, x, y, num_steps, float(run_config["lr"]), size)
    metrics = {"loss": loss, "num-examples": num_steps * size}
    return _reply(msg, ArrayRecord(model.state_dict()), metrics)


@app.train("gradient")
def gradient(msg: Message, context: Context) -> Message:
    """The mean gradient over one batch at the given parameters."""
    model = _model(msg.content["arrays"])
    x, y = next(batches(*_partition(context), 1, int(context.run_config["examples-per-step"])))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    arrays = ArrayRecord({name: p.grad for name, p in model.named_parameters()})
    return _reply(msg, arrays, {"loss": loss.item(), "num-examples": len(y)})


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    metrics = evaluate_test(0, msg.content["arrays"])
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def evaluate_test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """On the images that no client has; every client and the server can do that."""
    x, y = load_test()
    loss, accuracy = test(_model(arrays), x, y)
    return MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(y)})


def _model(arrays: ArrayRecord) -> nn.Module:
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return model


def _partition(context: Context) -> tuple[Tensor, Tensor]:
    config, run_config = context.node_config, context.run_config
    return load_partition(
        int(config["partition-id"]),
        int(config["num-partitions"]),
        str(run_config["partition"]),
        float(run_config["alpha"]),
        int(run_config["seed"]),
    )


def _reply(msg: Message, arrays: ArrayRecord, metrics: dict[str, float]) -> Message:
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=msg)


serverless(app)
