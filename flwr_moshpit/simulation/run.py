"""`Simulation`: a swarm of virtual devices that really trains, from settings to a `History`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from flwr_moshpit import __version__
from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.json_lines import JsonLines
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.observe.progress import Progress
from flwr_moshpit.protocol.build import build_machine
from flwr_moshpit.protocol.machine import Machine, PeerId, PeerInfo, Start, Vector, View
from flwr_moshpit.simulation.backend import ComputeBackend, trainer_backend
from flwr_moshpit.simulation.cost import CostModel, check_memory
from flwr_moshpit.simulation.device import DeviceProfile, builtin_catalogue
from flwr_moshpit.simulation.engine import Engine
from flwr_moshpit.simulation.explain import Row, explain
from flwr_moshpit.simulation.fault_grammar import parse_duration, parse_faults
from flwr_moshpit.simulation.faults import Fault, FaultSchedule
from flwr_moshpit.simulation.fleet import Fleet
from flwr_moshpit.simulation.history import EVENTS, History
from flwr_moshpit.simulation.meter import Spacing
from flwr_moshpit.simulation.network import Network
from flwr_moshpit.simulation.watch import Watch
from flwr_moshpit.trainer import Trainer
from flwr_moshpit.vector import Layout

SERVER = PeerId("server")
SERVER_DEVICE = "cloud-t4@datacenter"
DEFAULT_DEVICE = "jetson-orin-nano"

_FAULTS_STREAM = 3
"""The engine's own streams under one seed are 1 and 2."""


class Simulation:
    """Peers on virtual devices that train and average in virtual time.

    Parameters
    ----------
    algorithm : Moshpit, FedAvg, ...
        The settings of one of the algorithms in `flwr_moshpit.config`.
    trainer : Trainer
        What the clients train: `TorchTrainer`, `FlowerTrainer` or one of your own.
    fleet : Fleet or str, optional
        One device per peer, or a mix such as "jetson-nano:0.6,cloud-t4:0.4" of `peers` devices.
        By default all are Jetson Orin Nanos.
    peers : int, optional
        Number of peers; needed unless `fleet` is a `Fleet`.
    network : Network, optional
        By default each device has its own link.
    faults : str or list of str
        Such as "crash 20% per hour, back after 120 s"; see `simulation/fault_grammar.py`.
    seed : int
        Everything that is drawn follows from it: same seed, same digest.
    workers : int
        Processes that train; 0 trains in this one. Results are the same.
    backend : ComputeBackend, optional
        What carries out the trainer's jobs instead, such as Flower's simulation engine.
    dtype : "float32" or "float64", optional
        Of the averaged vectors; by default what the model needs.
    cost_as : str or CostModel, optional
        Put the cost of "resnet50", "albert-large" or a TOML file on clock and links.
    evaluate_every : int, optional
        Rounds between two evaluations of the swarm's mean model. By default as often as costs at
        most a twentieth of the work of training.
    evaluate_every_s : float, optional
        Virtual seconds between two evaluations instead: the same instants for every algorithm.
    observe : Observer, optional
        Called with every report as (virtual seconds, peer or None, report).

    Raises
    ------
    ConfigError
        For a setting that cannot be, and for a job that does not fit a device's memory.
    """

    def __init__(
        self,
        algorithm: Any,
        trainer: Trainer,
        fleet: Fleet | str | None = None,
        peers: int | None = None,
        network: Network | None = None,
        faults: str | Iterable[str | Fault] = (),
        seed: int = 0,
        workers: int = 0,
        backend: ComputeBackend | None = None,
        dtype: str | None = None,
        cost_as: str | CostModel | None = None,
        evaluate_every: int | None = None,
        evaluate_every_s: float | None = None,
        observe: Observer | None = None,
    ) -> None:
        if evaluate_every is not None and evaluate_every < 1:
            raise ConfigError(f"evaluate_every must be at least 1, not {evaluate_every}")
        if evaluate_every_s is not None and not evaluate_every_s > 0:
            raise ConfigError(f"evaluate_every_s must be above 0, not {evaluate_every_s}")
        if evaluate_every is not None and evaluate_every_s is not None:
            raise ConfigError("evaluate_every and evaluate_every_s exclude each other: set one")
        if seed < 0:
            raise ConfigError(f"seed must not be negative, not {seed}")
        if not hasattr(trainer, "initial_params"):
            raise ConfigError(
                "trainer must be a Trainer, such as TorchTrainer(...) or, for a Flower ClientApp, "
                f"FlowerTrainer(app), not a {type(trainer).__name__}"
            )
        self.algorithm = self._used = algorithm
        self.trainer = trainer
        self.fleet = _fleet(fleet, peers, seed)
        self.network = network or Network.from_profiles()
        self.seed = seed
        self.peers = peer_ids(len(self.fleet))
        self._workers = workers
        self._backend = backend
        self._dtype = dtype
        self._evaluate_every = evaluate_every
        self._evaluate_every_s = evaluate_every_s
        self._observe = observe
        self._fault_texts = [faults] if isinstance(faults, str) else list(faults)
        self._faults = parse_faults(self._fault_texts)
        self._cost_as = cost_as
        self._array_scale = 1.0
        # Refuses faults on peers that do not exist before the trainer loads its data.
        self._fault_schedule()
        trainer.prepare(len(self.fleet), dtype)
        self._is_fresh = True
        self.layout = trainer.layout
        self.cost = trainer.cost()
        if cost_as is not None:
            model = CostModel.load(cost_as) if isinstance(cost_as, str) else cost_as
            self.cost = model.stand_in_for(self.cost)
            self._array_scale = model.params / self.layout.dim
            if isinstance(algorithm, Moshpit):
                # The least share that is worth a message is one of the model of `cost_as`.
                least = round(algorithm.share_bytes_min / self._array_scale)
                self._used = dataclasses.replace(algorithm, share_bytes_min=least)
        check_memory(self.fleet, self.cost)

    def explain(self) -> list[Row]:
        """(setting, value, why): what was chosen from peers, model and profiles."""
        vector_bytes = self.layout.dim * self.layout.dtype.itemsize * self._array_scale
        return explain(
            self._used,
            self.fleet,
            self.network,
            self.layout,
            self.cost,
            vector_bytes,
            # Some Flower apps train for their own number of epochs, whatever they are told.
            takes_steps=getattr(self.trainer, "takes_steps", True),
        )

    def run(
        self,
        until: str | float | None = None,
        rounds: int | None = None,
        out: str | Path | None = None,
        *,
        progress: bool = False,
    ) -> History:
        """Run until every living peer has done `rounds`, or until a virtual time ("3h", 90).

        What comes first ends it; Ctrl-C ends it too, and the history says so. With `out`, reports
        are written to events.jsonl there while it runs, and everything else at its end. `progress`
        shows on stderr how far it is.

        Raises ConfigError where nothing would end it, and TrainerError for what the training code
        raises.
        """
        until_s = _until_s(until, rounds)
        if not self._is_fresh:
            self.trainer.prepare(len(self.fleet), self._dtype)
        self._is_fresh = False
        params = self.trainer.initial_params(self.seed)
        engine = self.make_engine(Start(rounds), params)
        watch = Watch(
            engine,
            self.trainer,
            dict(zip(self.peers, self.fleet, strict=True)),
            params,
            self._fault_schedule(),
            Spacing(self._evaluate_every, self.cost.flops_per_example, self._evaluate_every_s),
            rounds,
            SERVER if self._needs_server else None,
        )
        if self._observe is not None:
            watch.observers.append(self._observe)
        with contextlib.ExitStack() as stack:
            stack.callback(engine.close)
            if progress:
                shown = Progress(num_peers=len(self.fleet), rounds=rounds, until_s=until_s)
                watch.observers.append(stack.enter_context(shown))
            if out is not None:
                watch.observers.append(stack.enter_context(JsonLines(Path(out) / EVENTS)))
            interrupted = watch.run(until_s)
            history = self._history(engine, watch, interrupted, until_s, rounds)
        if out is not None:
            history.save_results(Path(out))
        return history

    def make_engine(self, start: Start, params: Vector) -> Engine:
        """An engine with every peer in it, each of which begins with `params` and `start`."""
        engine = Engine(
            seed=self.seed,
            network=self.network,
            backend=self._backend or trainer_backend(self.trainer, self._workers),
            cost=self.cost,
            array_scale=self._array_scale,
            start=start,
        )
        schema = self.layout.schema

        def make(info: PeerInfo, view: View, rng: np.random.Generator, incarnation: int) -> Machine:
            return build_machine(self._used, info, params, view, rng, incarnation, schema)

        for peer, device in zip(self.peers, self.fleet, strict=True):
            engine.add(peer, make, self._info(peer, device), device)
        if self._needs_server:
            device = builtin_catalogue().device(SERVER_DEVICE)
            engine.add(SERVER, make, self._info(SERVER, device), device)
        return engine

    @property
    def _needs_server(self) -> bool:
        return bool(getattr(self.algorithm, "needs_server", False))

    def _info(self, peer: PeerId, device: DeviceProfile) -> PeerInfo:
        link = self.network.link_of(device)
        # A peer counts the bytes of the model that is trained, its link those of `cost_as`.
        return PeerInfo(
            peer,
            speed=device.flops_per_s / self.cost.flops_per_example,
            uplink_bytes_per_s=link.uplink_bytes_per_s / self._array_scale,
            downlink_bytes_per_s=link.downlink_bytes_per_s / self._array_scale,
        )

    def _fault_schedule(self) -> FaultSchedule:
        rng = np.random.default_rng([self.seed, _FAULTS_STREAM])
        return FaultSchedule(self._faults, self.peers, rng)

    def _history(
        self,
        engine: Engine,
        watch: Watch,
        interrupted: bool,
        until_s: float | None,
        rounds: int | None,
    ) -> History:
        last = watch.points[-1]
        return History(
            digest=engine.digest,
            virtual_s=engine.now,
            bytes=last.bytes,
            joules=last.joules,
            interrupted=interrupted,
            points=tuple(watch.points),
            params=_named(self.layout, watch.mean),
            events=tuple(watch.events),
            settings=self._settings(until_s, rounds),
        )

    def _settings(self, until_s: float | None, rounds: int | None) -> dict[str, Any]:
        algorithm = self.algorithm
        names = [field.name for field in dataclasses.fields(algorithm)]
        return {
            "algorithm": type(algorithm).__name__,
            "algorithm_settings": {name: getattr(algorithm, name) for name in names},
            "peers": len(self.fleet),
            "fleet": self.fleet.counts(),
            "seed": self.seed,
            "faults": [str(fault) for fault in self._fault_texts],
            "until_round": rounds,
            "until_s": until_s,
            "dtype": self.layout.dtype.name,
            "cost_as": None if self._cost_as is None else str(self._cost_as),
            "version": __version__,
        }


def peer_ids(count: int) -> list[PeerId]:
    """ "peer-0000", "peer-0001", ...: as strings in the order of their numbers."""
    width = max(4, len(str(count - 1)))
    return [PeerId(f"peer-{index:0{width}d}") for index in range(count)]


def _fleet(fleet: Fleet | str | None, peers: int | None, seed: int) -> Fleet:
    if isinstance(fleet, Fleet):
        if peers is not None and peers != len(fleet):
            raise ConfigError(f"peers is {peers}, but the fleet has {len(fleet)} devices")
        return fleet
    if peers is None:
        raise ConfigError("the number of peers is missing: give `peers` or a Fleet")
    return Fleet.parse(fleet if fleet is not None else DEFAULT_DEVICE, peers, seed=seed)


def _until_s(until: str | float | None, rounds: int | None) -> float | None:
    if until is None and rounds is None:
        raise ConfigError("a run needs an end: set rounds, or until to a virtual time such as 3h")
    if rounds is not None and rounds < 0:
        raise ConfigError(f"rounds must not be negative, not {rounds}")
    if until is None:
        return None
    seconds: float = parse_duration(until, "until") if isinstance(until, str) else float(until)
    if not seconds > 0:
        raise ConfigError(f"until must be above 0, not {until}")
    return seconds


def _named(layout: Layout, vector: Vector) -> dict[str, np.ndarray[Any, Any]]:
    """The averaged arrays by name; bfloat16, which numpy does not have, as float32."""
    specs = [
        dataclasses.replace(spec, dtype="float32") if spec.dtype == "bfloat16" else spec
        for spec in layout.averaged
    ]
    return Layout(specs, (), layout.dtype.name).unflatten(vector)
