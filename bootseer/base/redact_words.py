"""Which words of a command or script are secrets, by the names and programs before them. Pure.

Alone holds the names that say "secret" and the table of programs whose short options do. Every
function reads its text once: time grows in proportion to the length.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bootseer.base.patterns import lazy_pattern

HIDDEN = "***"
"""What stands where a secret stood."""

_NAME = lazy_pattern(
    r"(?:^|[_.-])(?:token|secret|pat|pwd|pass|pin|otp|sas|sig|signature|auth|authorization|cookie"
    r"|credentials?|bearer)(?:$|[_.-])"
    r"|(?:token|secret|pwd|apikey|cookie|bearer|credentials?)$|passw(?:or)?d|passphrase|pass(?:in|out)$"
    r"|(?:store|key|user|db)pass$|[_.-]key$"
    r"|(?:api|access|secret|private|auth|account|shared|signing|client|license)[_.-]?key",
    re.I,
)
# Of a command's words only: messages of ours speak of keys and sessions.
_COMMAND_NAME = lazy_pattern(
    r"key$|^session(?:[_.-]?(?:id|key))?$|[_.-]session(?:[_.-]?id)?$", re.I
)
_PUBLIC_NAME = lazy_pattern(r"(?:gpg|hot|mon|pub|public|sort|primary|foreign)[_.-]?key$", re.I)
# A word that says by itself, without "-" or "=", that the next word is a secret.
_BARE_NAME = lazy_pattern(
    r"(?:login|password|passwd|passphrase|token|secret|bearer"
    r"|[\w.-]*_(?:key|access_key_id|password|passwd|token|secret|authToken))",
    re.I,
)
_PROSE = {"and", "as", "at", "for", "from", "has", "in", "is", "may", "must", "not", "of", "on"}
_PROSE |= {"or", "that", "the", "to", "was", "with"}
_VARIABLE = r"\$(?:\w+|\{\w+(?::?\?[^}]*|:?-(?:\$\w+)?)?\}|\((?:cat\s+|<\s*)[\w./~$-]+\))"
_VARIABLES = rf"(?i)\\?['\"]?(?:(?:bearer|basic|token)\s+)?(?:{_VARIABLE}[:.,-]?){{1,9}}"
_REFERENCE = lazy_pattern(rf"{_VARIABLES}(?:/|(?:\\?['\"])*[\]}},]*$)")
# A header's value goes on to the end of the line, with what else is there.
_HEADER_REFERENCE = lazy_pattern(rf"{_VARIABLES}(?=$|[\s'\"\\/,;)}}\]])")
_HOST = lazy_pattern(r"(?:https?://.*|[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,10}(?::\d+)?(?:/.*)?)")
# A name and what may stand between it and its value: a sign of equality, also behind the quote or
# bracket that closes the name; blanks; a comma or bracket before a quoted value.
_NAMED = lazy_pattern(
    r"(?<![\w.-])(?P<name>-{0,2}\w[\w.-]*)(?P<between>\\?['\"]?\]?"
    r"(?:=(?:[ \t]{1,9}(?=['\"]))?|\s{1,9}[:+]?=(?!=)[ \t]{0,9}|[:+]=(?!=)[ \t]{0,9})"
    r"|['\"]\s{0,9},\s{0,9}(?=['\"])|\(\s{0,9}(?=['\"])|(?:\s|\\\n)+)"
)
_BEFORE_BARE_NAME = frozenset(" \t\r\n'\"`(;|&[{,")
_PLAIN_WORD = lazy_pattern(r"[^\s;|&()]*")
_HEADER = lazy_pattern(
    r"(?<![\w-])(?P<name>(?:-H)?[A-Za-z][\w-]*)(?P<between>\\?['\"]?\s*:(?!//)\s*)"
)
_HEADER_VALUE = lazy_pattern(r"\\\"[^\"]*\"|\"[^\"]*\"|'[^'\n]+'|[^\s'\"][^'\"\n]*")
_SIGN = lazy_pattern(r"\\.|\$\(|[()\"'`]", re.DOTALL)
_SIGNS_MAX = 200
_ENDS = frozenset(" \t\r\n\v\f;|&<>()")


def says_secret(name: str) -> bool:
    """Whether `name`, of an option, variable or header, says that its value is a secret."""
    return bool(_NAME.search(name.lstrip("-"))) and not _PUBLIC_NAME.search(name)


def says_secret_in_command(name: str) -> bool:
    """Whether a name in a command says that its value is a secret: there "key" and "session" count,
    and a header may follow "-H"."""
    bare = name.lstrip("-")
    if says_secret(bare) or (name.startswith("-H") and says_secret(name[2:])):
        return True
    return bool(_COMMAND_NAME.search(bare)) and not _PUBLIC_NAME.search(bare)


def hides_next_word(name: str, following: str) -> bool:
    """Whether the word `name`, which is no option, says that the word behind it is a secret."""
    if not _BARE_NAME.fullmatch(name) or following.lower() in _PROSE:
        return False
    return name.lower() != "login" or not _HOST.fullmatch(following)


def is_shown(value: str, reference: re.Pattern[str] = _REFERENCE) -> bool:
    """Whether `value`, of a name that says "secret", may be shown: it is hidden already, or only
    refers to a variable, or to a file that is read (`$TOKEN`)."""
    return value.startswith(HIDDEN) or bool(reference.match(value))


def word_end(text: str, begin: int) -> int:
    """Where the shell's word at `begin` ends, with what is quoted, escaped or substituted in it.

    A quote that nothing closes ends the word; a substitution that nothing closes is its whole rest.
    """
    at = begin
    while at < len(text) and text[at] not in _ENDS:
        after = _quoted_end(text, at)
        if after < 0:
            if at > begin or text[at] == "`":
                return at if at > begin else len(text)
            after = at + 1
        at = after
    return at


def _quoted_end(text: str, at: int) -> int:
    """The end of the quotation, escape, substitution or character at `at`; -1: never closed."""
    sign = text[at]
    if sign == "\\":
        return min(at + 2, len(text))
    if sign == "'":
        return text.find("'", at + 1) + 1 or -1
    if sign in '"`':
        return _closed(text, at + 1, sign)
    if text.startswith("$(", at):
        end = _closed(text, at + 2, ")")
        return end if end > 0 else len(text)
    return at + 1


def _closed(text: str, at: int, closing: str) -> int:
    """The end behind `closing`, with what is opened in between closed first; -1: never closed. What
    is longer than a command ever is ends with the text: nothing is read many times."""
    expected = [closing]
    for count, match in enumerate(_SIGN.finditer(text, at)):
        if count == _SIGNS_MAX:
            return len(text)
        sign = match[0]
        if sign == expected[-1]:
            expected.pop()
            if not expected:
                return match.end()
        elif expected[-1] == "'":
            continue
        elif sign == "$(":
            expected.append(")")
        elif expected[-1] == ")" and sign in "(\"'`":
            expected.append(")" if sign == "(" else sign)
    return -1


def secrets_of_names(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each value in a script that a name before it calls secret: an option's, a
    variable's, a key's. What follows another name may be a name itself: `--env=TOKEN=value`."""
    at = 0
    while match := _NAMED.search(text, at):
        at = match.end()
        name, between, begin = match["name"], match["between"], match.start()
        is_blank = not between.strip(" \t\r\n\v\f\\")
        if is_blank and not name.startswith("-"):
            following = _PLAIN_WORD.match(text, at)
            is_secret = (
                (begin == 0 or text[begin - 1] in _BEFORE_BARE_NAME)
                and "\n" not in between.replace("\\\n", "")
                and text[max(begin - 2, 0) : begin] != ": "  # the value of a header
                and following is not None
                and hides_next_word(name, following[0])
            )
        else:
            is_secret = says_secret_in_command(name) or (between[0] == "(" and name == "login")
        if not is_secret:
            continue
        end = word_end(text, at)
        value = text[at:end]
        is_option = is_blank and value.startswith("-")
        is_empty = not value or (value in ("''", '""') and between != "=")
        if not is_option and not is_empty and not is_shown(value):
            yield at, end
            at = end


def secrets_of_headers(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each secret value of a header, "name: value", which goes on to the quote or
    line that ends it."""
    at = 0
    while match := _HEADER.search(text, at):
        at = match.end()
        if not says_secret_in_command(match["name"]):
            continue
        value = _HEADER_VALUE.match(text, at)
        if value is not None and not is_shown(value[0], _HEADER_REFERENCE):
            at = value.end()
            yield value.span()


def _anything(value: str) -> bool:
    return True


def _is_account(value: str) -> bool:
    """ "name:password", but no "1000:1000"."""
    return ":" in value and not re.fullmatch(r"['\"]?\d+:\d+['\"]?", value) and "://" not in value


class _Options(NamedTuple):
    """Short options of a program with secret values. `others` take another value, so that nothing
    behind them in a word is an option; "*": the program takes one option a word."""

    secret: str
    others: str = "*"
    attached_only: bool = False
    counts: Callable[[str], bool] = _anything


_PROGRAMS = {
    **dict.fromkeys(
        ("mysql", "mysqldump", "mysqladmin", "mysqlimport", "mariadb", "mariadb-dump"),
        _Options("p", "uhPDeSN", attached_only=True),
    ),
    **dict.fromkeys(("7z", "7za", "7zr", "rar", "unrar"), _Options("p", attached_only=True)),
    **dict.fromkeys(("unzip", "zip"), _Options("P", "dxib")),
    **dict.fromkeys(("mongo", "mongosh", "mongodump", "mongorestore", "twine"), _Options("p", "u")),
    **dict.fromkeys(("mosquitto_pub", "mosquitto_sub", "sqlcmd", "bcp"), _Options("P")),
    **dict.fromkeys(("http", "https"), _Options("a")),
    **dict.fromkeys(("ldapsearch", "ldapmodify"), _Options("w", "DHbfs")),
    "redis-cli": _Options("a", "hpnus"),
    "sshpass": _Options("p", "fdP"),
}
_LOGINS = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "buildah", "skopeo", "helm", "oras", "crane")),
    "az": None,
}
_LOGIN = _Options("p", "u")
_CURL_OTHERS = "oXdATFemcCDEKrtwxyYzQPhH"
_CURL = (
    _Options("uU", _CURL_OTHERS + "b", counts=_is_account),
    _Options("b", _CURL_OTHERS + "uU", counts=lambda value: "=" in value),
)


class SecretWords:
    """Tells of a command's words, one after the other, where a secret begins in them."""

    def __init__(self) -> None:
        self._program = ""
        self._options: tuple[_Options, ...] = ()
        self._counts: Callable[[str], bool] | None = None
        self._before = ""
        self._is_setting = False
        self._left: int | None = None

    @property
    def expects_value(self) -> bool:
        """Whether the next word may be a secret, whatever it looks like."""
        return self._counts is not None or self._left == 0

    def secret_at(self, word: str) -> int | None:
        """Where the secret in the next word begins, up to its end; None: it has none."""
        counts, self._counts = self._counts, None
        if counts and not word.startswith("-") and counts(word):
            return 0
        before, self._before = self._before, word
        if word.startswith("-") and word != "--set":
            return self._secret_in_option(word) if word[1:2] != "-" else None
        if self._left is not None:  # mc alias set NAME URL USER PASSWORD
            self._left -= 1
            if self._left < 0:
                return 0
        self._see_program(word.rsplit("/", 1)[-1], before)
        return None

    def _secret_in_option(self, word: str) -> int | None:
        for options in self._options:
            letters = word[1:2] if options.others == "*" else word[1:]
            for at, letter in enumerate(letters, 1):
                if letter in options.secret:
                    value = word[at + 1 :]
                    if value:
                        return at + 1 if options.counts(value) else None
                    if not options.attached_only:
                        self._counts = options.counts
                    return None
                if letter in options.others or not letter.isalnum():
                    break
        return None

    def _see_program(self, name: str, before: str) -> None:
        if name in _PROGRAMS:
            self._program, self._options = name, (_PROGRAMS[name],)
        elif name == "curl":
            self._program, self._options = name, _CURL
        elif name in _LOGINS:
            self._program, self._options = name, ()
        elif name == "login" and self._program in _LOGINS:
            self._options = (_LOGIN,)
        elif name == "set" and before == "alias":
            self._left = 2
        elif name in ("config", "configure"):
            self._is_setting = True
        elif self._is_setting and name not in ("set", "--set"):
            self._is_setting = False
            if says_secret_in_command(name.rsplit(":", 1)[-1]) and "=" not in name:
                self._counts = _anything


_PIECE = lazy_pattern(r"\\\n|[;|&\n()'\"`]|[^\s;|&()'\"`\\]+")


def secrets_of_programs(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each secret that the programs in a script tell. Words are seen in quotes,
    too: another shell may read these."""
    words = SecretWords()
    quote = ""
    at = 0
    while match := _PIECE.search(text, at):
        piece, begin, at = match[0], match.start(), match.end()
        if piece in "'\"`" and not words.expects_value:
            quote = "" if quote == piece else quote or piece
        elif piece in ";|&\n()":
            words = SecretWords()
        elif piece != "\\\n":
            following = text[at : at + 1]
            if words.expects_value or (piece[0] == "-" and following in {"'", '"'} - {quote}):
                at = max(at, word_end(text, begin))
                piece = text[begin:at]
            secret = words.secret_at(piece)
            if secret is not None and not is_shown(piece[secret:]):
                at = max(at, word_end(text, begin + secret))
                yield begin + secret, at
