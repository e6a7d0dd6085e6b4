"""Parts of a key from the set-up's command and variables, without their secrets. Pure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bootseer.base.redact import secret_values
from bootseer.errors import UnsupportedError
from bootseer.snapshots.key_parts import SECRETS, Part, fingerprint
from bootseer.snapshots.shown import hidden_atoms, shown_command, shown_script, shown_values

_INDEX_VARIABLE = re.compile(r"(PIP|UV|CONDA)_[A-Z_]*(URL|URLS|CHANNELS|INDEX|INDEXES)")
# Variables for options of pip and uv that decide what is installed, or where.
_OPTION_VARIABLES = {
    *(f"PIP_{name}" for name in ("TARGET", "PREFIX", "ROOT", "USER", "PRE", "NO_DEPS")),
    *("PIP_NO_BINARY", "PIP_ONLY_BINARY", "PIP_PREFER_BINARY"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT_ENVIRONMENT", "UV_TORCH_BACKEND"),
    *("UV_RESOLUTION", "UV_PRERELEASE", "UV_EXCLUDE_NEWER", "UV_NO_BINARY", "UV_NO_BUILD"),
}
SET, UNSET = "set", "unset"
"""Values of the part for a declared variable."""


class PartsAndSecrets(Struct, frozen=True):
    """Parts that every reader of the store may see, and secrets that decide the result as well."""

    parts: tuple[Part, ...]
    secrets: tuple[str, ...]


def command_part(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> PartsAndSecrets:
    """Return the set-up command as JSON, with only the words that may be shown.

    `environ`: the command's environment, whose secrets are hidden in the command. Users in URLs are
    left out.
    """
    words, hidden = shown_command(command, secret_values(environ or {}))
    return PartsAndSecrets((Part("command", json.dumps(words, ensure_ascii=True)),), hidden)


def shown_program(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the first word of the command as messages may show it."""
    return shown_command(command, secret_values(environ))[0][0]


def hidden_words(
    command: Sequence[str], scripts: Iterable[str], environ: Mapping[str, str]
) -> frozenset[str]:
    """Return the words of a command and its scripts, and pieces of them, that must be hidden."""
    known = secret_values(environ)
    shown, hidden = shown_command(command, known)
    all_hidden = list(hidden)
    for text in scripts:
        shown_text, found = shown_script(text, known)
        shown.append(shown_text)
        all_hidden += found
    return hidden_atoms(shown, all_hidden)


def is_always_in_key(name: str) -> bool:
    """Return whether a variable's value is in each key, without being declared."""
    return bool(_INDEX_VARIABLE.fullmatch(name)) or name in _OPTION_VARIABLES


def variable_parts(environ: Mapping[str, str], names: Iterable[str]) -> PartsAndSecrets:
    """Return parts for declared variables, and for those of pip and uv with an index or an option.

    A declared value may be a secret, so its part only says whether it is set. An index URL is kept
    without its user, which may change without another result.
    """
    parts = {}
    secrets: list[str] = []
    known = secret_values(environ)
    for name in environ:
        if is_always_in_key(name):
            shown, found = shown_values(environ[name], known)
            parts[name] = Part(f"env {name}", shown)
            secrets += found
    for name in sorted(set(names)):
        value = environ.get(name)
        if value is None:
            parts[name] = Part(f"env {name}", UNSET)
        elif name not in parts:
            parts[name] = Part(f"env {name}", SET)
            secrets.append(f"{name}={value}")
    return PartsAndSecrets(tuple(sorted(parts.values())), tuple(secrets))


def secret_part(parts: Sequence[Part], secrets: Sequence[str]) -> list[Part]:
    """Return one part for all secrets together, so that none can be tested without the others.

    Its value is scrypt(2) of RFC 7914 over their list, with the other parts as the salt. It takes
    about 40 ms and 16 MiB, here and for each guess. A store's readers know the salt, so this slows
    down a search for a value with few possibilities, and no more.

    Raises: UnsupportedError if Python has no scrypt.
    """
    if not secrets:
        return []
    import hashlib  # here: most set-ups have no secrets

    data = json.dumps(list(secrets), ensure_ascii=True).encode("ascii")
    try:
        key = hashlib.scrypt(data, salt=bytes.fromhex(fingerprint(parts)), n=1 << 14, r=8, p=1)
    except (AttributeError, ValueError) as error:
        raise UnsupportedError(
            f"this Python has no scrypt, which keeps secrets out of snapshots ({error}); take them "
            "out of the set-up's words and --input-env"
        ) from error
    return [Part(SECRETS, "scrypt:" + key[:32].hex())]
