"""`flwr-moshpit ca`: a swarm's authority, and invitations for its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import DAY_S, PEER_VALID_S, Authority

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
    and addresses that cannot be, and for an invitation that exists already.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    known = parse_contacts(contacts)
    if days is not None and not days > 0:
        raise ConfigError(f"days must be above 0, not {days}")
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
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists: two holders of one invitation are not two peers")
    authority.save(folder)
    console.print(f"authority of swarm {authority.swarm!r} in {folder}: keep authority.key secret")
    if paths:
        (folder / INVITATIONS).mkdir(mode=0o700, exist_ok=True)
    valid_s = PEER_VALID_S if days is None else days * DAY_S
    for peer, path in zip(invite, paths, strict=True):
        authority.invite(PeerId(peer), known, valid_s).save(path)
        console.print(f"{path}: for {peer} alone, over a trusted way")
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
        host, _, port = address.rpartition(":")
        if not peer or not host or not port.isdigit():
            raise ConfigError(f"contact {text!r} must be written as peer=host:port")
        contacts[PeerId(peer)] = address
    return contacts


def _file_name(peer: str) -> str:
    if "/" in peer or peer.startswith("."):
        raise ConfigError(f"peer {peer!r} cannot be the name of a file: leave out / and a first .")
    return peer
