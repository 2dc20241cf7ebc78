"""`flwr-moshpit ca`, `peer`, `status`, `stop` and `replay`."""

from __future__ import annotations

import errno
import queue
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.cli import main
from flwr_moshpit.commands import status
from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import TrainerError, TransportError
from flwr_moshpit.flower.app import load_app
from flwr_moshpit.flower.app_trainer import make_app_trainer
from flwr_moshpit.protocol.machine import Cancel, JobId, PeerId, PeerInfo, Start, View
from flwr_moshpit.protocol.moshpit import MoshpitPeer
from flwr_moshpit.runtime.control import Stop
from flwr_moshpit.runtime.identity import DAY_S, Authority, Invitation
from flwr_moshpit.runtime.trace import Recipe, Recorder
from flwr_moshpit.runtime.trainer_process import ProcessCompute
from flwr_moshpit.testing.swarm import Swarm
from tests.trainers import QuadraticTrainer

HANG_S = 120.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ca(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invite = ["--invite", "a", "b", "--contact", "a=10.0.0.1:4000"]
    assert main(["ca", "made", "--swarm", "s", *invite]) == 0
    said = capsys.readouterr().out
    for path in (here / "made").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    invited = Invitation.load(here / "made" / "invitations" / "b.invitation")
    assert (invited.identity.swarm, invited.identity.peer) == ("s", "b")
    assert invited.contacts == {"a": "10.0.0.1:4000"}

    key = (here / "made" / "authority.key").read_bytes()
    assert "next: on the device of a, flwr-moshpit peer --invitation a.invitation " in said
    assert "--client 0 --peers 2 --bind 10.0.0.1:4000; the others alike, --client up to 1" in said
    assert main(["ca", "made", "--invite", "c"]) == 0
    assert "--client 2 --peers 3 --bind HOST:PORT\n" in capsys.readouterr().out
    assert (here / "made" / "authority.key").read_bytes() == key
    capsys.readouterr()
    for arguments, said in (
        (["made", "--invite", "a"], "a.invitation exists"),
        (["made", "--swarm", "t"], "holds the authority of 's', not 't'"),
        (["new"], "a new authority needs the swarm's name"),
        (["init", "new"], "argument DIR: `ca` has no subcommand 'init'"),
        (["invite", "--help"], "`flwr-moshpit ca DIR --invite PEER` invites to its swarm"),
        (["new", "--swarm", "s", "--contact", "a"], "must be written as peer=host:port"),
        (["new", "--swarm", "s", "--invite", "../a"], "cannot be the name of a file"),
        (["new", "--swarm", "s", "--contact", "a=::1:80"], "[HOST]:PORT for IPv6, not '::1:80'"),
        (["new", "--swarm", "s", "--contact", "a=h:65536"], "contact a: a port must be at most"),
        (["new", "--swarm", "s", "--invite", "b", "b"], "invite: b is named twice"),
        (["new", "--swarm", "s", "--invite", "b", "b" * 200], "must be 1 to 128 printable"),
        (["new", "--swarm", "s", "--invite", "a", "--days", "0"], "days must be above 0"),
        (["new", "--swarm", "s", "--invite", "a", "--days", "1e12"], "at most 3650"),
        (["made/authority.key/new", "--swarm", "s"], "cannot be written (Not a directory"),
    ):
        assert main(["ca", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not (here / "new").exists()


def test_a_stop_is_the_authoritys_alone() -> None:
    authority, other = Authority.create("s"), Authority.create("s")
    now = 1_800_000_000.0
    stop = Stop.signed(authority, now)
    pem = authority.certificate_pem
    assert stop.flaw("s", pem, now + 60) is None
    assert len(stop.text) < 1024
    assert stop.flaw("t", pem, now) == "the authority has not signed it"
    assert stop.flaw("s", other.certificate_pem, now) == "the authority has not signed it"
    assert stop.flaw("s", pem, now + 2 * DAY_S) == "it is too old, or the clock is wrong"
    later = Stop(stop.text.replace(":1800000000:", ":1800000001:"))
    assert later.flaw("s", pem, now) == "the authority has not signed it"
    for text in ("", "moshpit-stop-1", "moshpit-stop-1:1800000000:%%", "moshpit-stop-1:x:AAAA"):
        assert Stop(text).flaw("s", pem, now) == "it is no signed stop"
    assert stop.record().key != later.record().key


@pytest.mark.parametrize(
    ("seat", "line"),
    [
        ({"lobby": {}, "leader": "b"}, "waits in the lobby of leader b for its group"),
        ({"group": {}, "parts": ["b", "c"]}, "waits for b, c: a part of the vector"),
        ({"group": {}, "parts": [], "averages": ["b"]}, "waits for b: an averaged part"),
        ({"group": {}, "answers": ["c"]}, "waits for c: whether it has finished"),
        ({"group": {}, "new version": "b"}, "waits for b: the group without the lost"),
        ({"model from": "b", "asked for": "40 %"}, "waits for b: the model, 40 % asked for"),
        ({"done": ""}, None),
    ],
)
def test_a_status_says_for_whom_and_what_and_since_when(
    seat: dict[str, object], line: str | None
) -> None:
    told = {
        "peer": "a",
        "swarm": "s",
        "address": "h:1",
        "up_s": 90.0,
        "peers": [{"peer": p, "status": s} for p, s in (("a", "alive"), ("b", "suspect"))],
        "round": 3,
        "phase": "meeting",
        "phase_s": 2.5,
        "waits_for": [seat],
        "refused": {"certificate": 2},
    }
    assert status._lines(told) == [
        "a of swarm 's' at h:1, up for 1 min 30 s",
        "suspect: b",
        "round 3, meeting for 2.5 s",
        *([line] if line else []),
        "refused from others: certificate 2",
    ]


def test_what_a_machine_waits_for_is_what_a_status_can_say() -> None:
    """They know each other by the names in a snapshot alone."""
    trainer = QuadraticTrainer(200, num_examples=[3, 10, 7])
    net = Swarm(trainer, peers=5, algorithm=Moshpit(local_steps=1), seed=1)
    net.run(rounds=2)
    net.begin()
    net.join("late")
    said: set[str] = set()
    for _ in range(3000):
        for peer in net.peers:
            for seat in net.machine(peer).snapshot()["waits_for"]:
                said.update(line.partition(":")[2] for line in status._seat_lines(seat))
                assert status._seat_lines(seat) or "done" in seat or "parts" in seat
        net.step()
    net.close()
    assert {" a part of the vector", " an averaged part"} <= said
    assert any("the model" in line for line in said)


def test_a_status_says_between_whom_r_fast_puts_a_peer() -> None:
    net = Swarm(QuadraticTrainer(20, num_examples=[3]), peers=4, algorithm=RFast(fan_out=2), seed=1)
    net.run(rounds=20)
    roots: set[str] = set()
    parents: set[tuple[str, str]] = set()
    children: set[tuple[str, str]] = set()
    for peer in net.peers:
        lines = status._edge_lines(net.machine(peer).snapshot()["edges"])
        roots.add(lines[0])
        for line in lines[1:]:
            others = re.split(" to | from ", line)[1].split(", ")
            if line.startswith("sends"):
                parents.update((peer, other) for other in others)
            else:
                children.update((other, peer) for other in others)
    assert len(roots) == 1
    assert len(parents) == 3
    assert parents == children


def test_wrong_arguments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Authority.create("s").invite(PeerId("a"), {}).save(here / "a.invitation")
    (here / "open").write_text("x")
    (here / "used").mkdir()
    (here / "used" / "events.jsonl").write_text("{}")
    peer = ["peer", "--app", "digits", "--peers", "3", "--client"]
    mine = ["--invitation", "a.invitation"]
    for arguments, said in (
        ([*peer, "0", "--invitation", "none"], "none cannot be read"),
        ([*peer, "0", "--invitation", "open"], "can be read by others"),
        ([*peer, "3", *mine], "client must be in 0..2, not 3"),
        ([*peer, "0", *mine], "give --bind HOST:PORT"),
        ([*peer, "0", *mine, "--relayed", "--advertise", "h:1"], "no address that others could"),
        ([*peer, "0", *mine, "--bind", "h"], "bind: an address must be written as HOST:PORT"),
        ([*peer, "0", *mine, "--bind", "h:99999"], "bind: a port must be at most 65535"),
        ([*peer, "0", *mine, "--bind", "h:1", "--advertise", "h"], "advertise: an address must"),
        ([*peer, "0", *mine, "--bind", "h:1", "--gather", "0"], "gather must be at least 1"),
        ([*peer, "0", *mine, "--bind", "h:1", "--out", "used"], "'used' holds a run of"),
        ([*peer, "0", *mine, "--bind", "h:1", "--out", "open"], "'open' is a file"),
        (["status", "127.0.0.1:1"], "give --invitation FILE, or --authority DIR"),
        (["status", "here", *mine], "must be written as HOST:PORT"),
        (["stop", "127.0.0.1:1", "--authority", "none"], "cannot be read"),
        (["replay", "open"], "is no trace of this version"),
        (["replay", "none"], "cannot be read"),
    ):
        assert main(arguments) == 2, arguments
        assert said in capsys.readouterr().err
    assert main(["status", "127.0.0.1:1", *mine]) == 1
    said = capsys.readouterr().err
    assert "no peer answers at 127.0.0.1:1" in said
    assert "Traceback" not in said


def test_what_the_network_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TransportError("cannot listen on h:1") from RuntimeError("deep inside gRPC")

    monkeypatch.setattr(status, "status", refuse)
    assert main(["status", "h:1"]) == 1
    assert capsys.readouterr().err == "flwr-moshpit: cannot listen on h:1\n"


def test_replay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    me = PeerInfo(PeerId("a"))
    recipe = Recipe(Moshpit(), me, np.zeros(8, np.float32), View({me.peer: me}), (1,))
    for name, forged in (("good", ()), ("other", (Cancel(JobId(9)),))):
        recorder = Recorder(here / name)
        recorder.recipe(recipe)
        machine = recipe.build()
        recorder.event(3.0, Start(2))
        recorder.effects([*machine.handle(Start(2), 3.0), *forged], machine.deadline)
        recorder.close()
    assert main(["replay", "good"]) == 0
    assert "MoshpitPeer, 1 events" in capsys.readouterr().out
    assert main(["replay", "other"]) == 1
    assert "it did something else after event 1 at 3.0 s: Start" in capsys.readouterr().out


def test_a_crash_that_was_none_in_the_field_is_a_difference(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    me = PeerInfo(PeerId("a"))
    recipe = Recipe(Moshpit(), me, np.zeros(8, np.float32), View({me.peer: me}), (1,))
    machine = recipe.build()
    for name, crashed in (("went-on", False), ("crashed", True), ("headless", False)):
        recorder = Recorder(here / name)
        recorder.recipe(recipe)
        if name != "headless":
            recorder.event(3.0, Start(2))
        if not crashed:
            recorder.effects([], None)
        recorder.close()

    def crash(self: MoshpitPeer, event: object, now: float) -> list[object]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(machine), "handle", crash)
    assert main(["replay", "went-on"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: a bug" in said
    assert "it did something else after event 1" in said
    assert main(["replay", "crashed"]) == 0
    assert "RuntimeError: a bug" in capsys.readouterr().out
    assert main(["replay", "headless"]) == 1
    assert "it did something else after event 0" in capsys.readouterr().out


class Disk:
    """A file on a disk that is full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_ends_the_trace_and_not_the_peer(
    here: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    me = PeerInfo(PeerId("a"))
    recipe = Recipe(Moshpit(), me, np.zeros(8, np.float32), View({me.peer: me}), (1,))
    machine = recipe.build()
    recorder = Recorder(here / "trace")
    recorder.recipe(recipe)
    recorder.event(3.0, Start(2))
    recorder.effects(machine.handle(Start(2), 3.0), machine.deadline)
    assert recorder._file is not None
    recorder._file = Disk(recorder._file)  # type: ignore[assignment]
    for _ in range(3):
        recorder.event(4.0, Start(3))
        recorder.effects([], None)
    recorder.close()
    assert caplog.text.count("trace ends here, the peer goes on: [Errno 28]") == 1
    assert main(["replay", "trace"]) == 0
    assert "MoshpitPeer, 1 events" in capsys.readouterr().out


def test_an_app_trains_without_flower() -> None:
    pytest.importorskip("torch")
    app = load_app("digits")
    trainer = make_app_trainer(app, app.config, flower=False)()
    trainer.prepare(3)
    assert type(trainer).__name__ == "TorchTrainer"
    params = trainer.initial_params(1)
    trained = trainer.train(0, params, 20, seed=1)
    before, after = (
        trainer.evaluate(each).metrics["accuracy"] for each in (params, trained.params)
    )
    assert after > before + 0.1


@pytest.mark.parametrize(("days", "is_told"), [(1.0, True), (30.0, False)])
def test_an_invitation_that_ends_soon_is_told(
    days: float,
    is_told: bool,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(compute: ProcessCompute) -> None:
        raise TrainerError("as far as this test goes")

    monkeypatch.setattr(ProcessCompute, "start", fail)
    Authority.create("s").invite(PeerId("a"), {}, days * DAY_S).save(here / "a.invitation")
    arguments = ["--app", "digits", "--peers", "3", "--client", "0", "--bind", "127.0.0.1:0"]
    assert main(["peer", *arguments, "--invitation", "a.invitation"]) == 1
    told = capsys.readouterr().err
    assert "as far as this test goes" in told
    assert ("a's invitation is valid for 1 d 00 h more" in told) is is_told


class Process:
    def __init__(self, folder: Path, *arguments: str) -> None:
        run = "import sys; from flwr_moshpit.cli import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", run, "peer", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Always: a peer whose lines nobody reads stands still at some time.
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, pattern: str) -> re.Match[str]:
        while True:
            found = re.search(pattern, self._lines.get(timeout=HANG_S))
            if found:
                return found

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


@pytest.fixture
def start(here: Path) -> Generator[Callable[..., Process], None, None]:
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(Process(here, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        assert each.process.stdout is not None
        each.process.stdout.close()


@pytest.mark.slow
def test_peers_status_stop(
    start: Callable[..., Process], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ca", "made", "--swarm", "s", "--invite", "a", "b", "c"]) == 0
    common = ["--app", "digits", "--peers", "3", "--bind", "127.0.0.1:0"]

    def arguments(name: str, client: int, *more: str) -> list[str]:
        own = ["--invitation", f"made/invitations/{name}.invitation", "--client", str(client)]
        return [*own, *common, "--out", f"out-{name}", *more]

    first = start(*arguments("a", 0, "--trace", "a.trace"))
    address = first.until(r"listens on (\S+)").group(1)
    second = start(*arguments("b", 1, "--contact", f"a={address}"))
    third = start(*arguments("c", 2, "--contact", f"a={address}"))
    for each in (first, second, third):
        each.until("with 3 peers, coverage 100 %")

    capsys.readouterr()
    assert main(["status", address, "--authority", "made"]) == 0
    told = capsys.readouterr().out
    assert f"a of swarm 's' at {address}" in told
    assert "alive: b, c" in told
    assert re.search(r"round \d+, (training|meeting) for ", told)
    foreign = Authority.create("t").invite(PeerId("x"), {})
    foreign.save(here / "x.invitation")
    assert main(["status", address, "--invitation", "x.invitation"]) == 2
    assert "is of swarm 's', not of 't'" in capsys.readouterr().err
    Authority.create("s").save(here / "forged")
    assert main(["stop", address, "--authority", "forged"]) == 1

    third.process.send_signal(signal.SIGINT)
    second.until("c is left")
    assert third.process.wait(HANG_S) == 130
    second.until("with 2 peers, coverage 100 %")

    assert main(["stop", address, "--authority", "made"]) == 0
    for each in (first, second):
        each.until("stopped by the swarm's authority")
        assert each.process.wait(HANG_S) == 0
    for name in ("a", "b", "c"):
        with np.load(here / f"out-{name}" / "model.npz") as model:
            assert sum(model[key].size for key in model.files) == 4810
    assert main(["replay", "a.trace"]) == 0
    assert "bit for bit" in capsys.readouterr().out
