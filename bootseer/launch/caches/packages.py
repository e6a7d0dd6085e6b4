"""The Python that a command runs in, and the versions of the packages installed for it.

Found by the names of folders alone, without starting that Python: a start without caches should
cost a few listings of folders, and importing torch costs seconds. Only a launcher in the place of
the interpreter, such as pyenv's, is asked which one it starts. Edge, stateless.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.package_names import package_of
from bootseer.errors import BootseerError
from bootseer.launch.caches.known import ALL_PACKAGES, CACHED_PACKAGES, data_cache_path
from bootseer.linux.interpreters import is_interpreter
from bootseer.linux.root_paths import WorkingDirectory, find_program, resolve_in_root

if TYPE_CHECKING:
    from bootseer.snapshots.python import Answers, Runner

_PYTHON = re.compile(r"python(\d+(\.\d+t?)?)?")
_FOLDERS = ("lib*/python3*/site-packages", "lib/python3*/dist-packages")
_CONFIG_BYTES_MAX = 1 << 16
_ANSWER_S = 10.0
"""Limit of a launcher's answer: without it, packages are looked for beside the launcher."""
_SCRIPT_BYTES_MAX = 256
# Paths that exist if the driver of NVIDIA or AMD has a GPU.
_GPUS = ("/proc/driver/nvidia", "/sys/class/kfd")


class Python(Struct, frozen=True):
    """A Python interpreter and its package folders."""

    path: str
    """Path of the interpreter as the job sees it."""
    version: str
    """Name of the program, with its version: "python3.11"."""
    folders: tuple[Path, ...]
    """Package folders, as paths on this host."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the installed packages among `ALL_PACKAGES`, by name."""
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    package = package_of(os.fsencode(name), is_directory=True)
                    if package is not None and package[0].name in ALL_PACKAGES:
                        found.setdefault(package[0].name, set()).add(package[1])
        return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def python_of(
    place: WorkingDirectory,
    command: Sequence[str],
    environ: Mapping[str, str],
    answers: "Answers | None" = None,
    runner: "Runner | None" = None,
) -> Python | None:
    """Return the Python that `command` runs in; None if there is none.

    The first word of the command that is an interpreter, or a script of one; else the first Python
    in PATH, which shell scripts use. `answers` are those of launchers in this start, to which new
    ones are added; `runner` runs a program in the root, and None as a child of this process.
    """
    search_path = environ.get("PATH") or os.defpath
    found = (_python_in(place, word, search_path) for word in (*command, "python3", "python"))
    path = next(filter(None, found), None)
    if path is None:
        return None
    real = resolve_in_root(place.root, os.path.join(place.directory, path))
    if not is_interpreter(str(real)):
        path = _launched_by(place, path, environ, {} if answers is None else answers, runner)
        real = resolve_in_root(place.root, os.path.join(place.directory, path))
    prefixes = _prefixes(place, path, real)
    folders = [folder for prefix in prefixes for folder in _folders_of(prefix)]
    folders += _user_folders(place, prefixes, environ)
    for text in filter(None, environ.get("PYTHONPATH", "").split(":")):
        folders.append(place.host(text))
    return Python(path, _version(real, folders), tuple(dict.fromkeys(folders)))


def may_have_caches(command: Sequence[str], environ: Mapping[str, str], answers: "Answers") -> bool:
    """Return whether a command of this host can have automatically kept caches. Never raises."""
    try:
        python = python_of(WorkingDirectory(Path("/"), os.getcwd()), command, environ, answers)
    except (BootseerError, OSError):
        return False  # for example, the working directory was removed
    return (
        bool(python and not CACHED_PACKAGES.isdisjoint(python.versions()))
        or any(map(os.path.exists, _GPUS))
        or bool(data_cache_path(tuple(command)))
    )


def _python_in(place: WorkingDirectory, word: str, search_path: str) -> str | None:
    """Return the interpreter that a word of a command names, or a script's first line."""
    program = find_program(place.root, word, search_path, place.directory)
    if program is None or _PYTHON.fullmatch(os.path.basename(program)):
        return program
    try:
        with place.host(program).open("rb") as file:
            line = os.fsdecode(file.read(_SCRIPT_BYTES_MAX).partition(b"\n")[0])
    except OSError:
        return None
    words = line.removeprefix("#!").split()
    if not line.startswith("#!") or not any(_PYTHON.fullmatch(os.path.basename(w)) for w in words):
        return None
    # `env python`, and a first line whose path would be too long, name the interpreter alone.
    named = next(w for w in words if _PYTHON.fullmatch(os.path.basename(w)))
    beside = os.path.join(os.path.dirname(program), "python3")
    candidates = (named if "/" in named else beside, named, beside)
    paths = (find_program(place.root, one, search_path, place.directory) for one in candidates)
    return next(filter(None, paths), None)


def _launched_by(
    place: WorkingDirectory,
    launcher: str,
    environ: Mapping[str, str],
    answers: "Answers",
    runner: "Runner | None",
) -> str:
    """Return the interpreter that a launcher starts; the launcher itself if it does not tell."""
    # Imported here: few jobs have a launcher, and an interpreter is asked nothing.
    if launcher not in answers and (runner is not None or place.root == Path("/")):
        from bootseer.snapshots.key import run_plainly
        from bootseer.snapshots.python import probe

        answers[launcher] = probe(
            launcher,
            runner or run_plainly,
            cwd=place.directory,
            env=environ,
            timeout_s=_ANSWER_S,
        )
    answer = answers.get(launcher)
    return (answer and answer.executable) or launcher


def _prefixes(place: WorkingDirectory, path: str, real: Path) -> list[Path]:
    prefix = place.host(os.path.dirname(os.path.dirname(os.path.join(place.directory, path))))
    config = ""
    with contextlib.suppress(OSError):
        config = (prefix / "pyvenv.cfg").read_text("utf-8", "replace")[:_CONFIG_BYTES_MAX]
    base = real.parent.parent
    if not config:
        return [base]
    shares = re.search(r"^include-system-site-packages\s*=\s*true", config, re.M | re.I)
    return [prefix, base] if shares else [prefix]


def _folders_of(prefix: Path) -> list[Path]:
    found = []
    for top in (prefix, prefix / "local"):
        for pattern in _FOLDERS:
            found += sorted(top.glob(pattern))
    return found


def _user_folders(
    place: WorkingDirectory, prefixes: list[Path], environ: Mapping[str, str]
) -> list[Path]:
    if any((prefix / "pyvenv.cfg").exists() for prefix in prefixes) or not environ.get("HOME"):
        return []
    return sorted(place.host(environ["HOME"]).glob(".local/lib/python3*/site-packages"))


def _version(real: Path, folders: Sequence[Path]) -> str:
    names = (real.name, *(folder.parent.name for folder in folders))
    return next((name for name in names if re.fullmatch(r"python3\.\d+t?", name)), real.name)
