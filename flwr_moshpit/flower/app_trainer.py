"""A trainer of an app, made in whatever process needs it, with Flower or without."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import App, load_app
from flwr_moshpit.runtime.compute import MakeTrainer
from flwr_moshpit.simulation.advice import BATCH_KEY, TRIAL_BATCH, batch_for, leaves_batch_open
from flwr_moshpit.simulation.device import DeviceProfile
from flwr_moshpit.trainer import Trainer


def make_app_trainer(
    app: App,
    config: Mapping[str, Any],
    *,
    flower: bool | None = None,
    node_config: Mapping[str, Any] | None = None,
    device: DeviceProfile | None = None,
) -> MakeTrainer:
    """A picklable function without arguments that makes a trainer of `app`.

    `flower`: whether the ClientApp trains; None where Flower is installed. Otherwise it is a
    `TorchTrainer` of what the app's `task.py` offers; see `torch_trainer_of`. `node_config` is the
    SuperNode's, for the ClientApp. `device`: the profile from which the batch size follows where
    the config leaves it open; see `simulation.own_device`.
    """
    return partial(_make, str(app.path), dict(config), flower, dict(node_config or {}), device)


def _make(
    path: str,
    config: dict[str, Any],
    flower: bool | None,
    node_config: dict[str, Any],
    device: DeviceProfile | None,
) -> Trainer:
    app = load_app(path)
    if flower is None:
        flower = importlib.util.find_spec("flwr") is not None
    if not flower:
        # Its loader has the app's batch size, which nobody else can set.
        return torch_trainer_of(app, config)
    if device is not None and leaves_batch_open(config):
        trial = app.trainer({**config, BATCH_KEY: TRIAL_BATCH}, node_config=node_config)
        trial.prepare(1)
        model_bytes = trial.layout.dim * trial.layout.dtype.itemsize
        config = {**config, BATCH_KEY: batch_for(device, trial.cost(), model_bytes)}
    return app.trainer(config, node_config=node_config)


def torch_trainer_of(app: App, config: Mapping[str, Any]) -> Trainer:
    """A trainer of the app's `task.py`, which needs no Flower.

    `task.py` lies beside the module of the ClientApp and offers `make_model()`, `make_loader(
    partition, num_partitions)` and, if accuracy shall be known, `make_test_loader()`. The learning
    rate is the run config's `lr` or `learning-rate`. Raises ConfigError where that is missing.
    """
    try:
        from flwr_moshpit.torch_trainer import TorchTrainer
    except ModuleNotFoundError as error:
        raise ConfigError(f"app {app.name!r} needs {error.name}, which is not installed") from error
    module = app.client_ref.partition(":")[0].rpartition(".")[0]
    task = f"{module}.task" if module else "task"
    try:
        make_model = app.load(f"{task}:make_model")
        make_loader = app.load(f"{task}:make_loader")
    except ConfigError as error:
        raise ConfigError(
            f"app {app.name!r} cannot train without Flower ({error}): install flwr>=1.42, or offer "
            f"make_model() and make_loader(partition, num_partitions) in {task}"
        ) from error
    try:
        make_test_loader = app.load(f"{task}:make_test_loader")
    except ConfigError:
        make_test_loader = None
    given = config.get("lr", config.get("learning-rate"))
    if given is None:
        return TorchTrainer(make_model, make_loader, make_test_loader=make_test_loader)
    return TorchTrainer(make_model, make_loader, float(given), make_test_loader=make_test_loader)
