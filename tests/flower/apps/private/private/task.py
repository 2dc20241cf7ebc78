"""private: A Flower / PyTorch app with a personal head and local differential privacy."""

from collections import OrderedDict

import torch
from sklearn.datasets import load_digits


class Net(torch.nn.Module):
    """A body that everybody shares and a head that each client keeps for itself."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


def get_body(net):
    return [val.cpu().numpy() for _, val in net.body.state_dict().items()]


def set_body(net, ndarrays):
    params = zip(net.body.state_dict().keys(), ndarrays, strict=True)
    net.body.load_state_dict(OrderedDict({k: torch.tensor(v) for k, v in params}), strict=True)


def load_data(partition_id: int, num_partitions: int):
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)[partition_id::num_partitions]
    y = torch.tensor(labels)[partition_id::num_partitions]
    cut = int(0.8 * len(y))
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def train(net, data, epochs, lr):
    x, y = data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(16):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x[index]), y[index])
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net, data):
    x, y = data
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())
