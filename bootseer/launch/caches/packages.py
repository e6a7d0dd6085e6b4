"""Which Python a command runs in, and which versions of which packages that has.

Told by names of folders alone, without starting that Python: a start without a cache should cost
some listings of folders, and an import of torch costs seconds. Edge, stateless.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.package_names import package_of
from bootseer.errors import BootseerError
from bootseer.launch.caches.known import ALL_PACKAGES, data_cache_path
from bootseer.linux.root_paths import Place, find_program, resolve_in_root

_PYTHON = re.compile(r"python(\d+(\.\d+t?)?)?")
_FOLDERS = ("lib*/python3*/site-packages", "lib/python3*/dist-packages")
_CONFIG_BYTES_MAX = 1 << 16
_SCRIPT_BYTES_MAX = 256
# Where the drivers of NVIDIA and AMD show that they have a GPU.
_GPUS = ("/proc/driver/nvidia", "/sys/class/kfd")


class Python(Struct, frozen=True):
    """An interpreter, and where it finds packages."""

    path: str
    """Where the job finds it."""
    version: str
    """As its program is called: "python3.11"."""
    folders: tuple[Path, ...]
    """Folders of packages, on this host."""

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """The versions of those of the packages `names` that are installed, by name."""
        wanted = set(names)
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    package = package_of(os.fsencode(name), is_directory=True)
                    if package is not None and package[0].name in wanted:
                        found.setdefault(package[0].name, set()).add(package[1])
        return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def python_of(place: Place, command: Sequence[str], environ: Mapping[str, str]) -> Python | None:
    """The Python that `command` runs in: a word of it that is one, or a script of one; else the
    first in PATH, which shell scripts use."""
    search_path = environ.get("PATH") or os.defpath
    found = (_python_in(place, word, search_path) for word in (*command, "python3", "python"))
    path = next(filter(None, found), None)
    if path is None:
        return None
    real = resolve_in_root(place.root, os.path.join(place.directory, path))
    prefixes = _prefixes(place, path, real)
    folders = [folder for prefix in prefixes for folder in _folders_of(prefix)]
    folders += _user_folders(place, prefixes, environ)
    for text in filter(None, environ.get("PYTHONPATH", "").split(":")):
        folders.append(place.host(text))
    return Python(path, _version(real, folders), tuple(dict.fromkeys(folders)))


def may_have_caches(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command of this host can have a cache that is kept by itself. Light: of what has
    none, every start asks. Never raises."""
    try:
        python = python_of(Place(Path("/"), os.getcwd()), command, environ)
    except (BootseerError, OSError):
        return False  # the folder that the start is in has gone, for example
    return (
        bool(python and python.versions(ALL_PACKAGES))
        or any(map(os.path.exists, _GPUS))
        or bool(data_cache_path(tuple(command)))
    )


def _python_in(place: Place, word: str, search_path: str) -> str | None:
    """The interpreter that a word of a command stands for, itself or in a script's first line."""
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
    # `env` looks in PATH, as does what has a path that is too long for a first line.
    named = next(w for w in words if _PYTHON.fullmatch(os.path.basename(w)))
    beside = os.path.join(os.path.dirname(program), "python3")
    candidates = (named if "/" in named else beside, named, beside)
    paths = (find_program(place.root, one, search_path, place.directory) for one in candidates)
    return next(filter(None, paths), None)


def _prefixes(place: Place, path: str, real: Path) -> list[Path]:
    """The folders that it may have packages in, below which it was installed."""
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


def _user_folders(place: Place, prefixes: list[Path], environ: Mapping[str, str]) -> list[Path]:
    if any((prefix / "pyvenv.cfg").exists() for prefix in prefixes) or not environ.get("HOME"):
        return []
    return sorted(place.host(environ["HOME"]).glob(".local/lib/python3*/site-packages"))


def _version(real: Path, folders: Sequence[Path]) -> str:
    names = (real.name, *(folder.parent.name for folder in folders))
    return next((name for name in names if re.fullmatch(r"python3\.\d+t?", name)), real.name)
