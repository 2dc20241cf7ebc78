"""Who a peer is: a key of its own, certified by the swarm's authority, and mutual TLS with both.

    authority   a key and a certificate, made once per swarm; signs each peer's key
    identity    a peer's key, its certificate and the authority's certificate: all it needs for TLS
    invitation  an identity made for one peer, with addresses to begin with, as one line of text

Both ends of every connection check the other's certificate: signed by the swarm's authority, not
expired, for this swarm and this peer. There is no connection without TLS and no way to ask for one.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from flwr_moshpit.errors import ConfigError, RemoteProtocolError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime.certificates import (
    check_key,
    check_period,
    check_signed,
    load_certificate,
    named_by,
    new_key,
    public_key,
    sign_authority,
    sign_peer,
    tls_name,
)
from flwr_moshpit.runtime.private_files import make_private, read, read_private, write_private

NAME_LENGTH_MAX = 128
"""Longest name of a swarm or a peer, in characters."""
DAY_S = 86_400.0
AUTHORITY_VALID_S = 3_650 * DAY_S
PEER_VALID_S = 365 * DAY_S

_INVITATION = "moshpit-invitation-1:"


def check_name(what: str, name: str) -> None:
    """Raise `ConfigError` unless `name` can be the name of a swarm or a peer."""
    if not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{what} must be 1 to {NAME_LENGTH_MAX} printable characters without blanks at the "
            f"ends, not {name!r}"
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """What one peer needs to prove who it is, and to check who others are.

    Raises `ConfigError` when its parts do not belong together or have expired.
    """

    swarm: str
    peer: PeerId
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    authority_pem: bytes = field(repr=False)
    """The authority's certificate."""

    def __post_init__(self) -> None:
        what = f"the certificate of {self.peer}"
        certificate = load_certificate(self.certificate_pem)
        authority = load_certificate(self.authority_pem)
        swarm, peer = named_by(certificate)
        if (swarm, peer) != (self.swarm, self.peer):
            raise ConfigError(
                f"{what} in {self.swarm} is for {peer or 'an authority'} in {swarm}: take its own"
            )
        check_signed(what, certificate, authority)
        check_key(what, certificate, self.key_pem)
        check_period(what, certificate)
        check_period(f"the authority's certificate of {self.swarm}", authority)

    @property
    def expires_at(self) -> datetime.datetime:
        return load_certificate(self.certificate_pem).not_valid_after_utc

    def server_credentials(self) -> Any:
        """For a gRPC server: clients must have a certificate of the same authority."""
        return grpc.ssl_server_credentials(
            [(self.key_pem, self.certificate_pem)],
            root_certificates=self.authority_pem,
            require_client_auth=True,
        )

    def channel_credentials(self) -> Any:
        return grpc.ssl_channel_credentials(self.authority_pem, self.key_pem, self.certificate_pem)

    def channel_options(self, peer: PeerId) -> list[tuple[str, Any]]:
        """For a gRPC channel to `peer`: nobody else's certificate is accepted at the other end."""
        return [("grpc.ssl_target_name_override", tls_name(self.swarm, peer))]

    def peer_of(self, auth_context: Mapping[str, Sequence[bytes]]) -> PeerId:
        """Who is at the other end of a gRPC connection, from the certificate that TLS has checked.

        Raises `RemoteProtocolError` when there is none, or it is of another swarm or has expired.
        """
        pems = auth_context.get("x509_pem_cert", ())
        if list(auth_context.get("transport_security_type", ())) != [b"ssl"] or len(pems) != 1:
            raise RemoteProtocolError("no certificate")
        try:
            certificate = load_certificate(bytes(pems[0]))
            check_period("the certificate", certificate)
            swarm, peer = named_by(certificate)
        except ConfigError as error:
            raise RemoteProtocolError(str(error)) from error
        if swarm != self.swarm or not peer:
            raise RemoteProtocolError(f"a certificate for {peer!r} in swarm {swarm!r}")
        return peer

    def save(self, directory: Path) -> None:
        """Write it to `directory`, which only its owner can read afterwards."""
        make_private(directory)
        write_private(directory / "peer.key", self.key_pem)
        write_private(directory / "peer.crt", self.certificate_pem)
        write_private(directory / "authority.crt", self.authority_pem)

    @classmethod
    def load(cls, directory: Path) -> Identity:
        certificate_pem = read(directory / "peer.crt")
        swarm, peer = named_by(load_certificate(certificate_pem))
        key_pem = read_private(directory / "peer.key")
        return cls(swarm, peer, key_pem, certificate_pem, read(directory / "authority.crt"))


@dataclass(frozen=True, slots=True)
class Authority:
    """What makes peers of one swarm: its key signs theirs."""

    swarm: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)

    @classmethod
    def create(cls, swarm: str, valid_s: float = AUTHORITY_VALID_S) -> Authority:
        check_name("the swarm's id", swarm)
        key_pem = new_key()
        return cls(swarm, key_pem, sign_authority(key_pem, swarm, valid_s))

    def sign(self, public_pem: bytes, peer: PeerId, valid_s: float = PEER_VALID_S) -> bytes:
        """A certificate, PEM, that the owner of this public key is `peer`, for `valid_s` from now.

        That it is, the caller must know. Raises `ConfigError` for what is no key over P-256.
        """
        check_name("a peer's id", peer)
        return sign_peer(self.key_pem, self.certificate_pem, self.swarm, peer, public_pem, valid_s)

    def issue(self, peer: PeerId, valid_s: float = PEER_VALID_S) -> Identity:
        """A key made here and its certificate: for invitations, and for peers of this machine."""
        key_pem = new_key()
        certificate_pem = self.sign(public_key(key_pem), peer, valid_s)
        return Identity(self.swarm, peer, key_pem, certificate_pem, self.certificate_pem)

    def invite(
        self, peer: PeerId, contacts: Mapping[PeerId, str], valid_s: float = PEER_VALID_S
    ) -> Invitation:
        """An identity of its own for `peer`. `contacts`: some peers' addresses, "host:port"."""
        return Invitation(self.issue(peer, valid_s), dict(contacts))

    def save(self, directory: Path) -> None:
        """Write it to `directory`, which only its owner can read afterwards."""
        make_private(directory)
        write_private(directory / "authority.key", self.key_pem)
        write_private(directory / "authority.crt", self.certificate_pem)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        certificate_pem = read(directory / "authority.crt")
        certificate = load_certificate(certificate_pem)
        swarm, peer = named_by(certificate)
        if peer:
            raise ConfigError(f"{directory / 'authority.crt'} is the certificate of {peer}")
        key_pem = read_private(directory / "authority.key")
        check_key(f"{directory / 'authority.crt'}", certificate, key_pem)
        return cls(swarm, key_pem, certificate_pem)


@dataclass(frozen=True, slots=True)
class Invitation:
    """An identity made by the authority for one peer, and where to find others.

    Whoever holds it is that peer: it goes to one, over a trusted way, and is kept like a key.
    """

    identity: Identity
    contacts: Mapping[PeerId, str]

    def to_text(self) -> str:
        """One line of text."""
        identity = self.identity
        parts = {
            "swarm": identity.swarm,
            "peer": identity.peer,
            "key": identity.key_pem.decode(),
            "certificate": identity.certificate_pem.decode(),
            "authority": identity.authority_pem.decode(),
            "contacts": dict(self.contacts),
        }
        return _INVITATION + base64.b64encode(json.dumps(parts).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> Invitation:
        text = text.strip()
        if not text.startswith(_INVITATION):
            raise ConfigError(f"this is no invitation: it does not begin with {_INVITATION!r}")
        try:
            parts = json.loads(base64.b64decode(text[len(_INVITATION) :], validate=True))
            pems = [parts[name].encode() for name in ("key", "certificate", "authority")]
            contacts = {PeerId(str(peer)): str(at) for peer, at in parts["contacts"].items()}
            swarm, peer = str(parts["swarm"]), PeerId(str(parts["peer"]))
        except (binascii.Error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("the invitation is damaged: ask for a new copy of it") from error
        return cls(Identity(swarm, peer, *pems), contacts)

    def save(self, path: Path) -> None:
        """Write it to a file that only its owner can read."""
        write_private(path, self.to_text().encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Invitation:
        return cls.from_text(read_private(path).decode(errors="replace"))
