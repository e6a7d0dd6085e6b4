"""Names of images in registries, in Docker's notation. Pure (no I/O).

The defaults are Docker's: a name without a host is on Docker Hub, a name without "/" is an
official image there (`library/`), and a name without tag and digest means `latest`.
"""

import ipaddress
import re

from msgspec import Struct

from bootseer.errors import InvalidInputError

DOCKER_HUB = "docker.io"
_HUB_ALIASES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_NAME_CHARACTERS_MAX = 255
"""Length of host and repository together that every registry and engine accepts."""

# The grammar of github.com/distribution/reference, and no more.
_LABEL = "(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?")
_COMPONENT = "[a-z0-9]+(?:(?:[.]|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(f"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LOGIN = re.compile("^[^/@]*:[^/@]*@(?=[^/]+/)")
"""A login, as in a URL: not part of a name, and hidden in messages."""
_DIGEST = re.compile("sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


class Reference(Struct, frozen=True):
    """Name of an image: its registry, its repository there, and a tag, a digest or both."""

    host: str
    """The host, with the port if one was given; IPv6 in brackets."""
    repository: str
    tag: str | None
    digest: str | None
    """If there is a digest, the tag is ignored."""

    @property
    def target(self) -> str:
        """Return the name for requests to the registry: the digest, or else the tag."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.host}/{self.repository}{tag}{digest}"


def parse_reference(text: str) -> Reference:
    """Parse a name such as "python:3.12" or "[::1]:5000/team/train@sha256:...".

    Raises: InvalidInputError.
    """
    name, at, digest = text.partition("@")
    # A colon before the last "/" belongs to a port.
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        path, colon, tag = name, "", ""
    host, slash, repository = path.partition("/")
    # The first part is a host if no folder of Docker Hub can have that name.
    if not slash or not (set(host) & set(".:[") or host == "localhost" or host.lower() != host):
        host, repository = DOCKER_HUB, path
    if host in _HUB_ALIASES:
        host = DOCKER_HUB
        if "/" not in repository:
            repository = f"library/{repository}"
    for value, form, what in (
        (host, _HOST, "registry"),
        (repository, _REPOSITORY, "repository"),
        (tag if colon else "latest", _TAG, "tag"),
        (digest if at else f"sha256:{'0' * 64}", _DIGEST, "digest"),
    ):
        if not form.fullmatch(value):
            raise InvalidInputError(
                f"{_LOGIN.sub('', text)[:200]!r} does not name an image: {value[:80]!r} is no "
                f"{what}; write [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST], in lower case"
            )
    if len(host) + 1 + len(repository) > _NAME_CHARACTERS_MAX:
        raise InvalidInputError(f"the image name {text[:80]!r}... is longer than 255 characters")
    if host.startswith("["):
        _check_ipv6(host, text)
    return Reference(host, repository, tag or (None if at else "latest"), digest or None)


def _check_ipv6(host: str, text: str) -> None:
    try:
        ipaddress.IPv6Address(host[1 : host.index("]")])
    except ValueError:
        raise InvalidInputError(
            f"{text[:200]!r} does not name an image: {host} is no IPv6 address"
        ) from None
