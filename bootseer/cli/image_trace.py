"""`bootseer image trace`: the reads of an image's starts, recorded or listed by other tools."""

import sys
import time
from pathlib import Path

import click
from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.cli.command_tree import command, current_settings
from bootseer.cli.options import open_current_store
from bootseer.cli.show import document_of, emit_records, shows
from bootseer.cli.text import human_bytes, print_stderr, say
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror


class ListedTrace(Struct):
    """Recorded trace of a workload."""

    id: str
    workload: str
    node: str
    """Node that recorded it."""
    started_ns: int
    ended: str
    """End of the record: `ready`, `window`, `unmount`, ..."""
    file_count: int
    access_count: int
    read_bytes: int
    bundle: str | None
    """Digest of the workload's bundle."""
    bundle_size_bytes: int | None


class TraceAccess(Struct):
    """Read of a start."""

    after_s: float
    """Seconds since the start."""
    is_ahead: bool
    """Whether the server handed the bytes to the kernel unasked, so that the job may not have
    wanted them."""
    offset: int
    length: int
    path: str


class ShownTrace(Struct):
    """Recorded trace, with every read."""

    id: str
    index: str
    """Digest of the image's index."""
    workload: str
    node: str
    started_ns: int
    ended: str
    readahead_bytes: int
    """Read-ahead of the kernel during the record."""
    accesses: list[TraceAccess]


class ImportedTrace(Struct):
    """List of another tool that was made a trace."""

    index_digest: str
    """Digest of the image's index."""
    workload: str
    file_count: int
    """Number of files of the list that the image has."""
    range_count: int
    content_bytes: int
    """Bytes of these files and ranges."""
    unknown_count: int
    """Number of lines that name no file of the image."""
    bundle: str | None
    """Digest of the new bundle; null where the old one holds all this, or another node makes
    one."""
    bundle_size_bytes: int | None


class ExportedRange(Struct):
    """Range of a file that starts read."""

    path: str
    """Path; ranges are in the order of use."""
    offset: int
    """Offset in whole pages."""
    length: int
    """Length in whole pages; may reach beyond the file's end."""
    digest: str | None
    """Digest of the file's content, hex digits."""
    trace_count: int
    """Starts that read it."""


class ExportedHotSet(Struct):
    """Hot set of an image: the reads of its starts, merged."""

    index_digest: str
    """Digest of the image's index."""
    workload: str
    trace_count: int
    """Number of starts that it was made from."""
    ranges: list[ExportedRange]


@command("image trace list", epilog="Example: bootseer image trace list train:v1")
@click.argument("reference", metavar="REF")
@shows(
    list[ListedTrace],
    *("trace=id", "workload", "node", "started_ns", "ended by=ended", "files=file_count"),
    *("reads=access_count", "read_bytes", "bundle=bundle_size_bytes"),
)
def image_trace_list(reference: str) -> list[ListedTrace]:
    """List the traces of the image REF, of all workloads, and the bundles made from them."""
    from bootseer.prefetch.bundle import hot_store
    from bootseer.prefetch.index.catalogue import find_image

    found: list[ListedTrace] = []
    with open_current_store() as store:
        index = find_image(store, reference).index_digest
        for workload in hot_store.workloads(store, index):
            pointer = hot_store.read_pointer(store, index, workload)
            for key in hot_store.trace_keys(store, index, workload):
                one = hot_store.read_trace(store, key)
                found.append(
                    document_of(
                        ListedTrace,
                        one,
                        id=key.rpartition("/")[2],
                        workload=workload,
                        file_count=len(one.files),
                        access_count=len(one.accesses),
                        read_bytes=sum(access.length for access in one.accesses),
                        bundle=pointer.bundle_digest if pointer else None,
                        bundle_size_bytes=pointer.size_bytes if pointer else None,
                    )
                )
    return found


def _show_trace(found: ShownTrace) -> None:
    emit_records(found.accesses, "path", "after_s", "offset", "length")


@command("image trace show", epilog="Example: bootseer image trace show train:v1 --workload train")
@click.argument("reference", metavar="REF")
@click.argument("identity", metavar="[TRACE]", required=False)
@shows(ShownTrace, text=_show_trace)
def image_trace_show(reference: str, identity: str | None) -> ShownTrace:
    """Show the reads of a start of the image REF, in order.

    The trace is the newest one, or the one whose name begins with TRACE.
    """
    from bootseer.prefetch.bundle import hot_store
    from bootseer.prefetch.index.catalogue import find_image

    workload = current_settings().workload
    with open_current_store() as store:
        index = find_image(store, reference).index_digest
        keys = hot_store.trace_keys(store, index, workload)
        fitting = [key for key in keys if key.rpartition("/")[2].startswith(identity or "")]
        if not fitting:
            raise NotFoundError(
                f"{reference} has no such trace of the workload {workload!r}; see "
                "`bootseer image trace list`"
            )
        if identity and len(fitting) > 1:
            raise InvalidInputError(f"{identity} fits {len(fitting)} traces; write more of it")
        found = hot_store.read_trace(store, fitting[0])
    return document_of(
        ShownTrace,
        found,
        id=fitting[0].rpartition("/")[2],
        index=found.index_digest,
        accesses=[
            TraceAccess(
                access.after_ns / 1e9,
                access.is_preloaded,
                access.offset,
                access.length,
                found.files[access.file].path.decode("utf-8", "surrogateescape"),
            )
            for access in found.accesses
        ],
    )


def _show_imported(done: ImportedTrace) -> None:
    print_stderr(
        f"{done.file_count} files, {human_bytes(done.content_bytes)}; "
        f"{done.unknown_count} lines name nothing in the image"
    )
    if done.bundle is None:
        print_stderr(
            "the bundle stays as it is: it holds all these files, or another process is making a "
            "new one; in that case, import the list again later"
        )
    else:
        click.echo(done.bundle)


@command("image trace import", epilog="Example: bootseer image trace import train:v1 files.txt")
@click.argument("reference", metavar="REF")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@shows(ImportedTrace, text=_show_imported)
def image_trace_import(reference: str, file: Path) -> ImportedTrace:
    """Import the list of files in FILE as a trace of the image REF, and make a bundle of it.

    Each line of FILE (- for standard input) names a file of the image, or a range of a file (path,
    offset and length, separated by tabs or spaces), in the order of use. FILE may also be a record
    of eStargz's optimizer (JSON lines with "path"). Lines that name nothing in the image are
    counted.

    A list counts as one start. The bundle is made of all recorded starts of the workload; if there
    are three or more, ranges that only one of them read are left out.
    """
    from bootseer.prefetch.index.catalogue import find_image, load_tree
    from bootseer.prefetch.publish.bundle_build import add_trace
    from bootseer.prefetch.record import hints as hint_lists

    settings = current_settings()
    listed = hint_lists.parse(_read(file, hint_lists.HINTS_BYTES_MAX + 1))
    with open_current_store() as store:
        record = find_image(store, reference)
        tree = load_tree(store, record, settings.cache_dir, run_dir=settings.run_dir)
        hinted = hint_lists.trace_of(
            listed,
            tree,
            index_digest=record.index_digest,
            workload=settings.workload,
            node=settings.node,
            started_ns=time.time_ns(),
        )
        if not hinted.trace.accesses:
            raise InvalidInputError(
                f"none of the {len(listed)} lines of the list names content of the image "
                f"{record.reference}; paths are those inside the image"
            )
        pointer = add_trace(settings, store, tree, hinted.trace, record.reference)
    return document_of(
        ImportedTrace,
        hinted,
        index_digest=record.index_digest,
        workload=settings.workload,
        file_count=len(hinted.trace.files),
        range_count=len(hinted.trace.accesses),
        bundle=pointer.bundle_digest if pointer else None,
        bundle_size_bytes=pointer.size_bytes if pointer else None,
    )


def _read(path: Path, size_bytes: int) -> bytes:
    try:
        with click.open_file(path, "rb") as file:
            data: bytes = file.read(size_bytes)
            return data
    except OSError as error:
        raise from_oserror(error, f"read the list {path}") from error


def _write_lines(found: ExportedHotSet) -> None:
    from bootseer.prefetch.record.hints import plain_lines

    ranges = (
        (one.path.encode("utf-8", "surrogateescape"), one.offset, one.length)
        for one in found.ranges
    )
    sys.stdout.buffer.writelines(plain_lines(ranges))


@command("image trace export", epilog="Example: bootseer image trace export train:v1")
@click.argument("reference", metavar="REF")
@shows(ExportedHotSet, text=_write_lines)
def image_trace_export(reference: str) -> ExportedHotSet:
    """Print the reads of starts of the image REF, in the order of use, as `import` takes them.

    Each line: path, offset and length, separated by tabs, in whole pages of 4096 bytes. Names with
    a tab or a line feed are only in the JSON.
    """
    from bootseer.prefetch.bundle import hot_store
    from bootseer.prefetch.index.catalogue import find_image

    workload = current_settings().workload
    with open_current_store() as store:
        record = find_image(store, reference)
        pointer = hot_store.read_pointer(store, record.index_digest, workload)
        if pointer is None:
            raise NotFoundError(
                f"the image {record.reference} has no hot set for the workload {workload!r} yet; "
                "one is made of what a first start reads"
            )
        hot = hot_store.read_hotset(store, pointer)
    if pointer.scattered:
        names = ", ".join(map(quoted, pointer.scattered))
        say(f"each start reads other bytes of {names}, which are therefore not hot")
    return document_of(
        ExportedHotSet,
        hot,
        index_digest=record.index_digest,
        workload=workload,
        ranges=[
            document_of(
                ExportedRange,
                one,
                path=one.path.decode("utf-8", "surrogateescape"),
                digest=one.digest.hex() or None,
            )
            for one in hot.ranges
        ],
    )
