"""Extraction of a tree to disk: in parallel, with exact attributes, completely or not at all.

All files are created in a private directory beside the target, relative to open directories, with
O_EXCL and O_NOFOLLOW, symbolic links last; then one rename. Names in a `Tree` cannot contain "/" or
be "..", so no file can be created elsewhere. A killed process leaves only the private directory,
which the next extraction to the same target removes. Worker processes write the files (`pool`),
since Python threads would take turns; this process writes a small tree itself. The caller's `read`
is called from one other thread.
"""

import errno
import logging
import mmap
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bootseer.base.documents import to_builtins
from bootseer.blob.extract.plan import MAX_BYTES, ExtractionPlan, plan_extraction, worker_columns
from bootseer.blob.extract.pool import FILES_MAX, WorkerPool
from bootseer.blob.extract.sections import SETTINGS, Section, write_columns
from bootseer.blob.extract.source import ReadSome, Supply, pieces, read_ahead
from bootseer.blob.extract.worker import DamagedError, ExtractionWorker
from bootseer.blob.extract.writer import ExtractionSettings, TreeWriter
from bootseer.blob.pack.frame_writer import usable_cpus
from bootseer.blob.pack.stat_record import RECORD, Records
from bootseer.blob.tree import Tree
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NoSpaceError,
    UnavailableError,
    from_oserror,
)
from bootseer.linux.locks import lock_within, try_lock
from bootseer.linux.processes import status_line
from bootseer.linux.removal import remove_tree

_log = logging.getLogger(__name__)

ABANDONED_AFTER_S = 60.0
# Size of a tree that one process writes in the time that workers take to start.
_SMALL_NAMES = 1000
_SMALL_BYTES = 16 * 1024 * 1024
_PROCESSES_MAX = 8


def extract(
    tree: Tree,
    read: ReadSome,
    target: Path,
    *,
    processes: int | None = None,
    is_verified: bool = False,
    files: Sequence[int] = (),
    allow_devices: bool = False,
    skip_devices: bool = False,
    recorded: bytes = b"",
    on_progress: Callable[[int], None] | None = None,
) -> Records:
    """Extract the tree to `target`, which must be absent or an empty directory.

    Root restores user and group. Otherwise set-user-ID and set-group-ID bits are restored only on
    files that this user owns in the tree. Attributes that the file system or missing privileges do
    not allow are left out, and each kind is logged once.

    Args:
        tree: The tree.
        read: Function that reads stored bytes of a blob.
        target: Path to create.
        processes: Number of worker processes; None for one per processor, or for a small tree only
            this process.
        is_verified: Whether `read` returns whole frames whose digests were verified.
        files: Descriptors of local files with the blobs, one per blob. The workers read them
            directly, and `read` is called only if there are no workers.
        allow_devices: Whether to create device nodes.
        skip_devices: Whether to leave device nodes out, with one log message.
        recorded: A byte per name of the tree, nonzero if its record is wanted; empty for no
            records.
        on_progress: Function that is called with counts of content bytes written.

    On failure the partial result is removed.

    Returns: Records of lstat (see `stat_record`) of each name in `recorded`, then of the root.

    Raises: AlreadyExistsError, NoSpaceError, PermissionDeniedError (also for a device node that is
    neither allowed nor skipped), InvalidInputError (beyond a limit), CorruptError; as `read`.
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
        _check_target(target, min(content_bytes, MAX_BYTES))
        root = _private_directory(target)
    except BootseerError:
        raise
    except OSError as error:
        raise from_oserror(error, f"extract to {target}") from error
    done = False
    root_fd = -1
    try:
        root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        lock_within(root_fd, 0)
        settings = ExtractionSettings(
            owners=os.geteuid() == 0,
            umask=_umask(),
            uid=os.geteuid(),
            gid=_created_gid(root_fd),
            atime_ns=time.time_ns(),
        )
        with ExitStack() as stack:
            # The workers import their modules while this process plans.
            pool = _start_pool(tree, processes, root_fd, files)
            if pool is not None:
                stack.callback(pool.close)
            plan = plan_extraction(tree, allow_devices=allow_devices, skip_devices=skip_devices)
            if plan.devices:
                shown = os.fsdecode(tree.path(tree.columns.name_inode[plan.devices[0]]))
                _log.warning(
                    "%d device nodes are left out, such as %s: only root can make them",
                    len(plan.devices),
                    shown,
                )
            more = {"is_verified": is_verified, "file_count": len(files)}
            columns = worker_columns(tree, plan, to_builtins(settings) | more, recorded)
            records = _make_records(tree, recorded, pool)
            writer = TreeWriter(tree, plan, columns, root_fd, settings)
            stack.callback(writer.close)
            writer.make_large_files()

            def count(task: int) -> None:
                if on_progress and (written := plan.task_bytes[task]):
                    on_progress(written)

            if pool is None:
                _run_here(tree, plan, columns, read, writer, root_fd, records, count)
            elif plan.task_count:
                _run_in_pool(tree, plan, columns, read, pool, writer, files, count)
            writer.finish()
            if recorded:
                writer.record(recorded, records)
        root.rename(target)
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
                remove_tree(root)
            except OSError as error:
                _log.warning("cannot remove %s, which is not whole: %s", root, error)
        if root_fd >= 0:
            os.close(root_fd)
    return records


def _check_target(target: Path, content_bytes: int) -> None:
    try:
        with os.scandir(target) as entries:
            if next(entries, None) is not None:
                raise AlreadyExistsError(f"{target} is not empty: choose another directory")
        if target.is_symlink():
            raise AlreadyExistsError(f"{target} is a symbolic link: name the directory itself")
    except FileNotFoundError:
        if target.is_symlink():
            raise AlreadyExistsError(f"{target} is a symbolic link to nothing") from None
        target.parent.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError as error:
        raise AlreadyExistsError(f"{target} exists and is not a directory") from error
    space = os.statvfs(target.parent)
    if space.f_bavail * space.f_frsize < content_bytes:
        raise NoSpaceError(
            f"{target} needs {content_bytes} bytes and its file system has "
            f"{space.f_bavail * space.f_frsize} left"
        )


def _private_directory(target: Path) -> Path:
    prefix = f".{target.name[:64]}.extracting-"
    _remove_abandoned(target.parent, prefix)
    root = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    # The parent's set-group-ID bit and default ACL would change the attributes of our files.
    root.chmod(0o700)
    for acl in ("system.posix_acl_default", "system.posix_acl_access"):
        try:
            os.removexattr(root, acl)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
    return root


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove private directories of killed extractions to this target; live ones hold a lock."""
    for name in os.listdir(parent):
        if not name.startswith(prefix):
            continue
        path = parent / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            # A new directory may belong to a process that has not locked it yet.
            if try_lock(fd) and time.time() - os.fstat(fd).st_ctime > ABANDONED_AFTER_S:
                _log.warning("removing %s, left by an extraction that was killed", path)
                remove_tree(path)
        except OSError:
            continue
        finally:
            os.close(fd)


def _umask() -> int:
    # Reading the umask with umask(2) would change it for other threads for a moment.
    return int(status_line("self", "Umask") or "777", 8)


def _created_gid(directory: int) -> int:
    """Return the group of new files in an open directory; some mount options change it."""
    name = ".gid-probe"
    os.mkdir(name, 0o700, dir_fd=directory)
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_gid
    finally:
        os.rmdir(name, dir_fd=directory)


# ---- tasks ---------------------------------------------------------------------------------------


def _start_pool(
    tree: Tree, processes: int | None, root_fd: int, files: Sequence[int]
) -> WorkerPool | None:
    """Start the worker processes for a tree; return None if this process should do the work.

    `processes` and `files`: see `extract`.
    """
    if processes is None:
        content_bytes = sum(tree.columns.extent_length)
        if tree.name_count < _SMALL_NAMES and content_bytes < _SMALL_BYTES:
            return None
        processes = min(usable_cpus(), _PROCESSES_MAX)
    if processes == 1:
        return None
    try:
        return WorkerPool(processes, root_fd, files)
    except OSError as error:
        _log.warning("extracting with one process, since others cannot be started: %s", error)
        return None


def _make_records(tree: Tree, recorded: bytes, pool: WorkerPool | None) -> Records:
    """Return memory for a record of each name and of the root, shared with the workers.

    The memory is empty if no records are requested. Raises: OSError.
    """
    size_bytes = (tree.name_count + 1) * RECORD.size if recorded else 0
    if pool is None or not size_bytes:
        return bytearray(size_bytes)
    os.ftruncate(pool.records_fd, size_bytes)
    return memoryview(mmap.mmap(pool.records_fd, size_bytes))


def _run_here(
    tree: Tree,
    plan: ExtractionPlan,
    columns: Mapping[str, Section],
    read: ReadSome,
    writer: TreeWriter,
    root_fd: int,
    records: Records,
    count: Callable[[int], None],
) -> None:
    bases = columns["blob_base"]

    def stored(offset: int, length: int) -> bytes:
        blob = next(i for i in range(len(tree.blobs)) if offset < bases[i + 1])
        return b"".join(pieces(tree, read, blob, offset - bases[blob], length))

    named = {**columns, "name_list": tree.columns.names}
    worker = ExtractionWorker(named, stored, root_fd, records, looks_ahead=False)
    try:
        for task in plan.tasks():
            writer.make_directories(task)
            try:
                worker.run(task)
            except DamagedError as error:
                raise CorruptError(str(error)) from error
            except BootseerError:
                raise
            except OSError as error:
                raise writer.error_at(worker.current, error) from error
            count(task)
    finally:
        worker.close()


def _run_in_pool(
    tree: Tree,
    plan: ExtractionPlan,
    columns: Mapping[str, Section],
    read: ReadSome,
    pool: WorkerPool,
    writer: TreeWriter,
    files: Sequence[int],
    count: Callable[[int], None],
) -> None:
    # The workers run with umask 0.
    settings = array("q", columns["settings"])
    settings[SETTINGS.index("umask")] = 0
    # Workers read local files directly.
    supply = None if files else Supply(tree, plan, read, columns, pool.stored_fd)
    try:
        write_columns(pool.columns_fd, {**columns, "settings": settings})

        def bring(task: int) -> None:
            writer.make_directories(task)
            if supply is None:
                read_ahead(tree, plan, files, task)
            else:
                supply.fetch(task)

        def on_report(task: int, report: dict[str, Any]) -> None:
            if "damage" in report:
                raise CorruptError(report["damage"])
            if "errno" in report:
                error = OSError(report["errno"], os.strerror(report["errno"]))
                raise writer.error_at(report["name"], error)
            if "unread" in report:
                why = os.strerror(report["unread"])
                raise UnavailableError(f"cannot read a blob's file: {why}")
            if report:
                raise UnavailableError(f"a worker process failed: {report['failure']}")
            if supply is not None:
                supply.release(task)
            count(task)

        # Blobs that are fetched are needed in the order of their streams, so one strand is shared.
        strands = plan.strands(pool.count) if files else [plan.tasks()]
        pool.run(strands, bring, on_report)
    finally:
        # After this, no thread calls `bring`.
        pool.close()
        if supply is not None:
            supply.close()
