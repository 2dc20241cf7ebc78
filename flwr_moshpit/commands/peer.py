"""`flwr-moshpit peer`: one peer of a swarm, on this device."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_moshpit.commands.ca import parse_contacts
from flwr_moshpit.commands.swarm import swarm_settings
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.flower.app_trainer import make_app_trainer
from flwr_moshpit.flower.profile import suited, trainer_threads
from flwr_moshpit.observe.folder import run_folder
from flwr_moshpit.observe.json_lines import JsonLines
from flwr_moshpit.observe.observer import Observer
from flwr_moshpit.observe.swarm_results import EVENTS, named_arrays, save_model
from flwr_moshpit.observe.text import duration, notice
from flwr_moshpit.observe.voice import Voice
from flwr_moshpit.protocol.machine import PeerId, Report, Start, Vector
from flwr_moshpit.runtime.compute import Offer, Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.identity import DAY_S, Invitation
from flwr_moshpit.runtime.memory import share_one_heap
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from flwr_moshpit.runtime.whereabouts import ANYWHERE, host_and_port
from flwr_moshpit.settings import read_toml
from flwr_moshpit.simulation.device import own_device

LINGER_S = 10.0
"""How long a peer that has done its rounds goes on serving those who have not."""
GATHER_S = 30.0

EXPIRES_SOON_S = 3 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a peer is, and what it keeps there."""

    bind: str = "0.0.0.0:0"
    advertised: str | None = None
    relayed: bool = False
    """Nobody can dial this device."""
    contacts: Sequence[str] = ()
    """ "peer=host:port", besides those of the invitation."""
    state: Path | None = None
    trace: Path | None = None
    out: Path | None = None

    def check(self, contacts: Mapping[PeerId, str]) -> None:
        """Raises ConfigError for addresses that cannot be, or at which nobody could find it."""
        if self.relayed and self.advertised is not None:
            raise ConfigError(
                "advertise: a peer that is relayed has no address that others could dial"
            )
        host_and_port(self.bind, "bind")
        if self.advertised is not None:
            host_and_port(self.advertised, "advertise")
        is_anywhere = self.bind.rpartition(":")[0] in ANYWHERE
        if is_anywhere and not contacts and self.advertised is None and not self.relayed:
            raise ConfigError(
                "bind: give --bind HOST:PORT with an address of this device that others reach, or "
                "--advertise HOST:PORT with it: there is no contact to find out with"
            )


def peer(
    name: str,
    invitation: Path,
    client: int,
    *,
    place: Place,
    flags: Mapping[str, Any],
    config: Path | None = None,
    gather_peers: int = 2,
    profile: Path | None = None,
) -> bool:
    """Run the peer that holds `invitation`, on the data of `client`, until its rounds are done, the
    authority stops the swarm, or a signal comes; whether a signal came. `profile`: of this device,
    as `probe` has written it; what follows from it is said.

    Rounds without number by default. Raises ConfigError for what is wrong from the start,
    TrainerError where the app cannot be loaded, and TransportError when it cannot listen.
    """
    invited = Invitation.load(invitation)
    app = load_app(name)
    file = read_toml(config) if config is not None else {}
    settings = swarm_settings(app, file, flags)
    rounds = settings.rounds if "rounds" in {**file, **flags} else None
    if not 0 <= client < settings.peers:
        raise ConfigError(f"client must be in 0..{settings.peers - 1}, not {client}")
    if gather_peers < 1:
        raise ConfigError(f"gather must be at least 1, not {gather_peers}")
    contacts = {**invited.contacts, **parse_contacts(place.contacts)}
    place.check(contacts)
    device = None if profile is None else own_device(profile)
    if device is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(trainer_threads()))
    task = Task(
        make_app_trainer(app, settings.app, device=device),
        client,
        settings.peers,
        # Two lives of one peer shall not draw the same batches.
        seed=(settings.seed, client, time.time_ns()),
        initial_seed=settings.seed,
        dtype=settings.dtype,
        tells_cost=device is not None,
    )
    schedule = Schedule(
        start=Start(until_round=rounds),
        gather_peers=gather_peers,
        gather_s=GATHER_S,
        linger_s=LINGER_S if rounds is not None else None,
    )
    peer_settings = PeerSettings(
        identity=invited.identity,
        algorithm=settings.algorithm,
        task=task,
        contacts=contacts,
        bind="127.0.0.1:0" if place.relayed else place.bind,
        advertised=place.advertised,
        dialable=not place.relayed,
        schedule=schedule,
        seed=settings.seed,
        state=place.state,
        trace=place.trace,
    )
    # After a restart with a state the run goes on, and so do its results.
    resumes = place.state is not None
    keeping = nullcontext() if place.out is None else run_folder(place.out, resumes=resumes)
    with keeping:
        left_s = invited.identity.expires_at.timestamp() - time.time()
        if left_s < EXPIRES_SOON_S:
            # Links that are there then go on, but nobody lets it in anew.
            notice(f"{invited.identity.peer}'s invitation is valid for {duration(left_s)} more")
        notice(f"{invited.identity.peer} loads {app.name} ...")
        share_one_heap()
        compute = ProcessCompute(task)
        try:
            # Before there is an event loop, so that Ctrl-C ends it at once.
            offer = compute.start()
            if device is not None:
                given = {**app.config, **file, **flags}
                peer_settings, remarks = suited(peer_settings, given, device, offer)
                notice(*remarks)
            running = asyncio.run(_run(peer_settings, compute, offer, place.out))
        finally:
            compute.close()
        driver = running.driver
        if place.out is not None and driver.last_model is not None:
            _save(place.out, task, driver.last_model[0])
    return driver.result is None and not running.stopped


async def _run(
    settings: PeerSettings, compute: ProcessCompute, offer: Offer, out: Path | None
) -> Peer:
    me = settings.identity
    with Voice(sys.stdout) as voice, ExitStack() as closing:
        observers: list[Observer] = [_Lines(voice)]

        def say_address(address: str) -> None:
            verb = "listens on" if settings.dialable else "waits at relay"
            voice.say(f"{me.peer} of swarm {me.swarm!r} {verb} {address}")

        def say_loss(error: OSError) -> None:
            voice.say(f"{EVENTS} ends here, the peer goes on: {error.strerror or error}")

        if out is not None:
            resumes = settings.state is not None
            events = JsonLines(out / EVENTS, resumes=resumes, on_loss=say_loss)
            observers.append(closing.enter_context(events))
        running = Peer(settings, compute, offer, observers=observers, on_address=say_address)
        del offer  # It holds a model, which the machine moves on from.
        await running.run(signals=True)
        if running.stopped:
            voice.say("stopped by the swarm's authority")
    return running


def _save(folder: Path, task: Task, params: Vector) -> None:
    """The averaged arrays by name. Their layout is the trainer's, whose process has ended."""
    trainer = task.make_trainer()
    task.offer(trainer)
    save_model(folder, named_arrays(trainer.layout, params))


class _Lines:
    """Says what happens, a line each."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    def __call__(self, now: float, peer: PeerId | None, report: Report) -> None:
        text = _line(report.name, report.values)
        if text:
            self._voice.say(f"{now:9.1f} s  {text}")


def _line(name: str, values: Mapping[str, Any]) -> str | None:
    match name:
        case "round":
            if not values.get("contributors", 1):
                return f"round {values['round']}, averaged with nobody: {values.get('reason', '')}"
            parts = [f"round {values['round']}", f"with {values.get('contributors', 1)} peers"]
            parts.append(f"coverage {100 * float(values.get('coverage', 1.0)):.0f} %")
            if "wait_s" in values:
                parts.append(f"waited {duration(float(values['wait_s']))}")
            return ", ".join(parts)
        case "peer":
            return f"{values['peer']} is {values['status']}"
        case "training_failed":
            return f"training failed: {values['error']}"
        case "stalled":
            return f"this device stood still for {duration(float(values['late_s']))}"
        case "checkpoint_failed":
            return f"no checkpoint: {values['error']}"
        case "refused":
            what = f"{values['what']}: " if values.get("what") else ""
            times = f", {values['times']} times" if values.get("times", 1) > 1 else ""
            return f"refused from {values['peer']}: {what}{values['reason']}{times}"
    return None
