"""`bootseer image index`: makes an image mountable from a store."""

import contextlib
import threading
import time
from pathlib import Path

import click

from bootseer.base.progress import Progress
from bootseer.cli.image.image_commands import image_summary
from bootseer.cli.output import (
    current_settings,
    emit_json,
    human_bytes,
    json_option,
    open_current_store,
)
from bootseer.errors import InvalidInputError
from bootseer.prefetch.index.records import LayerRecord
from bootseer.registry.reference import parse_reference
from bootseer.store import Store, open_store


@click.command(epilog="Example: bootseer image index oci:./build:v1 --name train:v1")
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
@click.option(
    "--verify",
    is_flag=True,
    help="Read the layers that are there already, and make damaged ones anew.",
)
@json_option
def index(source: str, name: str | None, target: str, verify: bool, as_json: bool) -> None:
    """Make the image SRC mountable from the store.

    SRC is a directory with a root file system, an OCI layout (DIR or oci:DIR[:TAG]), an archive
    of docker save (FILE or docker-archive:FILE[:TAG]), docker://NAME for the Docker engine, or
    registry://HOST/NAME[:TAG|@DIGEST]. Layers that the store has already are not read again.

    With --to registry all is pushed beside the image, as artifacts that refer to it; the store is
    then oci://HOST/NAME@DIGEST, as is printed.
    """
    # Imported late: `image mount` must not pay for what only indexing needs.
    from bootseer.prefetch.publish.indexing import index_image
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
            # Under another name nobody would know the registry.
            copies=settings.copy_layers or name is not None,
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
                verify=verify,
            )
    seconds = time.monotonic() - started_s
    blob_bytes = sum(layer.blob_size_bytes for layer in record.layers)
    if as_json:
        emit_json(
            {
                **image_summary(record),
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
