"""Keys, certificates and invitations: what fits together is taken, everything else refused."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from flwr_moshpit.errors import ConfigError, RemoteProtocolError
from flwr_moshpit.protocol.machine import PeerId
from flwr_moshpit.runtime import certificates
from flwr_moshpit.runtime.certificates import new_key, public_key, tls_name
from flwr_moshpit.runtime.identity import Authority, Identity, Invitation

ADA, BOB = PeerId("ada"), PeerId("bob")


def test_a_peer_keeps_its_key_and_gets_a_certificate_for_it() -> None:
    authority = Authority.create("swarm-1")
    key = new_key()
    certificate = authority.sign(public_key(key), ADA)
    identity = Identity("swarm-1", ADA, key, certificate, authority.certificate_pem)
    context = {"transport_security_type": [b"ssl"], "x509_pem_cert": [certificate]}
    assert authority.issue(BOB).peer_of(context) == ADA
    assert identity.expires_at > identity.expires_at.replace(year=2000)
    assert b"PRIVATE" not in public_key(key)


@pytest.mark.parametrize("name", ["ada", "x" * 128, "Zoë/../%2F", "10.0.0.1:80", "a b"])
def test_any_printable_name_survives_its_certificate(name: str) -> None:
    authority = Authority.create(name)
    identity = authority.issue(PeerId(name))
    context = {
        "transport_security_type": [b"ssl"],
        "x509_pem_cert": [identity.certificate_pem],
    }
    assert identity.peer_of(context) == name


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", " a", "a\0"])
def test_names_that_cannot_be_printed_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        Authority.create("s").issue(PeerId(name))
    with pytest.raises(ConfigError, match="printable"):
        Authority.create(name)


def test_tls_names_differ_between_peers_and_swarms() -> None:
    names = {tls_name(swarm, peer) for swarm in ("s", "t") for peer in (ADA, BOB)}
    assert len(names) == 4
    assert tls_name("s/a", PeerId("b")) != tls_name("s", PeerId("a/b"))


def test_parts_that_do_not_belong_together_are_refused() -> None:
    authority, other = Authority.create("s"), Authority.create("s")
    ada = authority.issue(ADA)
    trusted = authority.certificate_pem
    with pytest.raises(ConfigError, match="not signed by this authority"):
        Identity("s", ADA, ada.key_pem, ada.certificate_pem, other.certificate_pem)
    with pytest.raises(ConfigError, match="another key"):
        Identity("s", ADA, new_key(), ada.certificate_pem, trusted)
    with pytest.raises(ConfigError, match="for ada in s"):
        Identity("s", BOB, ada.key_pem, ada.certificate_pem, trusted)
    with pytest.raises(ConfigError, match="for ada in s"):
        Identity("t", ADA, ada.key_pem, ada.certificate_pem, trusted)
    with pytest.raises(ConfigError, match="cannot be read"):
        Identity("s", ADA, ada.key_pem, b"no certificate", trusted)
    with pytest.raises(ConfigError, match="cannot be read"):
        Identity("s", ADA, b"no key", ada.certificate_pem, trusted)


def test_only_keys_that_tls_can_use_are_signed() -> None:
    authority = Authority.create("s")
    foreign = ed25519.Ed25519PrivateKey.generate().public_key()
    pem = foreign.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with pytest.raises(ConfigError, match="P-256"):
        authority.sign(pem, ADA)
    with pytest.raises(ConfigError, match="cannot be read"):
        authority.sign(b"junk", ADA)


def test_an_expired_certificate_is_refused_at_both_ends() -> None:
    authority = Authority.create("s")
    with pytest.raises(ConfigError, match="expired"):
        authority.issue(ADA, valid_s=-1)
    certificate = authority.sign(public_key(new_key()), ADA, valid_s=-1)
    context = {"transport_security_type": [b"ssl"], "x509_pem_cert": [certificate]}
    with pytest.raises(RemoteProtocolError, match="expired"):
        authority.issue(BOB).peer_of(context)


def test_a_certificate_that_is_not_valid_yet_asks_for_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = certificates.load_certificate(Authority.create("s").certificate_pem)
    certificates.check_period("it", certificate)
    # As on a board without a battery.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(ConfigError, match="set the clock"):
        certificates.check_period("it", certificate)


def test_who_is_there_needs_exactly_one_certificate_over_tls() -> None:
    authority = Authority.create("s")
    ada, bob = authority.issue(ADA), authority.issue(BOB)
    good = {"transport_security_type": [b"ssl"], "x509_pem_cert": [bob.certificate_pem]}
    assert ada.peer_of(good) == BOB
    foreign = Authority.create("t").issue(BOB)
    for bad in (
        {},
        {"x509_pem_cert": good["x509_pem_cert"]},
        {**good, "transport_security_type": [b"insecure"]},
        {**good, "x509_pem_cert": [b"junk"]},
        {**good, "x509_pem_cert": good["x509_pem_cert"] * 2},
        {**good, "x509_pem_cert": [foreign.certificate_pem]},
        {**good, "x509_pem_cert": [authority.certificate_pem]},
    ):
        with pytest.raises(RemoteProtocolError):
            ada.peer_of(bad)


def test_what_is_saved_is_private_and_comes_back(tmp_path: Path) -> None:
    authority = Authority.create("s")
    identity = authority.issue(ADA)
    authority.save(tmp_path / "ca")
    identity.save(tmp_path / "ada")
    assert Authority.load(tmp_path / "ca") == authority
    assert Identity.load(tmp_path / "ada") == identity
    for directory in (tmp_path / "ca", tmp_path / "ada"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        files = list(directory.iterdir())
        assert files
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    identity.save(tmp_path / "ada")
    assert Identity.load(tmp_path / "ada") == identity


def test_files_that_others_can_read_or_that_are_mixed_up_are_refused(tmp_path: Path) -> None:
    authority = Authority.create("s")
    authority.save(tmp_path / "ca")
    authority.issue(ADA).save(tmp_path / "ada")
    (tmp_path / "ada" / "peer.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load(tmp_path / "ada")
    with pytest.raises(ConfigError, match=r"peer\.crt cannot be read: No such file"):
        Identity.load(tmp_path / "nobody")
    (tmp_path / "ca" / "authority.crt").write_bytes(authority.issue(ADA).certificate_pem)
    with pytest.raises(ConfigError, match="certificate of ada"):
        Authority.load(tmp_path / "ca")


def test_an_invitation_is_one_private_line(tmp_path: Path) -> None:
    invitation = Authority.create("s").invite(ADA, {BOB: "10.0.0.7:9100"})
    text = invitation.to_text()
    assert "\n" not in text
    assert Invitation.from_text(f"  {text}\n") == invitation
    invitation.save(tmp_path / "ada.invitation")
    assert Invitation.load(tmp_path / "ada.invitation") == invitation
    assert stat.S_IMODE((tmp_path / "ada.invitation").stat().st_mode) == 0o600
    for damaged in (text[:-40], text[:40] + "!" + text[40:], text.replace(":", ":QUJD", 1)):
        with pytest.raises(ConfigError, match="damaged"):
            Invitation.from_text(damaged)
    with pytest.raises(ConfigError, match="no invitation"):
        Invitation.from_text("hello")
    (tmp_path / "ada.invitation").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Invitation.load(tmp_path / "ada.invitation")


def test_secrets_are_not_printed() -> None:
    invitation = Authority.create("s").invite(ADA, {})
    assert "PRIVATE" not in repr(invitation)
    assert "PRIVATE" not in repr(Authority.create("s"))
