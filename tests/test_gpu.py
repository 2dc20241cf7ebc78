"""Peers that train on a CUDA device: `pytest -m gpu`, where there is one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
pytest.importorskip("flwr")

import torch

from flwr_moshpit import Moshpit, Simulation
from flwr_moshpit.errors import TrainerError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.torch_trainer import TorchTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

PEERS = 5


def watch_on(device: str) -> TorchTrainer:
    if find_spec("seglearn") is None:
        pytest.skip("the data of `watch` are in the extra `examples`")
    app = load_app("watch")
    return TorchTrainer(
        app.load("watch.task:make_model"),
        app.load("watch.task:make_loader"),
        float(app.config["lr"]),
        make_test_loader=app.load("watch.task:make_test_loader"),
        device=device,
    )


def test_several_peers_on_one_gpu_learn_what_they_learn_on_the_processor() -> None:
    accuracies = [
        Simulation(Moshpit(local_steps=20), watch_on(device), peers=PEERS, seed=1)
        .run(rounds=10)
        .points[-1]
        .accuracy
        for device in ("cuda", "cpu")
    ]
    assert accuracies[1] > 0.4
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.05)


def test_what_does_not_fit_is_told_with_whose_it_was() -> None:
    """A batch whose activations no GPU holds."""
    trainer = TorchTrainer(
        lambda: torch.nn.Linear(1, 2),
        lambda partition, count: [
            (torch.zeros(1, 1).expand(1 << 42, 1), torch.zeros(1, dtype=torch.long).expand(1 << 42))
        ],
        device="cuda",
    )
    trainer.prepare(2)
    with pytest.raises(TrainerError, match=r"client 1.*out of memory"):
        trainer.train(1, trainer.initial_params(0), 1, seed=0)
