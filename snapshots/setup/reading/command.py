"""What a set-up command says about itself: input files, directories, and what it leaves open.

Reads the words of a command line, runs and opens nothing. What it finds are hints: `setup.inputs`
and `setup.targets` check them against the file system, and what they use of them is told to the
user. A command that is not understood yields no hint but that, never an error. Pure.
"""

import posixpath
from collections.abc import Sequence

from msgspec.structs import replace

from bootseer.snapshots.setup.reading.hints import Hints, merged, moved_to
from bootseer.snapshots.setup.reading.tools import (
    PROJECT_TOOLS,
    PYTHON,
    PYTHON_OPTIONS,
    VENV_VALUE_OPTIONS,
    hints_of_project,
    hints_of_tool,
    option_values,
    positional,
)
from bootseer.snapshots.setup.reading.words import (
    SHELLS,
    base_name,
    read_shell,
    script_commands,
    simple_commands,
)

# Modules of Python that read what they are given, at most.
_OWN_MODULES = {"venv", "virtualenv", "ensurepip", "compileall", "site", "sysconfig"}


def hints_of(command: Sequence[str]) -> Hints:
    """What `command` says about what it reads and writes. Pure."""
    return _hints_of_all(simple_commands(command))


def hints_of_script(text: str) -> Hints:
    """What a shell script says. Pure."""
    return _hints_of_all(script_commands(text))


def _hints_of_all(commands: Sequence[list[str]]) -> Hints:
    hints = Hints()
    directory = ""
    for words in commands:
        if words[0] in ("cd", "pushd"):
            directory = posixpath.join(directory, words[1]) if len(words) > 1 else ""
        else:
            hints = merged(hints, moved_to(_hints_of_simple(words), directory))
    return hints


def _hints_of_simple(words: list[str]) -> Hints:
    program = base_name(words[0])
    if not any(letter.isalnum() for letter in program) and program != ".":
        return Hints()  # what is left of a construct of the shell's
    if program in (".", "source"):
        file = words[1] if len(words) > 1 else ""
        directory, _, rest = file.rpartition("/bin/")
        if rest == "activate" and directory:
            return Hints(environment_dirs=(directory,))
        return Hints(files=(file,), scripts=(file,)) if file else Hints()
    if program in SHELLS:
        script = read_shell(words).file
        return Hints(files=(script,), scripts=(script,)) if script else Hints(opaque=(program,))
    if PYTHON.fullmatch(program):
        module = _module(words)
        if module is None:
            script_words = positional(words[1:], {"-W", "-X", "-c"})[:1]
            what = f"{program} -c" if "-c" in words else " ".join((program, *script_words))
            is_asked = {"-V", "--version"}.intersection(words)
            opaque = () if is_asked else (what,)
            return Hints((words[0],), files=tuple(script_words), opaque=opaque)
        name, rest_words = module
        hints = hints_of_tool(name, words[0], rest_words)
        if hints.programs:
            is_known = name in _OWN_MODULES
            hints = Hints((words[0],), opaque=() if is_known else (f"{program} -m {name}",))
        return hints
    if program in PROJECT_TOOLS and (hints_or_none := hints_of_project(program, words)):
        return hints_or_none
    if program == "uv" and len(words) > 1 and words[1] in ("pip", "venv"):
        if words[1] == "venv":
            directories = positional(words[2:], VENV_VALUE_OPTIONS) or [".venv"]
            return Hints(("python3",), (directories[0],), tools=("uv",))
        hints = hints_of_tool("pip", "python3", words[2:])
        # Told which interpreter, it does not look for an active environment.
        is_told = "--system" in words or bool(option_values(words, PYTHON_OPTIONS))
        return replace(hints, uses_uv=not is_told, tools=("uv",))
    if program in PROJECT_TOOLS and words[1:2] == ["run"] and len(words) > 2:
        return replace(_hints_of_simple(words[2:]), tools=("uv",) if program == "uv" else ())
    return hints_of_tool(program, words[0], words[1:])


def _module(words: list[str]) -> tuple[str, list[str]] | None:
    """("pip", arguments) of "python -I -m pip ..."; None where a script is run."""
    for i, word in enumerate(words[1:], 1):
        if word == "-m":
            return (words[i + 1], words[i + 2 :]) if i + 1 < len(words) else None
        if not word.startswith("-") or word == "-c":
            return None
    return None
