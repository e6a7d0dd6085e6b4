"""The node's own copy of what a bundle's header says, for starts that need no store.

Alone owns `cache_dir/catalogue/hot`; `node_catalogue` removes what was not used for a month. A copy
is verified when it is read, and one that does not check is as good as none. Copies of one store's
bundles serve no image of another store. Not synced. Functions
only; safe from any thread and process.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.linux.private_files import write_private_file
from bootseer.prefetch.bundle.format import HEADER_BYTES_MAX, Bundle
from bootseer.prefetch.bundle.hot_store import (
    POINTER_FORM,
    HotPointer,
    decode_bundle,
    decode_pointer,
)
from bootseer.prefetch.cache.stream_keys import store_hex
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)


def keep_bundle(settings: Settings, workload: str, pointer: HotPointer, header: bytes) -> None:
    """Remember the bundle of an image and workload. Never raises: it is only a copy."""
    path = _path(settings, pointer.index_digest, workload)
    try:
        write_private_file(path.with_suffix(".header"), header)
        write_private_file(path, POINTER_FORM.encode(pointer))
    except OSError as error:
        _log.debug("the bundle of %s is not kept: %s", workload, error)


def kept_bundle(
    settings: Settings, index_digest: str, workload: str, stream_lengths: Sequence[int]
) -> tuple[HotPointer, Bundle] | None:
    """The bundle that was last kept, whether or not the store has a newer one by now."""
    path = _path(settings, index_digest, workload)
    try:
        data = _read(path, POINTER_FORM.size_max)
        pointer = decode_pointer(data, index_digest, str(path))
        header = _read(path.with_suffix(".header"), HEADER_BYTES_MAX)
        return pointer, decode_bundle(header, pointer, stream_lengths, str(path))
    except FileNotFoundError:
        return None
    except (BootseerError, OSError) as error:
        _log.debug("the kept bundle of %s is not used: %s", workload, error)
        return None


def refuse_bundle(settings: Settings, workload: str, pointer: HotPointer) -> None:
    """Never use the bundle of an image and workload again on this node: it brought wrong bytes.
    Never raises."""
    path = _path(settings, pointer.index_digest, workload).with_suffix(".refused")
    try:
        write_private_file(path, pointer.bundle_digest.encode("ascii"))
    except OSError as error:
        _log.warning("the bundle of %s may be used again: %s", workload, error)


def is_refused(settings: Settings, workload: str, pointer: HotPointer) -> bool:
    """Whether that was said of this bundle. Another one, under the same name, is used."""
    path = _path(settings, pointer.index_digest, workload).with_suffix(".refused")
    try:
        return _read(path, POINTER_FORM.size_max) == pointer.bundle_digest.encode("ascii")
    except OSError:
        return False


def _path(settings: Settings, index_digest: str, workload: str) -> Path:
    index = index_digest.partition(":")[2]
    store = store_hex(settings.store_url)
    return settings.cache_dir / "catalogue" / "hot" / f"{index}-{store}-{workload}.json"


def _read(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    with contextlib.suppress(OSError):
        os.utime(path)
    return data
