"""The webhook's key and certificate, and the authority that an API server is told of. No I/O.

The authority signs one certificate, and its key is thrown away: renewal makes another authority. So
nothing that could sign for others is stored anywhere.
"""

import datetime
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

VALIDITY = datetime.timedelta(days=90)
_EARLIER = datetime.timedelta(hours=1)
"""Clocks of other machines may be behind."""
_AUTHORITIES_MAX = 2
"""This one, and the one before it: replicas that have not seen the new pair are believed, too."""


class Pair(Struct, frozen=True, kw_only=True):
    """What a replica serves with, in PEM."""

    authorities: bytes
    """The first has signed the certificate; an API server believes all of them."""
    certificate: bytes
    key: bytes


def make_pair(names: Sequence[str], now: datetime.datetime, before: Pair | None = None) -> Pair:
    """A new pair for a server with these names. `before`: the one that it replaces."""
    key, authority_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bootseer webhook authority")])
    limits = now - _EARLIER, now + VALIDITY
    authority = (
        _certificate(subject, subject, authority_key.public_key(), *limits)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    # Names are in the extension, which has no limit of 64 characters.
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bootseer webhook")])
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    certificate = (
        _certificate(server, subject, key.public_key(), *limits)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    earlier = x509.load_pem_x509_certificates(before.authorities) if before else []
    kept = [one for one in earlier if one.not_valid_after_utc > now][: _AUTHORITIES_MAX - 1]
    pem = serialization.Encoding.PEM
    return Pair(
        authorities=b"".join(one.public_bytes(pem) for one in (authority, *kept)),
        certificate=certificate.public_bytes(pem),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def problem_of(pair: Pair, names: Sequence[str], now: datetime.datetime) -> str:
    """Why a pair cannot be used; empty where it can."""
    try:
        authority = x509.load_pem_x509_certificates(pair.authorities)[0]
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
        certificate.verify_directly_issued_by(authority)
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        found = extension.value.get_values_for_type(x509.DNSName)
    except (ValueError, TypeError, IndexError, InvalidSignature, x509.ExtensionNotFound) as error:
        return f"it cannot be read ({type(error).__name__})"
    if key.public_key() != certificate.public_key():
        return "its key is another one's"
    if not set(names) <= set(found):
        return "it is for another name"
    # Not whether it is valid already: a replica whose clock is behind would make another one.
    if now >= certificate.not_valid_after_utc:
        return "it is too old"
    return ""


def is_due(pair: Pair, now: datetime.datetime) -> bool:
    """Whether a usable pair is to be renewed: after two thirds of its time."""
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    whole = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_before_utc + whole * 2 / 3


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
