"""Files of a snapshot put into a target: staged beside it, committed, moved, recovered.

A restore works in `.bootseer-<hash>` beside the target, or in it where the target is a mount point:

    tree/     the extracted files; names leave it as they move into the target
    plan      what to do with it (JSON), and the path of the commit file
    index     the encoded tree, for the attributes of directories
    commit    in the first target's working directory only; lists all working directories

Once `commit` exists the restore is finished, never undone, by this process or by the next one that
locks a target. A working directory without a commit is thrown away. So until every target is staged
and verified nothing that a job could see has changed. Every step can be repeated after a crash,
works relative to open directories and follows no symbolic link. Callers hold the locks of all
targets.
"""

import contextlib
import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import DocumentFormat, PathBytes, to_line
from bootseer.blob.index import codec as index
from bootseer.blob.tree import Inode, Tree
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
from bootseer.snapshots.catalogue import admit_tree, read_encoded_tree
from bootseer.snapshots.key_parts import base_part_name
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.snapshots.scan import NOTHING, STAGING_PREFIX, Scan, base_digest, is_plain, text_of
from bootseer.store import Store

logger = logging.getLogger(__name__)


def _is_mount_point(target: Path) -> bool:
    """Whether nothing can be renamed from beside `target` into it."""
    if not target.is_dir():
        return False
    if os.lstat(target).st_dev != os.lstat(target.parent).st_dev:
        return True
    # A bind mount of the same file system shows only in the table of mounts.
    with contextlib.suppress(OSError):
        return any(one.path == os.fsencode(target) for one in mount_table.mount_points())
    return False


def is_entered(path: Path) -> bool:
    """Whether this process works in the directory."""
    try:
        return Path.cwd().is_relative_to(path)
    except OSError:
        return False  # it is gone, or cannot be named


_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr", "/var"),
)
_FREE = ("/dev/shm", "/var/tmp")
"""Directories in these in which nothing runs by itself."""

_FREE_OF_HOME = (".cache", ".conda", ".venv", ".virtualenvs")
"""Names in a home that begin with a dot and hold no settings."""


def why_guarded(path: Path, home: Path) -> str:
    """Return the reason why a restore to `path` must be asked for; "" if it need not.

    `path` is absolute; `home` is this user's home.
    """
    if any(_is_in(path, free) for free in _FREE):
        return ""
    for system in map(Path, _SYSTEM):
        if path.is_relative_to(system) or system.is_relative_to(path):
            return "belongs to the system"
    homes = [home, Path("/root"), *_homes_of(path.parts)]
    for one in homes:
        if one.is_relative_to(path):
            return "is, or holds, a home directory"
        if path.is_relative_to(one):
            name = path.relative_to(one).parts[0]
            if name.startswith(".") and name not in _FREE_OF_HOME:
                return "holds a user's settings"
    return ""


def _is_in(path: Path, folder: str) -> bool:
    return path != Path(folder) and path.is_relative_to(folder)


def _homes_of(parts: Sequence[str]) -> list[Path]:
    """The home that a path lies in, where homes lie in /home."""
    if len(parts) > 1 and parts[1] == "home":
        return [Path(*parts[:3])]
    return []


OnFinished = Callable[[Path, str, str, str], None]
"""Called with target, fingerprint, base and tree fingerprint, if it is known, once a target is in
place, and again if a crash lets a restore be finished twice."""


class _Plan(Struct, frozen=True):
    fingerprint: str
    base: str
    commit: Path
    """The file that says that this and other plans are carried out."""
    deletions: tuple[PathBytes, ...]


class _Committed(Struct, frozen=True):
    commit: Path


_PLAN: DocumentFormat[_Plan] = DocumentFormat(
    type=_Plan, versions=(1,), size_max=1 << 30, value_count_max=1 << 30
)
# Of a plan of any release: one that is carried out must not be taken for none.
_POINTER: DocumentFormat[_Committed] = DocumentFormat(
    type=_Committed, size_max=1 << 30, value_count_max=1 << 30
)
_COMMIT: DocumentFormat[list[Path]] = DocumentFormat(type=list[Path], size_max=1 << 24)


class _Staging(Struct, frozen=True):
    """The working directory for one target (a host path without symbolic links)."""

    target: Path
    directory: Path

    @property
    def tree(self) -> Path:
        """Returns the folder to extract to."""
        return self.directory / "tree"

    @property
    def is_inside(self) -> bool:
        """Whether it lies in the target, which is a mount point, and not beside it."""
        return self.directory.parent == self.target


def _name(target: Path) -> str:
    return STAGING_PREFIX.decode() + hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]


def _places(target: Path) -> tuple[Path, Path]:
    return target.parent / _name(target), target / _name(target)


def _make_staging(target: Path) -> _Staging:
    """A new, empty working directory on the target's file system. Raises: BootseerError."""
    beside, inside = _places(target)
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
    """Commit: from here on the restore of all planned targets is finished, also after a crash."""
    file = stagings[0].directory / "commit"
    try:
        draft = file.with_suffix(".draft")
        draft.write_text(to_line([staging.directory for staging in stagings]), encoding="ascii")
        draft.rename(file)
    except OSError as error:
        raise from_oserror(error, f"write the commit {file}") from error


def _are_committed(stagings: Sequence[_Staging]) -> bool:
    """Whether `commit` took place, and the rest was not removed yet."""
    return bool(stagings) and (stagings[0].directory / "commit").exists()


def abandon_targets(targets: Sequence[Path]) -> None:
    """Forget what an interrupted restore left at `targets`, finished or not."""
    for target in targets:
        for directory in _places(target):
            with contextlib.suppress(OSError):
                if os.lstat(directory).st_uid == os.geteuid():
                    _remove_stagings([_Staging(target, directory)])


def _complete_stagings(
    stagings: Sequence[_Staging], fingerprints: Sequence[str], on_finished: OnFinished
) -> None:
    """Carry out committed plans.

    `fingerprints`: the tree fingerprint of each staged tree, or an empty string.
    Raises: BootseerError; the next `recover` continues.
    """
    for staging, tree_fingerprint in zip(stagings, fingerprints, strict=True):
        _finish(staging, tree_fingerprint, on_finished)
    _remove_stagings(stagings)


def _finish(staging: _Staging, tree_fingerprint: str, on_finished: OnFinished) -> None:
    """Carry out a plan: first or again."""
    plan = _read_plan(staging)
    is_all = _carry_out(staging, plan)
    on_finished(staging.target, plan.fingerprint, plan.base, tree_fingerprint if is_all else "")


def _carry_out(staging: _Staging, plan: _Plan) -> bool:
    """Whether the target is now the staged tree, and nothing else."""
    try:
        # A process whose working directory is the target, such as the shell that started us,
        # would stay in the directory that is replaced.
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


def _read_tree(staging: _Staging) -> Tree:
    """Only where directories are merged: to decode a large one takes a tenth of a second."""
    return index.decode((staging.directory / "index").read_bytes())


def _remove_stagings(stagings: Sequence[_Staging]) -> None:
    """Throw working directories away: they are finished, or were never committed."""
    for staging in stagings:
        # Without these nothing of it is ever carried out again.
        for name in ("commit", "plan"):
            (staging.directory / name).unlink(missing_ok=True)
    for staging in stagings:
        _throw_away(staging)


def _throw_away(staging: _Staging) -> None:
    """Remove the directory; a target that it lies in keeps its time."""
    with contextlib.suppress(OSError):
        kept = os.stat(staging.directory.parent)
        with contextlib.suppress(OSError):
            remove_tree(staging.directory)
        if staging.is_inside:
            os.utime(staging.target, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def recover_targets(targets: Sequence[Path], on_finished: OnFinished) -> None:
    """Finish or throw away what an interrupted restore left at `targets` (host paths).

    Raises: PermissionDeniedError for a working directory that is not ours; BootseerError where it
    cannot be finished.
    """
    committed: list[_Staging] = []
    for target in targets:
        for directory in _places(target):
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
            elif not _others(staging):
                logger.info("removing %s, left by an interrupted restore", directory)
                with contextlib.suppress(OSError):
                    remove_tree(directory)
    for staging in committed:
        logger.warning("finishing the interrupted restore of %s", staging.target)
        _finish(staging, "", on_finished)
        (staging.directory / "plan").unlink()
    for staging in committed:
        if not _others(staging):
            _throw_away(staging)


def _others(staging: _Staging) -> bool:
    """Whether targets that are not ours to lock now still need this working directory's commit."""
    try:
        data = (staging.directory / "commit").read_bytes()
        paths = _COMMIT.decode(data, "a commit")
        return any((path / "plan").is_file() for path in paths if path != staging.directory)
    except (OSError, CorruptError):
        return False


def _is_committed(staging: _Staging) -> bool:
    plan = read_private_file(staging.directory / "plan", _POINTER)
    return plan is not None and plan.commit.is_file()


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _mode(name: bytes, dir_fd: int) -> int:
    """The mode of a name, or 0 where there is none."""
    try:
        return os.lstat(name, dir_fd=dir_fd).st_mode
    except FileNotFoundError:
        return 0


def move_into(staged: int, target: int) -> None:
    """Every name in the directory `staged` moves into the directory `target` (both descriptors).

    A file replaces what has its name in one step. A directory moves as a whole where nothing is
    in its place, else name by name. `staged` is empty afterwards.
    """
    merged = [b""]
    # The list grows while it is gone through: trees are deeper than Python's stack and than there
    # are descriptors.
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
    """Move a name; False for a directory that is to be moved name by name, and is in `target`."""
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
        # Overlayfs cannot rename a directory that a lower layer knows.
        if error.errno != errno.EXDEV:
            raise
    os.mkdir(name, 0o700, dir_fd=target)
    return False


def _delete_paths(target: int, paths: Iterable[bytes]) -> None:
    """Remove relative `paths` below the directory `target`; missing ones are no error.

    A directory goes with everything that appeared in it since: bytecode that was not there when the
    snapshot was made.
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
            continue  # done before, or its directory is none any more
        except OSError as error:
            # A symbolic link took its directory's place: nothing of ours lies behind it.
            if error.errno != errno.ELOOP:
                raise


@contextmanager
def _below(top: int, path: bytes) -> Iterator[int]:
    """The directory at `path` below `top`, opened component by component."""
    fd = os.dup(top)
    try:
        for part in path.split(b"/") if path else ():
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _set_directories(target: int, tree: Tree) -> None:
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


def _set_directory(fd: int, inode: Inode) -> None:
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
            # As an extraction does: what this file system or user may not have is left out.
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EACCES):
                raise


Fill = Callable[[Target, Tree, Path], str]
"""Function that makes a target's tree at a path that does not exist, whole or not at all. Returns
its `fingerprint_of_restored`, or "" if that is not known."""


class Placed(Struct, frozen=True):
    """A target and where it lies on this host."""

    target: Target
    path: Path


def place_targets(manifest: Manifest, root: Path) -> list[Placed]:
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


def check_base(manifest: Manifest, target: Target, scanned: Scan) -> None:
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
    store: Store
    manifest: Manifest
    placed: Sequence[Placed]
    bases: Mapping[bytes, str]
    """Base digests of what lies in the targets; the snapshot fits on it (`check_base`)."""
    checks_store: bool = True
    """Whether to look if the store has all blobs; another node of the start does it if not."""

    def load(self, target: Target) -> tuple[Tree, bytes]:
        """Return a target's tree as a restore may use it, and its encoded form."""
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


def one_directory(manifest: Manifest) -> Target:
    """The target of a snapshot of one whole directory. Raises: InvalidInputError."""
    if len(manifest.targets) != 1 or not manifest.targets[0].whole:
        raise InvalidInputError("--to needs a snapshot of one whole directory")
    return manifest.targets[0]
