"""A run's settings: which source wins, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flwr_moshpit.config import FedAvg, Moshpit, RFast
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.settings import DEFAULT_FLEET, DEFAULT_ROUNDS, gather, read_toml

APP: dict[str, Any] = {
    "algorithm": "moshpit",
    "group-size": 8,
    "local-steps": 20,
    "rounds": 30,
    "fleet": "jetson-nano",
    "seed": 1,
    "learning-rate": 0.05,
}


def test_file_overrides_app_and_flags_override_both() -> None:
    settings = gather(
        APP, {"group-size": 4, "rounds": 5, "learning-rate": 0.1}, {"rounds": 2, "peers": 6}
    )
    assert settings.algorithm == Moshpit(group_size=4, local_steps=20)
    assert (settings.rounds, settings.peers, settings.seed) == (2, 6, 1)
    assert settings.fleet == "jetson-nano"
    assert settings.app["learning-rate"] == 0.1
    # The app sees its whole config, as Flower would hand it over.
    assert settings.app["group-size"] == 4


def test_nothing_said_is_moshpit_on_orin_nanos() -> None:
    settings = gather({}, {}, {})
    assert settings.algorithm == Moshpit()
    assert settings.fleet == DEFAULT_FLEET
    assert settings.rounds == DEFAULT_ROUNDS
    assert settings.until is None


def test_an_end_by_time_takes_the_place_of_an_earlier_end_by_rounds() -> None:
    settings = gather(APP, {}, {"until": "3h"})
    assert settings.until == "3h"
    assert settings.rounds is None
    assert settings.app["rounds"] == 30


def test_both_ends_given_at_once_both_hold() -> None:
    settings = gather(APP, {}, {"until": "3h", "rounds": 7})
    assert (settings.until, settings.rounds) == ("3h", 7)


def test_local_seconds_take_the_place_of_the_apps_local_steps() -> None:
    assert gather(APP, {}, {"local-s": 2.5}).algorithm == Moshpit(group_size=8, local_s=2.5)


def test_the_apps_settings_of_another_algorithm_are_left_alone() -> None:
    assert gather(APP, {}, {"algorithm": "fedavg"}).algorithm == FedAvg(local_steps=20)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [("crash 20% per hour", ("crash 20% per hour",)), (["a", "b"], ("a", "b")), ([], ())],
)
def test_faults_are_one_or_several(faults: Any, expected: tuple[str, ...]) -> None:
    assert gather({}, {"faults": faults}, {}).faults == expected


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        ({"group-sise": 4}, {}, "setting 'group-sise' is unknown; did you mean 'group-size'?"),
        ({"zzz": 4}, {}, "setting 'zzz' is unknown; there are: algorithm, "),
        ({}, {"algorithm": "fedavg", "group-size": 4}, "fedavg has no setting 'group-size'"),
        ({"fraction": 0.5}, {}, "moshpit has no setting 'fraction'"),
        ({}, {"algorithm": "rumour"}, "algorithm 'rumour' is unknown"),
        ({"algorithm": ["rfast"]}, {}, "algorithm must be of type str, not ['rfast']"),
        ({"patience": float("inf")}, {}, "patience must be above 0, not inf"),
        ({"part-bytes": 1 << 31}, {}, "part-bytes must be at least 1024 and at most 1073741824"),
        ({}, {"seed": 1 << 63}, "seed must be at most 2^63 - 1, not 9223372036854775808"),
        ({}, {"group-size": 1}, "group-size must be at least 2, not 1"),
        ({}, {"peers": 0}, "peers must be at least 1, not 0"),
        ({}, {"rounds": -3}, "rounds must be at least 1, not -3"),
        ({}, {"workers": -1}, "workers must be 0 (in this process) or more, not -1"),
        ({"seed": -1}, {}, "seed must not be negative, not -1"),
        ({"rounds": "many"}, {}, "rounds must be of type int, not 'many'"),
        ({"peers": True}, {}, "peers must be of type int, not True"),
        ({"faults": [1]}, {}, "faults must be of type str or list of str, not [1]"),
        ({}, {"local-steps": 5, "local-s": 1.0}, "local-steps and local-s exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(
    file: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        gather(APP, file, flags)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_config_files_are_flat_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('group-size = 4\nfaults = ["crash 20% per hour"]\n')
    assert read_toml(path) == {"group-size": 4, "faults": ["crash 20% per hour"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("group-size = = 4", "is not TOML"),
        ("[moshpit]\ngroup-size = 4", "settings are flat, but 'moshpit' is a table"),
    ],
)
def test_config_files_that_are_not(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_toml(path)


def test_rfast_steps_by_the_learning_rate_of_the_app() -> None:
    app = {"lr": 0.2, "algorithm": "rfast"}
    assert gather(app, {}, {}).algorithm == RFast(learning_rate=0.2)
    assert gather(app, {"lr": 0.3}, {}).algorithm == RFast(learning_rate=0.3)
    assert gather(app, {"learning-rate": 0.4}, {}).algorithm == RFast(learning_rate=0.4)
    assert gather(app, {"lr": 0.3}, {"algorithm": "moshpit"}).app["lr"] == 0.3


def test_flowers_number_of_rounds_stands_in_for_ours() -> None:
    usual = {"num-server-rounds": 3, "fraction-train": 0.5, "fraction-evaluate": 1.0}
    settings = gather(usual, {}, {})
    assert settings.rounds == 3
    assert settings.remarks == (
        "rounds = 3, as the app's num-server-rounds says",
        "not used here: fraction-train (all peers train in every round)",
    )
    assert gather(usual, {"num-server-rounds": 4}, {}).rounds == 4
    assert gather({"num-server-rounds": ""}, {}, {}).rounds == DEFAULT_ROUNDS
    for end in ({"rounds": 7}, {"until": "3h"}):
        settings = gather({"num-server-rounds": 3}, {}, end)
        assert (settings.rounds, settings.remarks) == (end.get("rounds"), ())
    assert gather({"num-server-rounds": 3, "rounds": 7}, {}, {}).rounds == 7
    assert gather({"num-server-rounds": "many"}, {}, {}).rounds == DEFAULT_ROUNDS
