"""`bootseer image`: container images in the store and on this node."""

import contextlib
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import click
from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.cli.command_tree import command, current_settings, settings_without_fanout
from bootseer.cli.options import SIZE, open_current_store
from bootseer.cli.show import document_of, emit_records, emit_table, shows
from bootseer.cli.text import human_bytes, human_time, print_stderr, printable
from bootseer.errors import EXIT_OK, InvalidInputError, NotFoundError
from bootseer.prefetch.index.catalogue import find_image, list_images, load_tree
from bootseer.prefetch.index.records import ImageConfig, ImageRecord, LayerRecord
from bootseer.settings.config import Settings
from bootseer.store import Store, open_store

# ---- documents --------------------------------------------------------------------------------


class ShownLayer(Struct):
    """Layer of an image."""

    digest: str
    """Digest in the image."""
    blob_digest: str
    """Digest in the store."""
    blob_bytes: int


class ShownImage(Struct, kw_only=True):
    """Image in the store."""

    reference: str
    """Name in the store."""
    identity: str
    """Digest of the image's configuration; of the tree where it has none."""
    index_digest: str
    """Digest of the tree, by which a launch pins the image."""
    index_bytes: int
    """Size of the index."""
    files: int
    """Number of names that are no directories."""
    bytes: int
    """Size of all files."""
    blob_bytes: int
    """Size of all blobs."""
    created_ns: int
    """Time of the indexing."""
    config: ImageConfig
    layers: list[ShownLayer]


class IndexedImage(ShownImage, kw_only=True):
    """Image that was indexed just now."""

    layers_reused: int
    """Number of layers that the store had."""
    layers_written: int
    """Number of layers that were packed."""
    bytes_written: int
    """Bytes of blobs that were written for them."""
    seconds: float
    """Duration of the command."""
    store: str
    """URL of the store that has it now."""


class ImageFile(Struct):
    """Name in an image."""

    name: str
    mode: str
    """Mode as `ls -l` shows it."""
    links: int
    uid: int
    gid: int
    bytes: int
    mtime_ns: int
    target: str | None
    """Target of a symbolic link."""
    digest: str | None
    """Digest of a file's contents."""


class NewImageMount(Struct):
    """Image that was mounted."""

    directory: str
    id: str
    """Id of the mount: names its folder and log in the run directory."""
    reference: str
    index_digest: str


class FetchedImage(Struct):
    """Image that is in the node's cache in full."""

    reference: str
    index_digest: str
    blob_bytes: int
    """Size of all blobs, uncompressed, which are here now."""


class ListedStream(Struct):
    """Uncompressed stream of a layer in the node's cache."""

    digest: str
    """Name of the layer's uncompressed stream: `frames:`, by its frames; `sha256:` or
    `blake3:`, pulled whole; `own:`, sent by a registry in place of a lost blob, for one image;
    `bundle:`, what a bundle brought, for one image."""
    size_bytes: int
    """Size on the disk."""
    stream_bytes: int | None
    """Size of the whole stream, if known."""
    present_bytes: int | None
    """Bytes of the stream that are here."""
    used_ns: int
    """Time at which it was last opened."""
    is_used: bool
    """Whether a process of this node uses it now."""


class ImageCache(Struct):
    """Cache of images on this node."""

    limit_bytes: int
    """Setting `cache_limit`."""
    size_bytes: int
    """Size on the disk of everything that counts towards the limit."""
    folders: dict[str, int]
    """Bytes on the disk, by folder of the cache."""
    damaged_bytes: int | None
    """Damaged bytes that `--verify` found; null without it."""
    streams: list[ListedStream]


def _image(record: ImageRecord) -> ShownImage:
    return document_of(
        ShownImage,
        record,
        index_bytes=record.index_size_bytes,
        files=record.file_count,
        bytes=record.size_bytes,
        blob_bytes=sum(layer.blob_size_bytes for layer in record.layers),
        layers=[
            ShownLayer(one.digest, one.blob_digest, one.blob_size_bytes) for one in record.layers
        ],
    )


# ---- the store --------------------------------------------------------------------------------


def _show_indexed(done: IndexedImage) -> None:
    if done.store.startswith("oci:"):
        print_stderr(f"use it with BOOTSEER_STORE={done.store}")
    print_stderr(
        f"{done.reference}: {done.files} files, {human_bytes(done.bytes)} in "
        f"{human_bytes(done.blob_bytes)} of blobs; {done.layers_reused} of "
        f"{done.layers_reused + done.layers_written} layers were there; {done.seconds:.1f} s"
    )
    click.echo(done.index_digest)


@command("image index", epilog="Example: bootseer image index oci:./build:v1 --name train:v1")
@click.argument("source", metavar="SRC")
@click.option("--name", metavar="REF", help="Name of the image in the store.")
@click.option(
    "--to",
    "target",
    type=click.Choice(("store", "registry")),
    default="store",
    show_default=True,
    help="Destination: the store, or beside the image in its registry.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read the layers that exist already, and replace damaged ones.",
)
@shows(IndexedImage, text=_show_indexed)
def image_index(source: str, name: str | None, target: str, verify: bool) -> IndexedImage:
    """Make the image SRC mountable from the store.

    SRC is a directory with a root file system, an OCI layout (DIR or oci:DIR[:TAG]), an archive
    of docker save (FILE or docker-archive:FILE[:TAG]), docker://NAME for the Docker engine, or
    registry://HOST/NAME[:TAG|@DIGEST]. Layers that the store has already are not read again.

    With --to registry all is pushed beside the image, as artifacts that refer to it; the store is
    then oci://HOST/NAME@DIGEST, as is printed.
    """
    # Imported here, since `image mount` does not need these modules.
    from bootseer.base.progress import ProgressBar
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
            # A name that is not of the registry would not tell nodes where the layers are.
            copies=settings.copy_layers or name is not None,
        ) as opened,
        _open_target(target, source, opened.manifest_digest) as store,
    ):
        sizes = [layer.size_bytes for layer in opened.layers]
        total_bytes = sum(size or 0 for size in sizes) if None not in sizes else None
        with ProgressBar("indexing", total_bytes) as progress:
            record = index_image(
                opened,
                store,
                work_dir,
                reference=name,
                on_progress=progress.advance,
                on_layer=on_layer,
                verify=verify,
            )
    return document_of(
        IndexedImage,
        _image(record),
        layers_reused=len(reused),
        layers_written=len(written),
        bytes_written=sum(layer.blob_size_bytes for layer in written),
        seconds=round(time.monotonic() - started_s, 3),
        store=store.url,
    )


def _open_target(target: str, source: str, manifest_digest: str | None) -> Store:
    """Return the store that `--to` names."""
    from bootseer.registry.reference import parse_reference

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
    """Raise InvalidInputError for an empty directory: it is a tree, but no root file system."""
    with contextlib.suppress(OSError):
        if source.is_dir() and next(source.iterdir(), None) is None:
            raise InvalidInputError(f"{source} is empty: there is no root file system in it")


@command("image list", epilog="Example: bootseer image list --json")
@shows(
    list[ShownImage],
    *("image=reference", "index=index_digest", "files", "size=bytes", "blobs=blob_bytes"),
    "indexed=created_ns",
)
def image_list() -> list[ShownImage]:
    """List the images that the store has."""
    with open_current_store() as store:
        return [_image(record) for record in list_images(store)]


def _show_image(found: ShownImage) -> None:
    config = found.config
    emit_table(
        ("", ""),
        (
            ("image", found.reference),
            ("identity", found.identity),
            ("index", found.index_digest),
            ("indexed", human_time(found.created_ns)),
            ("files", found.files),
            ("size", human_bytes(found.bytes)),
            ("entrypoint", " ".join(config.entrypoint)),
            ("command", " ".join(config.cmd)),
            ("working directory", config.working_dir),
            ("user", config.user),
            *(("environment", variable) for variable in config.env),
        ),
    )
    emit_records(found.layers, "layer=digest", "blob=blob_digest", "size=blob_bytes")


@command("image show", epilog="Example: bootseer image show train:v1")
@click.argument("reference", metavar="REF")
@shows(ShownImage, text=_show_image)
def image_show(reference: str) -> ShownImage:
    """Show an image's layers, configuration and size.

    REF is a name, or at least six digits of the index's digest.
    """
    with open_current_store() as store:
        return _image(find_image(store, reference))


def _show_files(found: list[ImageFile]) -> None:
    """Print a line for each name: as its bytes to a pipe, without control codes to a terminal."""
    on_terminal = sys.stdout.isatty()
    for one in found:
        name = f"{one.name} -> {one.target}" if one.target else one.name
        line = (
            f"{one.mode} {one.links:3} {one.uid:6} {one.gid:6} {one.bytes:12} "
            f"{human_time(one.mtime_ns)} {printable(name) if on_terminal else name}\n"
        )
        sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape"))


@command("image ls", epilog="Example: bootseer image ls train:v1 usr/lib")
@click.argument("reference", metavar="REF")
@click.argument("path", default="/")
@shows(list[ImageFile], text=_show_files)
def image_ls(reference: str, path: str) -> list[ImageFile]:
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
        return [_file(tree, entry.name, entry.inode) for entry in tree.children(number)]
    return [_file(tree, wanted.rpartition(b"/")[2], number)]


def _file(tree: Tree, name: bytes, number: int) -> ImageFile:
    inode = tree.inode(number)
    return document_of(
        ImageFile,
        inode,
        name=name.decode("utf-8", "surrogateescape"),
        mode=stat.filemode(inode.mode),
        links=tree.link_count(number),
        bytes=inode.size_bytes,
        target=inode.link_target.decode("utf-8", "surrogateescape") or None,
        digest=f"blake3:{inode.digest.hex()}" if inode.digest else None,
    )


# ---- this node --------------------------------------------------------------------------------


def _stay_if_asked(mounted: NewImageMount) -> int:
    """Return once the image is unmounted, where the command is to stay in the foreground."""
    if click.get_current_context().params["foreground"]:
        sys.stdout.flush()
        _stay(current_settings(), Path(mounted.directory))
    return EXIT_OK


def _stay(settings: Settings, directory: Path) -> None:
    from bootseer.prefetch.images.mount import find_live_mount, unmount_image

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            find_live_mount(settings, directory)
            time.sleep(0.5)
    except NotFoundError:
        return
    except KeyboardInterrupt:
        with contextlib.suppress(NotFoundError):
            unmount_image(settings, directory)


@command("image mount", epilog="Example: bootseer image mount train:v1 /mnt/train")
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--foreground", is_flag=True, help="Serve in this process until unmounted; Ctrl-C unmounts."
)
@shows(NewImageMount, code=_stay_if_asked)
def image_mount(reference: str, directory: Path, foreground: bool) -> NewImageMount:
    """Mount the image REF, an indexed one or its source, on the directory DIR, read-only.

    An image without an index is pulled first, and indexed in the background. Otherwise the command
    returns at once: bytes are fetched when they are first read, and those that earlier starts of
    the workload (`bootseer --workload NAME image mount ...`) read are fetched ahead.
    """
    from bootseer.prefetch.images.mount import mount_image

    image = mount_image(settings_without_fanout(), reference, directory)
    return document_of(NewImageMount, image.state, directory=str(image.directory))


@command("image fetch", epilog="Example: bootseer image fetch train:v1")
@click.argument("reference", metavar="REF")
@shows(FetchedImage)
def image_fetch(reference: str) -> FetchedImage:
    """Bring all of the image REF into this node's cache, so that it starts without the store.

    REF is an indexed image or a source, such as registry://HOST/NAME:TAG.
    """
    from bootseer.prefetch.images.find import image_on_node, publish_later, resolve_image
    from bootseer.prefetch.reading.fill import fetch_tree

    settings = settings_without_fanout()
    resolved = resolve_image(settings, reference)
    try:
        record, is_local = resolved.record, not resolved.is_published
        # A layer that this node pulled is used, whichever node has published it.
        here = image_on_node(settings, resolved)
        if here is not None:
            here.release()
            size_bytes = sum(layer.blob_size_bytes for layer in record.layers)
        else:
            with open_current_store() as store:
                size_bytes = fetch_tree(
                    settings, store, record.index_digest, record.reference, is_local=is_local
                )
    finally:
        resolved.release()
    publish_later(settings, resolved)
    return FetchedImage(record.reference, record.index_digest, size_bytes)


def _show_cache(found: ImageCache) -> None:
    from bootseer.prefetch.cache.node_cache import STREAMS

    if found.damaged_bytes is not None:
        print_stderr(f"damaged: {human_bytes(found.damaged_bytes)}")
    emit_table(
        ("stream", "on disk", "here", "last used", "in use"),
        (
            (
                one.digest[:19],
                human_bytes(one.size_bytes),
                f"{(one.present_bytes or 0) / one.stream_bytes:.0%}" if one.stream_bytes else "-",
                human_time(one.used_ns),
                "yes" if one.is_used else "",
            )
            for one in found.streams
        ),
    )
    rest = [(name, human_bytes(size)) for name, size in found.folders.items() if name != STREAMS]
    if rest:
        emit_table(("beside them", "on disk"), rest)


@command("image cache", epilog="Example: bootseer image cache --trim 50GB")
@click.option(
    "--trim",
    "trim_bytes",
    type=SIZE,
    metavar="SIZE",
    help="First remove the least recently used contents, until the rest is within SIZE.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="First compare contents and indexes with their checksums; damaged ones are fetched again.",
)
@shows(ImageCache, text=_show_cache)
def image_cache(trim_bytes: int | None, verify: bool) -> ImageCache:
    """Show the cached images of this node, the longest unused first.

    Nothing that is mounted or being fetched is removed. Servers of images keep the cache within
    the setting cache_limit by themselves.
    """
    from bootseer.prefetch.cache.indexes import recheck_indexes
    from bootseer.prefetch.cache.limit import CacheRoom, folders
    from bootseer.prefetch.cache.node_cache import NodeCache

    settings = current_settings()
    node = NodeCache(settings.cache_dir)
    if trim_bytes is not None:
        CacheRoom(settings.cache_dir, trim_bytes).make_room()
    damaged_bytes = None
    if verify:
        damaged_bytes = recheck_indexes(settings.cache_dir)
        damaged_bytes += sum(node.recheck(stream.key) for stream in node.streams())
    kept = [one for one in folders(settings.cache_dir) if one.counts]
    return ImageCache(
        limit_bytes=settings.cache_limit_bytes,
        size_bytes=sum(one.size_bytes for one in kept),
        folders={one.name: one.size_bytes for one in kept},
        damaged_bytes=damaged_bytes,
        streams=[
            ListedStream(
                stream.key,
                stream.size_bytes,
                found.stream_length if found else None,
                found.present_bytes if found else None,
                stream.used_ns,
                found is not None and found.is_used,
            )
            for stream in node.streams()
            for found in [node.details(stream.key)]
        ],
    )
