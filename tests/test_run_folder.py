"""Where results go: nothing is overwritten, and nothing empty stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flwr_moshpit.cli import main
from flwr_moshpit.errors import ConfigError
from flwr_moshpit.observe.folder import run_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def used(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / name).write_text("{}\n")
    os.utime(folder / name, (1.7e9, 1.7e9))
    return folder


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["simulate", "digits"], "summary.json"),
        (["swarm", "digits"], "events.jsonl"),
        (["compare", "digits"], "compare.json"),
        (["demo"], "model.npz"),
    ],
)
def test_a_folder_with_a_run_is_refused(
    command: list[str], file: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = used(elsewhere / "mine", file)
    assert main([*command, "--out", "mine"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "out: 'mine' holds a run of 2023-11-1" in said.err
    assert "choose another folder or remove it" in said.err
    assert (folder / file).read_text() == "{}\n"


def test_a_swarm_that_is_resumed_goes_on_in_its_folder(elsewhere: Path) -> None:
    folder = used(elsewhere / "mine", "events.jsonl")
    with run_folder(folder, resumes=True) as out:
        assert out == folder


def test_two_that_begin_at_once_get_a_folder_each(elsewhere: Path) -> None:
    with run_folder(None) as one, run_folder(None) as other:
        (one / "summary.json").touch()
        assert one != other
    assert list((elsewhere / "runs").iterdir()) == [elsewhere / one]


def test_what_stays_empty_is_removed_but_not_the_users_own(elsewhere: Path) -> None:
    (elsewhere / "own").mkdir()
    for out in (None, Path("own"), Path("own/new/newer")):
        with run_folder(out) as folder:
            assert folder.is_dir()
    assert [path.name for path in elsewhere.rglob("*")] == ["own"]
    with pytest.raises(KeyboardInterrupt), run_folder(Path("early")):
        raise KeyboardInterrupt
    with run_folder(Path("a/b")) as folder:
        (folder / "summary.json").touch()
    assert (elsewhere / "a/b/summary.json").exists()
    assert not (elsewhere / "early").exists()


def test_files_in_the_way_are_named(elsewhere: Path) -> None:
    (elsewhere / "file").touch()
    with pytest.raises(ConfigError, match="out 'file' is a file"), run_folder(Path("file")):
        pass
    with pytest.raises(ConfigError, match="out 'file/x' cannot be"), run_folder(Path("file/x")):
        pass
