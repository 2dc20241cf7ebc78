"""`flwr-moshpit swarm`: an app's clients as processes of this machine, over gRPC and mutual TLS."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_moshpit.commands.swarm_run import SwarmRun
from flwr_moshpit.commands.swarm_table import SwarmTable
from flwr_moshpit.errors import ConfigError, MoshpitError, TrainerError
from flwr_moshpit.flower.app import App, load_app
from flwr_moshpit.flower.app_trainer import make_app_trainer
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.swarm_results import EVENTS, SwarmResults
from flwr_moshpit.observe.text import notice
from flwr_moshpit.protocol.machine import PeerId, Start
from flwr_moshpit.runtime.compute import MakeTrainer, Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.identity import DAY_S, Authority, Identity
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.peer import PeerSettings
from flwr_moshpit.settings import RunSettings, gather, read_toml
from flwr_moshpit.signals import ends_as_interrupt

DEFAULT_PEERS = 8
GATHER_S = 120.0
"""How long the first peers wait for the last one to load its trainer."""

_SIMULATED = ("fleet", "catalogue", "faults", "workers", "cost-as", "until")


def swarm(
    name: str,
    *,
    flags: Mapping[str, Any],
    config: Path | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> SwarmResults:
    """Train the app called `name` with real processes, and write everything to `out`.

    Raises ConfigError for a wrong setting, before anything is written, and TrainerError where the
    app's code raises. Interrupted, the results say so and hold what was done until then.
    """
    app = load_app(name)
    settings = swarm_settings(app, read_toml(config) if config is not None else {}, flags)
    # gRPC tells of every broken connection; so do this program's reports.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = SwarmTable(settings.peers, settings.rounds, quiet=quiet)
    make_trainer = make_app_trainer(app, settings.app)
    with ends_as_interrupt(), run_folder(out) as folder:
        if not quiet:
            notice(*settings.remarks, f"starting {settings.peers} peers of {app.name} ...")
        with (
            tempfile.TemporaryDirectory(prefix="flwr-moshpit-") as secrets,
            LocalSwarm(local_peers(app, settings, Path(secrets))) as swarm,
            SwarmRun(swarm, settings, make_trainer, folder, table) as run,
        ):
            if not quiet:
                run.on_address = lambda address: table.say(
                    f"ask a peer: flwr-moshpit status {address} --authority {secrets}"
                )
            results = run.run()
        results.save(folder)
        if len(results.failed) == settings.peers:
            peer, what = next(iter(results.failed.items()))
            raise TrainerError(f"{peer}, as all others: {what}; see {folder / EVENTS}")
        if not results.alive and not results.interrupted:
            raise MoshpitError(f"no peer is left: see {folder / EVENTS} for what they told")
        console.print(results.table())
        for file in sorted(path.name for path in folder.iterdir()):
            console.print(str(folder / file))
    return results


def swarm_settings(app: App, file: Mapping[str, Any], flags: Mapping[str, Any]) -> RunSettings:
    """As for `simulate`, without what only a simulation has. Raises ConfigError for that."""
    for key in _SIMULATED:
        if key in file or key in flags:
            raise ConfigError(f"setting {key!r} is for `simulate`: here devices and time are real")
    own = {key: value for key, value in app.config.items() if key not in _SIMULATED}
    settings = gather({"peers": DEFAULT_PEERS, **own}, file, flags)
    if settings.peers < 2:
        raise ConfigError(f"peers must be at least 2, not {settings.peers}: one has nobody to meet")
    if getattr(settings.algorithm, "needs_server", False):
        raise ConfigError(
            f"algorithm {type(settings.algorithm).__name__} needs a server: there is none here"
        )
    return settings


def local_peers(
    app: App, settings: RunSettings, folder: Path, *, flower: bool | None = None
) -> list[PeerSettings]:
    """One peer per client, under an authority made for this run in the private `folder`.

    `flower`: see `make_app_trainer`.
    """
    authority = Authority.create(f"{app.name}-{os.getpid()}", valid_s=7 * DAY_S)
    authority.save(folder)
    schedule = Schedule(
        start=Start(until_round=settings.rounds), gather_peers=settings.peers, gather_s=GATHER_S
    )
    make_trainer = make_app_trainer(app, settings.app, flower=flower)
    width = len(str(settings.peers - 1))
    identities = [authority.issue(PeerId(f"p{k:0{width}}")) for k in range(settings.peers)]
    return [
        _peer(identity, settings, make_trainer, client, schedule)
        for client, identity in enumerate(identities)
    ]


def _peer(
    identity: Identity,
    settings: RunSettings,
    make_trainer: MakeTrainer,
    client: int,
    schedule: Schedule,
) -> PeerSettings:
    task = Task(
        make_trainer,
        client,
        settings.peers,
        seed=(settings.seed, client),
        initial_seed=settings.seed,
        dtype=settings.dtype,
    )
    return PeerSettings(
        identity=identity,
        algorithm=settings.algorithm,
        task=task,
        schedule=schedule,
        seed=settings.seed,
    )
