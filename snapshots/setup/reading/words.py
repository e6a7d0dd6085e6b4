"""The words of a command line, taken apart: which simple commands a shell, or a wrapper, would run.

Pure (no I/O), and no shell: nothing is expanded. What is not understood yields fewer commands or
odd ones, never an error.
"""

import io
import re
import shlex
from collections.abc import Collection, Sequence

from msgspec import Struct

SHELLS = {"sh", "bash", "dash", "zsh", "ash", "ksh"}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_PUNCTUATION = "();<>|&\n"
# Words of the shell in front of a command.
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "fi", "done"}
# Programs that run the command behind their own words: which of their options take a value, and
# how many words of their own come before the command.
_WRAPPERS: dict[str, tuple[frozenset[str], int]] = {
    **dict.fromkeys(("command", "builtin", "nohup", "setsid", "unbuffer"), (frozenset(), 0)),
    **dict.fromkeys(("dumb-init", "catatonit"), (frozenset(), 0)),
    **dict.fromkeys(("gosu", "su-exec", "setarch", "taskset", "chrt"), (frozenset(), 1)),
    "exec": (frozenset({"-a"}), 0),
    "time": (frozenset({"-f", "-o", "--format", "--output"}), 0),
    "nice": (frozenset({"-n", "--adjustment"}), 0),
    "ionice": (frozenset({"-c", "-n", "--class", "--classdata"}), 0),
    "stdbuf": (frozenset({"-i", "-o", "-e", "--input", "--output", "--error"}), 0),
    "env": (frozenset({"-u", "-C", "--unset", "--chdir"}), 0),
    "sudo": (
        frozenset({"-u", "-g", "-h", "-p", "-C", "-T", "-R", "-D", "-U", "-r", "-t", "--user"}),
        0,
    ),
    "doas": (frozenset({"-u", "-C"}), 0),
    "timeout": (frozenset({"-k", "-s", "--kill-after", "--signal"}), 1),
    "numactl": (frozenset({"-N", "-m", "-C", "-p", "-i", "-P"}), 0),
    "flock": (frozenset({"-w", "-E", "--timeout", "--conflict-exit-code"}), 1),
    "tini": (frozenset({"-p", "-e"}), 0),
    "xargs": (frozenset({"-n", "-I", "-P", "-L", "-d", "-a", "-E", "-s"}), 0),
    "srun": (frozenset({"-n", "-N", "-c", "-p", "-A", "-t", "-J", "-w", "-x", "-D", "-o"}), 0),
}
_FUNCTION = re.compile(r"(?m)^\s*(?:function\s+([\w-]+)|([\w-]+)\s*\(\s*\))")
_SHELL_VALUE_OPTIONS = {"--rcfile", "--init-file"}
_DEPTH_MAX = 8


class Shell(Struct, frozen=True):
    """What a shell is told to run."""

    script: str | None = None
    """Its text (`-c`)."""
    file: str | None = None


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
    return Shell(script=rest[0]) if is_text else Shell(file=rest[0])


def simple_commands(command: Sequence[str]) -> list[list[str]]:
    """The simple commands in `command`, looking into `sh -c "..."` and behind wrappers such as
    `sudo`; assignments are dropped. A file that is read by "<" is one of `cat`."""
    return _commands(command, _DEPTH_MAX)


def script_commands(text: str) -> list[list[str]]:
    """The simple commands of a shell script."""
    return _of_script(text, _DEPTH_MAX)


def _commands(command: Sequence[str], depth: int) -> list[list[str]]:
    words = _without_prefix(list(command))
    if not words or depth <= 0:
        return []
    program = base_name(words[0])
    script = None
    if program in SHELLS:
        script = read_shell(words).script
    elif program in ("su", "runuser") and "-c" in words[:-1]:
        script = words[words.index("-c") + 1]
    elif program == "eval":
        script = " ".join(words[1:])
    elif words[0] == "-c" and len(words) > 1:
        script = words[1]  # of flock(1)
    return [words] if script is None else _of_script(script, depth - 1)


class _Text(io.StringIO):
    """A script. A comment, which the lexer reads as a line, ends before the end of its line."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        line = super().readline(size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def _of_script(script: str, depth: int) -> list[list[str]]:
    text = _Text(script.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    redirected = ""
    try:
        for token in lexer:
            if token and set(token) <= set(_PUNCTUATION):
                if "<" in token or ">" in token:
                    redirected = token
                    if commands[-1][-1:] in (["1"], ["2"]):
                        commands[-1].pop()  # of "2>"
                else:
                    commands.append([])
            elif redirected:
                # A file that is written, a word of a here-document, or "1" of "2>&1".
                if redirected == "<":
                    commands.insert(-1, ["cat", token])
                redirected = ""
            else:
                commands[-1].append(token)
    except ValueError:
        pass  # a quote that does not end: what came before counts
    functions = {name for match in _FUNCTION.finditer(script) for name in match.groups() if name}
    found = (one for words in commands for one in _commands(words, depth))
    return [words for words in found if words[0] not in functions]


def _without_prefix(words: list[str]) -> list[str]:
    while words:
        if _ASSIGNMENT.match(words[0]) or words[0] in _KEYWORDS:
            words = words[1:]
        elif wrapper := _WRAPPERS.get(base_name(words[0])):
            words = _behind(words[1:], *wrapper)
        else:
            break
    return words


def _behind(words: list[str], value_options: Collection[str], own_count: int) -> list[str]:
    at = 0
    while at < len(words) and words[at].startswith("-") and len(words[at]) > 1:
        option = words[at]
        at += 2 if option in value_options else 1
        if option == "--":
            break
    return words[at + own_count :]
