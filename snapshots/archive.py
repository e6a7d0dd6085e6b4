"""Snapshots made by hand, and tar archives: `snapshot create`, `export` and `import`.

An archive is untrusted: its expansion is bounded, its members are read by `pack.tar_packing`, and
names and nodes that a restore refuses are refused here.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from bootseer.base.content_digest import new_hasher
from bootseer.blob.keys import blob_key
from bootseer.blob.pack.frame_writer import FRAME_BYTES, FrameWriter
from bootseer.blob.pack.members import Members
from bootseer.blob.pack.packing import pack_tar
from bootseer.blob.read import BlobReader
from bootseer.blob.tar.header import END
from bootseer.blob.tar.inflate import ERRORS, PIECE_BYTES, ExpansionLimits, decompress
from bootseer.blob.tree import Inode, Tree
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    from_oserror,
)
from bootseer.linux.private_files import private_directory, private_opener
from bootseer.linux.root_paths import resolve_in_root
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.capture import Change, capture_directories, make_manifest
from bootseer.snapshots.key_parts import Part
from bootseer.snapshots.manifest import Manifest, Target, is_name
from bootseer.snapshots.scan import STAGING_PREFIX, scan, target_path, text_of
from bootseer.snapshots.staging import recover_targets
from bootseer.snapshots.target_inference import declared_targets
from bootseer.snapshots.targets import locked, remember
from bootseer.store import Store, open_own_store

_ROOT = Path("/")
LIMITS = ExpansionLimits()
OnProgress = Callable[[int], None]


def export_snapshot(store: Store, manifest: Manifest, path: Path, on_progress: OnProgress) -> int:
    """Write a snapshot's files to `path` as a tar.zst, whole or not at all; return its size.

    The names of one whole directory are relative to it. The names of several directories, or of
    differences, are absolute paths without the leading "/". Raises: AlreadyExistsError,
    CorruptError, NotFoundError, NoSpaceError, UnavailableError.
    """
    if path.exists():
        raise AlreadyExistsError(f"{path} exists already; remove it, or choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb", opener=private_opener) as file:
            try:
                if is_one_directory(manifest) and not manifest.is_layered:
                    # The only blob has the format of an export.
                    _copy_blob(store, manifest.targets[0], file, on_progress)
                else:
                    _write_members(store, manifest, file, on_progress)
                file.flush()
                os.fsync(file.fileno())
                size_bytes = file.tell()
                # A link does not replace a file that another process has made meanwhile.
                os.link(temporary, path)
            finally:
                temporary.unlink()
    except BootseerError:
        raise
    except OSError as error:
        raise from_oserror(error, f"export to {path}") from error
    return size_bytes


def is_one_directory(manifest: Manifest) -> bool:
    """Return whether a snapshot is one whole directory: names in its export are relative to it."""
    return len(manifest.targets) == 1 and manifest.targets[0].whole


def _copy_blob(store: Store, target: Target, file: BinaryIO, on_progress: OnProgress) -> None:
    hasher = new_hasher(target.blob.digest)
    for offset in range(0, target.blob.size_bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, target.blob.size_bytes - offset)
        data = store.read(blob_key(target.blob.digest), offset, length)
        hasher.update(data)
        file.write(data)
        on_progress(len(data))
    if hasher.hexdigest() != target.blob.digest.partition(":")[2]:
        raise CorruptError(f"the blob {target.blob.digest} in {store.url} is damaged")


def _write_members(
    store: Store, manifest: Manifest, file: BinaryIO, on_progress: OnProgress
) -> None:
    with FrameWriter(file, level=3, frame_bytes=FRAME_BYTES, threads=None) as writer:
        members = Members(writer)
        for target in sorted(manifest.targets, key=lambda target: target.path):
            tree = catalogue.load_tree(store, target)
            top = b"" if is_one_directory(manifest) else target.path[1:]
            _write_tree(store, top, tree, members, writer.frame_bytes)
            on_progress(sum(blob.size_bytes for blob in target.blobs))
        # Directories above the targets are not members, since unpacking the archive would change
        # existing ones.
        writer.write(END)
        writer.finish()


def _write_tree(store: Store, top: bytes, tree: Tree, members: Members, frame_bytes: int) -> None:
    """Write the tree with names below `top`, a path without the leading "/"."""
    keys = [blob_key(blob.digest) for blob in tree.blobs]
    reader = BlobReader(tree, lambda blob, offset, length: store.read(keys[blob], offset, length))
    first_names: dict[int, tuple[int, bytes]] = {}
    for path, number in tree.walk():
        name = b"/".join(filter(None, (top, path)))
        if number in first_names:
            members.add_hard_link(name, *first_names[number])
            continue
        inode = tree.inode(number)
        added = _add_member(members, reader, name, inode, frame_bytes)
        if not stat.S_ISDIR(inode.mode) and tree.link_count(number) > 1:
            first_names[number] = added, name


def _add_member(
    members: Members, reader: BlobReader, name: bytes, inode: Inode, frame_bytes: int
) -> int:
    def read(offset: int, length: int) -> bytes:
        return reader.read_extents(inode, offset, length)

    if not stat.S_ISREG(inode.mode):
        return members.add_plain(name, inode)
    stored = [(extent.file_offset, extent.length) for extent in inode.extents]
    is_sparse = sum(length for _, length in stored) < inode.size_bytes
    if inode.size_bytes < frame_bytes and not is_sparse:
        return members.add_small(name, inode, read(0, inode.size_bytes))
    return members.add_large(name, inode, read, stored if is_sparse else None)


def _check_name(name: str) -> None:
    if name and not is_name(name):
        raise InvalidInputError(
            f"{name!r} is not a usable name; use letters, digits, '.', '_' and '-', at most 128"
        )


def import_archive(
    settings: Settings,
    store: Store,
    archive: Path,
    target: str,
    name: str,
    on_progress: OnProgress,
) -> Manifest:
    """Make a snapshot of `target`, a directory's path, from a tar, tar.gz or tar.zst; publish it.

    `on_progress` is called with counts of bytes read. Raises: InvalidInputError for names and nodes
    that restores refuse; CorruptError for a malformed archive, or one that expands too much;
    NotFoundError, NoSpaceError, UnavailableError.
    """
    _check_name(name)
    path = target_path(target, str(Path.cwd()))
    made = import_target(settings, store, archive, path, on_progress)
    parts = [
        Part("kind", "imported from an archive"),
        Part(f"target {text_of(path)}", made.index.digest),
    ]
    manifest = make_manifest(parts, [made], setup_ns=0, node=settings.node, name=name)
    catalogue.publish(store, manifest)
    return manifest


def import_target(
    settings: Settings, store: Store, archive: Path, path: bytes, on_progress: OnProgress
) -> Target:
    """Store the content of an archive as the target `path`; no manifest names it yet.

    Raises: as `import_archive`.
    """
    try:
        with ExitStack() as stack:
            source = stack.enter_context(archive.open("rb"))
            folder = private_directory(settings.cache_dir / "snapshots")
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            stream = _Expanded(source, archive, on_progress)
            tree = _pack(stream, cast(BinaryIO, file), archive)
            _check_restorable(tree, archive)
            return catalogue.store_target(store, path, tree, cast(BinaryIO, file), whole=True)
    except BootseerError:
        raise
    except OSError as error:
        raise from_oserror(error, f"import {archive}") from error


def _pack(stream: "_Expanded", sink: BinaryIO, archive: Path) -> Tree:
    try:
        return pack_tar(stream, sink, must_end=True)
    except ERRORS as error:
        raise CorruptError(f"{archive} cannot be decompressed: {error}") from error
    except CorruptError as error:
        raise CorruptError(f"{archive}: {error}") from error


def _check_restorable(tree: Tree, archive: Path) -> None:
    if not tree.name_count:
        raise InvalidInputError(f"{archive} holds no files: it is empty, or no tar archive")
    for path, number in tree.walk():
        mode = tree.mode(number)
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise InvalidInputError(
                f"{archive} holds the device node {text_of(path)}, which restores refuse; make the "
                "archive without it"
            )
        if path.rpartition(b"/")[2].startswith(STAGING_PREFIX):
            raise InvalidInputError(f"{archive} holds the reserved name {text_of(path)}")


class _Expanded:
    """Expanded content of a compressed file, with bounds."""

    def __init__(self, source: BinaryIO, archive: Path, on_progress: OnProgress) -> None:
        self._source = source
        self._archive = archive
        self._on_progress = on_progress
        self._read_bytes = 0
        self._expanded_bytes = 0
        self._rest = b""
        self._pieces: Iterator[bytes] | None = None

    def _stored(self, count: int) -> bytes:
        data = self._source.read(count)
        self._read_bytes += len(data)
        self._on_progress(len(data))
        return data

    def read(self, size: int, /) -> bytes:
        """Return at most `size` expanded bytes. Raises: CorruptError for a decompression bomb."""
        if self._pieces is None:
            self._pieces = decompress(self._stored, f"archive {self._archive}")
        if not self._rest:
            self._rest = next(self._pieces, b"")
            self._expanded_bytes += len(self._rest)
            LIMITS.check(self._read_bytes, self._expanded_bytes, "archive")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def create_snapshot(settings: Settings, targets: Sequence[str], name: str = "") -> Manifest:
    """Capture existing directories as they are, and publish them under `name`, if given.

    Raises: InvalidInputError, NotFoundError; BusyError if something writes to them meanwhile.
    """
    _check_name(name)
    paths = declared_targets(targets, str(Path.cwd())).paths
    hosts = [resolve_in_root(_ROOT, path) for path in paths]
    with locked(settings.run_dir, hosts, deadline_s=settings.deadline_s):
        recover_targets(hosts, remember(settings, _ROOT))
        changes = []
        for path, host in zip(paths, hosts, strict=True):
            after = scan(host)
            if not after:
                raise NotFoundError(f"{host} does not exist; name an existing directory")
            changes.append(Change(path, host, {}, after))
        with open_own_store(settings) as store:
            return capture_directories(
                store, settings.cache_dir, changes, node=settings.node, name=name
            )
