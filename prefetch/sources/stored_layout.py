"""An OCI layout on shared storage: `oci:URL[#TAG]`, for any URL that a store may have.

What a site without a registry keeps its images as: `skopeo copy ... oci:DIR` into a folder that
lies on HDFS, an object store or a network file system.
"""

import io
from typing import BinaryIO, cast

from bootseer.prefetch.sources.layout import read_layout, reference_of
from bootseer.prefetch.sources.model import ImageSource
from bootseer.store import Backend, open_backend

# Large enough that a round trip costs little, small enough for two layers' worth of memory.
_READ_BYTES = 4 << 20


class _BackendFile(io.RawIOBase):
    """One file of a backend, read from start to end. Belongs to one thread."""

    def __init__(self, backend: Backend, path: str) -> None:
        self._backend = backend
        self._path = path
        self._size_bytes = backend.stat(path).size_bytes
        self._offset = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._size_bytes - self._offset)
        if wanted <= 0:
            return 0
        count = self._backend.read_into(self._path, self._offset, memoryview(buffer)[:wanted])
        self._offset += count
        return count


def open_stored_layout(url: str, tag: str) -> ImageSource:
    """Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError,
    UnavailableError, PermissionDeniedError."""
    backend = open_backend(url)

    def open_file(path: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_BackendFile(backend, path), _READ_BYTES))

    try:
        name, image = read_layout(open_file, tag, backend.url)
    except BaseException:
        backend.close()
        raise
    base = backend.url.rstrip("/").rpartition("/")[2]
    reference = reference_of(name, base)
    return ImageSource(reference, image.identity, image.config, image.layers, backend.close)
