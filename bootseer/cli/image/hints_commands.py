"""`bootseer image hints`: what starts of an image read, from and for other tools."""

import sys
import time
from pathlib import Path

import click

from bootseer.base.shown import quoted
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import (
    current_settings,
    emit_json,
    human_bytes,
    json_option,
    open_current_store,
    say,
)
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror


@click.group(cls=LazyGroup)
def hints() -> None:
    """What starts of an image read, as lists from and for other tools."""


@hints.command("import", epilog="Example: bootseer image hints import train:v1 files.txt")
@click.argument("reference", metavar="REF")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--workload", metavar="NAME", help="Of this workload, not of the settings' one.")
@json_option
def import_command(reference: str, file: Path, workload: str | None, as_json: bool) -> None:
    """Take what FILE lists for what a start of the image REF reads, and make a bundle of it.

    FILE (- for standard input) names a file of the image on each line, in the order of use, or a
    range of one: path, offset and length, separated by tabs or spaces. Or it is what eStargz's
    optimizer records (JSON lines with "path"). What the image does not have is counted.

    A list counts as one start. Where the workload has recorded others, the bundle is made of all;
    of three and more, what only one of them read is left out.
    """
    from bootseer.prefetch.index.catalogue import find_image, load_tree
    from bootseer.prefetch.publish.hot_build import add_trace
    from bootseer.prefetch.record import hints as hint_lists

    settings = current_settings()
    workload = workload or settings.workload
    listed = hint_lists.parse(_read(file, hint_lists.HINTS_BYTES_MAX + 1))
    with open_current_store() as store:
        record = find_image(store, reference)
        tree = load_tree(store, record, settings.cache_dir, run_dir=settings.run_dir)
        hinted = hint_lists.trace_of(
            listed,
            tree,
            index_digest=record.index_digest,
            workload=workload,
            node=settings.node,
            started_ns=time.time_ns(),
        )
        if not hinted.trace.accesses:
            raise InvalidInputError(
                f"of the {len(listed)} lines of the list not one names content of the image "
                f"{record.reference}; paths are those inside the image"
            )
        pointer = add_trace(settings, store, tree, hinted.trace, record.reference)
    if as_json:
        emit_json(
            {
                "index_digest": record.index_digest,
                "workload": workload,
                "file_count": len(hinted.trace.files),
                "range_count": len(hinted.trace.accesses),
                "content_bytes": hinted.content_bytes,
                "unknown_count": hinted.unknown_count,
                "bundle": pointer.bundle_digest if pointer else None,
                "bundle_size_bytes": pointer.size_bytes if pointer else None,
            }
        )
        return
    click.echo(
        f"{len(hinted.trace.files)} files, {human_bytes(hinted.content_bytes)}; "
        f"{hinted.unknown_count} lines name nothing in the image",
        err=True,
    )
    if pointer is None:
        click.echo(
            "the bundle is left as it is: it holds all this, or is being made; then import again",
            err=True,
        )
    else:
        click.echo(pointer.bundle_digest)


def _read(path: Path, size_bytes: int) -> bytes:
    try:
        with click.open_file(path, "rb") as file:
            data: bytes = file.read(size_bytes)
            return data
    except OSError as error:
        raise from_oserror(error, f"read the list {path}") from error


@hints.command(epilog="Example: bootseer image hints export train:v1")
@click.argument("reference", metavar="REF")
@click.option("--workload", metavar="NAME", help="Of this workload, not of the settings' one.")
@json_option
def export(reference: str, workload: str | None, as_json: bool) -> None:
    """Print what starts of the image REF read, in the order of use, as `hints import` takes it.

    Each line: path, offset and length, separated by tabs, in whole pages of 4096 bytes. Names with
    a tab or a line feed are only in the JSON.
    """
    from bootseer.prefetch.bundle import hot_store
    from bootseer.prefetch.index.catalogue import find_image
    from bootseer.prefetch.record.hints import plain_lines

    workload = workload or current_settings().workload
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
    if not as_json:
        sys.stdout.buffer.writelines(plain_lines(hot))
        return
    emit_json(
        {
            "index_digest": record.index_digest,
            "workload": workload,
            "trace_count": hot.trace_count,
            "ranges": [
                {
                    "path": one.path.decode("utf-8", "surrogateescape"),
                    "offset": one.offset,
                    "length": one.length,
                    "digest": one.digest.hex() or None,
                    "trace_count": one.trace_count,
                }
                for one in hot.ranges
            ],
        }
    )
