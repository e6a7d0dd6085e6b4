"""`bootseer image`: what the store knows of container images. Mounting and running them is in
`image_run_commands`."""

import contextlib
import stat
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from bootseer.blob.tree import Tree
from bootseer.cli.cache_commands import cache
from bootseer.cli.hints_commands import hints
from bootseer.cli.image_run_commands import COMMANDS
from bootseer.cli.image_status import status
from bootseer.cli.output import (
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    json_option,
    open_current_store,
    printable,
)
from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.prefetch.catalogue import find_image, list_images, load_tree
from bootseer.prefetch.records import ImageRecord, LayerRecord
from bootseer.progress import Progress
from bootseer.registry.reference import parse_reference
from bootseer.store import Store, open_store

_SHORT_DIGEST = 19
"""sha256: and twelve digits, as Docker shows them."""


@click.group()
def image() -> None:
    """Container images: index once, then mount and run lazily on any node."""


for _command in (*COMMANDS, status, cache, hints):
    image.add_command(_command)


@image.command(epilog="Example: bootseer image index oci:./build:v1 --name train:v1")
@click.argument("source", metavar="SRC")
@click.option("--name", metavar="REF", help="Catalogue it under this name.")
@click.option(
    "--to",
    "target",
    type=click.Choice(("store", "registry")),
    default="store",
    show_default=True,
    help="Where to: the store, or beside the image in its registry.",
)
@json_option
def index(source: str, name: str | None, target: str, as_json: bool) -> None:
    """Make the image SRC mountable from the store.

    SRC is a directory with a root file system, an OCI layout (DIR or oci:DIR[:TAG]), an archive
    of docker save (FILE or docker-archive:FILE[:TAG]), docker://NAME for the Docker engine, or
    registry://HOST/NAME[:TAG|@DIGEST]. Layers that the store has already are not read again.

    With --to registry all is pushed beside the image, as artifacts that refer to it; the store is
    then oci://HOST/NAME@DIGEST, as is printed.
    """
    # Imported late: `image run` must not pay for what only indexing needs.
    from bootseer.prefetch.indexing import index_image
    from bootseer.prefetch.sources import open_source

    settings = current_settings()
    if name == "":
        raise InvalidInputError("--name is empty; leave it out for the name of the source")
    _refuse_empty(Path(source))
    started_s = time.monotonic()
    work_dir = settings.cache_dir / "tmp"
    lock = threading.Lock()
    reused: list[LayerRecord] = []
    written: list[LayerRecord] = []

    def on_layer(record: LayerRecord, was_there: bool) -> None:
        with lock:
            (reused if was_there else written).append(record)

    with (
        open_source(
            source,
            work_dir,
            registry_hosts_dir=settings.registry_hosts_dir,
            deadline_s=settings.deadline_s,
        ) as opened,
        _open_target(target, source, opened.manifest_digest) as store,
    ):
        sizes = [layer.size_bytes for layer in opened.layers]
        total_bytes = sum(size or 0 for size in sizes) if None not in sizes else None
        with Progress("indexing", total_bytes) as progress:
            record = index_image(
                opened,
                store,
                work_dir,
                reference=name,
                on_progress=progress.advance,
                on_layer=on_layer,
            )
    seconds = time.monotonic() - started_s
    blob_bytes = sum(layer.blob_size_bytes for layer in record.layers)
    if as_json:
        emit_json(
            {
                **_summary(record),
                "layers_reused": len(reused),
                "layers_written": len(written),
                "bytes_written": sum(layer.blob_size_bytes for layer in written),
                "seconds": round(seconds, 3),
                "store": store.url,
            }
        )
        return
    if target == "registry":
        click.echo(f"use it with BOOTSEER_STORE={store.url}", err=True)
    click.echo(
        f"{record.reference}: {record.file_count} files, {human_bytes(record.size_bytes)} in "
        f"{human_bytes(blob_bytes)} of blobs; {len(reused)} of {len(reused) + len(written)} layers "
        f"were there; {seconds:.1f} s",
        err=True,
    )
    click.echo(record.index_digest)


def _open_target(target: str, source: str, manifest_digest: str | None) -> Store:
    """The store that `--to` names."""
    if target == "store":
        return open_current_store()
    if manifest_digest is None:
        raise InvalidInputError(
            f"{source} is not in a registry; --to registry needs registry://HOST/NAME"
        )
    settings = current_settings()
    reference = parse_reference(source.partition("://")[2])
    url = f"oci://{reference.host}/{reference.repository}@{manifest_digest}"
    return open_store(url, deadline_s=settings.deadline_s)


def _refuse_empty(source: Path) -> None:
    """An empty directory is a tree, too, but nobody means to start a job in it."""
    with contextlib.suppress(OSError):
        if source.is_dir() and next(source.iterdir(), None) is None:
            raise InvalidInputError(f"{source} is empty: there is no root file system in it")


@image.command("list", epilog="Example: bootseer image list --json")
@json_option
def list_command(as_json: bool) -> None:
    """List the images that the store has."""
    with open_current_store() as store:
        records = list(list_images(store))
    if as_json:
        emit_json([_summary(record) for record in records])
        return
    emit_table(
        ("image", "index", "files", "size", "blobs", "indexed"),
        (
            (
                record.reference,
                record.index_digest[:_SHORT_DIGEST],
                record.file_count,
                human_bytes(record.size_bytes),
                human_bytes(sum(layer.blob_size_bytes for layer in record.layers)),
                _when(record),
            )
            for record in records
        ),
    )


@image.command(epilog="Example: bootseer image show train:v1")
@click.argument("reference", metavar="REF")
@json_option
def show(reference: str, as_json: bool) -> None:
    """Show an image's layers, configuration and size.

    REF is a name, or at least six digits of the index's digest.
    """
    with open_current_store() as store:
        record = find_image(store, reference)
    if as_json:
        emit_json(_summary(record))
        return
    config = record.config
    emit_table(
        ("", ""),
        (
            ("image", record.reference),
            ("identity", record.identity),
            ("index", record.index_digest),
            ("indexed", _when(record)),
            ("files", record.file_count),
            ("size", human_bytes(record.size_bytes)),
            ("entrypoint", " ".join(config.entrypoint)),
            ("command", " ".join(config.cmd)),
            ("working directory", config.working_dir),
            ("user", config.user),
            *(("environment", variable) for variable in config.env),
        ),
    )
    emit_table(
        ("layer", "blob", "size"),
        (
            (
                layer.digest[:_SHORT_DIGEST],
                layer.blob_digest[:_SHORT_DIGEST],
                human_bytes(layer.blob_size_bytes),
            )
            for layer in record.layers
        ),
    )


@image.command(epilog="Example: bootseer image ls train:v1 usr/lib")
@click.argument("reference", metavar="REF")
@click.argument("path", default="/")
@json_option
def ls(reference: str, path: str, as_json: bool) -> None:
    """List a directory of an image; PATH is within the image, `/` when left out."""
    settings = current_settings()
    with open_current_store() as store:
        record = find_image(store, reference)
        tree = load_tree(store, record, settings.cache_dir)
    wanted = b"/".join(p for p in path.encode("utf-8", "surrogateescape").split(b"/") if p)
    number = tree.resolve(wanted)
    if number is None:
        raise NotFoundError(f"the image {record.reference} has no file {path}")
    if stat.S_ISDIR(tree.mode(number)):
        entries = [(entry.name, entry.inode) for entry in tree.children(number)]
    else:
        entries = [(wanted.rpartition(b"/")[2], number)]
    if as_json:
        emit_json([_entry(tree, name, inode) for name, inode in entries])
        return
    # Not a table: names are printed as the bytes they are, for pipes; not to a terminal, which
    # would obey what an image calls its files.
    on_terminal = sys.stdout.isatty()
    for name, number in entries:
        inode = tree.inode(number)
        target = b" -> " + inode.link_target if inode.link_target else b""
        line = (
            f"{stat.filemode(inode.mode)} {tree.link_count(number):3} {inode.uid:6} "
            f"{inode.gid:6} {inode.size_bytes:12} {_time(inode.mtime_ns)} "
        )
        shown = name + target
        if on_terminal:
            shown = printable(shown.decode("utf-8", "surrogateescape")).encode()
        sys.stdout.buffer.write(line.encode() + shown + b"\n")


def _summary(record: ImageRecord) -> dict[str, object]:
    """What `--json` shows of an image. Additive: keys are never removed or renamed."""
    config = record.config
    return {
        "reference": record.reference,
        "identity": record.identity,
        "index_digest": record.index_digest,
        "index_bytes": record.index_size_bytes,
        "files": record.file_count,
        "bytes": record.size_bytes,
        "blob_bytes": sum(layer.blob_size_bytes for layer in record.layers),
        "created_ns": record.created_ns,
        "config": {
            "env": config.env,
            "entrypoint": config.entrypoint,
            "cmd": config.cmd,
            "working_dir": config.working_dir,
            "user": config.user,
            "architecture": config.architecture,
        },
        "layers": [
            {
                "digest": layer.digest,
                "blob_digest": layer.blob_digest,
                "blob_bytes": layer.blob_size_bytes,
            }
            for layer in record.layers
        ],
    }


def _entry(tree: Tree, name: bytes, number: int) -> dict[str, object]:
    inode = tree.inode(number)
    return {
        "name": name.decode("utf-8", "surrogateescape"),
        "mode": stat.filemode(inode.mode),
        "links": tree.link_count(number),
        "uid": inode.uid,
        "gid": inode.gid,
        "bytes": inode.size_bytes,
        "mtime_ns": inode.mtime_ns,
        "target": inode.link_target.decode("utf-8", "surrogateescape") or None,
        "digest": f"blake3:{inode.digest.hex()}" if inode.digest else None,
    }


def _when(record: ImageRecord) -> str:
    return _time(record.created_ns)


def _time(time_ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):
        return "-"
