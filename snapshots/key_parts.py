"""Parts of a key, and their encoding: SHA-256 over named values.

The parts are stored in the manifest, so that a miss can be explained. No part holds a secret:
all secrets together make one part, through scrypt (`command_parts.secret_part`). Pure.
"""

from collections.abc import Iterable

from msgspec import Struct

from bootseer.base.short_digest import Sha256
from bootseer.snapshots.scan import text_of

# Prefix of the encoded parts: with another encoding, no key is equal by accident.
_DOMAIN = b"bootseer snapshot fingerprint 1\n"

SECRETS = "secrets"
"""Name of the part for all secrets together."""


class Part(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Named thing that decides the result: a short value, or the digest of a long one."""

    name: str
    value: str


def fingerprint(parts: Iterable[Part]) -> str:
    """Return the key (64 hex digits) of `parts`; their order does not matter. Pure.

    Every name and value is written with its length in front, so no two lists of parts have the
    same encoding.
    """
    digest = Sha256(_DOMAIN)
    for part in sorted(parts):
        for text in (part.name, part.value):
            data = text.encode("utf-8", "surrogateescape")
            digest.update(b"%d:%b," % (len(data), data))
    return digest.hexdigest()


def base_part_name(target: bytes) -> str:
    """Return the name of the part for the former contents of a target."""
    return f"before {text_of(target)}"
