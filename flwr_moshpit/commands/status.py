"""`flwr-moshpit status` and `flwr-moshpit stop`: what one asks of a running peer."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_moshpit.errors import ConfigError, TransportError
from flwr_moshpit.observe.text import duration
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.control import Stop, ask
from flwr_moshpit.runtime.identity import Authority, Identity, Invitation

ASKER_VALID_S = 600.0


def status(
    address: str, *, invitation: Path | None = None, authority: Path | None = None
) -> dict[str, Any]:
    """Ask the peer at `address` and print its answer, proving who asks by `invitation` or with the
    `authority`'s folder. Raises ConfigError when it refuses, TransportError when it is silent."""
    identity = _asker(invitation, authority)
    answer = asyncio.run(ask(identity, address, "Status"))
    try:
        told: dict[str, Any] = json.loads(answer)
        lines = _lines(told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError(f"the answer of {address} cannot be read: {error}") from error
    Console(highlight=False, markup=False, soft_wrap=True).print("\n".join(lines))
    return told


def stop(address: str, *, authority: Path) -> None:
    """Tell the peer at `address`, and through it all others, that the swarm stops."""
    held = Authority.load(authority)
    text = Stop.signed(held, time.time()).text
    asyncio.run(ask(_asker(None, authority), address, "Stop", text.encode()))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{address} has taken the stop of swarm {held.swarm!r} and tells the others")


def _asker(invitation: Path | None, authority: Path | None) -> Identity:
    if invitation is not None:
        return Invitation.load(invitation).identity
    if authority is None:
        raise ConfigError(
            "only the swarm's own may ask: give --invitation FILE, or --authority DIR as made by "
            "`flwr-moshpit ca`"
        )
    return Authority.load(authority).issue(PeerId(f"asks-{secrets.token_hex(4)}"), ASKER_VALID_S)


def _lines(told: dict[str, Any]) -> list[str]:
    lines = [
        f"{told['peer']} of swarm {told['swarm']!r} at {told['address']}, "
        f"up for {duration(told['up_s'])}"
    ]
    by_status: dict[str, list[str]] = {}
    for other in told["peers"]:
        if other["peer"] != told["peer"]:
            by_status.setdefault(str(other["status"]), []).append(str(other["peer"]))
    for state, peers in by_status.items():
        lines.append(f"{state}: {', '.join(sorted(peers))}")
    if told["round"] is None:
        lines.append("not training yet: it waits for others to come")
        return lines
    since = "" if told["phase_s"] is None else f" for {duration(told['phase_s'])}"
    phase = "" if told["phase"] is None else f", {told['phase']}{since}"
    lines.append(f"round {told['round']}{phase}")
    lines += [line for seat in told["waits_for"] for line in _seat_lines(seat)]
    lines += _edge_lines(told.get("edges") or {})
    if told["refused"]:
        refused = (f"{reason} {count}" for reason, count in told["refused"].items())
        lines.append(f"refused from others: {', '.join(refused)}")
    return lines


def _edge_lines(edges: dict[str, Any]) -> list[str]:
    """Of R-FAST's tree or graph."""
    what = (
        ("parents", "sends its gradients to {}"),
        ("children", "receives gradients from {}"),
        ("asked", "waits for {}: whether it may attach there"),
    )
    lines = [f"root: {edges['root']}"] if edges.get("root") else []
    return lines + [text.format(", ".join(edges[key])) for key, text in what if edges.get(key)]


def _seat_lines(seat: dict[str, Any]) -> list[str]:
    if "lobby" in seat:
        return [f"waits in the lobby of leader {seat['leader']} for its group"]
    if "model from" in seat:
        donor = seat["model from"] or "somebody who has it"
        return [f"waits for {donor}: the model, {seat['asked for']} asked for"]
    wanted = (
        ("parts", "a part of the vector"),
        ("averages", "an averaged part"),
        ("answers", "whether it has finished"),
        ("new version", "the group without the lost"),
    )
    lines = []
    for key, what in wanted:
        peers = seat.get(key) or []
        peers = [peers] if isinstance(peers, str) else peers
        if peers:
            lines.append(f"waits for {', '.join(map(str, peers))}: {what}")
    return lines
