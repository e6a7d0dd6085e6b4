"""Capture of a set-up's result: its changes are packed into a blob and published.

`capture` packs the difference between two scans of a target. The manifest is published last, and
nothing is visible before. An interrupted capture leaves blobs that no manifest names; its temporary
files have no name and end with the process.

`look_outside` and `OutsideLayers` name files outside of the targets that changed while the set-up
ran, as a hint for people. On a host, the usual places are searched for a bounded time by ctime,
which the kernel sets at every change and nobody can set back. In a container, the upper layer of
its root lists all changes.
"""

import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import Struct, field

import bootseer
from bootseer.base.progress import ProgressBar
from bootseer.base.redact import redact
from bootseer.blob.pack.packing import ReusedFiles, pack_directory
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, from_oserror
from bootseer.linux.private_files import private_directory
from bootseer.linux.root_paths import resolve_in_root
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue import privileged, publish, store_target
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.layers import WHITEOUT, Layers, Written, written
from bootseer.snapshots.manifest import (
    NOTHING_OUTSIDE,
    OUTSIDE_PATHS_MAX,
    Manifest,
    Outside,
    Target,
)
from bootseer.snapshots.scan import Scan, diff, text_of
from bootseer.snapshots.sharing import RULE, Rule, find_reusable_files
from bootseer.store import Store
from bootseer.store.paths import local_root

logger = logging.getLogger(__name__)


class Change(Struct, frozen=True):
    """Target before and after the set-up."""

    path: bytes
    """Absolute path inside the job's root."""
    host: Path
    before: Scan
    after: Scan
    identities: Mapping[bytes, tuple[int, int]] = field(default_factory=dict)
    """Identities of hard-linked files; see `pack_directory`."""


def capture(
    store: Store,
    cache_dir: Path,
    change: Change,
    *,
    base: Target | None = None,
    rule: Rule = RULE,
    replace: bool = False,
) -> Target:
    """Store one target's difference, not visible as a snapshot yet; return its manifest entry.

    `base`: target of an earlier snapshot of the same directory; content of its blobs is not stored
    again if that pays by `rule`. Raises: BusyError if something still writes to the target;
    NoSpaceError; UnavailableError.
    """
    difference = diff(change.before, change.after)
    paths = [path for path in difference.packed_paths() if not is_device(change, path)]
    reused = ReusedFiles()
    if base is not None:
        reused = find_reusable_files(store, base, change.host, change.after, paths, rule)
    try:
        folder = private_directory(cache_dir / "snapshots")
        # The file has no name, so it ends with the process.
        with tempfile.TemporaryFile(dir=folder) as file:
            tree = _pack(change, paths, cast(BinaryIO, file), reused)
            if inodes := privileged(tree):
                logger.warning(
                    "%d files in %s have set-user-ID or set-group-ID bits or capabilities: nodes "
                    "restore these with BOOTSEER_RESTORE_PRIVILEGES=on only",
                    len(inodes),
                    text_of(change.path),
                )
            return store_target(
                store,
                change.path,
                tree,
                cast(BinaryIO, file),
                whole=len(change.before) <= 1,
                deletions=difference.deleted,
                replace=replace,
            )
    except BootseerError:
        raise
    except OSError as error:
        what = f"capture {text_of(change.path)} by way of {cache_dir / 'snapshots'}"
        raise from_oserror(error, what) from error


def is_device(change: Change, path: bytes) -> bool:
    """Return whether a name is a device node, with a warning: extractions refuse device nodes."""
    mode = change.after[path].mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        logger.warning("the device node %s is left out", text_of(change.path + b"/" + path))
        return True
    return False


def _pack(change: Change, paths: Sequence[bytes], file: BinaryIO, reused: ReusedFiles) -> Tree:
    total = sum(
        change.after[path].size_bytes
        for path in paths
        if stat.S_ISREG(change.after[path].mode) and path not in reused.files
    )
    with ProgressBar(f"packing {text_of(change.path)}", total) as progress:
        return pack_directory(
            change.host,
            file,
            paths=paths,
            others=reused,
            identities=change.identities,
            on_progress=progress.advance,
        )


def make_manifest(
    parts: Sequence[Part],
    targets: Sequence[Target],
    *,
    setup_ns: int,
    node: str,
    name: str = "",
    outside: Outside = NOTHING_OUTSIDE,
) -> Manifest:
    """Return the manifest of captured targets."""
    shown = tuple(redact(path) for path in outside.paths[:OUTSIDE_PATHS_MAX])
    return Manifest(
        fingerprint=fingerprint(parts),
        parts=tuple(sorted(parts)),
        targets=tuple(targets),
        created_ns=time.time_ns(),
        setup_ns=setup_ns,
        node=node,
        name=name,
        version=bootseer.__version__,
        outside=Outside(
            paths=shown, is_complete=outside.is_complete, path_count=len(outside.paths)
        ),
    )


def capture_directories(
    store: Store, cache_dir: Path, changes: Sequence[Change], *, node: str, name: str = ""
) -> Manifest:
    """Capture existing directories as they are, and publish them under a key of their contents."""
    targets = [capture(store, cache_dir, change) for change in changes]
    parts = [Part("kind", "created from directories")]
    for target in targets:
        shown = text_of(target.path)
        parts.append(Part(f"target {shown}", target.index.digest))
    manifest = make_manifest(parts, targets, setup_ns=0, node=node, name=name)
    publish(store, manifest)
    return manifest


# Clock of file times, which is some milliseconds behind CLOCK_REALTIME (linux/time.h).
_CLOCK_REALTIME_COARSE = 5
_LOOK_S = 1.5
_LOOK_SHORT_S = 0.1
# Limit for finding the processes that have changed files open.
_OPEN_LOOK_S = 0.3
NAMES_MAX = 200_000
# Likely places first, since the search may reach its bounds.
_SYSTEM_PLACES = (
    *("/usr/local", "/etc", "/opt", "/usr/bin", "/usr/sbin"),
    *("/var/lib/dpkg", "/var/lib/rpm", "/usr/lib", "/usr/share"),
)
_HOME_PLACES = (".local", ".config", ".conda", "bin")
# Caches and logs, which no job misses.
_IGNORED_NAMES = {"__pycache__", ".cache", ".git", "log", "logs"}
_CACHE_VARIABLES = (
    *("PIP_CACHE_DIR", "UV_CACHE_DIR", "XDG_CACHE_HOME", "CONDA_PKGS_DIRS"),
    *("POETRY_CACHE_DIR", "PDM_CACHE_DIR"),
)
_IGNORED_PATHS = ("/etc/mtab", "/etc/ld.so.cache", "/usr/share/man", "/usr/share/doc")


def now_ns() -> int:
    """Return the time that the kernel would give to a change now."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def usual_places(environ: Mapping[str, str], directory: str) -> list[str]:
    """Return the usual places of set-ups: working directory, environments, home, system."""
    home = environ.get("HOME", "")
    places = [directory, environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", "")]
    if home:
        places += [os.path.join(home, name) for name in _HOME_PLACES]
    return [place for place in (*places, *_SYSTEM_PLACES) if place.startswith("/") and place != "/"]


def _own_places(settings: Settings) -> list[Path]:
    """Return the folders to which Bootseer itself writes."""
    places = [settings.cache_dir, settings.run_dir, settings.timeline_dir]
    try:
        places.append(local_root(settings.store_url))
    except BootseerError:
        pass  # not on this host
    return places


def cache_folders(environ: Mapping[str, str], directory: str) -> list[Path]:
    """Return the cache folders that the variables of pip, uv, conda and others name."""
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
    """Return the names in `places` that changed at `since_ns` or later.

    Left out are `ignored` directories, changes after `until_ns`, this process's output, the output
    of Slurm's job `job_id`, and files that a process has open to write. Never raises: unreadable
    folders are left out.
    """
    end = time.monotonic() + look_s
    output = {_identity(f"/proc/self/fd/{number}") for number in (1, 2)}
    until_ns = time.time_ns() if until_ns is None else until_ns
    skipped = {*_IGNORED_PATHS, *(os.path.realpath(path) for path in ignored)}
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
                # The times of a directory change with its entries, which are looked at.
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
    """Return whether a file is the output file of a Slurm job.

    Slurm writes it from a pipe, so the job does not have the file open. Its name is
    "slurm-%j.out", or another name with the job's number.
    """
    if name.startswith("slurm-") and name.endswith(".out"):
        return True
    return bool(job_id) and job_id in name and name.endswith((".out", ".err", ".txt"))


def _not_open(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths, sorted, without those that a visible process has open for writing."""
    left = set(paths)
    end = time.monotonic() + _OPEN_LOOK_S
    for folder in Path("/proc").glob("[0-9]*") if left else ():
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
                if entry.name not in _IGNORED_NAMES:
                    yield entry.path, entry.stat(follow_symlinks=False)
    except OSError:
        return  # gone, or not ours to read


def look_outside(
    settings: Settings,
    since_ns: int,
    setup_s: float,
    environ: Mapping[str, str],
    directory: str,
    targets: Sequence[Path],
) -> Outside:
    """Return the changes outside of `targets` during a set-up on this host that ends now.

    The set-up began in `directory` and took `setup_s`: a short one gets a short look.
    """
    return changed_since(
        since_ns,
        usual_places(environ, directory),
        [*targets, *_own_places(settings), *cache_folders(environ, directory)],
        until_ns=time.time_ns(),
        job_id=environ.get("SLURM_JOB_ID", ""),
        look_s=min(_LOOK_S, _LOOK_SHORT_S + setup_s / 20),
    )


_TEMPORARY_FOLDERS = (b"/tmp", b"/var/tmp", b"/run", b"/var/run")
_IGNORED_NAMES_BYTES = {os.fsencode(name) for name in _IGNORED_NAMES}
_Writings = Mapping[bytes, Written]
"""Entries of the upper layer by path below the root."""


class OutsideLayers:
    """Changes outside the targets in a container, since the construction of this object."""

    def __init__(
        self, layers: Layers, environ: Mapping[str, str], directory: str, targets: Iterable[Path]
    ) -> None:
        """Note the present contents of the upper layer.

        `targets` are paths of this host; `directory` is a path inside the root.
        """
        self._layers = layers
        self._ignored = {*_TEMPORARY_FOLDERS, *map(os.fsencode, _IGNORED_PATHS)}
        for place in cache_folders(environ, directory):
            try:
                path = resolve_in_root(layers.root, os.fsencode(place))
            except (BootseerError, OSError):
                continue
            self._ignored.add(self._inside(path))
        self._ignored.update(map(self._inside, targets))
        self._before, self._is_whole = self._written()

    def changed(self) -> Outside:
        """Return the changes since then. Never raises: unreadable directories are left out."""
        if not self._is_whole:
            return Outside(is_complete=False)
        after, is_whole = self._written()
        paths = _changed_paths(self._before, after, self._lower, is_whole=is_whole)
        return Outside(paths=tuple(sorted(map(os.fsdecode, paths))), is_complete=is_whole)

    def _inside(self, path: Path) -> bytes:
        below = os.fsencode(path.relative_to(self._layers.root.absolute()))
        return b"/" if below == b"." else b"/" + below

    def _written(self) -> tuple[_Writings, bool]:
        return written(self._layers.upper, self._is_ignored, names_max=NAMES_MAX)

    def _is_ignored(self, path: bytes) -> bool:
        return (
            b"/" in self._ignored
            or b"/" + path in self._ignored
            or path.rpartition(b"/")[2] in _IGNORED_NAMES_BYTES
            or path.endswith((b".pyc", b".log"))
        )

    def _lower(self, path: bytes) -> os.stat_result | None:
        try:
            return os.lstat(os.path.join(os.fsencode(self._layers.lower), path))
        except OSError:
            return None


def _changed_paths(
    before: _Writings,
    after: _Writings,
    lower: Callable[[bytes], os.stat_result | None],
    *,
    is_whole: bool = True,
) -> list[bytes]:
    """Return absolute paths that are new, changed or gone.

    `lower` gives the original status of a path. A directory is listed if its mode or owner changed,
    if it is new and empty, or if it replaces something else. Of a directory that is gone, the names
    in it are not listed. `is_whole`: whether `after` holds everything.
    """
    found = []
    # Directories that hide the lower layer.
    replaced: set[bytes] = set()
    for path, now in after.items():
        is_hidden = path.rpartition(b"/")[0] in replaced
        if stat.S_ISDIR(now.mode) and (is_hidden or now.is_opaque):
            replaced.add(path)
        then = before.get(path)
        if now == then:
            continue
        if not stat.S_ISDIR(now.mode) or _is_directory_changed(
            now, then, None if is_hidden else lower(path)
        ):
            found.append(b"/" + path)
    if is_whole:
        gone = {path for path in before.keys() - after.keys() if before[path] != WHITEOUT}
        found += [b"/" + path for path in gone if path.rpartition(b"/")[0] not in gone]
    return found


def _is_directory_changed(now: Written, then: Written | None, lower: os.stat_result | None) -> bool:
    """Return whether a directory itself is a change, besides the changes in it."""
    if then is not None and then != WHITEOUT:
        return now[:4] != then[:4]
    if lower is None or then is not None:
        # Its entries are named.
        return now.is_empty
    return (
        now.is_opaque
        or not stat.S_ISDIR(lower.st_mode)
        or (now.mode, now.uid, now.gid) != (lower.st_mode, lower.st_uid, lower.st_gid)
    )
