"""Credentials out of what people see: URLs, messages, logs, timelines. Pure (no I/O).

Alone decides what in a URL is a secret: the user name and password, and the whole query.
"""

import re

# Everything between "//" and "@" within one word. A secret key may hold "/", which no URL parser
# takes for a part of the password: so what stands before the "@" goes if it has a ":" that begins
# no port number.
_USER = re.compile(r"//(?:[^/\s'\"?#]*|[^/\s'\"?#:]*:(?!\d+/)[^\s'\"?#]*)@")
_SECRET_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:key|secret|token|password|signature|sig|credential)[\w.-]*=)[^&\s'\"]+", re.I
)


def public_url(url: str) -> str:
    """`url` without user name, password and query: safe to show, log and trace. Never raises."""
    bare = re.split(r"[?#]", _USER.sub("//", url), maxsplit=1)[0]
    return bare if bare.endswith("//") else bare.rstrip("/")


def names_user(url: str) -> bool:
    """Whether `url` has a user name before its host."""
    return bool(_USER.search(url))


def redact(text: str) -> str:
    """`text` with the user names, passwords and secret parameters of all URLs in it removed."""
    return _SECRET_PARAMETER.sub(r"\1***", _USER.sub("//", text))
