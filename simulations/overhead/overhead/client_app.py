"""Some steps of SGD on random data; with `trains = false` the model goes back as it came."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from flwr_moshpit.flower import serverless

torch.set_num_threads(1)
app = ClientApp()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 720), nn.ReLU(), nn.Linear(720, 10))


@app.train()
def train(msg: Message, context: Context) -> Message:
    config = context.run_config
    num_steps, size = int(msg.content["config"]["local-steps"]), int(config["examples-per-step"])
    arrays = msg.content["arrays"]
    if config["trains"]:
        model = make_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=float(config["lr"]))
        generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        for _ in range(num_steps):
            x = torch.randn(size, 128, generator=generator)
            y = x.argmax(1) % 10
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": num_steps * size})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


serverless(app)
