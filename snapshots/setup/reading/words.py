"""Simple commands of a shell script, in order, with the blocks that they lie in. Pure (no I/O).

Reads the part of the shell's grammar that set-ups use. The rest is named in `Script.odd`, and
what came before it counts.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct, field

from bootseer.snapshots.setup.reading.lexer import REDIRECTIONS, Token, lex

SHELLS = {"sh", "bash", "dash", "zsh", "ash", "ksh"}
_SHELL_VALUE_OPTIONS = {"--rcfile", "--init-file"}
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?\+?=", re.DOTALL)
_SEPARATORS = {";", "&", "\n", "&&", "||", "|", "|&", ";;", ";&", ";;&"}
_CASE_ENDS = {";;", ";&", ";;&"}


class Simple(Struct):
    """A simple command of a script, nothing in it expanded."""

    words: list[Token] = field(default_factory=list)
    assignments: list[Token] = field(default_factory=list)
    reads: list[Token] = field(default_factory=list)
    """Files that are redirected to its input."""
    writes: list[Token] = field(default_factory=list)
    """Files that its output replaces."""
    appends: list[Token] = field(default_factory=list)
    """Files that its output is appended to, ends of here-documents, patterns of `case`."""
    others: list[Token] = field(default_factory=list)
    """Here-strings, words of `case`."""
    is_piped: bool = False
    """Whether it reads the output of the command in front of it."""
    is_output_used: bool = False
    """Whether its output goes to a file, to a command or into a block's."""
    joined: Literal["", "&&", "||"] = ""
    """The operator in front of it in its list."""

    def tokens(self) -> Iterator[Token]:
        """Yield all words."""
        yield from (*self.assignments, *self.words, *self.reads, *self.writes)
        yield from (*self.appends, *self.others)


class Block(Struct, frozen=True):
    """Where a compound command begins, goes on with another branch, or ends."""

    kind: Literal["begin", "branch", "end", "function", "for", "list"]
    """"list": begins commands in brackets that run for certain. "function": a body follows."""
    name: str = ""
    """The word that ends what begins; the name of a function or of a loop's variable."""
    values: tuple[Token, ...] | None = None
    """The words that a loop's variable takes; None: not known."""


class Script(Struct, frozen=True):
    """A shell script, taken apart."""

    events: tuple[Simple | Block, ...]
    odd: str
    """What was not understood, in a few words; empty: nothing."""


class Shell(Struct, frozen=True):
    """What a shell is told to run."""

    script: str | None = None
    """Its text (`-c`)."""
    file: str | None = None
    arguments: tuple[str, ...] = ()


def base_name(word: str) -> str:
    """A program without its directory."""
    return word.rpartition("/")[2]


def read_shell(words: Sequence[str]) -> Shell:
    """What "bash -euxo pipefail FILE" and its like run; nothing where that is typed in."""
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
    tokens, odd = lex(text)
    parser = _Parser()
    at = 0
    while at < len(tokens):
        at = parser.take(tokens, at)
    parser.end_list()
    return Script(tuple(parser.events), odd or parser.odd or parser.unfinished())


class _Parser:
    def __init__(self) -> None:
        self.events: list[Simple | Block] = []
        self.odd = ""
        self._current = Simple()
        self._blocks: list[str] = []
        """Words or brackets that end the open blocks."""
        self._redirection = ""
        self._in_pattern = False
        self._piped = False
        self._joined: Literal["", "&&", "||"] = ""

    def unfinished(self) -> str:
        """Say that a block does not end."""
        return "a shell script with an unfinished block" if self._blocks else ""

    def take(self, tokens: Sequence[Token], at: int) -> int:
        """Take the token at `at`, and what belongs to it. Return the place of the next one."""
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
        if operator in REDIRECTIONS:
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
                    self.odd = self.odd or "an arithmetic command"
                self._begin(")")
            else:
                self.odd = self.odd or "a pattern with brackets"
        elif operator == ")":
            self.end_list()
            self._end_block(")")
        elif operator in _SEPARATORS:
            if token.scripts or token.variables:  # of a here-document
                self._current.appends.append(token)
            if operator in ("|", "|&"):
                self._end_simple(is_output_used=True)
                self._piped = True
            elif operator in ("&&", "||"):
                self._end_simple()
                self._joined = "&&" if operator == "&&" else "||"
            elif operator != "\n" or self._current != Simple() or not (self._piped or self._joined):
                self.end_list()  # else the list goes on after an empty line
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
        """Take `NAME=(WORDS)`. The words count; the value of the variable is not known."""
        name, at = tokens[at], at + 2
        self._current.assignments.append(Token(name.text + "\x01\x02"))
        while at < len(tokens) and tokens[at].text != ")":
            self._current.reads += [] if tokens[at].is_operator else [tokens[at]]
            at += 1
        return at + 1

    def _take_keyword(self, tokens: Sequence[Token], at: int) -> int:
        """Take a word of the shell's grammar. Return `at` where it is none."""
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
            self.odd = self.odd or "a loop that counts"
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
        self._end_simple()
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
        self.odd = self.odd or "a condition that does not end"
        return at

    def _begin(self, end: str) -> None:
        is_certain = end in (")", "}") and not self._joined and not self._piped
        self._end_simple()
        self.events.append(Block("list" if is_certain else "begin", end))
        self._blocks.append(end)

    def _end_block(self, end: str) -> None:
        self._end_simple()
        if not self._blocks or self._blocks.pop() != end:
            self.odd = self.odd or f"a shell script with {end!r} in an odd place"
            return
        self.events.append(Block("end"))
        # Redirections of the block follow.
        self._current = Simple()

    def _end_simple(self, *, is_output_used: bool = False) -> None:
        current, self._current = self._current, Simple()
        self._redirection = ""
        if any(True for _ in current.tokens()):
            current.is_piped = self._piped
            current.joined = self._joined
            current.is_output_used |= is_output_used or bool(self._blocks)
            self.events.append(current)
        self._piped = False
        self._joined = ""

    def end_list(self) -> None:
        """End the command, and the list that `&&` and `||` have made."""
        self._end_simple()


def _is_descriptor(token: Token) -> bool:
    return token.text == "-" or token.text.isdigit()
