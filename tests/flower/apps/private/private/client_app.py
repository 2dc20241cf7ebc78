"""private: A Flower / PyTorch app with a personal head and local differential privacy."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from private.task import Net, get_body, load_data, set_body, test, train

local_dp = LocalDpMod(clipping_norm=3.0, sensitivity=0.01, epsilon=5.0, delta=1e-3)

app = ClientApp()


def load_net(msg: Message, context: Context) -> Net:
    """The body that the server sent, and the head of this client's last round."""
    net = Net()
    set_body(net, msg.content["arrays"].to_numpy_ndarrays())
    if "head" in context.state:
        net.head.load_state_dict(context.state["head"].to_torch_state_dict())
    return net


@app.train(mods=[local_dp])
def train_fn(msg: Message, context: Context) -> Message:
    net = load_net(msg, context)
    trainset, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    loss = train(net, trainset, context.run_config["local-epochs"], context.run_config["lr"])
    context.state["head"] = ArrayRecord(net.head.state_dict())

    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainset[1])})
    content = RecordDict({"arrays": ArrayRecord(get_body(net)), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate_fn(msg: Message, context: Context) -> Message:
    net = load_net(msg, context)
    _, testset = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    metrics = MetricRecord({"eval_acc": test(net, testset), "num-examples": len(testset[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
