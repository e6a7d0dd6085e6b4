"""Parser of shell scripts: simple commands in order, and the blocks around them.

`lex` makes tokens by the rules of POSIX (Shell Command Language, 2.3) and bash (`$'...'`, `<(...)`,
here-strings). `parse` makes commands of them. Nothing is expanded: a word holds a mark for each
variable, and for each expansion that only a shell can compute; scripts inside words, as in
`$(...)`, are returned as text. Grammar that set-ups do not use is named in `Script.not_understood`.
Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

_BEGIN, _END, _DEFAULT = "\x01", "\x02", "\x03"
COMPUTED = _BEGIN + _END
"""Mark of an expansion that only a shell can compute."""

_MARK = re.compile(r"\x01([^\x01-\x03]*)(?:\x03([^\x01-\x03]*))?\x02")
# Longer operators come first.
_OPERATOR_LIST = "&>> <<- <<< ;;& && || ;; ;& |& &> >> >& >| <& <> << ; & | ( ) < >"
_OPERATORS = _OPERATOR_LIST.split()
_REDIRECTIONS = frozenset(one for one in _OPERATORS if "<" in one or ">" in one)
_TOKENS_MAX = 20_000
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`\x01-\x03]+")
_WITH_DEFAULT = re.compile(r"([A-Za-z_]\w*):?[-=]([^$`'\"\\{}]*)")


class Token(Struct):
    """Operator, or word without its quotes."""

    text: str
    is_operator: bool = False
    is_quoted: bool = False
    """Whether a part of the word was quoted, so that it is no keyword."""
    is_glued: bool = False
    """Whether no blank precedes the token."""
    scripts: list[str] = field(default_factory=list)
    """Texts of the command and process substitutions in the word."""
    variables: list[str] = field(default_factory=list)
    """Names of the variables in the word."""


def variable(name: str, default: str = "") -> str:
    """Return the mark of a variable in a word."""
    return f"{_BEGIN}{name}{_DEFAULT}{default}{_END}" if default else f"{_BEGIN}{name}{_END}"


def has_marks(word: str) -> bool:
    """Return whether a word holds variables or computed expansions."""
    return _BEGIN in word


def marks(word: str) -> list[tuple[str, str, str]]:
    """Return (mark, name of the variable, default value) of each mark.

    A computed expansion has an empty name.
    """
    return [(match[0], match[1], match[2] or "") for match in _MARK.finditer(word)]


def as_text(word: str) -> str:
    """Return a word in the notation of a script, for a shell or for people."""
    return _MARK.sub(lambda match: f"${{{match[1]}}}" if match[1] else "$(...)", word)


def filled(word: str, environ: Mapping[str, str]) -> str:
    """Return a word with its variables replaced by their values. Computed expansions stay."""
    if _BEGIN not in word:
        return word

    def value(match: re.Match[str]) -> str:
        return environ.get(match[1]) or match[2] or "" if match[1] else match[0]

    return _MARK.sub(value, word)


def lex(text: str) -> tuple[list[Token], str]:
    """Return the tokens of a script, and a description of syntax that is not understood, or ""."""
    lexer = _Lexer(text)
    try:
        lexer.run()
    except (ValueError, RecursionError):
        lexer.not_understood = lexer.not_understood or "a shell script with an unfinished quote"
    return lexer.tokens, lexer.not_understood


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.tokens: list[Token] = []
        self.not_understood = ""
        self.word = Token("")
        self._heres: list[tuple[str, bool, bool]] = []
        if any(mark in text for mark in (_BEGIN, _END, _DEFAULT)):
            self.not_understood = "a shell script with control characters"
            self.text = ""

    def run(self) -> None:
        text = self.text
        is_glued = False
        awaits_delimiter = ""
        while self.at < len(text):
            if len(self.tokens) > _TOKENS_MAX:
                self.not_understood = "a very long shell script"
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
        """Collect the scripts and variables of a text that is expanded as inside double quotes."""
        inner = _Lexer(text)
        inner._read_quoted("")
        into.scripts += inner.word.scripts
        into.variables += inner.word.variables
        self.not_understood = self.not_understood or inner.not_understood

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
        """Read to the character `end`; if `end` is empty, to the end of the text."""
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
        """Read the text between the braces of `${...}`."""
        word = self.word
        match = _NAME.match(inner.lstrip("#!"))
        word.variables += [match[0]] if match else []
        if match and match[0] == inner:
            word.text += variable(inner)
        elif match and (whole := _WITH_DEFAULT.fullmatch(inner)):
            word.text += variable(whole[1], whole[2])
        else:
            word.text += COMPUTED
            self._absorb(inner[match.end() :] if match else inner, word)
            if inner.startswith("!"):
                self.not_understood = self.not_understood or "a variable that another one names"


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """Return the position of the bracket that closes the one before `at`. Raises: ValueError."""
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
    """Return the position behind the closing double quote. Raises: ValueError."""
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == '"':
            return at + 1
        elif text.startswith("$(", at):
            at = _closing(text, at + 2, "(", ")")
        at += 1
    raise ValueError("a quote does not end")


SHELLS = {"sh", "bash", "dash", "zsh", "ash", "ksh"}
_SHELL_VALUE_OPTIONS = {"--rcfile", "--init-file"}
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?\+?=", re.DOTALL)
_SEPARATORS = {";", "&", "\n", "&&", "||", "|", "|&", ";;", ";&", ";;&"}
_CASE_ENDS = {";;", ";&", ";;&"}


class Simple(Struct):
    """Simple command of a script, without any expansion."""

    words: list[Token] = field(default_factory=list)
    assignments: list[Token] = field(default_factory=list)
    reads: list[Token] = field(default_factory=list)
    """Files that are redirected to the command's input."""
    writes: list[Token] = field(default_factory=list)
    """Files that the command's output replaces."""
    appends: list[Token] = field(default_factory=list)
    """Files to which output is appended, ends of here-documents, patterns of `case`."""
    others: list[Token] = field(default_factory=list)
    """Here-strings, words of `case`."""
    is_piped: bool = False
    """Whether the command reads the output of the command before it."""
    is_output_used: bool = False
    """Whether the output goes to a file, to a command, or into the output of a block."""
    joined: Literal["", "&&", "||"] = ""
    """Operator before the command in its list."""

    def tokens(self) -> Iterator[Token]:
        """Yield all words."""
        yield from (*self.assignments, *self.words, *self.reads, *self.writes)
        yield from (*self.appends, *self.others)


class Block(Struct, frozen=True):
    """Beginning, next branch or end of a compound command."""

    kind: Literal["begin", "branch", "end", "function", "for", "list"]
    """Kind of the event: "list" begins commands in brackets, which certainly run; "function"
    precedes a body."""
    name: str = ""
    """Word that ends the block; name of a function, or of a loop's variable."""
    values: tuple[Token, ...] | None = None
    """Words that a loop's variable takes; None if unknown."""


class Script(Struct, frozen=True):
    """Parsed shell script."""

    events: tuple[Simple | Block, ...]
    not_understood: str
    """Description of the first syntax that was not understood, or ""."""


class Shell(Struct, frozen=True):
    """Script that a shell is told to run."""

    script: str | None = None
    """Text of the script (`-c`)."""
    file: str | None = None
    arguments: tuple[str, ...] = ()


def base_name(word: str) -> str:
    """Return a program's name without its directory."""
    return word.rpartition("/")[2]


def read_shell(words: Sequence[str]) -> Shell:
    """Return the script that a call such as "bash -euxo pipefail FILE" runs, if any."""
    is_text = False
    at = 1
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("--", "-"):
            break
        if word.startswith("--"):
            at += word in _SHELL_VALUE_OPTIONS
        elif word[:1] in ("-", "+") and len(word) > 1:
            is_text = is_text or (word[0] == "-" and "c" in word)
            at += word.count("o", 1) + word.count("O", 1)
        else:
            at -= 1
            break
    rest = words[at:]
    if not rest:
        return Shell()
    arguments = tuple(rest[1:])
    return Shell(rest[0], None, arguments) if is_text else Shell(None, rest[0], arguments)


def parse(text: str) -> Script:
    """Return the commands of a script."""
    tokens, not_understood = lex(text)
    parser = _Parser()
    at = 0
    while at < len(tokens):
        at = parser.take(tokens, at)
    parser.end_command()
    return Script(
        tuple(parser.events), not_understood or parser.not_understood or parser.unfinished()
    )


class _Parser:
    def __init__(self) -> None:
        self.events: list[Simple | Block] = []
        self.not_understood = ""
        self._current = Simple()
        self._blocks: list[str] = []
        """Words or brackets that close the open blocks."""
        self._redirection = ""
        self._in_pattern = False
        self._piped = False
        self._joined: Literal["", "&&", "||"] = ""

    def unfinished(self) -> str:
        """Return a description of an unfinished block, or ""."""
        return "a shell script with an unfinished block" if self._blocks else ""

    def take(self, tokens: Sequence[Token], at: int) -> int:
        """Take the token at `at` and the tokens that belong to it. Return the next position."""
        token = tokens[at]
        following = tokens[at + 1] if at + 1 < len(tokens) else None
        if self._in_pattern:
            return self._take_pattern(token, at)
        if token.is_operator:
            return self._take_operator(token, following, at)
        if self._redirection:
            self._redirect(token)
            return at + 1
        current = self._current
        if not current.words and not token.is_quoted and not current.assignments:
            next_at = self._take_keyword(tokens, at)
            if next_at > at:
                return next_at
        if not current.words and ASSIGNMENT.match(token.text):
            if following is not None and following.text == "(" and following.is_glued:
                return self._take_array(tokens, at)
            current.assignments.append(token)
        else:
            current.words.append(token)
        return at + 1

    def _take_operator(self, token: Token, following: Token | None, at: int) -> int:
        operator = token.text
        if operator in _REDIRECTIONS:
            self._redirection = operator
        elif operator == "(":
            words = self._current.words
            is_function = following is not None and following.text == ")"
            if is_function and len(words) == 1:
                self._current = Simple()
                self.events.append(Block("function", words[0].text))
                return at + 2
            if not words:
                if following is not None and following.text == "(" and following.is_glued:
                    self.not_understood = self.not_understood or "an arithmetic command"
                self._begin(")")
            else:
                self.not_understood = self.not_understood or "a pattern with brackets"
        elif operator == ")":
            self.end_command()
            self._end_block(")")
        elif operator in _SEPARATORS:
            if token.scripts or token.variables:  # of a here-document
                self._current.appends.append(token)
            if operator in ("|", "|&"):
                self.end_command(is_output_used=True)
                self._piped = True
            elif operator in ("&&", "||"):
                self.end_command()
                self._joined = "&&" if operator == "&&" else "||"
            elif operator != "\n" or self._current != Simple() or not (self._piped or self._joined):
                self.end_command()  # else the list goes on after an empty line
            if operator in _CASE_ENDS:
                self.events.append(Block("branch"))
                self._in_pattern = True
        return at + 1

    def _redirect(self, token: Token) -> None:
        operator, self._redirection = self._redirection, ""
        current = self._current
        if operator in ("<", "<>"):
            current.reads.append(token)
        elif operator in (">", ">|", "&>") or (operator == ">&" and not _is_descriptor(token)):
            current.writes.append(token)
            current.is_output_used = True
        elif operator in (">>", "&>>"):
            current.appends.append(token)
            current.is_output_used = True
        elif operator == "<<<":
            current.others.append(token)
        else:
            current.appends.append(token)

    def _take_array(self, tokens: Sequence[Token], at: int) -> int:
        """Take `NAME=(WORDS)`: the words are noted; the value of the variable is unknown."""
        name, at = tokens[at], at + 2
        self._current.assignments.append(Token(name.text + COMPUTED))
        while at < len(tokens) and tokens[at].text != ")":
            self._current.reads += [] if tokens[at].is_operator else [tokens[at]]
            at += 1
        return at + 1

    def _take_keyword(self, tokens: Sequence[Token], at: int) -> int:
        """Take a keyword of the shell. Return `at` if the word is none."""
        word = tokens[at].text
        if word in ("if", "while", "until"):
            self._begin("fi" if word == "if" else "done")
        elif word in ("for", "select"):
            return self._take_for(tokens, at)
        elif word == "case":
            return self._take_case(tokens, at)
        elif word == "function" and at + 1 < len(tokens):
            self.events.append(Block("function", tokens[at + 1].text))
            return at + (4 if [one.text for one in tokens[at + 2 : at + 4]] == ["(", ")"] else 2)
        elif word == "[[":
            return self._take_condition(tokens, at)
        elif word == "{":
            self._begin("}")
        elif word in ("then", "do", "!"):
            pass
        elif word in ("else", "elif"):
            self.events.append(Block("branch"))
        elif word in ("fi", "done", "esac", "}"):
            self._end_block(word)
        else:
            return at
        return at + 1

    def _take_for(self, tokens: Sequence[Token], at: int) -> int:
        """Take `for NAME in WORDS`."""
        is_select = tokens[at].text == "select"
        self._begin("done")
        at += 1
        if at >= len(tokens) or tokens[at].is_operator:
            self.not_understood = self.not_understood or "a loop that counts"
            return at
        name, at = tokens[at].text, at + 1
        while at < len(tokens) and tokens[at].text == "\n":
            at += 1
        values: list[Token] = []
        has_words = at < len(tokens) and tokens[at].text == "in"
        at += has_words
        while has_words and at < len(tokens) and tokens[at].text not in (";", "\n"):
            values += [] if tokens[at].is_operator else [tokens[at]]
            at += 1
        known = None if is_select or not has_words else tuple(values)
        self.events.append(Block("for", name, known))
        return at

    def _take_case(self, tokens: Sequence[Token], at: int) -> int:
        """Take `case WORD in`."""
        self._begin("esac")
        at += 1
        while at < len(tokens) and (tokens[at].text != "in" or tokens[at].is_quoted):
            self._current.others += [] if tokens[at].is_operator else [tokens[at]]
            at += 1
        self.end_command()
        self._in_pattern = True
        return at + 1

    def _take_pattern(self, token: Token, at: int) -> int:
        """Take a word or an operator of a pattern of `case`."""
        if token.text == "esac" and not token.is_quoted:
            self._in_pattern = False
            self._end_block("esac")
        elif token.is_operator:
            self._in_pattern = token.text != ")"
        else:
            self._current.appends.append(token)
        return at + 1

    def _take_condition(self, tokens: Sequence[Token], at: int) -> int:
        """Take `[[ ... ]]`, in which operators are words."""
        while at < len(tokens):
            self._current.words.append(tokens[at])
            at += 1
            if tokens[at - 1].text == "]]":
                return at
        self.not_understood = self.not_understood or "a condition that does not end"
        return at

    def _begin(self, end: str) -> None:
        is_certain = end in (")", "}") and not self._joined and not self._piped
        self.end_command()
        self.events.append(Block("list" if is_certain else "begin", end))
        self._blocks.append(end)

    def _end_block(self, end: str) -> None:
        self.end_command()
        if not self._blocks or self._blocks.pop() != end:
            self.not_understood = (
                self.not_understood or f"a shell script with {end!r} in an odd place"
            )
            return
        self.events.append(Block("end"))
        # Redirections of the block follow.
        self._current = Simple()

    def end_command(self, *, is_output_used: bool = False) -> None:
        """End the simple command, with its redirections."""
        current, self._current = self._current, Simple()
        self._redirection = ""
        if any(True for _ in current.tokens()):
            current.is_piped = self._piped
            current.joined = self._joined
            current.is_output_used |= is_output_used or bool(self._blocks)
            self.events.append(current)
        self._piped = False
        self._joined = ""


def _is_descriptor(token: Token) -> bool:
    return token.text == "-" or token.text.isdigit()
