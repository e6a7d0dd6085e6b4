"""Collectors that the environment names, by OpenTelemetry's variables. Pure.

Source: opentelemetry-specification, "OpenTelemetry Protocol Exporter" and "General SDK
Configuration". Imports little, since every start asks for the collectors.
"""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_PREFIX = "OTEL_EXPORTER_OTLP_"
_TIMEOUT_S, _TIMEOUT_S_MAX = 10.0, 60.0
_SIGNALS = ("traces", "logs")


class Endpoint(NamedTuple):
    """Address and options for one kind of records. Its headers are secrets."""

    signal: str
    """`traces` or `logs`."""
    url: str
    headers: tuple[tuple[str, str], ...]
    protocol: str
    """`http/protobuf` or `http/json`; no other is supported."""
    timeout_s: float
    """Limit for one request."""
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""
    compresses: bool = False


def endpoints(environ: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """Return an endpoint for each kind of records that a variable names a collector for."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    found = (_endpoint(environ, signal) for signal in _SIGNALS)
    return tuple(one for one in found if one is not None)


def _endpoint(environ: Mapping[str, str], signal: str) -> Endpoint | None:
    def of(name: str) -> str:
        own = environ.get(f"{_PREFIX}{signal.upper()}_{name}", "").strip()
        return own or environ.get(_PREFIX + name, "").strip()

    # A URL for one signal is used as it is; the common URL gets the signal's path appended.
    url = environ.get(f"{_PREFIX}{signal.upper()}_ENDPOINT", "").strip()
    if not url and (common := environ.get(f"{_PREFIX}ENDPOINT", "").strip()):
        url = f"{common.rstrip('/')}/v1/{signal}"
    exporters = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower() or "otlp"
    if not url or "otlp" not in [one.strip() for one in exporters.split(",")]:
        return None
    return Endpoint(
        signal=signal,
        url=url if urlsplit(url).path else f"{url}/",
        headers=_headers(of("HEADERS")),
        protocol=of("PROTOCOL").lower() or "http/protobuf",
        timeout_s=_timeout_s(of("TIMEOUT")),
        certificate=of("CERTIFICATE"),
        client_certificate=of("CLIENT_CERTIFICATE"),
        client_key=of("CLIENT_KEY"),
        compresses=of("COMPRESSION").lower() == "gzip",
    )


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `key=value,key=value` with percent-encoded values, as in W3C Baggage."""
    pairs = (one.partition("=") for one in text.split(","))
    return tuple((key.strip(), unquote(value.strip())) for key, _, value in pairs if key.strip())


def _timeout_s(text: str) -> float:
    number = int(text) if text.isascii() and text.isdigit() else 0
    return min(number / 1000, _TIMEOUT_S_MAX) if number else _TIMEOUT_S
