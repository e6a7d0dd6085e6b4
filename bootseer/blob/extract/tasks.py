"""Carries out the tasks of an extraction: in worker processes, or for a small tree in this one."""

import logging
import mmap
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bootseer.blob.extract.plan import Plan
from bootseer.blob.extract.pool import Pool
from bootseer.blob.extract.sections import SETTINGS, Section, write_columns
from bootseer.blob.extract.source import ReadSome, Supply, pieces, read_ahead
from bootseer.blob.extract.worker import DamagedError, Worker
from bootseer.blob.extract.writer import Writer
from bootseer.blob.pack.frame_writer import usable_cpus
from bootseer.blob.pack.stat_record import RECORD, Records
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, UnavailableError

_log = logging.getLogger(__name__)

# What one process writes in the time in which others would start.
_SMALL_NAMES = 1000
_SMALL_BYTES = 16 * 1024 * 1024
_PROCESSES_MAX = 8


def start_pool(
    tree: Tree, processes: int | None, root_fd: int, files: Sequence[int]
) -> Pool | None:
    """Processes to write the tree's files; None: this one does it. `files`: see `extract`."""
    if processes is None:
        content_bytes = sum(tree.columns.extent_length)
        if tree.name_count < _SMALL_NAMES and content_bytes < _SMALL_BYTES:
            return None
        processes = min(usable_cpus(), _PROCESSES_MAX)
    if processes == 1:
        return None
    try:
        return Pool(processes, root_fd, files)
    except OSError as error:
        _log.warning("writing files with one process, since others cannot be started: %s", error)
        return None


def make_records(tree: Tree, recorded: bytes, pool: Pool | None) -> Records:
    """Room for a record of each name, and behind them of the root, which the pool's processes have,
    too; none if nothing is recorded. Raises: OSError."""
    size_bytes = (tree.name_count + 1) * RECORD.size if recorded else 0
    if pool is None or not size_bytes:
        return bytearray(size_bytes)
    os.ftruncate(pool.records_fd, size_bytes)
    return memoryview(mmap.mmap(pool.records_fd, size_bytes))


def carry_out(
    tree: Tree,
    plan: Plan,
    columns: Mapping[str, Section],
    read: ReadSome,
    pool: Pool | None,
    writer: Writer,
    root_fd: int,
    files: Sequence[int],
    records: Records,
    on_progress: Callable[[int], None] | None,
) -> None:
    """All tasks, each once; `on_progress` gets content bytes. `records`: see `make_records`.
    Raises: BootseerError."""

    def count(task: int) -> None:
        if on_progress:
            written = plan.task_bytes[task]
            if written:
                on_progress(written)

    if pool is None:
        _alone(tree, plan, columns, read, writer, root_fd, records, count)
    elif plan.task_count:
        _together(tree, plan, columns, read, pool, writer, files, count)


def _alone(
    tree: Tree,
    plan: Plan,
    columns: Mapping[str, Section],
    read: ReadSome,
    writer: Writer,
    root_fd: int,
    records: Records,
    count: Callable[[int], None],
) -> None:
    bases = columns["blob_base"]

    def stored(offset: int, length: int) -> bytes:
        blob = next(i for i in range(len(tree.blobs)) if offset < bases[i + 1])
        return b"".join(pieces(tree, read, blob, offset - bases[blob], length))

    named = {**columns, "name_list": tree.columns.names}
    worker = Worker(named, stored, root_fd, records, looks_ahead=False)
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


def _together(
    tree: Tree,
    plan: Plan,
    columns: Mapping[str, Section],
    read: ReadSome,
    pool: Pool,
    writer: Writer,
    files: Sequence[int],
    count: Callable[[int], None],
) -> None:
    # A worker creates with exactly the mode that it is told.
    settings = array("q", columns["settings"])
    settings[SETTINGS.index("umask")] = 0
    # Of files of this node the workers read by themselves what they need.
    supply = None if files else Supply(tree, plan, read, columns, pool.stored_fd)
    try:
        write_columns(pool.columns_fd, {**columns, "settings": settings})

        def bring(task: int) -> None:
            writer.make_directories(task)
            if supply is None:
                read_ahead(tree, plan, files, task)
            else:
                supply.have(task)

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
                raise UnavailableError(f"a process that writes files failed: {report['failure']}")
            if supply is not None:
                supply.release(task)
            count(task)

        # What is sent for comes in one order.
        strands = plan.strands(pool.count) if files else [plan.tasks()]
        pool.run(strands, bring, on_report)
    finally:
        # No thread brings anything any more.
        pool.close()
        if supply is not None:
            supply.close()
