"""A swarm as its ServerApp keeps it: the authority's key, and where peers were last seen."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.flower.peer_folder import swarms_folder
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.identity import DAY_S, Authority
from flwr_moshpit.runtime.private_files import write_private


class Swarm:
    """In a folder that nobody but its owner can read. Whoever has it can stop the swarm."""

    def __init__(self, authority: Authority, path: Path, is_resumed: bool) -> None:
        self.id = authority.swarm
        self.authority = authority
        self.path = path
        self.is_resumed = is_resumed
        """Whether its peers run already."""
        self._addresses: dict[PeerId, str] = {}
        if is_resumed:
            self._addresses = self.addresses()

    @classmethod
    def create(cls, app_name: str, budget_s: float) -> Swarm:
        """A new one, whose certificates outlast the peers' budget."""
        authority = Authority.create(f"{app_name}-{secrets.token_hex(4)}", budget_s + 30 * DAY_S)
        swarm = cls(authority, _folder(authority.swarm), is_resumed=False)
        authority.save(swarm.path)
        return swarm

    @classmethod
    def load(cls, swarm_id: str) -> Swarm:
        """Raises ConfigError if this ServerApp's home does not hold it."""
        path = _folder(swarm_id)
        if not (path / "authority.key").exists():
            known = sorted(folder.parent.name for folder in swarms_folder().glob("*/authority"))
            raise ConfigError(
                f"resume: there is no swarm {swarm_id!r} here; there are: {', '.join(known) or '-'}"
            )
        return cls(Authority.load(path), path, is_resumed=True)

    def note(self, peer: PeerId, address: str) -> None:
        """`peer` runs, and was last seen at `address`."""
        self._addresses[peer] = address
        write_private(self.path / "peers.json", json.dumps(self._addresses).encode())

    def addresses(self) -> dict[PeerId, str]:
        """Where peers were last seen."""
        try:
            found: dict[PeerId, str] = json.loads((self.path / "peers.json").read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def end(self) -> None:
        """It has ended as it should: nobody need stop it."""
        write_private(self.path / "over", b"")

    def is_over(self) -> bool:
        return (self.path / "over").exists()


def _folder(swarm_id: str) -> Path:
    return swarms_folder() / swarm_id / "authority"
