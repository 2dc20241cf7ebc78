"""`flwr-moshpit ca`: a swarm's authority, and invitations for its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import (
    AUTHORITY_VALID_S,
    DAY_S,
    PEER_VALID_S,
    Authority,
    check_name,
)
from flwr_moshpit.runtime.whereabouts import host_and_port

INVITATIONS = "invitations"


def ca(
    folder: Path,
    *,
    swarm: str | None = None,
    invite: Sequence[str] = (),
    contacts: Sequence[str] = (),
    days: float | None = None,
) -> Authority:
    """Make the authority in `folder`, unless it is there, and invitations for the peers `invite`.

    `contacts`: "peer=host:port", where those invited begin to look. Raises ConfigError for names
    and addresses that cannot be, for an invitation that exists already, and for a folder that
    cannot be written.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    known = parse_contacts(contacts)
    days_max = AUTHORITY_VALID_S / DAY_S
    if days is not None and not 0 < days <= days_max:
        raise ConfigError(
            f"days must be above 0 and at most {days_max:g}, as long as an authority is valid, "
            f"not {days:g}"
        )
    if (folder / "authority.key").exists():
        authority = Authority.load(folder)
        if swarm is not None and swarm != authority.swarm:
            raise ConfigError(f"{folder} holds the authority of {authority.swarm!r}, not {swarm!r}")
    else:
        if swarm is None:
            raise ConfigError("swarm: a new authority needs the swarm's name: --swarm NAME")
        authority = Authority.create(swarm)
    invited_before = len(list((folder / INVITATIONS).glob("*.invitation")))
    paths = [folder / INVITATIONS / f"{_file_name(peer)}.invitation" for peer in invite]
    for number, path in enumerate(paths):
        if path.exists():
            raise ConfigError(f"{path} exists: two holders of one invitation are not two peers")
        if path in paths[:number]:
            raise ConfigError(f"invite: {invite[number]} is named twice, but would be one peer")
    valid_s = PEER_VALID_S if days is None else days * DAY_S
    try:
        authority.save(folder)
        console.print(
            f"authority of swarm {authority.swarm!r} in {folder}: keep authority.key secret"
        )
        if paths:
            (folder / INVITATIONS).mkdir(mode=0o700, exist_ok=True)
        for peer, path in zip(invite, paths, strict=True):
            authority.invite(PeerId(peer), known, valid_s).save(path)
            console.print(f"{path}: for {peer} alone, over a trusted way")
    except OSError as error:
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        raise ConfigError(f"folder {folder} cannot be written ({what})") from error
    console.print(f"next: {_next_command(folder, invite, paths, known, invited_before)}")
    return authority


def _next_command(
    folder: Path,
    invited: Sequence[str],
    paths: Sequence[Path],
    contacts: Mapping[PeerId, str],
    num_before: int,
) -> str:
    """What to type now, for the first of those who are invited."""
    if not invited:
        return f"flwr-moshpit ca {folder} --invite PEER ... [--contact PEER=HOST:PORT]"
    peer, total = PeerId(invited[0]), num_before + len(invited)
    bind = f" --bind {contacts.get(peer, 'HOST:PORT')}" if peer in contacts or not contacts else ""
    others = f"; the others alike, --client up to {total - 1}" if len(invited) > 1 else ""
    return (
        f"on the device of {peer}, flwr-moshpit peer --invitation {paths[0].name} --app APP "
        f"--client {num_before} --peers {total}{bind}{others}"
    )


def parse_contacts(texts: Sequence[str]) -> dict[PeerId, str]:
    """ "peer=host:port" each. Raises ConfigError for anything else."""
    contacts = {}
    for text in texts:
        peer, _, address = text.partition("=")
        if not peer or not address:
            raise ConfigError(f"contact {text!r} must be written as peer=host:port")
        host_and_port(address, f"contact {peer}")
        contacts[PeerId(peer)] = address
    return contacts


def _file_name(peer: str) -> str:
    check_name("a peer's id", peer)
    if "/" in peer or peer.startswith("."):
        raise ConfigError(f"peer {peer!r} cannot be the name of a file: leave out / and a first .")
    return peer
