"""Atomic restore of files into targets: staging, commit, move, and recovery after a crash.

A restore works in `.bootseer-<hash>` beside the target; inside it, if the target is a mount point:

    tree/     the extracted files; names leave it as they move into the target
    plan      snapshot, deletions, and the path of the commit file (JSON)
    index     the encoded tree, for the attributes of directories
    commit    in the first target's working directory only; lists all working directories

After `commit` exists, the restore is completed, never undone, by this process or by the next one
that locks a target. A working directory without a commit is removed. So nothing visible changes
until every target is staged and verified. Every step can be repeated after a crash, works relative
to open directories and follows no symbolic link. Callers hold the locks of all targets.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.documents import DocumentFormat, PathBytes, to_line
from bootseer.base.short_digest import short_digest
from bootseer.errors import (
    AlreadyExistsError,
    BusyError,
    CorruptError,
    InvalidInputError,
    PermissionDeniedError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.linux import mount_table
from bootseer.linux.private_files import read_private_file
from bootseer.linux.removal import remove_tree
from bootseer.linux.root_paths import resolve_in_root
from bootseer.settings.config import Settings
from bootseer.snapshots.key_parts import base_part_name
from bootseer.snapshots.scan import NOTHING, STAGING_PREFIX, Scan, base_digest, is_plain, text_of

if TYPE_CHECKING:
    from bootseer.blob.tree import Inode, Tree
    from bootseer.snapshots.manifest import Manifest, Target
    from bootseer.store import Store

logger = logging.getLogger(__name__)


def _is_mount_point(target: Path) -> bool:
    """Return whether `target` is a mount point, into which nothing beside it can be renamed."""
    if not target.is_dir():
        return False
    if os.lstat(target).st_dev != os.lstat(target.parent).st_dev:
        return True
    # A bind mount of the same file system shows only in the table of mounts.
    with contextlib.suppress(OSError):
        return any(one.path == os.fsencode(target) for one in mount_table.mount_points())
    return False


def is_entered(path: Path) -> bool:
    """Return whether this process's working directory is at or below `path`."""
    try:
        return Path.cwd().is_relative_to(path)
    except OSError:
        return False  # it is gone, or cannot be named


_SYSTEM_FOLDERS = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr", "/var"),
)
_FREE_FOLDERS = ("/dev/shm", "/var/tmp")
"""Folders inside `_SYSTEM_FOLDERS` that do not belong to the system."""

_FREE_HOME_NAMES = (".cache", ".conda", ".venv", ".virtualenvs")
"""Names in a home that begin with a dot and hold no settings."""


def why_guarded(path: Path, home: Path) -> str:
    """Return the reason why a restore to `path` must be asked for; "" if it need not.

    `path` is absolute; `home` is this user's home.
    """
    if any(_is_in(path, free) for free in _FREE_FOLDERS):
        return ""
    for system in map(Path, _SYSTEM_FOLDERS):
        if path.is_relative_to(system) or system.is_relative_to(path):
            return "belongs to the system"
    homes = [home, Path("/root"), *_homes_of(path.parts)]
    for one in homes:
        if one.is_relative_to(path):
            return "is, or holds, a home directory"
        if path.is_relative_to(one):
            name = path.relative_to(one).parts[0]
            if name.startswith(".") and name not in _FREE_HOME_NAMES:
                return "holds a user's settings"
    return ""


def _is_in(path: Path, folder: str) -> bool:
    return path != Path(folder) and path.is_relative_to(folder)


def _homes_of(parts: Sequence[str]) -> list[Path]:
    """Return the home directory below /home that a path lies in, if any."""
    if len(parts) > 1 and parts[1] == "home":
        return [Path(*parts[:3])]
    return []


OnFinished = Callable[[Path, str, str, str], None]
"""Function that is called when a target is in place, with target, fingerprint, base digest, and
tree fingerprint ("" if unknown). A second call follows if a crash makes a restore finish twice."""


class _Plan(Struct, frozen=True):
    fingerprint: str
    base: str
    commit: Path
    """Commit file of this plan and those of the other targets."""
    deletions: tuple[PathBytes, ...]


class _Committed(Struct, frozen=True):
    commit: Path


_PLAN: DocumentFormat[_Plan] = DocumentFormat(
    type=_Plan, version=1, size_max=1 << 30, value_count_max=1 << 30
)
# Member of a plan of any release: a committed plan must be recognized.
_COMMIT_POINTER: DocumentFormat[_Committed] = DocumentFormat(
    type=_Committed, size_max=1 << 30, value_count_max=1 << 30
)
_COMMIT: DocumentFormat[list[Path]] = DocumentFormat(type=list[Path], size_max=1 << 24)


class _Staging(Struct, frozen=True):
    """Working directory for one target (a host path without symbolic links)."""

    target: Path
    directory: Path

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def is_inside(self) -> bool:
        """Whether the working directory lies inside the target, which is a mount point."""
        return self.directory.parent == self.target


def _staging_name(target: Path) -> str:
    return STAGING_PREFIX.decode() + short_digest(os.fsencode(target.name))[:16]


def _staging_paths(target: Path) -> tuple[Path, Path]:
    return target.parent / _staging_name(target), target / _staging_name(target)


def _make_staging(target: Path) -> _Staging:
    """Make an empty working directory on the target's file system. Raises: BootseerError."""
    beside, inside = _staging_paths(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = _Staging(target, inside if _is_mount_point(target) else beside)
        staging.directory.mkdir(mode=0o700)
    except FileExistsError as error:
        raise BusyError(f"{staging.directory} is in the way; remove it") from error
    except OSError as error:
        raise from_oserror(error, f"prepare the restore of {target}") from error
    return staging


def _write_plan(
    staging: _Staging,
    first: _Staging,
    *,
    fingerprint: str,
    base: str,
    encoded_tree: bytes,
    deletions: Sequence[bytes],
) -> None:
    """Write the plan of a restore; it takes effect with `commit`."""
    plan = _Plan(fingerprint, base, first.directory / "commit", tuple(deletions))
    try:
        (staging.directory / "index").write_bytes(encoded_tree)
        (staging.directory / "plan").write_bytes(_PLAN.encode(plan))
    except OSError as error:
        raise from_oserror(error, f"write the plan in {staging.directory}") from error


def commit(stagings: Sequence[_Staging]) -> None:
    """Commit the restore of all planned targets, which is then completed even after a crash."""
    file = stagings[0].directory / "commit"
    try:
        draft = file.with_suffix(".draft")
        draft.write_text(to_line([staging.directory for staging in stagings]), encoding="ascii")
        draft.rename(file)
    except OSError as error:
        raise from_oserror(error, f"write the commit {file}") from error


def _are_committed(stagings: Sequence[_Staging]) -> bool:
    """Return whether the restore was committed and its working directories still exist."""
    return bool(stagings) and (stagings[0].directory / "commit").exists()


def abandon_targets(targets: Sequence[Path]) -> None:
    """Remove the working directories that a restore left at `targets`, committed or not."""
    for target in targets:
        for directory in _staging_paths(target):
            with contextlib.suppress(OSError):
                if os.lstat(directory).st_uid == os.geteuid():
                    _remove_stagings([_Staging(target, directory)])


def _complete_stagings(
    stagings: Sequence[_Staging], fingerprints: Sequence[str], on_finished: OnFinished
) -> None:
    """Carry out committed plans.

    `fingerprints`: the tree fingerprint of each staged tree, or an empty string.
    Raises: BootseerError; the next `recover_targets` continues.
    """
    for staging, tree_fingerprint in zip(stagings, fingerprints, strict=True):
        _finish(staging, tree_fingerprint, on_finished)
    _remove_stagings(stagings)


def _finish(staging: _Staging, tree_fingerprint: str, on_finished: OnFinished) -> None:
    """Carry out a plan, which may have been carried out in part."""
    plan = _read_plan(staging)
    is_all = _carry_out(staging, plan)
    on_finished(staging.target, plan.fingerprint, plan.base, tree_fingerprint if is_all else "")


def _carry_out(staging: _Staging, plan: _Plan) -> bool:
    """Carry out a plan; return whether the target is the staged tree without any other file."""
    try:
        # A process whose working directory is the target, such as the calling shell, would stay in
        # the old directory.
        is_kept = staging.is_inside or is_entered(staging.target)
        if staging.tree.is_dir() and not is_kept and _rename_whole(staging):
            return True
        tree = _read_tree(staging)
        target = os.open(staging.target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if staging.tree.is_dir():
                staged = os.open(staging.tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    move_into(staged, target)
                finally:
                    os.close(staged)
            _delete_paths(target, plan.deletions)
            _set_directories(target, tree)
        finally:
            os.close(target)
    except OSError as error:
        raise from_oserror(error, f"finish the restore of {staging.target}") from error
    return False


def _rename_whole(staging: _Staging) -> bool:
    """Put the staged tree in the place of a missing or empty target, in one step."""
    try:
        # rename(2) replaces an empty directory and nothing else.
        staging.tree.rename(staging.target)
    except OSError as error:
        if not staging.target.is_dir():
            raise
        logger.debug("merging into %s: %s", staging.target, error)
        return False
    return True


def _read_plan(staging: _Staging) -> _Plan:
    try:
        plan = _PLAN.decode((staging.directory / "plan").read_bytes(), "its plan")
    except OSError as error:
        raise from_oserror(error, f"read the plan in {staging.directory}") from error
    except (CorruptError, UnknownFormatError) as error:
        raise CorruptError(f"{staging.directory} cannot be finished, remove it: {error}") from None
    if not all(is_plain(path.split(b"/")) for path in plan.deletions):
        raise CorruptError(f"{staging.directory} is damaged; remove it")
    return plan


def _read_tree(staging: _Staging) -> "Tree":
    """Return the staged tree, for a merge only: decoding a large tree takes 0.1 s."""
    from bootseer.blob import index  # here: most starts find nothing to merge

    return index.decode((staging.directory / "index").read_bytes())


def _remove_stagings(stagings: Sequence[_Staging]) -> None:
    """Remove working directories that are finished, or were never committed."""
    for staging in stagings:
        # Without these files, no process carries the plan out.
        for name in ("commit", "plan"):
            (staging.directory / name).unlink(missing_ok=True)
    for staging in stagings:
        _remove_staging(staging)


def _remove_staging(staging: _Staging) -> None:
    """Remove a working directory; a target that contains it keeps its times."""
    with contextlib.suppress(OSError):
        kept = os.stat(staging.directory.parent)
        with contextlib.suppress(OSError):
            remove_tree(staging.directory)
        if staging.is_inside:
            os.utime(staging.target, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def recover_targets(targets: Sequence[Path], on_finished: OnFinished) -> None:
    """Complete or remove interrupted restores of `targets` (host paths).

    Raises: PermissionDeniedError for a working directory of another user; BootseerError if a
    restore cannot be completed.
    """
    committed: list[_Staging] = []
    for target in targets:
        for directory in _staging_paths(target):
            try:
                status = os.lstat(directory)
            except OSError:
                continue
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionDeniedError(
                    f"{directory} belongs to somebody else; remove it, it is in the way"
                )
            staging = _Staging(target, directory)
            if _is_committed(staging):
                committed.append(staging)
            elif not _is_needed_by_others(staging):
                logger.info("removing %s, left by an interrupted restore", directory)
                with contextlib.suppress(OSError):
                    remove_tree(directory)
    for staging in committed:
        logger.warning("finishing the interrupted restore of %s", staging.target)
        _finish(staging, "", on_finished)
        (staging.directory / "plan").unlink()
    for staging in committed:
        if not _is_needed_by_others(staging):
            _remove_staging(staging)


def _is_needed_by_others(staging: _Staging) -> bool:
    """Return whether other targets, which may not be locked, still need this directory's commit."""
    try:
        data = (staging.directory / "commit").read_bytes()
        paths = _COMMIT.decode(data, "a commit")
        return any((path / "plan").is_file() for path in paths if path != staging.directory)
    except (OSError, CorruptError):
        return False


def _is_committed(staging: _Staging) -> bool:
    plan = read_private_file(staging.directory / "plan", _COMMIT_POINTER)
    return plan is not None and plan.commit.is_file()


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _mode(name: bytes, dir_fd: int) -> int:
    """Return the mode of a name; 0 if it does not exist."""
    try:
        return os.lstat(name, dir_fd=dir_fd).st_mode
    except FileNotFoundError:
        return 0


def move_into(staged: int, target: int) -> None:
    """Move every name in the directory `staged` into the directory `target` (both descriptors).

    A file atomically replaces a file of its name. A directory moves as a whole if `target` has no
    such name, otherwise name by name. `staged` is empty afterwards.
    """
    merged = [b""]
    # The list grows during the loop: a tree may be deeper than Python's stack, and than the number
    # of descriptors.
    for path in merged:
        with _below(staged, path) as source, _below(target, path) as place:
            for name_text in os.listdir(source):
                name = os.fsencode(name_text)
                if not _move(name, source, place):
                    merged.append(path + b"/" + name if path else name)
    for path in reversed(merged[1:]):
        parent, _, name = path.rpartition(b"/")
        with _below(staged, parent) as source:
            os.rmdir(name, dir_fd=source)


def _move(name: bytes, staged: int, target: int) -> bool:
    """Move a name. Return False for a directory that has to be moved name by name."""
    there = _mode(name, target)
    if not stat.S_ISDIR(_mode(name, staged)):
        if stat.S_ISDIR(there):
            remove_tree(name, dir_fd=target)
        os.rename(name, name, src_dir_fd=staged, dst_dir_fd=target)
        return True
    if stat.S_ISDIR(there):
        return False
    if there:
        os.unlink(name, dir_fd=target)
    try:
        os.rename(name, name, src_dir_fd=staged, dst_dir_fd=target)
        return True
    except OSError as error:
        # Overlayfs cannot rename a directory of a lower layer.
        if error.errno != errno.EXDEV:
            raise
    os.mkdir(name, 0o700, dir_fd=target)
    return False


def _delete_paths(target: int, paths: Iterable[bytes]) -> None:
    """Remove relative `paths` below the directory `target`; missing ones are no error.

    A directory is removed with everything in it, such as bytecode that is newer than the
    snapshot.
    """
    for path in sorted(paths, reverse=True):
        parent, _, name = path.rpartition(b"/")
        try:
            with _below(target, parent) as fd:
                if stat.S_ISDIR(_mode(name, fd)):
                    remove_tree(name, dir_fd=fd)
                else:
                    os.unlink(name, dir_fd=fd)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed before, or its directory has been replaced
        except OSError as error:
            # A symbolic link has replaced its directory: the path behind it is not ours.
            if error.errno != errno.ELOOP:
                raise


@contextmanager
def _below(top: int, path: bytes) -> Iterator[int]:
    """Open the directory at `path` below `top`, component by component; close it at the end."""
    fd = os.dup(top)
    try:
        for part in path.split(b"/") if path else ():
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _set_directories(target: int, tree: "Tree") -> None:
    """Give every directory of `tree` its attributes, deepest first.

    This is the last step of a merge, because every move into a directory changes its times. Missing
    directories are left out.
    """
    directories = [
        (path, number) for path, number in tree.walk() if stat.S_ISDIR(tree.mode(number))
    ]
    for path, number in reversed(directories):
        try:
            with _below(target, path) as fd:
                _set_directory(fd, tree.inode(number))
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed since, by a user who did not wait for the recovery


def _set_directory(fd: int, inode: "Inode") -> None:
    now = os.fstat(fd)
    if os.geteuid() == 0 and (now.st_uid, now.st_gid) != (inode.uid, inode.gid):
        os.fchown(fd, inode.uid, inode.gid)
    if stat.S_IMODE(now.st_mode) != stat.S_IMODE(inode.mode):
        os.fchmod(fd, stat.S_IMODE(inode.mode))
    _set_xattrs(fd, dict(inode.xattrs))
    if now.st_mtime_ns != inode.mtime_ns:
        os.utime(fd, ns=(now.st_atime_ns, inode.mtime_ns))


def _set_xattrs(fd: int, wanted: dict[bytes, bytes]) -> None:
    """Set missing attributes, and remove extra ones in the user's own namespace."""
    try:
        present = [os.fsencode(name) for name in os.listxattr(fd)]
    except OSError:
        return  # a file system without them
    for name in present:
        if name.startswith(b"user.") and name not in wanted:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        try:
            if name not in present or os.getxattr(fd, name) != value:
                os.setxattr(fd, name, value)
        except OSError as error:
            # Attributes that this file system or user may not have are left out, as in an
            # extraction.
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EACCES):
                raise


Fill = Callable[["Target", "Tree", Path], str]
"""Function that makes a target's complete tree at a path that does not exist. It returns the
`fingerprint_of_restored`, or "" if that is unknown."""


class Placed(Struct, frozen=True):
    """Target with its path on this host."""

    target: "Target"
    path: Path


def place_targets(manifest: "Manifest", root: Path) -> list[Placed]:
    """Return the place of each target on this host.

    Raises: InvalidInputError if two are one directory here.
    """
    placed = [Placed(target, resolve_in_root(root, target.path)) for target in manifest.targets]
    paths = [item.path for item in placed]
    for one in paths:
        if any(other != one and other.is_relative_to(one) for other in paths) or (
            paths.count(one) > 1
        ):
            raise InvalidInputError(f"two targets of this snapshot meet in {one} on this host")
    return placed


def check_base(manifest: "Manifest", target: "Target", scanned: Scan) -> None:
    """Check that a snapshot fits on the contents of its target. Raises: AlreadyExistsError."""
    wanted = next(
        (part.value for part in manifest.parts if part.name == base_part_name(target.path)),
        NOTHING,
    )
    if target.whole:
        wanted = NOTHING
    if base_digest(scanned) != wanted:
        shown = text_of(target.path)
        raise AlreadyExistsError(
            f"{shown} is not empty; move it away first"
            if target.whole
            else f"{shown} is not as it was before the set-up; this snapshot does not fit on it"
        )


class Restoration(Struct, frozen=True):
    """Restore of a snapshot to the places of its targets."""

    settings: Settings
    store: "Store"
    manifest: "Manifest"
    placed: Sequence[Placed]
    bases: Mapping[bytes, str]
    """Base digests of the targets' present contents, which `check_base` has accepted."""
    checks_store: bool = True
    """Whether to check that the store has all blobs; if not, another node of the start does."""

    def load(self, target: "Target") -> "tuple[Tree, bytes]":
        """Return a target's tree as a restore may use it, and its encoded form."""
        # Here: a start that finds its environment in place needs none of it.
        from bootseer.snapshots.catalogue import admit_tree, read_encoded_tree

        data = read_encoded_tree(self.store, target, self.settings)
        return admit_tree(target, data, privileges=self.settings.restore_privileges), data


def put_in_place(work: Restoration, fill: Fill, on_finished: OnFinished) -> None:
    """Put all targets of a snapshot in place, or change nothing.

    `fill` makes each target's tree, beside the target. `on_finished` is called for each target
    before a crash could no longer be recovered from.

    Raises: CorruptError, NotFoundError, UnavailableError, DeadlineError, NoSpaceError,
    PermissionDeniedError: nothing has changed, unless the message says that a restore could not be
    *finished*; the next run goes on with it.
    """
    stagings: list[_Staging] = []
    fingerprints: list[str] = []
    try:
        for item in work.placed:
            tree, encoded = work.load(item.target)
            staging = _make_staging(item.path)
            stagings.append(staging)
            fingerprints.append(fill(item.target, tree, staging.tree))
            _write_plan(
                staging,
                stagings[0],
                fingerprint=work.manifest.fingerprint,
                base=work.bases[item.target.path],
                encoded_tree=encoded,
                deletions=item.target.deletions,
            )
        commit(stagings)
        _complete_stagings(stagings, fingerprints, on_finished)
    except BaseException:
        if not _are_committed(stagings):
            _remove_stagings(stagings)
        raise


def one_directory(manifest: "Manifest") -> "Target":
    """Return the target of a snapshot of one whole directory. Raises: InvalidInputError."""
    if len(manifest.targets) != 1 or not manifest.targets[0].whole:
        raise InvalidInputError("--to needs a snapshot of one whole directory")
    return manifest.targets[0]
