"""What the options of pip, uv, conda and their like say about what they read and write. Pure."""

import posixpath
import re

from msgspec.structs import replace

from bootseer.snapshots.setup.reading.file_tools import named_words, option_values, positional
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
    "--group",
}
# Options of `venv` and `virtualenv` that take a value.
VENV_VALUE_OPTIONS = {"--prompt", "-p", "--python", "--upgrade-deps", "--app-data", "--seeder"}


# Options of uv's and pip's installers that name an interpreter, or its environment.
PYTHON_OPTIONS = {"-p", "--python"}
# Variables with files, separated by blanks, which pip and uv read like those that options name.
FILE_VARIABLES = (
    "PIP_REQUIREMENT",
    "PIP_CONSTRAINT",
    "PIP_BUILD_CONSTRAINT",
    "UV_CONSTRAINT",
    "UV_BUILD_CONSTRAINT",
    "UV_OVERRIDE",
)
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
_UPGRADES = {"-U", "--upgrade", "--upgrade-package", "--no-lock"}
_CONDA_VERBS = {"create", "install", "update", "upgrade", "remove", "uninstall", "env"}
_CONDA_READS_NOTHING = {"list", "info", "clean", "search", "compare", "deactivate"}
_TOOLS = {"venv", "virtualenv", "conda", "mamba", "micromamba"}
_KNOWN = _FILE_OPTIONS | _PIP_VALUE_OPTIONS | VENV_VALUE_OPTIONS
# conda's own list, where `conda env` is given none.
_CONDA_LISTS = ("environment.yml", "environment.yaml")
_PIP_INSTALLS = {"install", "sync"}
_PIP_READS_NOTHING = {"list", "check", "freeze", "show", "cache", "config", "debug", "inspect"}


def _is_local(requirement: str) -> bool:
    return requirement.startswith((".", "/", "file:")) or requirement.endswith((".whl", ".tar.gz"))


def hints_of_project(tool: str, words: list[str]) -> Hints | None:
    """The hints of "uv sync" and its like; None for a command that fills no project's
    environment."""
    lock, verbs, options = PROJECT_TOOLS[tool]
    if not verbs.intersection(positional(words[1:], options)[:1]):
        return None
    folder = (option_values(words, options) or [""])[-1]
    files = tuple(posixpath.join(folder, name) for name in (lock, "pyproject.toml"))
    # Without that, the project itself is only pointed to.
    copied = (folder or ".",) if "--no-editable" in words else ()
    verb, *added = positional(words[1:], options)
    version = (posixpath.join(folder, ".python-version"),) if tool == "uv" else ()
    is_locked = verb in _LOCKED_VERBS and not _UPGRADES.intersection(words)
    hints = Hints(
        ("python3",),
        files=(*files, *copied),
        words=(*version, *named_words(words[1:])),
        link_dirs=tuple(option_values(words, _LINKS_OPTIONS)) if tool == "uv" else (),
        # A lock file says all; where there is none yet, `requirements` are the project's.
        requirements=() if is_locked else (f"what {tool} {verb} asks for", *added),
        lock_files=files[:1] if verb in _LOCKED_VERBS else (),
        tools=("uv",) if tool == "uv" else (),
    )
    if "--active" in words:
        return replace(hints, uses_uv=True)
    # "-g" is the Python on PATH, "--venv" one of pdm's own.
    elsewhere = tool == "pdm" and {"-g", "--global", "--venv"}.intersection(words)
    return replace(hints, projects=() if elsewhere else ((tool, folder),))


def is_package_tool(tool: str) -> bool:
    """Return whether `hints_of_tool` knows a tool."""
    return bool(_PIP.fullmatch(tool)) or tool in _TOOLS


def hints_of_tool(tool: str, program: str, words: list[str]) -> Hints:
    """The hints of `tool`, which runs in the interpreter of `program`, and the words behind it."""
    # Options that are in no table may name files.
    odd = [word for word in words if word.startswith("-") and not _is_known(word)]
    # Of several letters the last may have its value behind it.
    with_value = _FILE_OPTIONS | _PIP_VALUE_OPTIONS
    odd += [one for one in words if re.match("-[A-Za-z]{2}", one) and one[:2] not in with_value]
    hints = _hints_of_tool(tool, program, words)
    return replace(hints, words=named_words(words if hints.opaque else odd))


def _is_known(option: str) -> bool:
    name = option.partition("=")[0]
    return name in _KNOWN or (not option.startswith("--") and option[:2] in _KNOWN)


def _hints_of_tool(tool: str, program: str, words: list[str]) -> Hints:
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
        groups = option_values(words, {"--group"})
        projects = [one.rpartition(":")[0] or "pyproject.toml" for one in groups]
        indexed = option_values(words, _REQUIREMENT_OPTIONS)
        named = [*option_values(words, {"-e", "--editable"}), *positional(words, skipped)]
        named = [word for word in named if word not in ("install", "sync", "uninstall")]
        if "sync" in words:
            lists, indexed = [*lists, *named], [*indexed, *named]
        asks = bool(_PIP_INSTALLS.intersection(words)) and "--no-index" not in words
        has_deps = "--no-deps" not in words
        asked = [one for one in named if has_deps or not _is_local(one)]
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
            files=tuple(dict.fromkeys((*lists, *named, *projects))),
            link_dirs=tuple(links),
            uses_pip=not places,
            uses_user_site="--user" in words,
            requirement_files=tuple(lists),
            indexed_files=tuple(indexed) if asks else (),
            requirements=(*asked, *groups) if asks and "sync" not in words else (),
            tools=("pip",),
        )
    if tool in ("conda", "mamba", "micromamba"):
        prefixes = option_values(words, {"-p", "--prefix"})
        changes = bool(_CONDA_VERBS.intersection(words[:1]))
        # A new one without -p has a name, on the command line or in environment.yml.
        is_named = bool(option_values(words, {"-n", "--name"})) or "create" in words[:2]
        verbs = [word for word in words if not word.startswith("-")][:1]
        opaque = " ".join((tool, *verbs))
        lists = option_values(words, {"-f", "--file"})
        if not lists and {"create", "update"}.intersection(words[1:2]) and words[0] == "env":
            lists = list(_CONDA_LISTS)
        options = _FILE_OPTIONS | {"-p", "--prefix", "-n", "--name", "-c", "--channel"}
        specs = [one for one in positional(words, options) if one not in _CONDA_VERBS]
        return Hints(
            environment_dirs=tuple(prefixes),
            files=tuple(dict.fromkeys((*option_values(words, _FILE_OPTIONS), *lists))),
            requirements=tuple(specs) if changes and "--offline" not in words else (),
            spec_files=tuple(lists) if changes and "--offline" not in words else (),
            opaque=() if changes or _CONDA_READS_NOTHING.intersection(verbs) else (opaque,),
            tools=("conda",),
            uses_conda=changes and not prefixes and not is_named,
            names_conda_environment=changes and not prefixes and is_named,
        )
    raise ValueError(f"{tool} is not in the tables")
