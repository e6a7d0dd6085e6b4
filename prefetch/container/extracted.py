"""A container over an image that is extracted whole: where no FUSE file system can be mounted.

The ordinary path of any container engine: slow the first time on a node, and without a record.
Alone owns `extracted` in the node's cache. Who uses something in there, or the folder of a
container, holds a lock on it by a descriptor that exec hands on to the job; whatever is not locked
is removed by the next one. So nothing has to watch the job.

A tree is called by its index and by this boot of the machine: nothing is synced, so what an earlier
boot extracted may lack what a crash tore. It appears and goes in one step, and is never there in
part, whichever process is killed.
"""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.blob.extract.extraction import extract
from bootseer.blob.keys import POINTS, blob_key
from bootseer.errors import (
    AlreadyExistsError,
    BusyError,
    NotFoundError,
    UnsupportedError,
    from_oserror,
)
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.linux.locks import lock_within, try_lock
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import boot_id
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache
from bootseer.prefetch.container.container import CHROOT, Container
from bootseer.prefetch.container.root import parse_bind
from bootseer.prefetch.images.find import publish_later
from bootseer.prefetch.index.node_catalogue import FoundImage, NodeCatalogue
from bootseer.prefetch.index.records import ImageRecord
from bootseer.served.ending import remove_scratch
from bootseer.settings.config import Settings
from bootseer.store import open_store

_log = logging.getLogger(__name__)

_CONTAINER_PREFIX = "container-"
_GONE_PREFIX = "removed-"
YOUNG_S = 60.0
"""An extraction without a lock may be about to get one."""
_LOCK_S = 60.0
"""A directory is locked exclusively for moments: while it is renamed, or once extracted."""
_ATTEMPTS_MAX = 5
"""Each fails only when another start removes what this one has just made or found."""


class ExtractedImage(Struct, frozen=True):
    """An image's tree as plain files; what a `Container` wants of a `MountedImage`."""

    record: ImageRecord
    directory: Path
    state_dir: Path
    """The container's own folder, which is this container's alone."""
    ready_name: str = ""
    """Nothing is recorded, so no process listens."""

    def detach(self) -> None:
        """Nothing is mounted."""

    def close(self) -> None:
        """Remove the container's folder; the tree stays for the next start. Never raises."""
        remove_scratch(self.state_dir)


def prepare_extracted(
    settings: Settings,
    image: FoundImage,
    *,
    binds: Sequence[str] = (),
    user: str | None = None,
    runtime: str = CHROOT,
) -> Container:
    """As `container.prepare_container`, without any mount outside the container.

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


def _locked_tree(settings: Settings, resolved: FoundImage, base: Path) -> Path:
    """The image's tree, whole and locked. Raises: BootseerError, OSError."""
    index_digest = resolved.record.index_digest
    own = base / _name_of(index_digest)
    for _ in range(_ATTEMPTS_MAX):
        target = own if own.exists() else _before_published(settings, index_digest, base) or own
        _remove_unused(base, keep=target)
        if not target.exists():
            with contextlib.suppress(AlreadyExistsError):
                _extract(settings, resolved, target)
        if _lock(target):
            return target
    raise BusyError(f"others keep removing the extracted image {own}; start it again")


def _name_of(index_digest: str) -> str:
    return f"{index_digest.partition(':')[2]}-{boot_id().replace('-', '')}"


def _before_published(settings: Settings, index_digest: str, base: Path) -> Path | None:
    """The tree of this image as it was called before this node published it."""
    catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
    for path in base.iterdir():
        older = f"sha256:{path.name.partition('-')[0]}"
        if path.name == _name_of(older):
            published = catalogue.find_published(older)
            if published is not None and published.index_digest == index_digest:
                return path
    return None


def _locked_folder(base: Path) -> Path:
    """A new folder for a container, locked. Raises: BusyError, OSError."""
    for _ in range(_ATTEMPTS_MAX):
        path = private_directory(base / f"{_CONTAINER_PREFIX}{secrets.token_hex(8)}")
        if _lock(path):
            return path
    raise BusyError(f"others keep removing new folders in {base}; start the container again")


def _extract(settings: Settings, resolved: FoundImage, target: Path) -> None:
    tree = read_kept_tree(settings.cache_dir, resolved.record.index_digest)
    keys = [blob_key(blob.digest) if blob.frames else "" for blob in tree.blobs]
    cache = NodeCache(settings.cache_dir)
    if any(blob.digest.startswith(POINTS) for blob in tree.blobs):
        raise UnsupportedError(
            f"image {resolved.record.reference} is read from its registry by seek points, which "
            "needs FUSE; index it with BOOTSEER_COPY_LAYERS=on for nodes that have none"
        )
    with (
        open_store(settings.store_url, deadline_s=settings.deadline_s) as store,
        contextlib.ExitStack() as stack,
    ):
        local: dict[int, CachedStream] = {}
        for number, blob in enumerate(tree.blobs):
            if not blob.frames:
                # Only an index that this node made of what it pulled may name such a stream.
                is_local = not resolved.is_published
                stream = cache.open_whole(blob.stream_digest) if is_local else None
                if stream is None:
                    raise NotFoundError(f"this node has lost {blob.stream_digest}; pull it again")
                stack.callback(stream.close)
                local[number] = stream

        def read(blob: int, offset: int, length: int) -> bytes:
            if blob in local:
                return local[blob].read(offset, length)
            return store.read(keys[blob], offset, length)

        is_root = can_mount_directly()
        extract(tree, read, target, allow_devices=is_root, skip_devices=not is_root)


def _lock(directory: Path) -> bool:
    """For as long as this process and what it becomes lives; False where the directory has gone.

    Raises: OSError.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Locked exclusively by another process only while it is renamed, or has just been
        # extracted.
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
                # Hidden: what is being extracted, or was when its process was killed.
                if path.name.startswith(".") and time.time() - os.fstat(fd).st_ctime < YOUNG_S:
                    continue
                gone = base / f"{_GONE_PREFIX}{secrets.token_hex(8)}"
                # At once: a process that is killed meanwhile leaves nothing that looks like an
                # image.
                path.rename(gone)
            finally:
                os.close(fd)
            remove_scratch(gone)
            _log.info("removed %s, which nobody uses any more", path)
