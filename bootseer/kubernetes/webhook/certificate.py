"""Certificate of the webhook: made, renewed, and registered with the API server.

There is no certificate authority. The certificate is self-signed, and the webhook's configuration
(`caBundle`) trusts exactly this one, so no key exists that could sign for others. After a renewal
the previous certificate stays trusted, for replicas that have not read the new one yet.

Key and certificate are in a Secret, which is replaced only if its resourceVersion is unchanged. A
replica serves with a new certificate one refresh after the configuration trusts it, so that every
API server has seen the change. Not thread-safe.
"""

import base64
import binascii
import datetime
import logging
from collections.abc import Callable, Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from bootseer.errors import NotFoundError
from bootseer.kubernetes.api import Api

_log = logging.getLogger(__name__)

VALIDITY = datetime.timedelta(days=90)
WEBHOOK = "pods.bootseer.io"
"""Entry that the webhook configuration must have."""
_EARLIER = datetime.timedelta(hours=1)
"""Time by which a certificate is valid earlier: other machines' clocks may be behind."""
_TRUSTED_MAX = 2
_FIELDS = {"trusted": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}


class Pair(Struct, frozen=True, kw_only=True):
    """Certificate and key in PEM."""

    trusted: bytes
    """Content of `caBundle`: this certificate and the previous one."""
    certificate: bytes
    key: bytes


def make_pair(names: Sequence[str], now: datetime.datetime, before: Pair | None = None) -> Pair:
    """Return a new pair for a server with these DNS names, to replace the pair `before`."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The DNS names are in the extension, since a common name has at most 64 characters.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bootseer webhook")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_SIGNS_HANDSHAKES, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    earlier = x509.load_pem_x509_certificates(before.trusted) if before else []
    kept = [one for one in earlier if one.not_valid_after_utc > now][: _TRUSTED_MAX - 1]
    pem = serialization.Encoding.PEM
    certificate = made.public_bytes(pem)
    return Pair(
        trusted=certificate + b"".join(one.public_bytes(pem) for one in kept),
        certificate=certificate,
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def problem_of(pair: Pair, names: Sequence[str], now: datetime.datetime) -> str:
    """Return why a pair cannot be used, or "" if it can."""
    try:
        trusted = x509.load_pem_x509_certificates(pair.trusted)
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        found = extension.value.get_values_for_type(x509.DNSName)
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        return f"the pair cannot be read ({type(error).__name__})"
    if trusted[0] != certificate:
        return "the certificate is not the trusted one"
    if key.public_key() != certificate.public_key():
        return "the key belongs to another certificate"
    if not set(names) <= set(found):
        return "the certificate is for another name"
    # not_valid_before is not checked: a replica whose clock is behind would replace the pair.
    if now >= certificate.not_valid_after_utc:
        return "the certificate has expired"
    return ""


def is_due(pair: Pair, now: datetime.datetime) -> bool:
    """Return whether a usable pair must be renewed: two thirds of its lifetime have passed."""
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    whole = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_before_utc + whole * 2 / 3


_SIGNS_HANDSHAKES = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Certificate:
    """Certificate of one replica."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        use: Callable[[Pair], None],
        clock: Callable[[], datetime.datetime] = _now,
    ) -> None:
        """Prepare the certificate.

        Args:
            api: Client of the API server.
            namespace: Namespace of the Service and the Secret.
            name: Name of the Service, the Secret and the webhook configuration.
            use: Called with each pair to serve with.
            clock: Returns the time; for tests.
        """
        self._api = api
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._configuration = (
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + name
        )
        self._names = (f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local")
        self._use = use
        self._clock = clock
        self._used: Pair | None = None
        self.is_ready = False
        """Whether API servers trust the certificate that this replica serves with."""

    def serve_untrusted(self) -> None:
        """Serve with a new pair that API servers do not trust, for the kubelet's probes."""
        self._use(make_pair(self._names, self._clock()))

    def refresh(self) -> None:
        """Renew the pair in the Secret if it is due, register it, and serve with it.

        Raises: BootseerError. The served pair stays then.
        """
        pair = self._stored_pair()
        was_registered = self._register(pair)
        if pair != self._used and (was_registered or self._used is None):
            self._use(pair)
            self._used = pair
            _log.info("serving with the certificate in %s", self._secret)
        # The first pair is registered by now, and after a renewal the previous one stays trusted.
        self.is_ready = self._used is not None

    def _stored_pair(self) -> Pair:
        secret = self._api.get(self._secret)
        if secret is None:
            raise NotFoundError(
                f"there is no {self._secret}; make an empty Secret of this name, or install the "
                "chart again"
            )
        now = self._clock()
        found = _pair_of(secret)
        problem = problem_of(found, self._names, now) if found else "the Secret is empty"
        if found and not problem and not is_due(found, now):
            return found
        _log.info("making a certificate for %s: %s", self._secret, problem or "it expires soon")
        pair = make_pair(self._names, now, found if found and not problem else None)
        secret["data"] = {**(secret.get("data") or {}), **_data_of(pair)}
        # If another replica was first, the next refresh finds its pair.
        self._api.replace(self._secret, secret)
        return pair

    def _register(self, pair: Pair) -> bool:
        """Put the pair into the webhook configuration; return whether it was there already.

        Raises: BusyError if the configuration has changed meanwhile; BootseerError.
        """
        configuration = self._api.get(self._configuration) or {}
        hooks = configuration.get("webhooks")
        entries = [
            (place, hook)
            for place, hook in enumerate(hooks if isinstance(hooks, list) else ())
            if isinstance(hook, dict)
        ]
        if all(hook.get("name") != WEBHOOK for _, hook in entries):
            raise NotFoundError(
                f"there is no webhook {WEBHOOK} at {self._configuration}; install the chart again"
            )
        bundle = base64.b64encode(pair.trusted).decode()
        changes = [
            {"op": "add", "path": f"/webhooks/{place}/clientConfig/caBundle", "value": bundle}
            for place, hook in entries
            if (hook.get("clientConfig") or {}).get("caBundle") != bundle
        ]
        if changes:
            version = configuration["metadata"]["resourceVersion"]
            unchanged = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            self._api.patch(self._configuration, [unchanged, *changes])
        return not changes


def _pair_of(secret: dict[str, Any]) -> Pair | None:
    data = secret.get("data")
    if not isinstance(data, dict):
        return None
    try:
        found = {key: base64.b64decode(data[name]) for key, name in _FIELDS.items()}
    except (KeyError, TypeError, binascii.Error):
        return None
    return Pair(**found)


def _data_of(pair: Pair) -> dict[str, str]:
    return {name: base64.b64encode(getattr(pair, key)).decode() for key, name in _FIELDS.items()}
