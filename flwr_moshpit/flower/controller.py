"""Ends a swarm whose run has ended before its time, as by `flwr stop`.

From then on Flower delivers no message of the run, so this small process, which the ServerApp
starts and which outlives it, tells the peers itself: a stop signed by the swarm's authority goes to
those that can be dialled, and from them to the others. It goes on for a while: a peer that has just
been started loads what it trains before it listens to anybody. It leaves them alone when the
SuperLink has died, since nobody has stopped the run: they train on, and `resume` finds them again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flwr_moshpit.errors import MoshpitError
from flwr_moshpit.flower.peer_folder import is_alive
from flwr_moshpit.flower.swarm import Swarm
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.control import Stop, ask
from flwr_moshpit.runtime.whereabouts import why_unreachable

POLL_S = 1.0
ANSWER_S = 10.0
STOP_S = 120.0
"""How long it goes on trying to reach peers."""
_SUPERLINK = "flower-superlink"


def watch_over(swarm: Swarm) -> None:
    """Start the controller of `swarm` for the ServerApp in this process."""
    command = [
        *(sys.executable, "-m", "flwr_moshpit.flower.controller", swarm.id),
        str(os.getpid()),
        str(_ancestor(_SUPERLINK) or 0),
        _superlink_address() or "-",
    ]
    with (swarm.path / "controller.log").open("ab") as log:
        subprocess.Popen(
            command,
            cwd=swarm.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def control(
    swarm: Swarm,
    server_app_lives: Callable[[], bool],
    superlink_lives: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Wait for the end of the ServerApp and do what is to be done then; says what that is."""
    while server_app_lives() and not swarm.is_over():
        time.sleep(POLL_S)
    if swarm.is_over():
        say("the run has ended as it should")
    elif not superlink_lives():
        say(f'the SuperLink is gone: the peers go on, and resume = "{swarm.id}" finds them')
    else:
        stop_all(swarm, say)


def stop_all(swarm: Swarm, say: Callable[[str], None]) -> None:
    """Give the stop to every peer that can be dialled within `STOP_S`."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    text = Stop.signed(swarm.authority, time.time()).text.encode()
    me = swarm.authority.issue(PeerId(f"asks-{secrets.token_hex(4)}"), 600.0)
    untold = swarm.addresses()
    was_told = False
    ends_at = time.monotonic() + STOP_S
    while untold and time.monotonic() < ends_at:
        for peer, address in list(untold.items()):
            try:
                asyncio.run(ask(me, address, "Stop", text))
            except MoshpitError:
                # It has ended, is not there yet, or cannot be dialled from here.
                continue
            del untold[peer]
            if not was_told:
                say(f"the run was stopped: {peer} has taken the swarm's stop and tells the others")
            was_told = True
        time.sleep(POLL_S)
    if not was_told:
        say("the run was stopped, and no peer can be reached: they end by their budget")


def _ancestor(name: str) -> int | None:
    """The process above this one whose command line has `name`, where /proc tells."""
    pid = os.getppid()
    while pid > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
        if name in command:
            return pid
        pid = parent
    return None


def _superlink_address() -> str | None:
    """As Flower has told it to this process."""
    for option, value in zip(sys.argv, sys.argv[1:], strict=False):
        if option == "--runtime-api-address":
            return value
    return None


def main(swarm_id: str, server_app_pid: str, superlink_pid: str, superlink_address: str) -> int:
    def superlink_lives() -> bool:
        if int(superlink_pid):
            return is_alive(int(superlink_pid), _SUPERLINK)
        return not why_unreachable(superlink_address, ANSWER_S)

    def say(what: str) -> None:
        sys.stdout.write(what + "\n")
        sys.stdout.flush()

    control(Swarm.load(swarm_id), lambda: is_alive(int(server_app_pid)), superlink_lives, say)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
