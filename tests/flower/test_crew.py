"""How a ServerApp looks after peers, on devices that follow a script, in virtual time."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Error, Message
from flwr.serverapp import Grid

from flwr_moshpit.errors import ConfigError, MoshpitError
from flwr_moshpit.flower.compat import ensure_identity
from flwr_moshpit.flower.crew import Crew
from flwr_moshpit.flower.deployment import result_of
from flwr_moshpit.flower.peer_actions import reply_to
from flwr_moshpit.flower.swarm import Swarm
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.certificates import new_key, public_key
from flwr_moshpit.runtime.identity import Identity

ROUNDS = 3
ROUND_S = 20.0
PARAMS = np.arange(6, dtype="float32")


@dataclass
class Device:
    """A SuperNode and its peer: joins, trains for `ROUNDS` x `ROUND_S`, and has finished."""

    client: int
    arrives_s: float = 0.0
    port_is_taken: bool = False
    silent_s: tuple[float, float] = (0.0, 0.0)
    """When the SuperNode does not answer."""
    dies_s: float | None = None
    params: Any = field(default_factory=lambda: PARAMS)
    lies: bool = False
    weight: float = 1.0
    sent_bytes: int = 0
    raises: bool = False
    reached_by: tuple[int, ...] | None = None
    """Clients that can dial it; None for all."""
    relayed: bool = False
    key: bytes = field(default_factory=new_key)
    orders: dict[str, Any] | None = None
    started_s: float | None = None
    joins: int = 0
    stopped: bool = False
    others: dict[int, Device] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        return f"client-{self.client}"

    def answer(self, action: str, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        return getattr(self, f"_{action}")(asked, now)

    def _join(self, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        if self.port_is_taken:
            raise ConfigError("peer-address: cannot listen on 127.0.0.1:9100")
        self.joins += 1
        if self.dies_s is not None and now >= self.dies_s:
            self.dies_s = None
        dialable = False if self.relayed else None
        return {
            "dialable": self.orders["dialable"] if self.orders else dialable,
            "peer": self.peer,
            "address": f"127.0.0.1:{9000 + self.client}",
            "public-key": public_key(self.key).decode(),
            "client": self.client,
            "num-clients": 3,
            "host": "device",
            "started": self.orders is not None,
        }, {}

    def _dial(self, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        assert self.peer not in asked["addresses"]
        at = {f"client-{d.client}": d for d in self.others.values()}
        unreached = {
            peer: "timed out"
            for peer in asked["addresses"]
            if (by := at[peer].reached_by) is not None and self.client not in by
        }
        return {"failures": unreached}, {}

    def _start(self, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        self.orders, self.started_s = asked, now
        return {}, {}

    def _status(self, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        assert self.started_s is not None
        completed = min(ROUNDS, int((now - self.started_s) / ROUND_S))
        lines = [
            json.dumps({"t": k, "peer": self.peer, "name": "round", "round": k, "coverage": 1.0})
            for k in range(completed)
        ]
        if self.raises:
            error = "Traceback ...\nclient 1, step 4: ValueError: torn\n  File ..."
            lines.insert(0, json.dumps({"t": 0, "name": "training_failed", "error": error}))
        text = "".join(line + "\n" for line in lines)
        end = None
        if completed == ROUNDS:
            end = {"finished": True, "sha256": self._sha256(), "sample": [1.0, 2.0]}
            end |= {"weight": self.weight, "sent-bytes": self.sent_bytes}
        is_dead = self.dies_s is not None and now >= self.dies_s
        return {
            "alive": not is_dead,
            "end": end,
            "reports": text[asked["offset"] :],
            "offset": len(text),
        }, {}

    def _result(self, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        return {}, {"params": self.params + self.lies}

    def _stop(self, asked: dict[str, Any], now: float) -> tuple[Any, Any]:
        self.stopped = True
        end = {"finished": True, "sha256": self._sha256(), "sample": [1.0], "sent-bytes": 70}
        return {"alive": False, "end": end}, {}

    def _sha256(self) -> str:
        return hashlib.sha256(self.params.data).hexdigest()


class Devices(Grid):
    """Answers come 2 s after the question; a SuperNode that is silent is noticed after 60 s."""

    def __init__(self, *devices: Device) -> None:
        ensure_identity()
        self.now = 0.0
        self.devices = {100 + device.client: device for device in devices}
        for device in devices:
            device.others = self.devices
        self.arrays: list[str] = []
        """The actions whose messages carried an array."""
        self._ids = count()
        self._pending: dict[str, tuple[float, Message]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10_000, "nothing happens any more"

    def get_node_ids(self) -> list[int]:
        return [node for node, device in self.devices.items() if self.now >= device.arrives_s]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(str(next(self._ids)))
            message.metadata.__dict__["_message_id"] = ids[-1]
            action = message.metadata.message_type.partition(".")[2]
            device = self.devices[message.metadata.dst_node_id]
            record: Any = message.content.config_records["moshpit"]
            begin_s, end_s = device.silent_s
            if begin_s <= self.now < end_s:
                reply = Message(Error(5, "Node Unavailable"), reply_to=message)
                self._pending[ids[-1]] = (self.now + 60.0, reply)
                continue
            try:
                told, arrays = device.answer(action, json.loads(record["json"]), self.now)
                reply = reply_to(message, told, arrays)
            except ConfigError as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            if not reply.has_error() and reply.content.array_records:
                self.arrays.append(action)
            self._pending[ids[-1]] = (self.now + 2.0, reply)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = [key for key in message_ids if self._pending[key][0] <= self.now]
        return [self._pending.pop(key)[1] for key in ready]

    def _not_used(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the crew never waits for all")

    create_message = send_and_receive = set_run = _not_used
    run = property(_not_used)


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    return


Make = Callable[..., tuple[Crew, Devices, list[str]]]


@pytest.fixture
def make() -> Make:
    def made(*devices: Device, min_members: int = 2) -> tuple[Crew, Devices, list[str]]:
        grid, lines = Devices(*devices), []  # type: ignore[var-annotated]
        crew = Crew(
            grid,
            Swarm.create("app", 3600.0),
            min_members=min_members,
            log_every_s=10.0,
            start={"schema": "00"},
            rounds=ROUNDS,
            write=lines.append,
            clock=lambda: grid.now,
            sleep=grid.sleep,
        )
        return crew, grid, lines

    return made


def test_peers_are_certified_brought_together_and_let_go(make: Make) -> None:
    devices = [Device(client) for client in range(3)]
    crew, grid, lines = make(*devices, min_members=3)
    crew.run()
    for device in devices:
        assert device.orders is not None
        assert len(device.orders["contacts"]) == 2
        assert (device.orders["gather"], device.orders["num-clients"]) == (3, 3)
        swarm = device.orders["swarm"]
        pems = [device.orders[key].encode() for key in ("certificate", "authority")]
        # Raises unless key, name and authority belong together.
        Identity(swarm, PeerId(device.peer), device.key, *pems)
    assert [json.loads(line)["round"] for line in lines if "client-1" in line] == [0, 1, 2]
    params = result_of(crew, PARAMS)
    np.testing.assert_array_equal(params, PARAMS)
    crew.stop()
    assert all(device.stopped for device in devices)
    assert grid.arrays == ["result"]
    assert [member.end["sent-bytes"] for member in crew.members.values() if member.end] == [70] * 3


def test_a_late_supernode_joins_the_swarm_that_runs(make: Make) -> None:
    late = Device(2, arrives_s=30.0)
    crew, _, _ = make(Device(0), Device(1), late)
    crew.run()
    assert late.orders is not None
    assert sorted(late.orders["contacts"]) == ["client-0", "client-1"]
    assert crew.members[102].state == "finished"


def test_a_supernode_that_is_away_at_first_joins_when_it_is_back(make: Make) -> None:
    away = Device(2, silent_s=(0.0, 30.0))
    crew, _, _ = make(Device(0), Device(1), away)
    crew.run()
    assert away.orders is not None
    assert crew.members[102].state == "finished"


def test_a_taken_port_is_told_and_the_others_go_on(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    crew, _, _ = make(Device(0), Device(1), Device(2, port_is_taken=True))
    crew.run()
    assert "SuperNode 102 cannot join: peer-address: cannot listen on" in caplog.text
    refused, _, _ = make(Device(0, port_is_taken=True), min_members=1)
    with pytest.raises(MoshpitError, match="no SuperNode can join"):
        refused.run()


def test_a_dead_peer_is_started_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    mortal = Device(1, dies_s=35.0)
    crew, _, _ = make(Device(0), mortal)
    crew.run()
    assert mortal.joins == 2
    assert "client-1 has died: it is started again" in caplog.text
    assert crew.members[101].state == "finished"


def test_a_peer_that_dies_again_and_again_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = Device(1, dies_s=30.0)
    monkeypatch.setattr(mortal, "_join", lambda asked, now: Device._join(mortal, asked, 0.0))
    crew, _, _ = make(Device(0), mortal)
    crew.run()
    assert crew.members[101].state == "lost"
    assert crew.members[100].state == "finished"


def test_a_silent_supernode_is_noted_once_and_heard_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Device(1, silent_s=(20.0, 200.0))
    caplog.set_level("INFO", "flwr")
    # The other one finishes late enough to hear of it.
    other = Device(0, silent_s=(30.0, 200.0))
    crew, _, _ = make(other, silent)
    crew.run()
    assert caplog.text.count("the SuperNode of client-1 does not answer") == 1
    assert caplog.text.count("the SuperNode of client-1 answers again") == 1
    assert crew.members[101].state == "finished"


def test_what_an_app_raises_is_told_in_one_line(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    crew, _, _ = make(Device(0), Device(1, raises=True))
    crew.run()
    [record] = [r for r in caplog.records if "training failed" in r.getMessage()]
    assert record.getMessage() == "client-1: training failed: client 1, step 4: ValueError: torn"


def test_a_peer_whom_nobody_can_dial_is_relayed(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    hidden, half, told = Device(1, reached_by=()), Device(2, reached_by=(1,)), Device(3)
    told.relayed = True
    devices = [Device(0), hidden, half, told]
    crew, _, _ = make(*devices, min_members=4)
    crew.run()
    assert [device.orders["dialable"] for device in devices if device.orders] == [
        True, False, True, False
    ]  # fmt: skip
    assert hidden.orders is not None
    assert sorted(hidden.orders["contacts"]) == ["client-0", "client-2"]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "others cannot dial client-1 at 127.0.0.1:9001 (client-0: timed out)" in warnings[0]
    # Whom the controller calls.
    assert sorted(Swarm.load(hidden.orders["swarm"]).addresses()) == ["client-0", "client-2"]


def test_a_late_peer_is_dialled_too(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    late = Device(2, arrives_s=30.0, reached_by=())
    crew, _, _ = make(Device(0), Device(1), late)
    crew.run()
    assert late.orders is not None
    assert not late.orders["dialable"]
    assert crew.members[102].state == "finished"


def test_one_peer_must_be_dialable(make: Make) -> None:
    crew, _, _ = make(Device(0, reached_by=()), Device(1, reached_by=()))
    with pytest.raises(MoshpitError, match="no peer can be dialled by another"):
        crew.run()


def test_whom_nobody_could_try_is_taken_at_its_word(make: Make) -> None:
    """The lookers' SuperNodes are away when they are asked."""
    alone = Device(0)
    crew, _, _ = make(alone, min_members=1)
    crew.run()
    assert alone.orders is not None
    assert alone.orders["dialable"]


def test_two_of_one_name_are_refused(make: Make) -> None:
    twin = Device(1)
    crew, grid, _ = make(Device(0), Device(1), min_members=3)
    grid.devices[500] = twin
    with pytest.raises(ConfigError, match="two SuperNodes say that they are client-1"):
        crew.run()


def test_the_parameters_of_most_are_taken_and_checked(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flwr")
    other = Device(0, params=PARAMS + 1)
    crew, _, _ = make(other, Device(1), Device(2), min_members=3)
    crew.run()
    np.testing.assert_array_equal(result_of(crew, PARAMS), PARAMS)
    assert "2 of 3 peers have the same, bit for bit" in caplog.text
    liars, _, _ = make(*(Device(client, lies=True) for client in range(2)))
    liars.run()
    with pytest.raises(MoshpitError, match="no peer gives its parameters"):
        result_of(liars, PARAMS)
    assert "what client-0 sends is not what it has finished with" in caplog.text


@pytest.mark.parametrize(
    ("sent_bytes", "fetched", "expected"),
    [(10**6, 3, PARAMS + 6 / 4), (3_200, 2, PARAMS + 2 / 3), (0, 1, PARAMS)],
)
def test_the_result_of_peers_that_differ_is_their_mean_as_far_as_flower_may_carry_it(
    make: Make, sent_bytes: int, fetched: int, expected: Any
) -> None:
    devices = [
        Device(client, params=PARAMS + 2 * client, weight=weight, sent_bytes=sent_bytes)
        for client, weight in ((0, 2.0), (1, 1.0), (2, 1.0))
    ]
    crew, grid, _ = make(*devices, min_members=3)
    crew.run()
    params = result_of(crew, PARAMS)
    np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert params.dtype == PARAMS.dtype
    assert grid.arrays == ["result"] * fetched


def test_a_swarm_is_resumed_with_peers_that_run(make: Make) -> None:
    devices = [Device(client) for client in range(2)]
    crew, grid, _ = make(*devices)
    while len(crew.members) < 2 or any(m.state != "running" for m in crew.members.values()):
        crew._step()
    [orders, _] = [device.orders for device in devices]
    assert orders is not None
    swarm = Swarm.load(orders["swarm"])
    assert sorted(swarm.addresses()) == ["client-0", "client-1"]
    again = Crew(
        grid,
        swarm,
        min_members=2,
        log_every_s=10.0,
        start={},
        rounds=ROUNDS,
        write=lambda line: None,
        clock=lambda: grid.now,
        sleep=grid.sleep,
    )
    again.run()
    assert devices[0].orders is orders
    assert all(member.state == "finished" for member in again.members.values())
    with pytest.raises(ConfigError, match=rf"no swarm 'other' here; there are: .*{swarm.id}"):
        Swarm.load("other")
