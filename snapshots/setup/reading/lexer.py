"""Tokens of a shell script: operators, and words in which expansions are marked. Pure (no I/O).

Follows the token rules of POSIX (Shell Command Language, 2.3) and what bash adds: `$'...'`,
`<(...)`, here-strings. Expands nothing: a word holds a mark for each variable, and for each
expansion that only a shell can compute. Scripts inside of words, as in `$(...)`, are handed out as
text.
"""

import re
from collections.abc import Mapping

from msgspec import Struct, field

_BEGIN, _END, _DEFAULT = "\x01", "\x02", "\x03"
COMPUTED = _BEGIN + _END
"""The mark of an expansion that only a shell can compute."""
_MARK = re.compile(r"\x01([^\x01-\x03]*)(?:\x03([^\x01-\x03]*))?\x02")
# Longer ones first.
_OPERATOR_LIST = "&>> <<- <<< ;;& && || ;; ;& |& &> >> >& >| <& <> << ; & | ( ) < >"
_OPERATORS = _OPERATOR_LIST.split()
REDIRECTIONS = frozenset(one for one in _OPERATORS if "<" in one or ">" in one)
_TOKENS_MAX = 20_000
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`\x01-\x03]+")
_WITH_DEFAULT = re.compile(r"([A-Za-z_]\w*):?[-=]([^$`'\"\\{}]*)")
_PARAMETER = re.compile(r"[A-Za-z_]\w*")


class Token(Struct):
    """An operator, or a word without its quotes."""

    text: str
    is_operator: bool = False
    is_quoted: bool = False
    """Whether a part of it was quoted, so that it is no keyword."""
    is_glued: bool = False
    """Whether no blank is in front of it."""
    scripts: list[str] = field(default_factory=list)
    """The texts of command and process substitutions in it."""
    variables: list[str] = field(default_factory=list)
    """Names of the variables in it."""


def variable(name: str, default: str = "") -> str:
    """Return the mark of a variable in a word."""
    return f"{_BEGIN}{name}{_DEFAULT}{default}{_END}" if default else f"{_BEGIN}{name}{_END}"


def has_marks(word: str) -> bool:
    """Return whether a word holds variables or computed expansions."""
    return _BEGIN in word


def marks(word: str) -> list[tuple[str, str, str]]:
    """Return (mark, name of the variable, its default) of each mark. A computed expansion has an
    empty name."""
    return [(match[0], match[1], match[2] or "") for match in _MARK.finditer(word)]


def as_text(word: str) -> str:
    """Return a word as a script would have it, for a shell or for people."""
    return _MARK.sub(lambda match: f"${{{match[1]}}}" if match[1] else "$(...)", word)


def filled(word: str, environ: Mapping[str, str]) -> str:
    """Return a word with the values of the variables in it. Computed expansions stay."""
    if _BEGIN not in word:
        return word

    def value(match: re.Match[str]) -> str:
        return environ.get(match[1]) or match[2] or "" if match[1] else match[0]

    return _MARK.sub(value, word)


def lex(text: str) -> tuple[list[Token], str]:
    """Return the tokens of a script, and what cannot be understood in it (empty: nothing)."""
    lexer = _Lexer(text)
    try:
        lexer.run()
    except (ValueError, RecursionError):
        lexer.odd = lexer.odd or "a shell script with an unfinished quote"
    return lexer.tokens, lexer.odd


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.tokens: list[Token] = []
        self.odd = ""
        self.word = Token("")
        self._heres: list[tuple[str, bool, bool]] = []
        if any(mark in text for mark in (_BEGIN, _END, _DEFAULT)):
            self.odd = "a shell script with control characters"
            self.text = ""

    def run(self) -> None:
        """Read all tokens."""
        text = self.text
        is_glued = False
        awaits_delimiter = ""
        while self.at < len(text):
            if len(self.tokens) > _TOKENS_MAX:
                self.odd = "a very long shell script"
                return
            char = text[self.at]
            if char in " \t\r" or text.startswith("\\\n", self.at):
                self.at += 1 + (char == "\\")
                is_glued = False
                continue
            if char == "\n":
                self.at += 1
                self.tokens.append(Token("\n", is_operator=True))
                self._skip_heres()
            elif char == "#" and not is_glued:
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith(("<(", ">("), self.at) or char not in ";&|<>()":
                self.word = Token("", is_glued=is_glued)
                self._read_word()
                number = self.word.text
                before_redirection = self.text[self.at : self.at + 1] in ("<", ">")
                if not (number.isdigit() and before_redirection) or self.word.is_quoted:
                    self.tokens.append(self.word)
                    if awaits_delimiter:
                        is_stripped = awaits_delimiter == "<<-"
                        self._heres.append((self.word.text, self.word.is_quoted, is_stripped))
                        awaits_delimiter = ""
            else:
                operator = next(one for one in _OPERATORS if text.startswith(one, self.at))
                self.at += len(operator)
                self.tokens.append(Token(operator, is_operator=True, is_glued=is_glued))
                awaits_delimiter = operator if operator in ("<<", "<<-") else ""
            is_glued = True

    def _skip_heres(self) -> None:
        """Skip here-documents. Scripts and variables in them go to the newline's token."""
        for delimiter, is_literal, is_stripped in self._heres:
            begin = self.at
            while True:
                if self.at >= len(self.text):
                    raise ValueError("a here-document does not end")
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                last, self.at = self.at, end + 1
                if (line.lstrip("\t") if is_stripped else line) == delimiter:
                    break
            if not is_literal:
                self._absorb(self.text[begin:last], self.tokens[-1])
        self._heres.clear()

    def _absorb(self, text: str, into: Token) -> None:
        """Collect the scripts and variables of a text that is expanded like a quoted one."""
        inner = _Lexer(text)
        inner._read_quoted("")
        into.scripts += inner.word.scripts
        into.variables += inner.word.variables
        self.odd = self.odd or inner.odd

    def _read_word(self) -> None:
        text, word = self.text, self.word
        while self.at < len(text):
            char = text[self.at]
            if text.startswith(("<(", ">("), self.at) and not word.text:
                end = _closing(text, self.at + 2, "(", ")")
                word.scripts.append(text[self.at + 2 : end])
                word.text += COMPUTED
                word.is_quoted = True
                self.at = end + 1
            elif char in " \t\r\n;&|<>()":
                return
            elif char == "\\":
                word.text += text[self.at + 1 : self.at + 2].replace("\n", "")
                word.is_quoted = True
                self.at += 2
            elif char == "'":
                end = text.index("'", self.at + 1)
                word.text += text[self.at + 1 : end]
                word.is_quoted = True
                self.at = end + 1
            elif char == '"':
                word.is_quoted = True
                self.at += 1
                self._read_quoted('"')
            elif char == "$":
                self._read_dollar()
            elif char == "`":
                self._read_backticks()
            elif match := _PLAIN.match(text, self.at):
                word.text += match[0]
                self.at = match.end()
            else:
                word.text += char
                self.at += 1

    def _read_quoted(self, end: str) -> None:
        """Read to the character `end`, or to the end of the text where that is empty."""
        text, word = self.text, self.word
        while self.at < len(text):
            char = text[self.at]
            if char == end:
                self.at += 1
                return
            if char == "\\" and text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                word.text += text[self.at + 1].replace("\n", "")
                self.at += 2
            elif char == "$":
                self._read_dollar()
            elif char == "`":
                self._read_backticks()
            else:
                word.text += char
                self.at += 1
        if end:
            raise ValueError("a quote does not end")

    def _read_backticks(self) -> None:
        at = self.at + 1
        while self.text[at : at + 1] != "`":
            if at >= len(self.text):
                raise ValueError("a quote does not end")
            at += 2 if self.text[at] == "\\" else 1
        script = re.sub(r"\\([$`\\])", r"\1", self.text[self.at + 1 : at])
        self.word.scripts.append(script)
        self.word.text += COMPUTED
        self.at = at + 1

    def _read_dollar(self) -> None:
        text, word = self.text, self.word
        following = text[self.at + 1 : self.at + 2]
        if match := _NAME.match(text, self.at + 1):
            word.variables.append(match[0])
            word.text += variable(match[0])
            self.at = match.end()
        elif following == "(":
            end = _closing(text, self.at + 2, "(", ")")
            inner = text[self.at + 2 : end]
            if inner.startswith("(") and inner.endswith(")"):
                word.variables += _NAME.findall(inner)
                if "$(" in inner or "`" in inner:
                    self._absorb(inner, word)
            else:
                word.scripts.append(inner)
            word.text += COMPUTED
            self.at = end + 1
        elif following == "{":
            end = _closing(text, self.at + 2, "{", "}")
            self._read_parameter(text[self.at + 2 : end])
            self.at = end + 1
        elif following == "'":
            end = self.at + 2
            while text[end : end + 1] != "'":
                if end >= len(text):
                    raise ValueError("a quote does not end")
                end += 2 if text[end] == "\\" else 1
            inner = text[self.at + 2 : end]
            word.text += COMPUTED if "\\" in inner else inner
            word.is_quoted = True
            self.at = end + 1
        elif following and following in "0123456789@*?#$!-":
            word.text += COMPUTED
            self.at += 2
        else:
            word.text += "" if following == '"' else "$"
            self.at += 1

    def _read_parameter(self, inner: str) -> None:
        """Read what stands between the braces of `${...}`."""
        word = self.word
        match = _PARAMETER.match(inner.lstrip("#!"))
        word.variables += [match[0]] if match else []
        if match and match[0] == inner:
            word.text += variable(inner)
        elif match and (whole := _WITH_DEFAULT.fullmatch(inner)):
            word.text += variable(whole[1], whole[2])
        else:
            word.text += COMPUTED
            self._absorb(inner[match.end() :] if match else inner, word)
            if inner.startswith("!"):
                self.odd = self.odd or "a variable that another one names"


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """Return where the bracket ends that was opened before `at`. Raises: ValueError."""
    depth = 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'":
            at = text.index("'", at + 1)
        elif char == '"':
            at = _after_quote(text, at + 1) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return at
        at += 1
    raise ValueError("a bracket does not end")


def _after_quote(text: str, at: int) -> int:
    """Return the place behind the double quote that ends. Raises: ValueError."""
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == '"':
            return at + 1
        elif text.startswith("$(", at):
            at = _closing(text, at + 2, "(", ")")
        at += 1
    raise ValueError("a quote does not end")
