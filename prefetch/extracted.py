"""A container over an image that is extracted whole: where no FUSE file system can be mounted.

The ordinary path of any container engine: slow the first time on a node, and without a record.
Alone owns `extracted` in the node's cache. Who uses something in there, or the folder of a
container, holds a lock on it by a descriptor that exec hands on to the job; whatever is not locked
is removed by the next one. So nothing has to watch the job.
"""

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.blob.extract import extract
from bootseer.blob.keys import blob_key
from bootseer.config import Settings
from bootseer.errors import AlreadyExistsError, BootseerError, NotFoundError, from_oserror
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.prefetch.cache import NodeCache, StreamCache
from bootseer.prefetch.container import Container
from bootseer.prefetch.container_root import parse_bind
from bootseer.prefetch.mount_state import make_private, remove_scratch
from bootseer.prefetch.obtain import obtain_image
from bootseer.prefetch.obtained import ObtainedImage, publish_later
from bootseer.prefetch.publish import load_local_tree
from bootseer.prefetch.records import ImageRecord
from bootseer.store import open_store

_log = logging.getLogger(__name__)

_CONTAINER_PREFIX = "container-"


@dataclass(frozen=True, slots=True)
class ExtractedImage:
    """An image's tree as plain files; what a `Container` wants of a `MountedImage`."""

    record: ImageRecord
    directory: Path
    state_dir: Path
    """The container's own folder, which is this container's alone."""
    ready_name: str = ""
    """Nothing is recorded, so nobody listens."""

    def detach(self) -> None:
        """Nothing is mounted."""

    def close(self) -> None:
        """Remove the container's folder; the tree stays for the next start. Never raises."""
        remove_scratch(self.state_dir)


def prepare_extracted(
    settings: Settings, image: str | ObtainedImage, *, binds: Sequence[str] = ()
) -> Container:
    """As `container.prepare_container`, without any mount outside the container.

    Raises: NotFoundError, InvalidInputError, UnavailableError, DeadlineError, CorruptError,
    NoSpaceError.
    """
    parsed = [parse_bind(text) for text in binds]
    obtained = obtain_image(settings, image) if isinstance(image, str) else image
    record = obtained.record
    try:
        base = make_private(make_private(settings.cache_dir) / "extracted")
        # By what the image is, not by its index, which is another once it is published.
        target = base / record.identity.partition(":")[2]
        _remove_unused(base, keep=target)
        if not target.exists():
            with contextlib.suppress(AlreadyExistsError):
                _extract(settings, record.index_digest, target)
        _lock(target)
        own = make_private(base / f"{_CONTAINER_PREFIX}{secrets.token_hex(8)}")
        _lock(own)
        root = make_private(own / "root")
    except OSError as error:
        if isinstance(error, BootseerError):
            raise
        raise from_oserror(error, f"extract the image {record.reference}") from error
    finally:
        obtained.release()
    publish_later(settings, obtained)
    extracted = ExtractedImage(record, target, own)
    return Container(extracted, root, own, not can_mount_directly(), parsed)


def _extract(settings: Settings, index_digest: str, target: Path) -> None:
    tree = load_local_tree(settings, index_digest)
    keys = [blob_key(blob.digest) if blob.frames else "" for blob in tree.blobs]
    cache = NodeCache(settings.cache_dir)
    with (
        open_store(settings.store_url, deadline_s=settings.deadline_s) as store,
        contextlib.ExitStack() as stack,
    ):
        local: dict[int, StreamCache] = {}
        for number, blob in enumerate(tree.blobs):
            if not blob.frames:
                stream = cache.open_whole(blob.stream_digest)
                if stream is None:
                    raise NotFoundError(f"this node has lost {blob.stream_digest}; pull it again")
                stack.callback(stream.close)
                local[number] = stream

        def read(blob: int, offset: int, length: int) -> bytes:
            if blob in local:
                return local[blob].read(offset, length)
            return store.read(keys[blob], offset, length)

        extract(tree, read, target, allow_devices=can_mount_directly())


def _lock(directory: Path) -> None:
    """For as long as this process and what it becomes lives. Raises: OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    os.set_inheritable(fd, True)


def _remove_unused(base: Path, keep: Path) -> None:
    for path in base.iterdir():
        # Hidden: one that is being extracted, which locks and sweeps for itself.
        if path == keep or path.name.startswith("."):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(path)
                _log.info("removed %s, which nobody uses any more", path)
            except BlockingIOError:
                continue
            finally:
                os.close(fd)
