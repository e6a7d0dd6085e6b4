"""What a set-up command says about itself: its simple commands, input files and directories.

Pure (no I/O): reads the words of a command line, runs and opens nothing. What it finds are hints:
`snapshots.inputs` and `snapshots.targets` check them against the file system, and what they use
of them is told to the user. A command that is not understood yields no hint, never an error.
"""

import posixpath
import re
import shlex
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

_SHELLS = {"sh", "bash", "dash", "zsh", "ash", "ksh"}
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?t?)?")
_PIP = re.compile(r"pip(\d+(\.\d+)?)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")", ";;", "|&"}
# Options of pip, uv, conda and friends whose value is a file that decides what is installed.
_FILE_OPTIONS = {
    "-r",
    "--requirement",
    "--requirements",
    "-c",
    "--constraint",
    "--constraints",
    "--build-constraint",
    "--override",
    "-f",
    "--file",
    "-e",
    "--editable",
}
_LINKS_OPTIONS = {"-f", "--find-links"}
# Options of `pip install` that take a value which is no requirement.
_PIP_VALUE_OPTIONS = {
    "-i",
    "--index-url",
    "--extra-index-url",
    "--cache-dir",
    "--log",
    "--python",
    "-p",
    "--root",
    "--src",
    "--platform",
    "--python-version",
    "--implementation",
    "--abi",
    "--timeout",
    "--retries",
    "--proxy",
    "--trusted-host",
    "--cert",
    "--report",
    "--no-binary",
    "--only-binary",
    "--progress-bar",
    "--upgrade-strategy",
    "--config-settings",
    "-C",
    "--target",
    "-t",
    "--prefix",
    "--find-links",
}
# Options of `venv` and `virtualenv` that take a value.
_VENV_VALUE_OPTIONS = {"--prompt", "-p", "--python", "--upgrade-deps", "--app-data", "--seeder"}


# Options of uv's and pip's installers that name an interpreter, or its environment.
_PYTHON_OPTIONS = {"-p", "--python"}
# Tool -> lock file, commands that fill the project's environment, options that name the project.
_PROJECT_TOOLS = {
    "uv": ("uv.lock", {"sync", "add", "remove"}, {"--project", "--directory"}),
    "poetry": (
        "poetry.lock",
        {"install", "sync", "add", "update", "remove"},
        {"-C", "--directory", "-P", "--project"},
    ),
    "pdm": ("pdm.lock", {"install", "sync", "add", "update", "remove"}, {"-p", "--project"}),
}
_CONDA_VERBS = {"create", "install", "update", "upgrade", "remove", "uninstall", "env"}


class Hints(Struct, frozen=True):
    """What the words of a set-up command tell. Paths are as written, relative ones included."""

    python_words: tuple[str, ...] = ()
    """Programs that are, or live beside, the interpreter in use: "python3", "/opt/v/bin/pip"."""
    environment_dirs: tuple[str, ...] = ()
    """Environments that the command makes or activates."""
    install_dirs: tuple[str, ...] = ()
    """Given with --target or --prefix."""
    files: tuple[str, ...] = ()
    """Words that may be input files or directories."""
    link_dirs: tuple[str, ...] = ()
    """Folders of wheels (--find-links)."""
    uses_pip: bool = False
    """Installs into the environment of the interpreter in use."""
    uses_user_site: bool = False
    """`pip install --user`."""
    uses_uv: bool = False
    """`uv pip`, which prefers the active environment to the interpreter on PATH."""
    projects: tuple[tuple[str, str], ...] = ()
    """"uv", "poetry" or "pdm", and the folder of the project whose environment it fills."""
    uses_conda: bool = False
    """Changes the active conda environment."""
    names_conda_environment: bool = False
    """Changes one that is given by its name, which only conda's settings lead to."""


def simple_commands(command: Sequence[str]) -> list[list[str]]:
    """The simple commands in `command`, looking into `sh -c "..."`; assignments are dropped."""
    words = _without_prefix(list(command))
    if words and _base(words[0]) in _SHELLS:
        for i, word in enumerate(words[1:], 1):
            if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
                return _of_script(words[i + 1]) if i + 1 < len(words) else []
            if not word.startswith("-"):
                break
    return [words] if words else []


def _of_script(script: str) -> list[list[str]]:
    lexer = shlex.shlex(script.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    is_redirected = False
    try:
        for token in lexer:
            if token in _SEPARATORS:
                commands.append([])
            elif is_redirected:
                is_redirected = False  # a file that is written, or "1" of "2>&1"
            elif set(token) <= set("<>&|"):
                is_redirected = bool(token)
            else:
                commands[-1].append(token)
    except ValueError:
        return []
    found = []
    for words in commands:
        if words := _without_prefix(words):
            found.extend(simple_commands(words) if _base(words[0]) in _SHELLS else [words])
    return found


def _without_prefix(words: list[str]) -> list[str]:
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("exec", "env", "time", "nice")):
        words = words[1:]
    return words


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _values(words: Sequence[str], options: set[str]) -> list[str]:
    """The values of `options`, given as "-r x", "-rx" or "--requirement=x"."""
    values = []
    for i, word in enumerate(words):
        if word in options:
            if i + 1 < len(words):
                values.append(words[i + 1])
        elif word.startswith("--") and "=" in word:
            option, _, value = word.partition("=")
            if option in options:
                values.append(value)
        elif len(word) > 2 and word[0] == "-" and word[1] != "-" and word[:2] in options:
            values.append(word[2:])
    return values


def _positional(words: Sequence[str], value_options: set[str]) -> list[str]:
    found = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in value_options
        else:
            found.append(word)
    return found


def hints_of(command: Sequence[str]) -> Hints:
    """What `command` says about what it reads and writes. Pure."""
    hints = Hints()
    for words in simple_commands(command):
        hints = _merged(hints, _hints_of_simple(words))
    return hints


def _merged(one: Hints, other: Hints) -> Hints:
    return Hints(
        one.python_words + other.python_words,
        one.environment_dirs + other.environment_dirs,
        one.install_dirs + other.install_dirs,
        one.files + other.files,
        one.link_dirs + other.link_dirs,
        one.uses_pip or other.uses_pip,
        one.uses_user_site or other.uses_user_site,
        one.uses_uv or other.uses_uv,
        one.projects + other.projects,
        one.uses_conda or other.uses_conda,
        one.names_conda_environment or other.names_conda_environment,
    )


def _hints_of_simple(words: list[str]) -> Hints:
    program = _base(words[0])
    if program in (".", "source"):
        activated = words[1] if len(words) > 1 else ""
        directory, _, rest = activated.rpartition("/bin/")
        return Hints(environment_dirs=(directory,)) if rest == "activate" and directory else Hints()
    if _PYTHON.fullmatch(program):
        module = _module(words)
        if module is None:
            script = _positional(words[1:], {"-W", "-X", "-c"})[:1]
            return Hints(python_words=(words[0],), files=tuple(script))
        name, rest_words = module
        return _hints_of_tool(name, words[0], rest_words)
    if program in _PROJECT_TOOLS and (hints := _hints_of_project(program, words)) is not None:
        return hints
    if program == "uv" and len(words) > 1 and words[1] in ("pip", "venv"):
        if words[1] == "venv":
            directories = _positional(words[2:], _VENV_VALUE_OPTIONS) or [".venv"]
            return Hints(("python3",), (directories[0],))
        hints = _hints_of_tool("pip", "python3", words[2:])
        # Told which interpreter, it does not look for an active environment.
        is_told = "--system" in words or bool(_values(words, _PYTHON_OPTIONS))
        return replace(hints, uses_uv=not is_told)
    return _hints_of_tool(program, words[0], words[1:])


def _hints_of_project(tool: str, words: list[str]) -> Hints | None:
    """Of "uv sync" and its like; None for a command that fills no project's environment."""
    lock, verbs, options = _PROJECT_TOOLS[tool]
    if not verbs.intersection(_positional(words[1:], options)[:1]):
        return None
    folder = (_values(words, options) or [""])[-1]
    files = tuple(posixpath.join(folder, name) for name in (lock, "pyproject.toml"))
    if "--active" in words:
        return Hints(("python3",), files=files, uses_uv=True)
    # "-g" is the Python on PATH, "--venv" one of pdm's own.
    elsewhere = tool == "pdm" and {"-g", "--global", "--venv"}.intersection(words)
    return Hints(("python3",), files=files, projects=() if elsewhere else ((tool, folder),))


def _module(words: list[str]) -> tuple[str, list[str]] | None:
    """("pip", arguments) of "python -I -m pip ..."; None where a script is run."""
    for i, word in enumerate(words[1:], 1):
        if word == "-m":
            return (words[i + 1], words[i + 2 :]) if i + 1 < len(words) else None
        if not word.startswith("-") or word == "-c":
            return None
    return None


def _hints_of_tool(tool: str, program: str, words: list[str]) -> Hints:
    if tool in ("venv", "virtualenv"):
        directories = _positional(words, _VENV_VALUE_OPTIONS)
        interpreter = _values(words, {"-p", "--python"}) if tool == "virtualenv" else []
        return Hints((interpreter[0] if interpreter else program,), tuple(directories))
    if _PIP.fullmatch(tool):
        if "install" not in words and "sync" not in words and "uninstall" not in words:
            return Hints((program,))
        links = _values(words, _LINKS_OPTIONS)
        options = _FILE_OPTIONS - _LINKS_OPTIONS
        skipped = options | _LINKS_OPTIONS | _PIP_VALUE_OPTIONS
        files = [*_values(words, options), *_positional(words, skipped)]
        places = _values(words, {"-t", "--target", "--prefix"})
        environments = []
        for python in _values(words, _PYTHON_OPTIONS):
            if _PYTHON.fullmatch(_base(python)):
                program = python
            elif "/" in python:
                environments.append(python)
        return Hints(
            python_words=(program,),
            environment_dirs=tuple(environments),
            install_dirs=tuple(places),
            files=tuple(file for file in files if file not in ("install", "sync", "uninstall")),
            link_dirs=tuple(links),
            uses_pip=not places,
            uses_user_site="--user" in words,
        )
    if tool in ("conda", "mamba", "micromamba"):
        prefixes = _values(words, {"-p", "--prefix"})
        changes = bool(_CONDA_VERBS.intersection(words[:1]))
        # A new one without -p has a name, on the command line or in environment.yml.
        is_named = bool(_values(words, {"-n", "--name"})) or "create" in words[:2]
        return Hints(
            environment_dirs=tuple(prefixes),
            files=tuple(_values(words, _FILE_OPTIONS)),
            uses_conda=changes and not prefixes and not is_named,
            names_conda_environment=changes and not prefixes and is_named,
        )
    if tool in _SHELLS:
        return Hints(files=tuple(_positional(words, {"-o", "-O"})[:1]))
    # A program of the user's: what its words mean is unknown, but it may be a script beside him.
    return Hints(files=(program,) if program.startswith(("./", "../")) else ())
