"""The key of a snapshot: SHA-256 over named parts, everything that decides what a set-up makes.

Pure (no I/O); `snapshots.inputs` and `snapshots.interpreter` look at the machine. Alone owns the
canonical encoding of the parts and the removal of credentials from what they hold. The parts are
stored in the manifest, so that a miss can be explained; no part holds a secret.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

# In front of the encoded parts: another way to encode them makes other keys, never equal ones.
_DOMAIN = b"bootseer snapshot fingerprint 1\n"

# What stands between "scheme://" and "@" in a URL; a path after the host may hold "@" freely.
_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/@\s?#]*(?:@[^/@\s?#]*)*@")
_DEFAULT_VARIABLE = re.compile(r"(PIP|UV|CONDA)_[A-Z_]*(URL|URLS|CHANNELS|INDEX|INDEXES)")
# Options of pip and uv that decide what is installed, or where, like those on the command line.
_OPTION_VARIABLES = {
    *(f"PIP_{name}" for name in ("TARGET", "PREFIX", "ROOT", "USER", "PRE", "NO_DEPS")),
    *("PIP_NO_BINARY", "PIP_ONLY_BINARY", "PIP_PREFER_BINARY"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT_ENVIRONMENT", "UV_TORCH_BACKEND"),
    *("UV_RESOLUTION", "UV_PRERELEASE", "UV_EXCLUDE_NEWER", "UV_NO_BINARY", "UV_NO_BUILD"),
}


class Part(Struct, frozen=True, order=True):
    """One named thing that the result depends on: a short value, or the digest of a long one."""

    name: str
    value: str


def fingerprint(parts: Iterable[Part]) -> str:
    """The key (64 hex digits) of `parts`; their order does not matter. Pure.

    Every name and value is written with its length in front, so no two lists of parts have the
    same encoding.
    """
    digest = hashlib.sha256(_DOMAIN)
    for part in sorted(parts):
        for text in (part.name, part.value):
            data = text.encode("utf-8", "surrogateescape")
            digest.update(b"%d:%b," % (len(data), data))
    return digest.hexdigest()


def digest_text(data: bytes) -> str:
    """`sha256:<hex>` of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def without_credentials(text: str) -> str:
    """`text` with "user:password@" taken out of every URL in it."""
    return _CREDENTIALS.sub(r"\1", text)


def command_part(command: Sequence[str]) -> Part:
    """The set-up command as JSON; credentials in URLs are not part of the key."""
    words = [without_credentials(word) for word in command]
    return Part("command", json.dumps(words, ensure_ascii=True))


def variable_parts(environ: Mapping[str, str], names: Iterable[str]) -> list[Part]:
    """Parts of the declared variables, and of pip's and uv's own that name an index or an option.

    A declared value may be a secret, so only its digest is kept; an index URL is kept without its
    credentials, which change more often than what the index serves.
    """
    parts = {}
    for name in environ:
        if _DEFAULT_VARIABLE.fullmatch(name) or name in _OPTION_VARIABLES:
            parts[name] = Part(f"env {name}", without_credentials(environ[name]))
    for name in names:
        value = environ.get(name)
        if value is None:
            parts[name] = Part(f"env {name}", "unset")
        elif name not in parts:
            data = f"{name}={value}".encode("utf-8", "surrogateescape")
            parts[name] = Part(f"env {name}", digest_text(data))
    return sorted(parts.values())
