"""Which servers answer for a registry: mirrors as containerd's `certs.d/HOST/hosts.toml` says.

Alone owns where that file lies and what is read of it (containerd, docs/hosts.md): `server`, and
per host `capabilities`, `skip_verify`, `ca`, `client`, `header`, `override_path`. Files are read,
nothing else is done. Thread-safe: functions and frozen objects only.
"""

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.registry.reference import DOCKER_HUB, is_loopback

DEFAULT_HOSTS_DIR = Path("/etc/containerd/certs.d")
_FILE_BYTES_MAX = 2**20
_CAPABILITIES = frozenset(("pull", "resolve", "push"))
_HUB_SERVER = "registry-1.docker.io"


class Host(Struct, frozen=True):
    """One server of a registry, and how it is reached."""

    name: str
    """host[:port]: whose login is used."""
    base_url: str
    """Up to and including `/v2`, without a slash at the end."""
    capabilities: frozenset[str] = _CAPABILITIES
    """`pull` (by digest), `resolve` (tags), `push`."""
    namespace: str = ""
    """The registry that a mirror answers for; "" for the registry itself."""
    verify: bool = True
    ca_files: tuple[Path, ...] = ()
    client_certificates: tuple[tuple[Path, Path | None], ...] = ()
    """(certificate, key); the key is in the certificate's file when None."""
    headers: tuple[tuple[str, str], ...] = ()


def load_hosts(registry: str, directory: Path) -> tuple[Host, ...]:
    """The servers to ask for `registry` ("docker.io", "[::1]:5000"), in order; the registry itself
    is the last.

    Raises: InvalidInputError, PermissionDeniedError for a file that cannot be used: going round a
    mirror that somebody set up may be what they wanted to prevent.
    """
    for name in (*_directory_names(registry), "_default"):
        path = directory / name / "hosts.toml"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                with path.open("rb") as file:
                    data = file.read(_FILE_BYTES_MAX + 1)
            except (FileNotFoundError, NotADirectoryError):
                raise
            except OSError as error:
                raise from_oserror(error, f"read the registry hosts {path}") from error
            return parse_hosts(data, registry, path)
    return (_host({}, _default_server(registry), registry, Path(), is_mirror=False),)


def _directory_names(registry: str) -> Sequence[str]:
    """containerd looks for "host_5000_" first, since some file systems forbid colons."""
    host, colon, port = registry.rpartition(":")
    return (f"{host}_{port}_", registry) if colon and port.isdigit() else (registry,)


def _default_server(registry: str) -> str:
    if registry == DOCKER_HUB:
        return f"https://{_HUB_SERVER}"
    return f"http://{registry}" if is_loopback(registry) else f"https://{registry}"


def parse_hosts(data: bytes, registry: str, path: Path) -> tuple[Host, ...]:
    """The servers in the file's contents `data`; `path` is for messages and relative names. Pure.

    Raises: InvalidInputError.
    """
    if len(data) > _FILE_BYTES_MAX:
        raise InvalidInputError(f"{path} is larger than {_FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from error
    tables = document.get("host", {})
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise InvalidInputError(f"{path}: [host] is not a table of servers")
    mirrors = [_host(table, url, registry, path, is_mirror=True) for url, table in tables.items()]
    server = document.get("server") or _default_server(registry)
    if not isinstance(server, str):
        raise InvalidInputError(f"{path}: server is not a string")
    own = _host(document, server, registry, path, is_mirror=False)
    return (*(mirror for mirror in mirrors if mirror.base_url != own.base_url), own)


def _host(
    table: Mapping[str, Any], url: str, registry: str, path: Path, *, is_mirror: bool
) -> Host:
    if "://" not in url:
        url = f"http://{url}" if is_loopback(url) else f"https://{url}"
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise InvalidInputError(f"{path}: a server is not a URL such as https://host:5000")
    route = parts.path.rstrip("/")
    if not table.get("override_path") and not route.endswith("/v2"):
        route += "/v2"
    capabilities = table.get("capabilities", sorted(_CAPABILITIES))
    if not isinstance(capabilities, list) or not set(map(str, capabilities)) <= _CAPABILITIES:
        raise InvalidInputError(f"{path}: {url}: capabilities are of pull, resolve and push")
    return Host(
        name=DOCKER_HUB if parts.netloc == _HUB_SERVER else parts.netloc,
        base_url=f"{parts.scheme}://{parts.netloc}{route}",
        capabilities=frozenset(capabilities),
        namespace=registry if is_mirror else "",
        verify=not table.get("skip_verify"),
        ca_files=tuple(path.parent / name for name in _names(table.get("ca"), path, "ca")),
        client_certificates=tuple(_certificates(table.get("client"), path)),
        headers=tuple(_headers(table.get("header", {}), path)),
    )


def _names(value: object, path: Path, what: str) -> list[str]:
    """One file or several."""
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"{path}: {what} is neither a file nor a list of files")
    return names


def _certificates(value: object, path: Path) -> list[tuple[Path, Path | None]]:
    """One file, several, or pairs of certificate and key ("" where the file has both)."""
    pairs = value if isinstance(value, list) else [value] if value else []
    found: list[tuple[Path, Path | None]] = []
    for pair in pairs:
        certificate, *key = _names(pair, path, "client") or [""]
        if not certificate or len(key) > 1:
            raise InvalidInputError(f"{path}: client is no certificate, or [certificate, key]")
        found.append((path.parent / certificate, path.parent / key[0] if any(key) else None))
    return found


def _headers(value: object, path: Path) -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path}: header is not a table")
    return [(name, ", ".join(_names(values, path, "a header"))) for name, values in value.items()]
