"""A peer whose client fails at every training ends and says why; the others go on."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flwr_moshpit.cli import main
from flwr_moshpit.commands.swarm_run import SwarmRun
from flwr_moshpit.commands.swarm_table import SwarmTable
from flwr_moshpit.config import Moshpit
from flwr_moshpit.errors import ConfigError, TrainerError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.flower.peer_folder import PeerFolder
from flwr_moshpit.protocol.machine import PeerId, Report, Start, Trained, Vector
from flwr_moshpit.runtime import peer as peer_module
from flwr_moshpit.runtime.compute import Task
from flwr_moshpit.runtime.driver import Schedule
from flwr_moshpit.runtime.failures import Failures, Outcast
from flwr_moshpit.runtime.identity import DAY_S, Authority
from flwr_moshpit.runtime.local_swarm import LocalSwarm
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from flwr_moshpit.runtime.worker import Listening
from flwr_moshpit.settings import RunSettings
from tests.flower.flower_processes import wait_until
from tests.trainers import QuadraticTrainer

CAUSE = "client 1, step 4: ValueError: no data"


class Without(QuadraticTrainer):
    """Client 1, or all, have no data."""

    def __init__(self, *, all_fail: bool) -> None:
        super().__init__()
        self._all_fail = all_fail

    def train(self, client: int, params: Vector, num_steps: int, seed: int) -> Trained:
        if client == 1 or self._all_fail:
            raise TrainerError(f"{CAUSE}\n  File ...")
        return super().train(client, params, num_steps, seed)


def settings_of(num_peers: int, rounds: int, all_fail: bool = False) -> list[PeerSettings]:
    authority = Authority.create("s", valid_s=DAY_S)
    make_trainer = functools.partial(Without, all_fail=all_fail)
    schedule = Schedule(start=Start(until_round=rounds), gather_peers=num_peers, gather_s=60.0)
    return [
        PeerSettings(
            identity=authority.issue(PeerId(f"p{client}")),
            algorithm=Moshpit(local_steps=1),
            task=Task(make_trainer, client, num_peers, seed=(0, client)),
            schedule=schedule,
        )
        for client in range(num_peers)
    ]


def test_failures_in_a_row_are_counted() -> None:
    stops: list[None] = []
    failures = Failures(lambda: stops.append(None))
    peer = PeerId("a")

    def fail(times: int) -> None:
        for number in range(times):
            failures(0.0, peer, Report("training_failed", {"error": f"{CAUSE}\n  File ..."}))
            failures(0.0, peer, Report("round", {"round": number, "examples": 0}))

    assert failures.told is None
    fail(Failures.MAX - 1)
    failures(0.0, peer, Report("round", {"round": 9, "examples": 160}))
    assert failures.told is None
    fail(1)
    assert failures.told == f"training failed once: {CAUSE}"
    fail(Failures.MAX - 2)
    failures.check()
    assert not stops
    fail(1)
    assert len(stops) == 1
    with pytest.raises(TrainerError, match=f"^training failed 10 times in a row: {CAUSE}$"):
        failures.check()


def test_a_result_that_nobody_can_use_is_a_failure() -> None:
    failures = Failures()
    nan = Report("refused", {"peer": "a", "what": "training", "reason": "NaN", "count": 1})
    failures(0.0, PeerId("a"), nan)
    failures(0.0, PeerId("a"), Report("refused", {"peer": "b", "what": "part", "reason": "NaN"}))
    assert failures.told == "training failed once: NaN"


def test_who_is_alone_because_all_refuse_it_for_good_ends() -> None:
    stops: list[None] = []
    outcast, refused_by = Outcast(lambda: stops.append(None)), {PeerId("a"): "b trains x, a y"}
    for _ in range(3):
        for is_alone, who in ((True, {}), (False, refused_by)):
            for _ in range(Outcast.LOOKS + 1):
                outcast.look(is_alone, who)
        for _ in range(Outcast.LOOKS - 1):
            outcast.look(True, refused_by)
        outcast.look(False, {})
    outcast.check()
    for _ in range(Outcast.LOOKS + 5):
        outcast.look(True, refused_by)
    assert len(stops) == 1
    with pytest.raises(ConfigError, match=r"^a refuses this peer: b trains x, a y$"):
        outcast.check()


def test_a_peer_with_another_model_is_told_so_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_module, "LOOK_S", 0.05)
    ours, other = settings_of(2, rounds=10**6)
    other = replace(
        other, task=replace(other.task, make_trainer=functools.partial(QuadraticTrainer, 7))
    )

    async def run() -> None:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        peer = Peer(ours, computes[0], offers[0], on_address=address.set_result)
        running = asyncio.create_task(peer.run())
        contacts = {ours.identity.peer: await address}
        stranger = Peer(replace(other, contacts=contacts), computes[1], offers[1])
        why = "p0 refuses this peer: p1 trains Moshpit with 7 parameters of layout [0-9a-f]{8}, "
        with pytest.raises(ConfigError, match=why + "p0 Moshpit with [0-9]+ parameters"):
            await stranger.run()
        assert peer.transport.refusals["task"] > 0
        assert list(peer.driver.membership.view.peers) == ["p0"]
        peer.driver.stop()
        await running

    computes = [ProcessCompute(each.task) for each in (ours, other)]
    try:
        offers = [compute.start() for compute in computes]
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        for compute in computes:
            compute.close()


def test_what_no_code_of_ours_has_caught_is_told_in_one_line_too() -> None:
    failures = Failures()
    error = "Traceback (most recent call last):\n  File ...\nValueError: x"
    failures(0.0, PeerId("a"), Report("training_failed", {"error": error}))
    assert failures.told == "training failed once: ValueError: x"


def test_a_peer_whose_training_always_fails_ends_with_an_error() -> None:
    [settings] = settings_of(1, rounds=10**6, all_fail=True)
    compute = ProcessCompute(settings.task)

    async def run() -> None:
        peer = Peer(settings, compute, offer)
        await peer.run()

    try:
        offer = compute.start()
        with pytest.raises(TrainerError, match=f"^training failed 10 times in a row: {CAUSE}$"):
            asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        compute.close()


@pytest.mark.parametrize("all_fail", [False, True])
def test_a_swarm_goes_on_without_those_who_fail(tmp_path: Path, all_fail: bool) -> None:
    rounds = 40
    peers = settings_of(3, rounds, all_fail)
    table = SwarmTable(3, rounds, quiet=True)
    settings = RunSettings(algorithm=Moshpit(local_steps=1), peers=3, rounds=rounds)
    make_trainer = peers[0].task.make_trainer
    with (
        LocalSwarm(peers) as swarm,
        SwarmRun(swarm, settings, make_trainer, tmp_path, table) as run,
    ):
        results = run.run()
    failed = f"training failed 10 times in a row: {CAUSE}"
    if all_fail:
        assert results.failed == dict.fromkeys(["p0", "p1", "p2"], failed)
        assert results.alive == 0
    else:
        assert results.failed == {"p1": failed}
        assert (results.alive, results.rounds) == (2, rounds)
        assert results.summary()["failed"] == results.failed
    assert f"p1: {failed}" in results.table().splitlines()


def without_data(folder: Path) -> Path:
    """The app `digits`, whose clients cannot train."""
    app = folder / "digits"
    shutil.copytree(load_app("digits").path, app)
    client = app / "digits" / "client_app.py"
    text = client.read_text()
    assert "    num_steps = int(" in text
    client.write_text(
        text.replace(
            "    num_steps = int(", '    raise ValueError("no data")\n    num_steps = int('
        )
    )
    return app


def test_a_contact_that_dies_before_it_listens_is_replaced() -> None:
    with LocalSwarm(settings_of(2, rounds=1)) as swarm:
        swarm.kill(swarm.contact)
        ends_at = time.monotonic() + 60
        told = swarm.next(ends_at)
        while told is not None and not isinstance(told[1], Listening):
            told = swarm.next(ends_at)
        assert told is not None, "nobody tells the other to begin"
        assert told[0] == swarm.contact == "p1"


@pytest.mark.slow
def test_a_swarm_of_which_all_fail_ends_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    app = without_data(tmp_path)
    out = str(tmp_path / "out")
    assert main(["swarm", str(app), "--peers", "2", "--rounds", "3", "--out", out]) == 1
    said = capsys.readouterr().err
    told = r"p0, as all others: training failed .*: client 0, step \d+: ValueError: no data; see "
    assert re.search(told, said)
    assert "Traceback" not in said


@pytest.mark.slow
def test_the_peer_of_a_supernode_ends_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    app = load_app(str(without_data(tmp_path)))
    folder = PeerFolder(tmp_path / "peer")
    folder.path.mkdir()
    join = {
        "bind": "127.0.0.1:0",
        "address": "",
        "peer": "client-0",
        "app": str(app.path),
        "run-config": {**app.config, "rounds": 10**6},
        "node-config": {"partition-id": 0, "num-partitions": 1},
    }
    folder.write("join", join)
    command = [sys.executable, "-m", "flwr_moshpit.flower.peer_process", str(folder.path)]
    process = subprocess.Popen(command)
    try:
        wait_until(
            lambda: folder.read("peer") or process.poll() is not None, 120.0, "the peer listens"
        )
        made = folder.read("peer")
        assert made is not None
        authority = Authority.create("s", valid_s=DAY_S)
        trainer = app.trainer(app.config)
        trainer.prepare(1)
        start = {
            "swarm": "s",
            "client": 0,
            "num-clients": 1,
            "certificate": authority.sign(made["public-key"].encode(), PeerId("client-0")).decode(),
            "authority": authority.certificate_pem.decode(),
            "gather": 1,
            "contacts": {},
            "dialable": True,
            "schema": trainer.layout.schema.hex(),
        }
        folder.write("start", start)
        assert process.wait(120) == 1
    finally:
        process.kill()
        process.wait()
    end = folder.read("end")
    assert end is not None
    told = r"training failed 10 times in a row: client 0, step \d+: ValueError: no data"
    assert re.fullmatch(told, end["error"])
