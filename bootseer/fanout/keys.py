"""Keys of starts: 32 bytes with which the nodes of a start authenticate each other.

This module alone knows how a secret is written, which key files are trusted, and how a key is
derived from a secret. No key and no secret reaches a log, an argument of a process, a timeline or
an error. Any thread.
"""

import binascii
import contextlib
import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.errors import InvalidInputError, from_oserror

if TYPE_CHECKING:
    from bootseer.store.objects.store import Store

SECRET_BYTES = 32
_TEXT_BYTES_MAX = 4096
_PURPOSE = b"bootseer fanout key 1\0"


def new_secret() -> bytes:
    """Return a random secret, as it is written."""
    return os.urandom(SECRET_BYTES).hex().encode()


def parse_secret(text: bytes, where: str) -> bytes:
    """Return the secret in `text`. Raises: InvalidInputError, which names `where` alone."""
    try:
        secret = binascii.unhexlify(text.strip())
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise InvalidInputError(
            f"{where} is no key of {2 * SECRET_BYTES} hexadecimal digits; make one by "
            "`openssl rand -hex 32`"
        )
    return secret


def read_key_file(path: Path) -> bytes:
    """Return the secret in a file that only this user, or root, can read and write.

    Raises: InvalidInputError, NotFoundError, PermissionDeniedError.
    """
    try:
        # Not blocking, in case it is a pipe.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInputError(f"the key file {path} is no regular file")
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
                raise InvalidInputError(
                    f"the key file {path} belongs to others, or others may use it; make it yours, "
                    "with mode 0600"
                )
            return parse_secret(opened.read(_TEXT_BYTES_MAX), f"the key file {path}")
    except OSError as error:
        raise from_oserror(error, f"read the key file {path}") from error


def shared_secret(store: "Store", start: tuple[str, str, str]) -> bytes:
    """Return the secret of a start (job, submission, attempt) from the store.

    The first node of the start creates the secret; every reader of the store can read it.

    Everybody who can read the store can read it. Raises: BootseerError.
    """
    key = "leases/fanout/" + "/".join(start)
    with contextlib.suppress(FileNotFoundError):
        return parse_secret(store.read(key), f"{store.url}/{key}")
    # Of several nodes one makes it.
    store.publish(key, new_secret())
    return parse_secret(store.read(key), f"{store.url}/{key}")


def key_of(secret: bytes, members_digest: bytes, *start: str) -> bytes:
    """Return the key of a start, derived from the secret, the list of nodes and the start's words.

    Nodes with different lists, and nodes of two jobs that share a secret, have different keys and
    refuse each other.
    """
    words = b"\0".join(word.encode("utf-8", "surrogateescape") for word in start)
    return hmac.digest(secret, _PURPOSE + members_digest + words, hashlib.sha256)
