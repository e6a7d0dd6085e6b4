"""Removal of credentials from URLs, messages, logs and timelines.

The only module that decides what is a secret there. In a URL: the user name, the password and
secret query parameters. In a message also: the value of a `name=value` whose name says "secret", an
Authorization header, text with the form of a known kind of token, the values of this process's
variables with such names, and the logins that this process has used. The words of a set-up's
command are another matter: `snapshots.shown` lists those that may be shown. Reads the environment
only. Any thread.
"""

import collections
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping

HIDDEN = "***"
"""Replacement of a hidden secret."""

# Patterns are text: `re` compiles each at its first use, and most commands need few of them.
_NAME = (
    r"(?i)(?:^|[_.-])(?:token|secret|pat|pwd|pass|pin|otp|sas|sig|signature|auth|authorization|cookie"
    r"|credentials?|bearer)(?:$|[_.-])"
    r"|(?:token|secret|pwd|apikey|cookie|bearer|credentials?)$|passw(?:or)?d|passphrase|pass(?:in|out)$"
    r"|(?:store|key|user|db)pass$|[_.-]key$"
    r"|(?:api|access|secret|private|auth|account|shared|signing|client|license)[_.-]?key"
)
_PUBLIC_NAME = r"(?i)(?:gpg|hot|mon|pub|public|sort|primary|foreign)[_.-]?key$"
# Variables whose value is the place of a secret, which messages may name. Every shell sets PWD and
# OLDPWD to folders.
_PLACE_NAME = (
    r"(?i)_(?:file|path|dir|sock|socket|store|url|uri|endpoint|host|user|type|mode)$|^(?:OLD)?PWD$"
)
# Shorter values occur by chance inside other words.
_KNOWN_CHARS_MIN = 6
_NO_SECRETS = frozenset(("default", "disable", "disabled", "enable", "enabled", "required"))
# Characters that a URL's user name and password may contain unescaped.
_WORD = r"[^\s'\"?#]+"
_PORT = r"\d+/"
# For words that a shell has already split: quotes are part of the password. Repetitions that may
# begin anywhere are bounded, so that the time is proportional to the length of the text.
_USER_WITH_QUOTES = r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/@\s?#]*(?:@[^/@\s?#]*)*@"
_SECRET_PARAMETER = (
    r"(?i)([?&][\w.-]{0,99}(?:key|secret|token|password|signature|sig|credential)[\w.-]{0,99}=)"
    r"[^&\s'\"]+"
)
# Tokens of Hugging Face, GitHub, GitLab, AWS, OpenAI and the like, Slack, PyPI; JSON Web Tokens.
_TOKEN = (
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{16}|sk-[\w-]{16,}|xox[a-z]-[\w-]{10,}|pypi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_TOKEN_CHARS_MIN = 15
_VALUE = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|[^\s'\";|&<>()\\])+"
_ASSIGNMENT = rf"(?<![\w.-])(?P<name>-{{0,2}}[A-Za-z_][\w.-]*)=(?P<value>{_VALUE})"
_AUTHORIZATION = r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?)([^'\"\n]+)"

# Bounded, since a process that runs for weeks gets new tokens again and again.
_used_logins: collections.deque[str] = collections.deque(maxlen=64)


def public_url(url: str) -> str:
    """Return `url` without user name, password and query, safe to show and log. Never raises."""
    bare = re.split(r"[?#]", _without_plain_users(url), maxsplit=1)[0]
    return bare if bare.endswith("//") else bare.rstrip("/")


def has_login(url: str) -> bool:
    """Return whether `url` has a user name before its host."""
    return _without_plain_users(url) != url


def strip_logins(text: str) -> str:
    """Return `text` with "user:password@" removed from every URL in it."""
    return _without_plain_users(re.sub(_USER_WITH_QUOTES, r"\1", text))


def _without_plain_users(text: str) -> str:
    if "@" not in text:
        return text
    return re.sub(_WORD, lambda match: _without_user(match[0]), text)


def _without_user(word: str) -> str:
    """Return `word` without the text between "//" and "@" of each URL in it.

    A secret key may contain "/", which URL parsers do not accept in a password. So the text up to
    the last "@" is removed if it has a ":" that does not begin a port number.
    """
    kept = []
    at = 0
    last = word.rfind("@")
    while (begin := word.find("//", at) + 2) > 1 and begin <= last:
        slash = word.find("/", begin)
        end = slash if slash >= 0 else len(word)
        user_end = word.rfind("@", begin, end)
        colon = word.find(":", begin, end)
        if user_end < 0 <= colon and not re.match(_PORT, word[colon + 1 : colon + 8]):
            user_end = last
        # The next "//" may begin with the second "/" of this one.
        cut = begin if user_end >= 0 else begin - 1
        kept.append(word[at:cut])
        at = user_end + 1 if user_end >= 0 else cut
    return "".join(kept) + word[at:]


@functools.lru_cache(4096)
def _is_secret_name(name: str) -> bool:
    """Return whether the name of a variable, option or header says that its value is a secret."""
    bare = name.lstrip("-")
    return bool(re.search(_NAME, bare)) and not re.search(_PUBLIC_NAME, bare)


@functools.lru_cache(4096)
def _names_value(variable: str) -> bool:
    return _is_secret_name(variable) and not re.search(_PLACE_NAME, variable)


def secret_values(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the values of the variables whose names say that they are secrets."""
    found = (environ.get(name, "") for name in environ if _names_value(name))
    return frozenset(value for value in found if _is_telling(value))


def hide_login(*secrets: str) -> None:
    """Hide the password or token of a login in all messages of this process from now on."""
    _used_logins.extend(one for one in secrets if _is_telling(one) and one not in _used_logins)


def _is_telling(value: str) -> bool:
    return len(value) >= _KNOWN_CHARS_MIN and value.lower() not in _NO_SECRETS


def contains_token(text: str) -> bool:
    """Return whether something in `text` has the known form of a token."""
    return bool(re.search(_TOKEN, text))


def contains_secret(text: str, known: Iterable[str]) -> bool:
    """Return whether `text` contains one of the known secrets."""
    return any(value in text and re.search(_anywhere(value), text) for value in known)


def redact(text: str) -> str:
    """Return a message with all secrets in it removed or replaced by `HIDDEN`."""
    return redactor()(text)


def redactor() -> Callable[[str], str]:
    """Return `redact` for many texts: the secrets that it knows are looked up once, now."""
    return functools.partial(_redacted, secret_values(os.environ).union(_used_logins))


def _redacted(known: Collection[str], text: str) -> str:
    text = _without_plain_users(_without_known(text, known))
    # Most texts are names and numbers, which none of the patterns can match.
    if "=" in text:
        text = re.sub(_SECRET_PARAMETER, rf"\1{HIDDEN}", text)
    if "=" in text or ":" in text:
        text = re.sub(_AUTHORIZATION, rf"\1{HIDDEN}", text)
    if "=" in text:
        text = re.sub(_ASSIGNMENT, _without_value, text)
    if len(text) < _TOKEN_CHARS_MIN or text.isdigit():
        return text
    return re.sub(_TOKEN, HIDDEN, text)


def _without_known(text: str, known: Collection[str]) -> str:
    # The longest first: one secret may contain another.
    for value in sorted(filter(text.__contains__, known), key=len, reverse=True):
        text = re.sub(_anywhere(value), HIDDEN, text)
    return text


def _anywhere(value: str) -> str:
    """Return the pattern that finds a secret; one of letters only must be a whole word."""
    if value.isalpha():
        return rf"(?<![\w.-]){re.escape(value)}(?![\w-]|\.\w)"
    return re.escape(value)


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    is_shown = value.startswith((HIDDEN, "$"))
    return match[0] if is_shown or not _is_secret_name(name) else f"{name}={HIDDEN}"
