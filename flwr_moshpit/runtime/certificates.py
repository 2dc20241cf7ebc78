"""Keys and certificates as this package uses them: how they are made, what they say.

A certificate of a peer names swarm and peer in a URI, moshpit://SWARM/PEER, and carries a DNS name
made of both. An authority's certificate names the swarm alone. Keys are ECDSA over P-256: gRPC's
TLS library offers no Ed25519.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import time
import urllib.parse
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flwr_moshpit.errors import ConfigError
from flwr_moshpit.protocol.machine import PeerId

SCHEME = "moshpit"

_BACKDATED = datetime.timedelta(days=1)
"""Devices' clocks do not agree: what is signed now must be valid on one that is a little behind."""
_NOBODY = PeerId("")


def peer_uri(swarm: str, peer: PeerId) -> str:
    quote = urllib.parse.quote
    return f"{SCHEME}://{quote(swarm, safe='')}/{quote(peer, safe='')}"


def tls_name(swarm: str, peer: PeerId) -> str:
    """The DNS name in a peer's certificate. Ids hold what DNS names may not, so it is a hash."""
    digest = hashlib.sha256(peer_uri(swarm, peer).encode()).digest()[:20]
    return base64.b32encode(digest).decode().lower() + ".moshpit.invalid"


# Keys


def new_key() -> bytes:
    """A new private key, PEM. It stays where it is made; its `public_key` is what travels."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_key(key_pem: bytes) -> bytes:
    """The public half of a private key, PEM."""
    return _public_pem(_load_key(key_pem).public_key())


def sign(key_pem: bytes, content: bytes) -> bytes:
    """A signature of `content`, ECDSA with SHA-256."""
    return _load_key(key_pem).sign(content, ec.ECDSA(hashes.SHA256()))


def is_signed(certificate_pem: bytes, content: bytes, signature: bytes) -> bool:
    """Whether the owner of this certificate's key has signed `content`."""
    key = load_certificate(certificate_pem).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the private key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the private key is not over P-256: make a new one")
    return key


def _load_public(pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the public key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise ConfigError("the public key is not over P-256")
    return key


def _public_pem(key: Any) -> bytes:
    pem: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


# Certificates


def sign_authority(key_pem: bytes, swarm: str, valid_s: float) -> bytes:
    """The certificate, PEM, with which an authority's key signs itself."""
    key = _load_key(key_pem)
    name = _name("moshpit authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    uri = x509.UniformResourceIdentifier(peer_uri(swarm, _NOBODY))
    certificate = (
        _builder(name, name, key.public_key(), valid_s)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def sign_peer(
    key_pem: bytes,
    authority_pem: bytes,
    swarm: str,
    peer: PeerId,
    public_pem: bytes,
    valid_s: float,
) -> bytes:
    """A certificate, PEM, by the authority's key, that the owner of `public_pem` is `peer`."""
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [
        x509.DNSName(tls_name(swarm, peer)),
        x509.UniformResourceIdentifier(peer_uri(swarm, peer)),
    ]
    subject, issuer = _name(tls_name(swarm, peer)), load_certificate(authority_pem).subject
    certificate = (
        _builder(subject, issuer, _load_public(public_pem), valid_s)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(_load_key(key_pem), hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, valid_s: float
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(seconds=valid_s))
    )


def load_certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise ConfigError(f"the certificate cannot be read: {error}") from error


def named_by(certificate: x509.Certificate) -> tuple[str, PeerId]:
    """The swarm and the peer that a certificate is for; an authority's own names no peer, ""."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        parsed = urllib.parse.urlsplit(uri)
    except (x509.ExtensionNotFound, ValueError) as error:
        raise ConfigError("the certificate names no swarm and peer") from error
    swarm = urllib.parse.unquote(parsed.netloc)
    peer = PeerId(urllib.parse.unquote(parsed.path.removeprefix("/")))
    if uri != peer_uri(swarm, peer):
        raise ConfigError(f"the certificate names {uri}, which is no swarm and peer")
    return swarm, peer


def check_period(what: str, certificate: x509.Certificate) -> None:
    """Raise `ConfigError` unless `certificate` is valid now."""
    now = _now()
    if now > certificate.not_valid_after_utc:
        raise ConfigError(
            f"{what} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: sign a new one"
        )
    if now < certificate.not_valid_before_utc:
        raise ConfigError(
            f"{what} is valid from {certificate.not_valid_before_utc:%Y-%m-%d}, but this device's "
            f"clock says {now:%Y-%m-%d}: set the clock"
        )


def check_signed(what: str, certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """Raise `ConfigError` unless `authority` has signed `certificate`."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ConfigError(f"{what} is not signed by this authority") from error


def check_key(what: str, certificate: x509.Certificate, key_pem: bytes) -> None:
    """Raise `ConfigError` unless `certificate` is for this private key."""
    if _public_pem(certificate.public_key()) != public_key(key_pem):
        raise ConfigError(f"{what} is for another key")


def _now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time.time(), datetime.timezone.utc)
