"""What the options of pip, uv, conda and their like say about what they read and write. Pure."""

import posixpath
import re
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from bootseer.snapshots.setup.reading.hints import Hints
from bootseer.snapshots.setup.reading.words import base_name

PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?t?)?")
_PIP = re.compile(r"pip(\d+(\.\d+)?)?")
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
_REQUIREMENT_OPTIONS = {"-r", "--requirement", "--requirements"}
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
VENV_VALUE_OPTIONS = {"--prompt", "-p", "--python", "--upgrade-deps", "--app-data", "--seeder"}


# Options of uv's and pip's installers that name an interpreter, or its environment.
PYTHON_OPTIONS = {"-p", "--python"}
# Tool -> lock file, commands that fill the project's environment, options that name the project.
PROJECT_TOOLS = {
    "uv": ("uv.lock", {"sync", "add", "remove"}, {"--project", "--directory"}),
    "poetry": (
        "poetry.lock",
        {"install", "sync", "add", "update", "remove"},
        {"-C", "--directory", "-P", "--project"},
    ),
    "pdm": ("pdm.lock", {"install", "sync", "add", "update", "remove"}, {"-p", "--project"}),
}
_LOCKED_VERBS = {"sync", "install"}
_CONDA_VERBS = {"create", "install", "update", "upgrade", "remove", "uninstall", "env"}
_PIP_INSTALLS = {"install", "sync"}
_PIP_READS_NOTHING = {"list", "check", "freeze", "show", "cache", "config", "debug", "inspect"}
# Programs that read nothing but what is in the targets, or what decides nothing.
_HARMLESS_PROGRAMS = """
    mkdir rm rmdir touch ln mv chmod chown chgrp truncate sync echo printf true false : test [ [[
    set exit return unset export local readonly declare trap umask ulimit wait shift exec popd pwd
    which type hash sleep date tee ls id whoami uname dirname basename readlink realpath mktemp
    nproc for case esac in deactivate hostname head tail grep sort wc tr cut shopt
"""
_HARMLESS = frozenset(_HARMLESS_PROGRAMS.split())
# Programs that read the files among their words, told by what the words before those are.
_READERS: dict[str, Callable[[list[str]], list[str]]] = {
    "cat": lambda words: positional(words, set()),
    "cp": lambda words: positional(words, {"-t", "-S"})[: None if "-t" in words else -1],
    "install": lambda words: positional(words, {"-t", "-m", "-o", "-g", "-S"})[
        : None if "-t" in words else -1
    ],
    "unzip": lambda words: positional(words, {"-d", "-x"})[:1],
    "tar": lambda words: (
        [word for word in positional(words, {"-C", "--directory"}) if "." in word]
        if words and ("x" in words[0] or "--extract" in words)
        else []
    ),
}


def _is_local(requirement: str) -> bool:
    return requirement.startswith((".", "/", "file:")) or requirement.endswith((".whl", ".tar.gz"))


def option_values(words: Sequence[str], options: set[str]) -> list[str]:
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


def positional(words: Sequence[str], value_options: set[str]) -> list[str]:
    """The words that are no options and no values of `value_options`."""
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


def hints_of_project(tool: str, words: list[str]) -> Hints | None:
    """The hints of "uv sync" and its like; None for a command that fills no project's
    environment."""
    lock, verbs, options = PROJECT_TOOLS[tool]
    if not verbs.intersection(positional(words[1:], options)[:1]):
        return None
    folder = (option_values(words, options) or [""])[-1]
    files = tuple(posixpath.join(folder, name) for name in (lock, "pyproject.toml"))
    verb, *added = positional(words[1:], options)
    hints = Hints(
        ("python3",),
        files=files,
        # A lock file says all; where there is none yet, `requirements` are the project's.
        requirements=(f"what {tool} {verb} asks for", *added) if verb not in _LOCKED_VERBS else (),
        lock_files=files[:1] if verb in _LOCKED_VERBS else (),
        tools=("uv",) if tool == "uv" else (),
    )
    if "--active" in words:
        return replace(hints, uses_uv=True)
    # "-g" is the Python on PATH, "--venv" one of pdm's own.
    elsewhere = tool == "pdm" and {"-g", "--global", "--venv"}.intersection(words)
    return replace(hints, projects=() if elsewhere else ((tool, folder),))


def hints_of_tool(tool: str, program: str, words: list[str]) -> Hints:
    """The hints of `tool`, which runs in the interpreter of `program`, and the words behind it."""
    if tool in ("venv", "virtualenv"):
        directories = positional(words, VENV_VALUE_OPTIONS)
        interpreter = option_values(words, {"-p", "--python"}) if tool == "virtualenv" else []
        return Hints((interpreter[0] if interpreter else program,), tuple(directories))
    if _PIP.fullmatch(tool):
        if not {"install", "sync", "uninstall"}.intersection(words):
            verb = (positional(words, _PIP_VALUE_OPTIONS) or [""])[0]
            is_closed = not verb or verb in _PIP_READS_NOTHING
            return Hints((program,), opaque=() if is_closed else (f"{tool} {verb}",))
        links = option_values(words, _LINKS_OPTIONS)
        options = _FILE_OPTIONS - _LINKS_OPTIONS
        skipped = options | _LINKS_OPTIONS | _PIP_VALUE_OPTIONS
        lists = option_values(words, options - {"-e", "--editable"})
        indexed = option_values(words, _REQUIREMENT_OPTIONS)
        named = [*option_values(words, {"-e", "--editable"}), *positional(words, skipped)]
        named = [word for word in named if word not in ("install", "sync", "uninstall")]
        if "sync" in words:
            lists, indexed = [*lists, *named], [*indexed, *named]
        asks = bool(_PIP_INSTALLS.intersection(words)) and "--no-index" not in words
        asked = [one for one in named if not ("--no-deps" in words and _is_local(one))]
        places = option_values(words, {"-t", "--target", "--prefix"})
        environments = []
        for python in option_values(words, PYTHON_OPTIONS):
            if PYTHON.fullmatch(base_name(python)):
                program = python
            elif "/" in python:
                environments.append(python)
        return Hints(
            python_words=(program,),
            environment_dirs=tuple(environments),
            install_dirs=tuple(places),
            files=tuple(dict.fromkeys((*lists, *named))),
            link_dirs=tuple(links),
            uses_pip=not places,
            uses_user_site="--user" in words,
            requirement_files=tuple(lists),
            indexed_files=tuple(indexed) if asks else (),
            requirements=tuple(asked) if asks and "sync" not in words else (),
            tools=("pip",),
        )
    if tool in ("conda", "mamba", "micromamba"):
        prefixes = option_values(words, {"-p", "--prefix"})
        changes = bool(_CONDA_VERBS.intersection(words[:1]))
        # A new one without -p has a name, on the command line or in environment.yml.
        is_named = bool(option_values(words, {"-n", "--name"})) or "create" in words[:2]
        lists = option_values(words, {"-f", "--file"})
        options = _FILE_OPTIONS | {"-p", "--prefix", "-n", "--name", "-c", "--channel"}
        specs = [one for one in positional(words, options) if one not in _CONDA_VERBS]
        return Hints(
            environment_dirs=tuple(prefixes),
            files=tuple(option_values(words, _FILE_OPTIONS)),
            requirements=tuple(specs) if changes and "--offline" not in words else (),
            spec_files=tuple(lists) if changes and "--offline" not in words else (),
            opaque=("conda run",) if words[:1] == ["run"] else (),
            tools=("conda",),
            uses_conda=changes and not prefixes and not is_named,
            names_conda_environment=changes and not prefixes and is_named,
        )
    if tool in _READERS:
        return Hints(files=tuple(_READERS[tool](words)))
    if tool in _HARMLESS:
        return Hints()
    # A program of the user's: what its words mean is unknown, but it may be a script of his.
    return Hints(files=(program,) if "/" in program else (), programs=(program,))
