"""Servers of a registry: the registry and its mirrors in containerd's `certs.d/HOST/hosts.toml`.

These settings are read (containerd, docs/hosts.md): `server`, and for each host `capabilities`,
`skip_verify`, `ca`, `client`, `header`, `override_path`, `dial_timeout`, `proxy`; in a folder
without that file, Docker's certificates. Thread-safe: functions and frozen objects only.
"""

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from msgspec.structs import replace

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.http.addresses import is_loopback
from bootseer.http.transport import HttpServer
from bootseer.registry.reference import DOCKER_HUB

DEFAULT_HOSTS_DIR = Path("/etc/containerd/certs.d")
_FILE_BYTES_MAX = 2**20
_CAPABILITIES = frozenset(("pull", "resolve", "push"))
_HUB_SERVER = "registry-1.docker.io"
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_COUNTED = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(f"(?:{_COUNTED.pattern})+")


class RegistryHost(HttpServer, frozen=True, kw_only=True):
    """Server of a registry.

    `name` is host[:port], whose login is used. `base_url` goes up to and including `/v2`, without a
    slash at the end.
    """

    capabilities: frozenset[str] = _CAPABILITIES
    """`pull` (by digest), `resolve` (tags), `push`."""
    namespace: str = ""
    """The registry that a mirror answers for; "" for the registry itself."""
    is_registry: bool = False
    """Whether this is the registry itself, whose answers are final."""
    ca_advice: str = "give its authority as `ca` in the registry's hosts.toml"


def load_hosts(registry: str, directory: Path) -> tuple[RegistryHost, ...]:
    """Return the servers to ask for `registry` ("docker.io", "[::1]:5000"), in order.

    One of them, mostly the last, is the registry itself.

    Raises: InvalidInputError, PermissionDeniedError for a file that cannot be used. The registry is
    not asked then, because an administrator may have set up a mirror to prevent that.
    """
    for name in (*_directory_names(registry), "_default"):
        path = directory / name / "hosts.toml"
        try:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if data := file.read(_FILE_BYTES_MAX + 1):
                    return parse_hosts(data, registry, path)
            # Like containerd: the first folder counts, whatever it holds.
            table = _certificates_in(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise from_oserror(error, f"read the registry hosts {path}") from error
        return (_registry_itself(table, _default_server(registry), registry, path),)
    return (_registry_itself({}, _default_server(registry), registry, Path()),)


def _certificates_in(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder with Docker's certificates: *.crt, and *.cert with *.key."""
    names = sorted(entry.name for entry in folder.iterdir())
    pairs = [
        [name, key if key in names else ""]
        for name in names
        if name.endswith(".cert")
        for key in (name.removesuffix(".cert") + ".key",)
        # A user without access to a key logs in without it.
        if os.access(folder / (key if key in names else name), os.R_OK)
    ]
    return {"ca": [name for name in names if name.endswith(".crt")], "client": pairs}


def _directory_names(registry: str) -> Sequence[str]:
    """Return the names of folders to look for, in order."""
    # containerd looks for "host_5000_" first, since some file systems forbid colons.
    host, colon, port = registry.rpartition(":")
    return (f"{host}_{port}_", registry) if colon and port.isdigit() else (registry,)


def _default_server(registry: str) -> str:
    if registry == DOCKER_HUB:
        return f"https://{_HUB_SERVER}"
    return f"http://{registry}" if is_loopback(registry) else f"https://{registry}"


def parse_hosts(data: bytes, registry: str, path: Path) -> tuple[RegistryHost, ...]:
    """Return the servers in a hosts file.

    `data` is its contents; `path` is for messages and relative names. Pure.

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
    server = document.get("server") or _default_server(registry)
    if not isinstance(server, str):
        raise InvalidInputError(f"{path}: server is not a string")
    settings = {name: value for name, value in document.items() if name not in ("server", "host")}
    own_url = _with_port(_registry_itself(settings, server, registry, path).base_url)
    hosts: list[RegistryHost] = []
    own_tables: list[Mapping[str, Any]] = []
    own_place = len(tables)
    for url, table in tables.items():
        host = _host(table, url, registry, path)
        if _with_port(host.base_url) != own_url:
            hosts.append(host)
            continue
        own_place = min(own_place, len(hosts))
        own_tables.append(table)
    # containerd would ask the registry once for each table, and last with the settings at the top
    # of the file: the registry has the capabilities of all of them.
    merged = {name: value for one in (settings, *own_tables) for name, value in one.items()}
    merged["capabilities"] = sorted(
        set().union(*(_capabilities(one, server, path) for one in (settings, *own_tables)))
    )
    hosts.insert(own_place, _registry_itself(merged, server, registry, path))
    return tuple(hosts)


def _registry_itself(table: Mapping[str, Any], url: str, registry: str, path: Path) -> RegistryHost:
    return replace(_host(table, url, registry, path), namespace="", is_registry=True)


def _capabilities(table: Mapping[str, Any], url: str, path: Path) -> frozenset[str]:
    value = table.get("capabilities") or sorted(_CAPABILITIES)
    if isinstance(value, list):
        found = frozenset(one.lower() if isinstance(one, str) else "" for one in value)
        if found <= _CAPABILITIES:
            return found
    raise InvalidInputError(f"{path}: {url}: capabilities are of pull, resolve and push")


def _host(table: Mapping[str, Any], url: str, registry: str, path: Path) -> RegistryHost:
    if "://" not in url:
        url = f"http://{url}" if is_loopback(url) else f"https://{url}"
    parts = _split(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise InvalidInputError(f"{path}: a server is not a URL such as https://host:5000")
    route = parts.path.rstrip("/")
    if not table.get("override_path") and not route.endswith("/v2"):
        route += "/v2"
    netloc = parts.netloc
    return RegistryHost(
        name=DOCKER_HUB if netloc == _HUB_SERVER else netloc,
        base_url=f"{parts.scheme}://{netloc}{route}",
        capabilities=_capabilities(table, url, path),
        namespace="" if netloc == registry else registry,
        verify=not table.get("skip_verify"),
        ca_files=tuple(path.parent / name for name in _names(table.get("ca"), path, "ca")),
        client_certificates=tuple(_certificates(table.get("client"), path)),
        headers=tuple(_headers(table.get("header", {}), path)),
        connect_s=_duration_s(table.get("dial_timeout"), path),
        proxy=_proxy(table.get("proxy"), path),
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # Raises ValueError unless it is a number.
    except ValueError:
        parts = urlsplit("")
    return parts


def _with_port(base_url: str) -> str:
    """Return the URL with its port, so that equal servers have equal URLs."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path}"


def _duration_s(value: object, path: Path) -> float | None:
    """Parse a duration in Go's notation ("1.5s", "1m30s"); return None for none."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and _DURATION.fullmatch(value):
        parts = [(float(count), _UNITS_S[unit]) for count, unit in _COUNTED.findall(value)]
        return sum(count * unit_s for count, unit_s in parts)
    raise InvalidInputError(f"{path}: dial_timeout is no duration such as 500ms or 10s")


def _proxy(value: object, path: Path) -> str | None:
    if value is None or value == "":
        return None
    parts = _split(value if isinstance(value, str) else "")
    if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        return parts.geturl().rstrip("/")
    # The message must not quote the URL, which may hold a login.
    raise InvalidInputError(f"{path}: proxy is no URL such as http://proxy:8080")


def _names(value: object, path: Path, what: str) -> list[str]:
    """Return the names in `value`, a name or a list of names."""
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"{path}: {what} is neither a file nor a list of files")
    return names


def _certificates(value: object, path: Path) -> list[tuple[Path, Path | None]]:
    """Return (certificate, key) of a file, of several, or of pairs; None as key if in one file."""
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
