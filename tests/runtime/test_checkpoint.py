"""Checkpoints: whole or refused, and never worse than the one before."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_moshpit.config import Moshpit, RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.build import build_machine
from flwr_moshpit.protocol.machine import Machine, PeerId, PeerInfo, State, View
from flwr_moshpit.runtime.checkpoint import Checkpoints
from flwr_moshpit.runtime.compute import Task, ThreadCompute
from flwr_moshpit.runtime.identity import Authority
from flwr_moshpit.runtime.peer import Peer, PeerSettings
from tests.trainers import QuadraticTrainer

HANG_S = 60.0

CONTENT: dict[str, Any] = {
    "round": 7,
    "weight": float("inf"),
    "none": None,
    "schema": b"\x00\xff",
    "nested": [1, (2, "x"), {"a": [True, 0.1]}],
    "vector": np.arange(5, dtype=np.float32),
    "matrix": np.eye(3),
    "scalar": np.float64(0.1),
    "empty": np.empty(0),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "deep" / "state").save(CONTENT)
    loaded = Checkpoints(path.parent).load()
    assert loaded is not None
    assert same(loaded.content, CONTENT)
    assert loaded.path == path
    assert not loaded.refused
    assert not loaded.content["vector"].flags.writeable


def test_a_folder_is_one_lifes_alone(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.claim()
    for _ in range(2):
        with pytest.raises(ConfigError, match="is in use by a peer that still runs: end that one"):
            second.claim()
    first.release()
    first.release()
    second.claim()
    second.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [{"peer": "b"}, {"swarm": "t"}])
def test_the_state_of_another_peer_or_swarm_is_refused(
    other: dict[str, str], tmp_path: Path
) -> None:
    state = {"swarm": "s", "peer": "a", "incarnation": 0, "addresses": {}, "machine": None}
    Checkpoints(tmp_path).save({**state, **other})
    settings = PeerSettings(
        identity=Authority.create("s").issue(PeerId("a")),
        algorithm=Moshpit(),
        task=Task(QuadraticTrainer, 0, 1, seed=(0,)),
        bind="127.0.0.1:0",
        state=tmp_path,
    )
    compute = ThreadCompute(settings.task)
    offer = compute.start()
    [(what, whose)] = other.items()
    # Twice: who was refused does not have the folder.
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"is of {what} '{whose}', not of '{state[what]}'"):
            Peer(settings, compute, offer)
    compute.close()


def test_a_folder_without_any_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).load() is None


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in range(5):
        checkpoints.save({"number": number})
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "checkpoint-00000004",
        "checkpoint-00000005",
    ]
    again = Checkpoints(tmp_path)
    again.save({"number": 9})
    loaded = again.load()
    assert loaded is not None
    assert loaded.content == {"number": 9}


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "longer", "other"])
def test_a_torn_file_is_refused_and_an_older_one_taken(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"number": 1})
    newest = checkpoints.save(CONTENT)
    data = bytearray(newest.read_bytes())
    match damage:
        case "cut":
            del data[-40:]
        case "empty":
            data.clear()
        case "flip":
            data[len(data) // 2] ^= 1
        case "longer":
            data += b"x"
        case "other":
            data[:5] = b"other"
    newest.write_bytes(data)
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    assert loaded.content == {"number": 1}
    assert len(loaded.refused) == 1
    assert newest.name in loaded.refused[0]


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save({"v": np.arange(3.0)})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert Checkpoints(tmp_path).load() is None


def test_a_failed_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"number": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save({"number": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.content == {"number": 1}


def test_a_save_that_begins_within_another_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a peer: its thread may still be writing what nobody waits for any more."""
    checkpoints = Checkpoints(tmp_path)
    flush = os.fsync
    second = threading.Thread(target=checkpoints.save, args=({"number": 2},))

    def flush_late(descriptor: int) -> None:
        if second.ident is None:
            second.start()
            second.join(0.05)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_late)
    first = checkpoints.save({"number": 1})
    second.join(HANG_S)
    assert not second.is_alive()
    loaded = checkpoints.load()
    assert loaded is not None
    assert (loaded.content, loaded.refused) == ({"number": 2}, ())
    assert [path.name for path in sorted(tmp_path.iterdir())] == [first.name, loaded.path.name]


def test_a_write_that_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-00000003.partial").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object"):
        Checkpoints(tmp_path).save({"x": object()})
    with pytest.raises(TypeError, match="objects"):
        Checkpoints(tmp_path).save({"x": np.array([None])})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")
    with pytest.raises(ConfigError, match="state folder"):
        Checkpoints(tmp_path / "state")


def test_a_machine_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    me = PeerInfo(PeerId("a"))
    view = View({me.peer: me})
    params = np.linspace(0.0, 1.0, 6)
    machine = build_machine(Moshpit(), me, params, view, np.random.default_rng(0))
    Checkpoints(tmp_path).save({"machine": machine.snapshot()})
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    again = build_machine(
        Moshpit(),
        me,
        np.zeros(6),
        view,
        np.random.default_rng(0),
        incarnation=1,
        state=loaded.content["machine"],
    )
    assert np.array_equal(again.params, params)
    assert again.weight == machine.weight


@pytest.mark.parametrize("algorithm", [Moshpit(), RFast()])
def test_the_state_of_another_algorithm_or_model_is_refused(algorithm: Any) -> None:
    me = PeerInfo(PeerId("a"))
    view, rng = View({me.peer: me}), np.random.default_rng(0)

    def build(kind: Any, dim: int, state: State | None = None) -> Machine:
        return build_machine(kind, me, np.zeros(dim), view, rng, state=state)

    other = RFast() if isinstance(algorithm, Moshpit) else Moshpit()
    with pytest.raises(ConfigError, match="is not of this version's"):
        build(algorithm, 6, build(other, 6).snapshot())
    with pytest.raises(ConfigError, match="state: the saved model has 7 parameters, this one 6"):
        build(algorithm, 6, build(algorithm, 7).snapshot())
