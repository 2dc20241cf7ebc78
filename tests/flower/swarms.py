"""Swarms on SuperNodes of this machine: begun, looked at from outside, and stopped."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path

from flwr_moshpit.flower import load_app
from tests.flower.flower_processes import Deployment, flwr, wait_until

LONG_S = 600.0
"""Far more than anything takes on a busy machine with two cores."""

STOPPED_S = 60.0
"""By then all peers have ended of a run that was stopped, where one of them can be dialled."""


def peer_pids(deployment: Deployment) -> dict[str, int]:
    """Of the peers of all swarms, by name."""
    files = Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/*/peer.json")
    return {file.parent.name: int(json.loads(file.read_text())["pid"]) for file in files}


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def rounds_of(deployment: Deployment, peer: str) -> int:
    files = Path(deployment.env["FLWR_HOME"], "moshpit").glob(f"*/{peer}/events.jsonl")
    return sum(file.read_text().count('"name":"round"') for file in files)


def begin(deployment: Deployment, config: str, app: Path | None = None) -> str:
    """Start a run and do not wait for it; its id."""
    arguments = ("run", str(app or load_app("digits").path), "here", "-c", config)
    said = flwr(deployment.env, *arguments, cwd=deployment.folder, timeout_s=LONG_S)
    found = re.search(r"Successfully started run (\d+)", said)
    assert found, said
    return found[1]


def stop(deployment: Deployment, run_id: str) -> None:
    said = flwr(deployment.env, "stop", run_id, "here", cwd=deployment.folder, timeout_s=LONG_S)
    assert "successfully stopped" in said, said


def wait_for_rounds(deployment: Deployment, peer: str, more: int) -> None:
    before = rounds_of(deployment, peer)
    wait_until(lambda: rounds_of(deployment, peer) >= before + more, LONG_S, f"rounds of {peer}")


def wait_for_all_to_end(pids: Iterable[int]) -> None:
    """Of a run that was stopped just now."""
    began_at, ends = time.monotonic(), list(pids)
    wait_until(lambda: all(map(ended, ends)), STOPPED_S, "all peers end")
    logging.getLogger(__name__).info("all ended after %.0f s", time.monotonic() - began_at)


def controllers(deployment: Deployment) -> str:
    """What the processes that watch over runs have said."""
    files = Path(deployment.env["FLWR_HOME"], "moshpit").glob("*/authority/controller.log")
    return "".join(file.read_text() for file in files)
