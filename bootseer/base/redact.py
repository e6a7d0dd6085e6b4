"""Credentials out of what people see: URLs, commands, messages, logs, timelines. Pure (no I/O).

Alone decides what is a secret: in a URL the user name and password, and the query; in a command the
value of an option, variable or header whose name says so, and what has a token's known form.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from bootseer.base.patterns import lazy_pattern
from bootseer.base.redact_words import (
    HIDDEN,
    SecretWords,
    hides_next_word,
    is_shown,
    says_secret,
    says_secret_in_command,
    secrets_of_headers,
    secrets_of_names,
    secrets_of_programs,
)

# What no URL's user or password holds as it is.
_WORD = lazy_pattern(r"[^\s'\"?#]+")
_PORT = lazy_pattern(r"\d+/")
# A user where quotes belong to the password: in a word that no shell reads any more. Repetitions
# that may begin anywhere are bounded: a long word costs time in proportion.
_USER_WITH_QUOTES = lazy_pattern(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/@\s?#]*(?:@[^/@\s?#]*)*@")
_SECRET_PARAMETER = lazy_pattern(
    r"([?&][\w.-]{0,99}(?:key|secret|token|password|signature|sig|credential)[\w.-]{0,99}=)"
    r"[^&\s'\"]+",
    re.I,
)
_QUERY = lazy_pattern(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"?#]{0,2000}\?)([^\s'\"#]+)")
# Of Hugging Face, GitHub, GitLab, AWS, OpenAI and the like, Slack, PyPI; JSON Web Tokens.
_TOKEN = lazy_pattern(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{16}|sk-[\w-]{16,}|xox[a-z]-[\w-]{10,}|pypi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
# One word of a shell, with what is quoted in it.
_VALUE = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|[^\s'\";|&<>()\\])+"
_ASSIGNMENT = lazy_pattern(
    rf"(?<![\w.-])(?P<name>-{{0,2}}[A-Za-z_][\w.-]*)(?P<between>=)(?P<value>{_VALUE})"
)
_AUTHORIZATION = lazy_pattern(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?)([^'\"\n]+)")
# "name:password" of curl and its like, but no "1000:1000".
_ACCOUNT = lazy_pattern(
    r"(?<![\w-])(?P<name>-u|-U|--user|--proxy-user)(?P<between>=|\s*)"
    r"(?P<value>(?!\d+:\d+(?:\s|$))['\"]?[^\s:'\"/]+:[^\s'\"]+)"
)
_ACCOUNT_OPTIONS = {"-u", "-U", "--user", "--proxy-user"}
_WHOLE_WORD = lazy_pattern(r"(-{0,2}[A-Za-z_][\w.-]*)(=|:(?!//)\s*)(.*)", re.DOTALL)


def public_url(url: str) -> str:
    """`url` without user name, password and query: safe to show, log and trace. Never raises."""
    bare = re.split(r"[?#]", _without_plain_users(url), maxsplit=1)[0]
    return bare if bare.endswith("//") else bare.rstrip("/")


def names_user(url: str) -> bool:
    """Whether `url` has a user name before its host."""
    return _without_plain_users(url) != url


def without_users(text: str) -> str:
    """`text` with "user:password@" taken out of every URL in it."""
    return _without_plain_users(_USER_WITH_QUOTES.sub(r"\1", text))


def _without_plain_users(text: str) -> str:
    if "@" not in text:
        return text
    return _WORD.sub(lambda match: _without_user(match[0]), text)


def _without_user(word: str) -> str:
    """Without all that is between "//" and "@". A secret key may hold "/", which no URL parser
    takes for a part of the password: so what stands before the last "@" goes if it has a ":" that
    begins no port number."""
    kept = []
    at = 0
    last = word.rfind("@")
    while (begin := word.find("//", at) + 2) > 1 and begin <= last:
        slash = word.find("/", begin)
        end = slash if slash >= 0 else len(word)
        user_end = word.rfind("@", begin, end)
        colon = word.find(":", begin, end)
        if user_end < 0 <= colon and not _PORT.match(word, colon + 1):
            user_end = last
        # The next may begin with the second "/" of this one.
        cut = begin if user_end >= 0 else begin - 1
        kept.append(word[at:cut])
        at = user_end + 1 if user_end >= 0 else cut
    return "".join(kept) + word[at:]


def redact(text: str) -> str:
    """A message with the user names, passwords and secret parameters of all URLs in it removed, and
    with tokens and `name=value` of a name that says "secret" hidden."""
    text = _SECRET_PARAMETER.sub(rf"\1{HIDDEN}", _without_plain_users(text))
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, _ASSIGNMENT.sub(_hidden(_ignore), text))


def take_secrets(text: str) -> tuple[str, tuple[str, ...]]:
    """`text`, a value or a script, with every secret in it hidden; and the secrets, without the
    users of URLs, which are gone altogether."""
    secrets: list[str] = []

    def hide_group(match: re.Match[str]) -> str:
        secrets.append(match[2])
        return match[1] + HIDDEN

    def hide_all(match: re.Match[str]) -> str:
        secrets.append(match[0])
        return HIDDEN

    text = _QUERY.sub(hide_group, without_users(text))
    for find in (secrets_of_programs, secrets_of_names, secrets_of_headers):
        text = _hide_spans(text, find(text), secrets.append)
    text = _ACCOUNT.sub(_hidden(secrets.append, is_secret=lambda name: True), text)
    return _TOKEN.sub(hide_all, text), tuple(secrets)


def take_command_secrets(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a command, as `take_secrets` gives them: what one word says of the next counts,
    and what belongs to a value is told by where its word ends."""
    shown: list[str] = []
    secrets: list[str] = []
    before = ""
    programs = SecretWords()
    for word in words:
        found: tuple[str, ...]
        is_script = before.startswith("-") and before.endswith("c") and " " in word
        at = programs.secret_at(word)
        if not word.startswith("-") and (
            _is_secret_option(before)
            or hides_next_word(before, word)
            or (before in _ACCOUNT_OPTIONS and ":" in word and not _is_numbers(word))
        ):
            at = 0
        match = None if is_script else _WHOLE_WORD.fullmatch(word)
        if at is not None and not is_script:
            text, found = word[:at] + HIDDEN, (word[at:],)
        elif match and match[3] and says_secret_in_command(match[1]):
            text, found = match[1] + match[2] + HIDDEN, (match[3],)
        else:
            text, found = take_secrets(word)
        shown.append(text)
        secrets += found
        before = word
    return shown, tuple(secrets)


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and "=" not in word and says_secret_in_command(word)


def _is_numbers(word: str) -> bool:
    return bool(re.fullmatch(r"\d+:\d+", word))


def _ignore(secret: str) -> None:
    pass


def _hidden(
    note: Callable[[str], None],
    *,
    is_secret: Callable[[str], object] = says_secret,
) -> Callable[[re.Match[str]], str]:
    """What to put for a match of "name", "between" and "value": the name stays. A value that only
    refers to a variable, or is hidden already, stays as well."""

    def hide(match: re.Match[str]) -> str:
        value = match["value"]
        if not is_secret(match["name"]) or is_shown(value):
            return match[0]
        note(value)
        return match["name"] + match["between"] + HIDDEN

    return hide


def _hide_spans(text: str, spans: Iterable[tuple[int, int]], note: Callable[[str], None]) -> str:
    kept = []
    done = 0
    for begin, end in spans:
        note(text[begin:end])
        kept += [text[done:begin], HIDDEN]
        done = end
    return "".join([*kept, text[done:]])
