"""What a set-up changed outside its targets, as far as a short look tells.

The kernel sets a file's ctime at every change and nobody can set it back, so one look afterwards
tells what has changed since the command began, by whomever. Looked at are the places where set-ups
usually write, for at most `_LOOK_S` seconds and `NAMES_MAX` names: it is a hint for people. What
other processes wrote meanwhile is left out as far as that can be told. Stateless; any thread.
"""

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.manifest import Outside
from bootseer.store.paths import local_root

# The clock that file times are taken from, some milliseconds behind the other (linux/time.h).
_CLOCK_REALTIME_COARSE = 5
_LOOK_S = 1.5
_LOOK_SHORT_S = 0.1
# Only where something was found.
_OPEN_LOOK_S = 0.3
NAMES_MAX = 200_000

# The likeliest first: what comes after the bounds are reached is not looked at.
_SYSTEM = (
    "/usr/local",
    "/etc",
    "/opt",
    "/usr/bin",
    "/usr/sbin",
    "/var/lib/dpkg",
    "/var/lib/rpm",
    "/usr/lib",
    "/usr/share",
)
_HOME = (".local", ".config", ".conda", "bin")
# Caches and logs, which no job misses.
IGNORED_NAMES = {"__pycache__", ".cache", ".git", "log", "logs"}
_CACHE_VARIABLES = (
    "PIP_CACHE_DIR",
    "UV_CACHE_DIR",
    "XDG_CACHE_HOME",
    "CONDA_PKGS_DIRS",
    "POETRY_CACHE_DIR",
    "PDM_CACHE_DIR",
)
IGNORED_PATHS = ("/etc/mtab", "/etc/ld.so.cache", "/usr/share/man", "/usr/share/doc")


def now_ns() -> int:
    """The time that a change now would get."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def usual_places(environ: Mapping[str, str], directory: str) -> list[str]:
    """Where set-ups write: the working directory, environments, the home, the system."""
    home = environ.get("HOME", "")
    places = [directory, environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", "")]
    if home:
        places += [os.path.join(home, name) for name in _HOME]
    return [place for place in (*places, *_SYSTEM) if place.startswith("/") and place != "/"]


def own_places(settings: Settings) -> list[Path]:
    """What Bootseer itself writes."""
    places = [settings.cache_dir, settings.run_dir, settings.timeline_dir]
    try:
        places.append(local_root(settings.store_url))
    except BootseerError:
        pass  # not on this host
    return places


def caches(environ: Mapping[str, str], directory: str) -> list[Path]:
    """Returns the folders in which the tools were told to keep their caches."""
    places = [environ.get(name, "") for name in _CACHE_VARIABLES]
    return [Path(directory, place) for place in places if place]


def changed_since(
    since_ns: int,
    places: Iterable[str],
    ignored: Iterable[Path],
    *,
    until_ns: int | None = None,
    job_id: str = "",
    look_s: float = _LOOK_S,
) -> Outside:
    """The names in `places` that changed at `since_ns` or later, but for `ignored` directories, and
    for what others than the set-up write: what changed after `until_ns` as well, where this
    process's output goes, the output of Slurm's job `job_id`, what a process has open to write.

    Never raises: what cannot be read is left out.
    """
    end = time.monotonic() + look_s
    output = {_identity(f"/proc/self/fd/{number}") for number in (1, 2)}
    until_ns = time.time_ns() if until_ns is None else until_ns
    skipped = {*IGNORED_PATHS, *(os.path.realpath(path) for path in ignored)}
    seen: set[tuple[int, int]] = set()
    found = []
    count = 0
    stack = [os.path.realpath(place) for place in places][::-1]
    while stack:
        folder = stack.pop()
        if folder in skipped or any(folder.startswith(f"{path}/") for path in skipped):
            continue
        own = _identity(folder)
        if own is None or own in seen:
            continue
        seen.add(own)
        for path, info in _entries(folder):
            count += 1
            if path in skipped:
                continue
            if stat.S_ISDIR(info.st_mode):
                # Its own times move with its entries, which are looked at.
                if info.st_dev == own[0]:
                    stack.append(path)
            elif (
                since_ns <= info.st_ctime_ns <= until_ns
                and not path.endswith((".pyc", ".log"))
                and (info.st_dev, info.st_ino) not in output
                and not _is_job_output(os.path.basename(path), job_id)
            ):
                found.append(path)
        if count > NAMES_MAX or time.monotonic() > end:
            return Outside(paths=_not_open(found), is_complete=False)
    return Outside(paths=_not_open(found), is_complete=True)


def _is_job_output(name: str, job_id: str) -> bool:
    """Whether a file is what Slurm writes a job's output to: through a pipe, so that the job does
    not have it open. "slurm-%j.out", or another name with the number in it."""
    if name.startswith("slurm-") and name.endswith(".out"):
        return True
    return bool(job_id) and job_id in name and name.endswith((".out", ".err", ".txt"))


def _not_open(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths that no process has open to write, as far as we may see that. Sorted."""
    left = set(paths)
    end = time.monotonic() + _OPEN_LOOK_S
    for folder in _process_folders() if left else ():
        if time.monotonic() > end:
            break
        try:
            for number in os.listdir(f"{folder}/fd"):
                if (path := os.readlink(f"{folder}/fd/{number}")) in left:
                    text = Path(f"{folder}/fdinfo/{number}").read_text(encoding="ascii")
                    flags = int(text.partition("flags:")[2].split()[0], 8)
                    if flags & os.O_ACCMODE != os.O_RDONLY:
                        left.discard(path)
        except (OSError, ValueError, IndexError):
            continue  # gone, or somebody else's
    return tuple(sorted(left))


def _process_folders() -> list[str]:
    try:
        return [f"/proc/{name}" for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        info = os.stat(folder)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name not in IGNORED_NAMES:
                    yield entry.path, entry.stat(follow_symlinks=False)
    except OSError:
        return  # gone, or not ours to read


def look(
    settings: Settings,
    since_ns: int,
    setup_s: float,
    environ: Mapping[str, str],
    directory: str,
    targets: Sequence[Path],
) -> Outside:
    """What changed outside of `targets` since a set-up began in `directory` on this host, which
    took `setup_s` and ends now: a short one is not worth a long look."""
    return changed_since(
        since_ns,
        usual_places(environ, directory),
        [*targets, *own_places(settings), *caches(environ, directory)],
        until_ns=time.time_ns(),
        job_id=environ.get("SLURM_JOB_ID", ""),
        look_s=min(_LOOK_S, _LOOK_SHORT_S + setup_s / 20),
    )
