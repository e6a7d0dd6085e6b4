"""`bootseer image list | show | ls`: what the store knows of container images; and the group of all
commands on images."""

import stat
import sys

import click

from bootseer.blob.tree import Tree
from bootseer.cli.image.mount_commands import COMMANDS
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import (
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    human_time,
    json_option,
    open_current_store,
    printable,
)
from bootseer.errors import NotFoundError
from bootseer.prefetch.index.catalogue import find_image, list_images, load_tree
from bootseer.prefetch.index.records import ImageRecord

_SHORT_DIGEST = 19
"""sha256: and twelve digits, as Docker shows them."""


_ELSEWHERE = {
    "cache": ("image.cache_commands", "cache"),
    "hints": ("image.hints_commands", "hints"),
    "index": ("image.image_index_command", "index"),
    "trace": ("image.image_trace_commands", "trace"),
}


@click.group(cls=LazyGroup, elsewhere=_ELSEWHERE)
def image() -> None:
    """Container images: index once, then mount and run lazily on any node."""


for _command in COMMANDS:
    image.add_command(_command)


@image.command("list", epilog="Example: bootseer image list --json")
@json_option
def list_command(as_json: bool) -> None:
    """List the images that the store has."""
    with open_current_store() as store:
        records = list(list_images(store))
    if as_json:
        emit_json([image_summary(record) for record in records])
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
                human_time(record.created_ns),
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
        emit_json(image_summary(record))
        return
    config = record.config
    emit_table(
        ("", ""),
        (
            ("image", record.reference),
            ("identity", record.identity),
            ("index", record.index_digest),
            ("indexed", human_time(record.created_ns)),
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
        tree = load_tree(store, record, settings.cache_dir, run_dir=settings.run_dir)
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
            f"{inode.gid:6} {inode.size_bytes:12} {human_time(inode.mtime_ns)} "
        )
        shown = name + target
        if on_terminal:
            shown = printable(shown.decode("utf-8", "surrogateescape")).encode()
        sys.stdout.buffer.write(line.encode() + shown + b"\n")


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


def image_summary(record: ImageRecord) -> dict[str, object]:
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
