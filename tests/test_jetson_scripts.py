"""The scripts of `clients/jetson`, as far as they run without a board."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "clients" / "jetson"


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(FOLDER / script), *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **env},
        capture_output=True,
        text=True,
        check=False,
    )


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_fleet_runs_a_command_everywhere_and_tells_which_failed(tmp_path: Path) -> None:
    executable(tmp_path / "ssh", 'shift 4; echo "$1: $2"; [ "$1" != board2 ]')
    boards = tmp_path / "boards"
    boards.write_text("board1\n\nboard2\nboard3\n")
    done = run("fleet.sh", str(boards), "hostname", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 1
    for board, state in (("board1", "ok"), ("board2", "FAILED"), ("board3", "ok")):
        assert f"== {board}: {state}\n{board}: hostname\n" in done.stdout


@pytest.mark.parametrize(
    ("peer", "supernode", "told"),
    [
        ("exit 1", "exit 0", "has no torch: install NVIDIA's wheel"),
        ("exit 0", "exit 1", "is no Python 3.11: apt install"),
    ],
)
def test_install_says_what_is_missing(tmp_path: Path, peer: str, supernode: str, told: str) -> None:
    pythons = {
        "PEER_PYTHON": executable(tmp_path / "peer", peer),
        "SUPERNODE_PYTHON": executable(tmp_path / "supernode", supernode),
    }
    done = run("install.sh", "some.whl", str(tmp_path / "out"), **pythons)
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "out").exists()


def test_install_makes_both_environments(tmp_path: Path) -> None:
    """With a Python that notes what it is asked, and makes programs that do too."""
    asked = tmp_path / "asked"
    fake = f"""
echo "$(basename "$0") $*" >> {asked}
case "$*" in
  *venv*) for last; do :; done; mkdir -p "$last/bin"
    for name in pip python flwr-moshpit; do cp "$0" "$last/bin/$name"; done ;;
esac"""
    python = executable(tmp_path / "fake", fake)
    out = tmp_path / "out"
    done = run("install.sh", "some.whl", str(out), PEER_PYTHON=python, SUPERNODE_PYTHON=python)
    assert done.returncode == 0, done.stderr
    lines = asked.read_text().splitlines()
    assert f"fake -m venv --system-site-packages {out}/peer" in lines
    assert f"fake -m venv {out}/supernode" in lines
    assert lines.count("pip install --quiet some.whl") == 2
    assert "flwr-moshpit doctor" in lines
    assert f"peer-python is {out}/peer/bin/python" in done.stdout
