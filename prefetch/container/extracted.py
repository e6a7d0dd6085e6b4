"""Containers over extracted images, for nodes where no FUSE file system can be mounted.

The image is extracted whole, as other container engines do it: the first start on a node is slow,
and there is no record. Owns `cache_dir/extracted`. A process that uses a tree or a container's
folder in there holds a lock on it, by a descriptor that the job inherits. The next start removes
everything that is not locked, so that no process has to watch the job.

A tree is named after its index and the boot of the machine. It is not synced to the disk, so that
after a crash of the machine, a tree of the earlier boot may be incomplete. A tree appears and
disappears in one step, and is never there in part, whichever process is killed.
"""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.blob.extract.extraction import extract
from bootseer.blob.keys import POINTS
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import (
    AlreadyExistsError,
    BusyError,
    NotFoundError,
    from_oserror,
)
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.linux.locks import lock_within, try_lock
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import boot_id
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache, image_key_of
from bootseer.prefetch.container.container import CHROOT, Container
from bootseer.prefetch.container.root import parse_bind
from bootseer.prefetch.images.find import publish_later
from bootseer.prefetch.index.node_catalogue import FoundImage, NodeCatalogue, vouched_streams
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.reading.registry import second_source
from bootseer.prefetch.stored_frames import StoredFrames, plan_stored_frames
from bootseer.served.ending import remove_scratch
from bootseer.settings.config import Settings
from bootseer.store import open_store

_log = logging.getLogger(__name__)

_CONTAINER_PREFIX = "container-"
_GONE_PREFIX = "removed-"
YOUNG_S = 60.0
"""Age up to which an unlocked extraction is kept: its process may be about to lock it."""
_LOCK_S = 60.0
"""Deadline of a shared lock: others lock a directory exclusively only to rename it."""
_ATTEMPTS_MAX = 5
"""Most attempts; an attempt fails if another start removes the directory before it is locked."""


class ExtractedImage(Struct, frozen=True):
    """Image's tree as plain files, which `Container` uses like a `MountedImage`."""

    record: ImageRecord
    directory: Path
    state_dir: Path
    """Folder of this container only."""
    ready_name: str = ""
    """Empty: nothing is recorded, so that no process listens on a socket."""

    def detach(self) -> None:
        """Do nothing, since nothing is mounted."""

    def close(self) -> None:
        """Remove the container's folder. The tree stays for the next start. Never raises."""
        remove_scratch(self.state_dir)


def prepare_extracted(
    settings: Settings,
    image: FoundImage,
    *,
    binds: Sequence[str] = (),
    user: str | None = None,
    runtime: str = CHROOT,
) -> Container:
    """Extract an image for a container of this process. See `container.prepare_container`.

    Nothing is mounted outside the container's namespace.

    Raises: NotFoundError, InvalidInputError, UnavailableError, DeadlineError, CorruptError,
    NoSpaceError.
    """
    parsed = [parse_bind(text) for text in binds]
    record = image.record
    try:
        base = private_directory(settings.cache_dir / "extracted")
        target = _locked_tree(settings, image, base)
        own = _locked_folder(base)
        root = private_directory(own / "root")
    except OSError as error:
        raise from_oserror(error, f"extract the image {record.reference}") from error
    finally:
        image.release()
    publish_later(settings, image)
    extracted = ExtractedImage(record, target, own)
    runs_as = record.config.user if user is None else user
    return Container(extracted, root, own, not can_mount_directly(), runs_as, runtime, parsed)


def _locked_tree(settings: Settings, image: FoundImage, base: Path) -> Path:
    """Return the image's tree, extracted and locked. Raises: BootseerError, OSError."""
    index_digest = image.record.index_digest
    own = base / _name_of(index_digest)
    for _ in range(_ATTEMPTS_MAX):
        target = (
            own if own.exists() else _tree_before_publication(settings, index_digest, base) or own
        )
        _remove_unused(base, keep=target)
        if not target.exists():
            with contextlib.suppress(AlreadyExistsError):
                _extract(settings, image, target)
        if _lock(target):
            return target
    raise BusyError(f"other processes keep removing the extracted image {own}; start it again")


def _name_of(index_digest: str) -> str:
    return f"{index_digest.partition(':')[2]}-{boot_id().replace('-', '')}"


def _tree_before_publication(settings: Settings, index_digest: str, base: Path) -> Path | None:
    """Return the image's tree if it was extracted before this node published the image.

    The image had another index then, and the tree is named after that.
    """
    catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
    for path in base.iterdir():
        older = f"sha256:{path.name.partition('-')[0]}"
        if path.name == _name_of(older):
            published = catalogue.find_published(older)
            if published is not None and published.index_digest == index_digest:
                return path
    return None


def _locked_folder(base: Path) -> Path:
    """Create a new folder for a container, and lock it. Raises: BusyError, OSError."""
    for _ in range(_ATTEMPTS_MAX):
        path = private_directory(base / f"{_CONTAINER_PREFIX}{secrets.token_hex(8)}")
        if _lock(path):
            return path
    raise BusyError(f"other processes keep removing new folders in {base}; start it again")


def _extract(settings: Settings, image: FoundImage, target: Path) -> None:
    index_digest = image.record.index_digest
    stored = read_kept_tree(settings.cache_dir, index_digest)
    vouched = vouched_streams(settings, index_digest, stored.blobs, is_local=not image.is_published)
    with contextlib.ExitStack() as stack:
        local: dict[int, CachedStream] = {}
        for number, blob in enumerate(stored.blobs):
            if not blob.frames or blob.digest.startswith(POINTS):
                local[number] = _whole_stream(settings, image, blob, vouched)
                stack.callback(local[number].close)
        # Streams that are whole on this node are read without frames.
        blobs = tuple(
            replace(blob, frames=()) if number in local else blob
            for number, blob in enumerate(stored.blobs)
        )
        tree = Tree(stored.columns, blobs)
        store = stack.enter_context(open_store(settings.store_url, deadline_s=settings.deadline_s))
        frames = stack.enter_context(
            StoredFrames(store, plan_stored_frames(tree), deadline_s=settings.deadline_s)
        )

        def read(blob: int, offset: int, length: int) -> bytes | memoryview:
            if blob in local:
                return local[blob].read(offset, length)
            return frames.read(blob, offset, length)

        is_root = can_mount_directly()
        extract(
            tree,
            read,
            target,
            is_verified=not local,
            allow_devices=is_root,
            skip_devices=not is_root,
        )


def _whole_stream(
    settings: Settings, image: FoundImage, blob: Blob, vouched: frozenset[str]
) -> CachedStream:
    """Open the stream of a blob that the store has no copy of.

    The stream was pulled before, or a layer that stays in its registry is pulled now.
    """
    cache = NodeCache(settings.cache_dir)
    digest = blob.stream_digest
    stream = cache.open_whole(digest) if digest in vouched else None
    if stream is None and blob.frames:
        image_key = image_key_of(image.record.index_digest, settings.store_url)
        pull = second_source(settings, image.record.reference, image_key)
        if pull is not None:
            pull(blob, lambda count: None)
            stream = cache.open_replacement(blob, image_key)
    if stream is None:
        raise NotFoundError(
            f"the layer {digest} of image {image.record.reference} is neither on this node nor in "
            "the store; start the image from its source"
        )
    return stream


def _lock(directory: Path) -> bool:
    """Lock a directory until the end of this process, also if it becomes another program.

    Return False if the directory was removed. Raises: OSError.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        lock_within(fd, _LOCK_S, is_shared=True)
        if os.path.samestat(os.fstat(fd), os.stat(directory, follow_symlinks=False)):
            os.set_inheritable(fd, True)
            return True
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return False


def _remove_unused(base: Path, keep: Path) -> None:
    for path in base.iterdir():
        if path == keep:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not try_lock(fd):
                    continue
                # Hidden directories are extractions under way, or of killed processes.
                if path.name.startswith(".") and time.time() - os.fstat(fd).st_ctime < YOUNG_S:
                    continue
                gone = base / f"{_GONE_PREFIX}{secrets.token_hex(8)}"
                # Renamed first: if this process is killed, no incomplete tree is left.
                path.rename(gone)
            finally:
                os.close(fd)
            remove_scratch(gone)
            _log.info("removed %s, which no process uses", path)
