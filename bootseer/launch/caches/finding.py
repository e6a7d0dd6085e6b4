"""The caches of one start: where each lies, what it is called, and the key under which it is kept.

Alone decides which folders are kept, which variables are set, and of which parts a key is made. The
key is what decides whether a file can be used, so a cache of another compiler, driver, processor or
package is another one, and nothing is mixed across keys. Looks at the machine, changes nothing.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct, field

from bootseer.base.redact import strip_logins
from bootseer.launch.caches.known import (
    ALL_PACKAGES,
    CPU,
    EVERYTHING,
    GPU,
    KNOWN,
    USER_CHANGERS,
    Known,
    data_cache_path,
)
from bootseer.launch.caches.machine import compiler_parts, cpu_parts, gpu_parts, vendors
from bootseer.launch.caches.packages import Python, python_of
from bootseer.launch.caches.records import own_folder
from bootseer.linux.root_paths import Place
from bootseer.settings.config import Settings
from bootseer.snapshots.manifest import CACHE
from bootseer.snapshots.parts import Part, fingerprint
from bootseer.snapshots.scan import target_path

if TYPE_CHECKING:
    from bootseer.snapshots.python import Runner

_INSIDE = "/run/bootseer/caches"
"""Where a container sees the folders that we name. Not where they are on the host: a user other
than root may not get there, and the path, which files of a cache name, is the same everywhere."""
_SHARED_KINDS = frozenset(
    b"nfs nfs4 lustre ceph cifs smb3 beegfs gpfs glusterfs 9p virtiofs afs wekafs panfs".split()
)


class Wish(Struct, frozen=True):
    """What a start was asked to keep."""

    directories: tuple[str, ...] = ()
    automatic: bool = True
    """Also the caches that frameworks name by variables."""


class Job(Struct, frozen=True):
    """The command whose caches are looked for, and where it runs."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    root: Path = field(default_factory=lambda: Path("/"))
    directory: str = ""
    """Where it starts, inside the root; empty: here."""
    base: str = ""
    """The identity of its image; empty: BOOTSEER_IMAGE."""
    runner: "Runner | None" = None
    """Runs a program there; None: this process does."""
    binds: tuple[tuple[str, Path], ...] = ()
    """Of an image: where it sees folders of this host."""

    @property
    def is_image(self) -> bool:
        """Whether it runs in a root of its own."""
        return self.root != Path("/")

    @property
    def place(self) -> Place:
        """How its paths are found on this host."""
        return Place(self.root, self.directory or str(Path.cwd()))


class Cache(Struct, frozen=True, kw_only=True):
    """One folder that is kept."""

    name: str
    """The variable that names it, or its path."""
    path: str
    """Where the job sees it."""
    folder: Path
    """Where it lies on this host."""
    is_ours: bool
    """Nobody else writes there: all that it holds was made under its key."""
    sets: bool
    """Whether the variable is to be set to the path."""
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        """The fingerprint of its parts."""
        return fingerprint(self.parts)

    @property
    def target(self) -> bytes:
        """Its path, as a snapshot's target."""
        return target_path(self.path, "/")


def find_caches(settings: Settings, wish: Wish, job: Job) -> list[Cache]:
    """The caches of a start, one for each folder, in the order of their names.

    Raises: InvalidInputError for a folder that cannot be one.
    """
    finder = _Finder(settings, job)
    found = [finder.named(text) for text in wish.directories]
    # Behind these the job is another user's, or elsewhere.
    changes_user = {os.path.basename(word) for word in job.command[:3]} & USER_CHANGERS
    if wish.automatic and not changes_user:
        found += finder.automatic()
    by_path = {cache.path: cache for cache in reversed(found)}
    return sorted(by_path.values(), key=lambda cache: cache.name)


class _Finder:
    def __init__(self, settings: Settings, job: Job) -> None:
        self._settings = settings
        self._job = job
        self._place = job.place
        self._gpu = gpu_parts()
        self._facts: dict[str, list[Part]] = {GPU: self._gpu}
        self._python: Python | None = None
        self._versions: dict[str, str] = {}
        self._python = python_of(self._place, job.command, job.environ)
        if self._python is not None:
            self._versions = self._python.versions(ALL_PACKAGES)

    def named(self, text: str) -> Cache:
        """A folder that `--keep` names."""
        path = os.fsdecode(target_path(text, self._place.directory))
        return self._at(path, path, ALL_PACKAGES, EVERYTHING)

    def automatic(self) -> list[Cache]:
        """The caches that frameworks name by variables, and Megatron-LM by an option."""
        found = []
        for known in KNOWN:
            if (cache := self._known(known)) is not None:
                found.append(cache)
        if path := data_cache_path(self._job.command):
            path = os.fsdecode(target_path(path, self._place.directory))
            if not self._is_shared(path):
                found.append(self._at(path, path, ("megatron-core", "numpy"), frozenset()))
        return found

    def _known(self, known: Known) -> Cache | None:
        environ = self._job.environ
        named = environ.get(known.variable, "")
        if not self._is_of_use(known):
            return None
        if named:
            path = os.fsdecode(target_path(named, self._place.directory))
            if self._is_shared(path):
                return None
            return self._at(known.variable, path, known.decided_by, known.facts)
        if not known.is_set or any(environ.get(name) for name in known.instead):
            return None
        if known.ordinary and self._is_filled(known.ordinary):
            return None
        return self._ours(known)

    def _is_of_use(self, known: Known) -> bool:
        if known.vendor and known.vendor not in vendors(self._gpu):
            return False
        return not known.packages or any(name in self._versions for name in known.packages)

    def _is_filled(self, below_home: str) -> bool:
        home = self._job.environ.get("HOME", "")
        try:
            return bool(home) and any(self._place.host(f"{home}/{below_home}").iterdir())
        except OSError:
            return False

    def _is_shared(self, path: str) -> bool:
        """Whether all nodes see the folder already: what lies there is kept as it is."""
        from bootseer.linux import mount_table  # here: few have named a folder

        folder = self._host(path)
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        device = folder.stat().st_dev
        kinds = {one.kind for one in mount_table.mount_points() if one.device == device}
        return bool(kinds & _SHARED_KINDS) or any(kind.startswith(b"fuse") for kind in kinds)

    def _host(self, path: str) -> Path:
        """Where the job's path lies on this host."""
        for target, source in self._job.binds:
            if PurePosixPath(path).is_relative_to(target):
                return source / PurePosixPath(path).relative_to(target)
        return self._place.host(path)

    def _is_bound(self, path: str) -> bool:
        return any(PurePosixPath(path).is_relative_to(target) for target, _ in self._job.binds)

    def _parts(self, name: str, packages: Sequence[str], facts: frozenset[str]) -> list[Part]:
        base = self._job.base or self._job.environ.get("BOOTSEER_IMAGE", "")
        version = self._python.version if self._python else "none"
        return [
            Part(CACHE, name),
            Part("workload", self._settings.workload),
            Part("image", strip_logins(base)),
            Part("interpreter", version),
            *(
                Part(f"package {one}", self._versions[one])
                for one in sorted(set(packages))
                if one in self._versions
            ),
            *(part for fact in sorted(facts) for part in self._fact(fact)),
        ]

    def _fact(self, fact: str) -> list[Part]:
        if fact not in self._facts:
            self._facts[fact] = (
                cpu_parts()
                if fact == CPU
                else compiler_parts(self._place, self._job.environ, self._job.runner)
            )
        return self._facts[fact]

    def _ours(self, known: Known) -> Cache:
        """In a folder of ours, which nobody has named."""
        parts = self._parts(known.variable, known.decided_by, known.facts)
        short = known.variable.lower().replace("_", "-")
        folder = own_folder(self._settings.cache_dir, fingerprint(parts), short)
        path = f"{_INSIDE}/{short}" if self._job.is_image else str(folder)
        return Cache(
            name=known.variable,
            path=path,
            folder=folder,
            is_ours=True,
            sets=True,
            parts=(*parts, Part("folder", path)),
        )

    def _at(self, name: str, path: str, packages: Sequence[str], facts: frozenset[str]) -> Cache:
        """At a path that somebody has named."""
        parts = [*self._parts(name, packages, facts), Part("folder", path)]
        folder = self._host(path)
        # A root of an image goes with its job: there the folder is ours, and bound.
        is_ours = self._job.is_image and not self._is_bound(path)
        if is_ours:
            short = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
            folder = own_folder(self._settings.cache_dir, fingerprint(parts), short)
        return Cache(
            name=name,
            path=path,
            folder=folder,
            is_ours=is_ours,
            sets=False,
            parts=tuple(parts),
        )
