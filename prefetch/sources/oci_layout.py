"""An OCI layout in a directory: `oci:DIR`, `oci:DIR:TAG`, or a directory with an oci-layout file;
and one on shared storage: `oci:URL[#TAG]`, for any URL that a store may have.

What `skopeo copy ... oci:DIR:TAG`, `umoci`, `buildctl --output type=oci,tar=false` and
`docker buildx` write, and what a site without a registry keeps its images as.
"""

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.prefetch.sources.layout import read_layout, reference_of
from bootseer.prefetch.sources.model import ImageSource, name_of
from bootseer.store import Backend, open_backend

MARKER = "oci-layout"
# Large enough that a round trip costs little, small enough for two layers' worth of memory.
_READ_BYTES = 4 << 20


def split_tag(location: str, exists: Callable[[Path], bool]) -> tuple[Path, str]:
    """("path", "tag") of "path:tag"; the path is the shortest one that exists, since both it and
    the tag may hold colons."""
    parts = location.split(":")
    for count in range(1, len(parts) + 1):
        path = Path(":".join(parts[:count]))
        if exists(path):
            return path, ":".join(parts[count:])
    return Path(location), ""


def open_regular(path: Path) -> BinaryIO:
    """A file, unbuffered. A pipe in its place, which could be waited for without end, is refused.

    Raises: OSError, InvalidInputError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise InvalidInputError(f"{path} is not a regular file")
    return file


def opener_in(directory: Path) -> Callable[[str], BinaryIO]:
    """Opens files of a layout by their paths in it. What it returns raises: BootseerError."""

    def open_file(path: str) -> BinaryIO:
        try:
            return open_regular(directory / path)
        except OSError as error:
            raise from_oserror(error, f"read {directory / path}") from error

    return open_file


def open_oci_layout(directory: Path, tag: str) -> ImageSource:
    """Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError,
    PermissionDeniedError."""
    where = str(directory)
    if directory.is_dir() and not (directory / "index.json").exists():
        raise InvalidInputError(f"{where} is not an OCI layout: it has no index.json")
    name, image = read_layout(opener_in(directory), tag, where)
    reference = reference_of(name, name_of(directory))
    return ImageSource(reference, image.identity, image.config, image.layers)


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
