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
from bootseer.errors import AlreadyExistsError, BootseerError, from_oserror
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.prefetch.catalogue import find_image, load_tree
from bootseer.prefetch.container import Container
from bootseer.prefetch.container_root import parse_bind
from bootseer.prefetch.mount_state import make_private, remove_scratch
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
    settings: Settings, reference: str, *, binds: Sequence[str] = ()
) -> Container:
    """As `container.prepare_container`, without any mount outside the container.

    Raises: NotFoundError, InvalidInputError, UnavailableError, DeadlineError, CorruptError,
    NoSpaceError.
    """
    parsed = [parse_bind(text) for text in binds]
    try:
        base = make_private(make_private(settings.cache_dir) / "extracted")
        with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
            image = find_image(store, reference)
            tree = load_tree(store, image, settings.cache_dir)
            target = base / image.index_digest.partition(":")[2]
            _remove_unused(base, keep=target)
            if not target.exists():
                keys = [blob_key(blob.digest) for blob in tree.blobs]
                with contextlib.suppress(AlreadyExistsError):
                    extract(
                        tree,
                        lambda blob, offset, length: store.read(keys[blob], offset, length),
                        target,
                        allow_devices=can_mount_directly(),
                    )
        _lock(target)
        own = make_private(base / f"{_CONTAINER_PREFIX}{secrets.token_hex(8)}")
        _lock(own)
        root = make_private(own / "root")
    except OSError as error:
        if isinstance(error, BootseerError):
            raise
        raise from_oserror(error, f"extract the image {reference}") from error
    extracted = ExtractedImage(image, target, own)
    return Container(extracted, root, own, not can_mount_directly(), parsed)


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
