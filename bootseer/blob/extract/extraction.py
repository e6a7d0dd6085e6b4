"""Writes a tree to disk: in parallel, with exact attributes, whole or not at all.

Everything is made in a private directory beside the target, relative to open directories, with
O_EXCL and O_NOFOLLOW, symbolic links last; then one rename. Names in a `Tree` cannot contain "/"
or be "..", so nothing can land elsewhere. A process that is killed leaves only the private
directory, which the next extraction to the same target removes. Files are written by processes of
its own (`extract_pool`), since Python's threads would take turns; few of them by this one. The
caller's `read` is called from one other thread.
"""

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import to_builtins
from bootseer.blob.extract.plan import plan_extraction
from bootseer.blob.extract.plan_columns import worker_columns
from bootseer.blob.extract.pool import FILES_MAX
from bootseer.blob.extract.source import ReadSome
from bootseer.blob.extract.tasks import carry_out, make_records, start_pool
from bootseer.blob.extract.writer import Settings, Writer
from bootseer.blob.pack.stat_record import Records
from bootseer.blob.tree import Tree
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NoSpaceError,
    from_oserror,
)
from bootseer.linux.locks import lock_within, try_lock
from bootseer.linux.processes import status_line
from bootseer.linux.removal import empty_directory, remove_tree

_log = logging.getLogger(__name__)

MAX_FILES = 5_000_000
MAX_BYTES = 1024**4
ABANDONED_AFTER_S = 60.0


class ExtractResult(Struct, frozen=True):
    """What has been made. The `skipped` counts are attributes that the file system or our
    privileges did not allow; each kind has been logged once."""

    name_count: int
    content_bytes: int
    skipped_owners: int
    skipped_xattrs: int
    skipped_set_id_bits: int
    records: Records
    """For each name of the tree what lstat shows, as `stat_record` has it, where that was asked
    for; behind them that of the root."""


def extract(
    tree: Tree,
    read: ReadSome,
    target: Path,
    *,
    processes: int | None = None,
    is_verified: bool = False,
    files: Sequence[int] = (),
    owners: bool | None = None,
    allow_devices: bool = False,
    skip_devices: bool = False,
    in_place: bool = False,
    durable: bool = False,
    recorded: bytes = b"",
    max_files: int = MAX_FILES,
    max_bytes: int = MAX_BYTES,
    on_progress: Callable[[int], None] | None = None,
) -> ExtractResult:
    """Make `target` (absent, or an empty directory) hold exactly the tree.

    `processes`: how many write files; None: as many as there are processors, or for a small tree
    only this one. `is_verified`: `read` gives whole frames whose digests have been found right.
    `files`: descriptors of the files that hold the blobs, one for each, on a disk of this node; the
    processes read them by themselves, so that `read` is called only where this one does it alone.
    `owners`: restore user and group; None: when running as root. Without, set-user-ID and
    set-group-ID bits survive only on files that were ours already. `in_place` fills the empty
    directory itself instead of replacing it (a mount point; then a killed process leaves what it
    had made). `durable` flushes to the disk before the target appears. `recorded`: for each name
    of the tree a byte, not 0 where `ExtractResult.records` shall have it; none of them if empty.
    `on_progress` is called with counts of content bytes written.

    On failure nothing remains. Raises: AlreadyExistsError, NoSpaceError, PermissionDeniedError
    (also for device nodes, unless `allow_devices` makes them or `skip_devices` leaves them out, in
    one line of the log), InvalidInputError (beyond a limit), CorruptError, and whatever `read`
    raises.
    """
    if processes is not None and processes < 1:
        raise InvalidInputError(f"processes is {processes}, not 1 or more")
    if len(files) not in (0, len(tree.blobs)):
        raise InvalidInputError(f"{len(files)} files for {len(tree.blobs)} blobs")
    if len(files) > FILES_MAX:
        files = ()
    content_bytes = sum(tree.columns.extent_length)
    # resolve() would follow a final link.
    target = Path(os.path.abspath(target))
    try:
        _check_target(target, min(content_bytes, max_bytes), in_place=in_place)
        root = target if in_place else _private_directory(target)
    except BootseerError:
        raise
    except OSError as error:
        raise from_oserror(error, f"extract to {target}") from error
    done = False
    root_fd = -1
    try:
        root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not in_place:
            lock_within(root_fd, 0)
        settings = Settings(
            owners=os.geteuid() == 0 if owners is None else owners,
            umask=_umask(),
            uid=os.geteuid(),
            gid=_created_gid(root_fd),
            atime_ns=time.time_ns(),
        )
        with ExitStack() as stack:
            # They load what they need while this process plans.
            pool = start_pool(tree, processes, root_fd, files)
            if pool is not None:
                stack.callback(pool.close)
            plan = plan_extraction(
                tree,
                max_files=max_files,
                max_bytes=max_bytes,
                allow_devices=allow_devices,
                skip_devices=skip_devices,
            )
            if plan.devices:
                shown = os.fsdecode(tree.path(tree.columns.name_inode[plan.devices[0]]))
                _log.warning(
                    "%d device nodes are left out, such as %s: only root can make them",
                    len(plan.devices),
                    shown,
                )
            more = {"is_verified": is_verified, "file_count": len(files)}
            columns = worker_columns(tree, plan, to_builtins(settings) | more, recorded)
            records = make_records(tree, recorded, pool)
            writer = Writer(tree, plan, columns, root_fd, settings)
            stack.callback(writer.close)
            writer.make_large_files()
            carry_out(tree, plan, columns, read, pool, writer, root_fd, files, records, on_progress)
            writer.finish()
            if recorded:
                writer.record(recorded, records)
        if durable:
            os.sync()
        if not in_place:
            root.rename(target)
            if durable:
                _sync_directory(target.parent)
        done = True
    except BootseerError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise AlreadyExistsError(f"{target} has been filled by another process") from error
        raise from_oserror(error, f"extract to {target}") from error
    finally:
        if not done:
            try:
                (empty_directory if in_place else remove_tree)(root)
            except OSError as error:
                _log.warning("cannot remove %s, which is not whole: %s", root, error)
        if root_fd >= 0:
            os.close(root_fd)
    return ExtractResult(
        tree.name_count,
        plan.content_bytes,
        writer.skipped.owners,
        writer.skipped.xattrs,
        writer.skipped.set_id_bits,
        records,
    )


def _check_target(target: Path, content_bytes: int, *, in_place: bool) -> None:
    try:
        with os.scandir(target) as entries:
            if next(entries, None) is not None:
                raise AlreadyExistsError(f"{target} is not empty: choose another directory")
        if target.is_symlink():
            raise AlreadyExistsError(f"{target} is a symbolic link: name the directory itself")
    except FileNotFoundError:
        if target.is_symlink():
            raise AlreadyExistsError(f"{target} is a symbolic link to nothing") from None
        if in_place:
            raise
        target.parent.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError as error:
        raise AlreadyExistsError(f"{target} exists and is not a directory") from error
    space = os.statvfs(target if in_place else target.parent)
    if space.f_bavail * space.f_frsize < content_bytes:
        raise NoSpaceError(
            f"{target} needs {content_bytes} bytes and its file system has "
            f"{space.f_bavail * space.f_frsize} left"
        )


def _private_directory(target: Path) -> Path:
    prefix = f".{target.name[:64]}.extracting-"
    _remove_abandoned(target.parent, prefix)
    root = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    # What a parent hands down would falsify what we make: its group, its default ACL.
    root.chmod(0o700)
    for acl in ("system.posix_acl_default", "system.posix_acl_access"):
        try:
            os.removexattr(root, acl)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
    return root


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what killed extractions to this target have left; live ones hold a lock."""
    for name in os.listdir(parent):
        if not name.startswith(prefix):
            continue
        path = parent / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            # A young one may belong to a process that has not locked it yet.
            if try_lock(fd) and time.time() - os.fstat(fd).st_ctime > ABANDONED_AFTER_S:
                _log.warning("removing %s, left by an extraction that was killed", path)
                remove_tree(path)
        except OSError:
            continue
        finally:
            os.close(fd)


def _umask() -> int:
    """Reading it with umask(2) would change it for other threads for a moment."""
    return int(status_line("self", "Umask") or "777", 8)


def _created_gid(directory: int) -> int:
    """The group of what is created in an open directory: ours, but for some mount options."""
    name = ".gid-probe"
    os.mkdir(name, 0o700, dir_fd=directory)
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_gid
    finally:
        os.rmdir(name, dir_fd=directory)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
