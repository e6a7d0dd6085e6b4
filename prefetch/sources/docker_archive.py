"""What `docker save` writes: a tar with `manifest.json`, and since Docker 25 an OCI layout as well.

The archive is read where it lies: one pass over its headers finds its files, then each layer is
read at its offset. Nothing is unpacked.
"""

import hashlib
import io
import posixpath
import re
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.prefetch.sources.documents import parse_archive_manifest, parse_config
from bootseer.prefetch.sources.layout import read_document, read_layout
from bootseer.prefetch.sources.model import ImageSource, TarLayer, layer_count_checked, name_of

_MEMBER_COUNT_MAX = 100_000
_LINK_HOPS_MAX = 8
_HEX = re.compile("[0-9a-f]{64}")
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bunzip2"}


class _Slice(io.RawIOBase):
    """`length` bytes of a file from `offset`, with a position of its own."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(offset)
        self._left = length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        count = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= count or 0
        return count or 0

    def close(self) -> None:
        self._file.close()
        super().close()


class ArchiveFiles(Struct, frozen=True):
    """The regular files of an archive: path -> (offset, length); links are followed."""

    archive: Path
    files: Mapping[str, tuple[int, int]]
    links: Mapping[str, str]

    def __contains__(self, path: str) -> bool:
        return self._find(path) is not None

    def _find(self, path: str) -> tuple[int, int] | None:
        path = posixpath.normpath(path)
        for _ in range(_LINK_HOPS_MAX):
            if path in self.files:
                return self.files[path]
            if path not in self.links:
                break
            path = self.links[path]
        return None

    def _range(self, path: str) -> tuple[int, int]:
        found = self._find(path)
        if found is None:
            raise NotFoundError(f"{self.archive} holds no file {path}; it is cut off or incomplete")
        return found

    def size_bytes(self, path: str) -> int:
        """Raises: NotFoundError."""
        return self._range(path)[1]

    def open(self, path: str) -> BinaryIO:
        """Raises: NotFoundError."""
        found = self._range(path)
        try:
            return _Slice(self.archive, *found)  # type: ignore[return-value]
        except OSError as error:
            raise from_oserror(error, f"read {self.archive}") from error


def list_archive(path: Path) -> ArchiveFiles:
    """The files in the tar at `path`. Raises: InvalidInputError where it is no tar; CorruptError
    where it is cut off."""
    files: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, io.SEEK_END)
            file.seek(0)
            magic = file.read(4)
            file.seek(0)
            tool = next((t for m, t in _COMPRESSED.items() if magic.startswith(m)), None)
            if tool:
                raise InvalidInputError(f"{path} is compressed; decompress it first: {tool} {path}")
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    name = posixpath.normpath(member.name)
                    if member.isreg():
                        files[name] = (member.offset_data, member.size)
                        if member.offset_data + member.size > size_bytes:
                            raise CorruptError(f"{path} is cut off in {name}")
                    elif member.issym():
                        # Old docker save: abc/layer.tar -> ../def/layer.tar.
                        target = posixpath.join(posixpath.dirname(name), member.linkname)
                        links[name] = posixpath.normpath(target)
                    elif member.islnk():
                        links[name] = posixpath.normpath(member.linkname)
                    if len(files) + len(links) > _MEMBER_COUNT_MAX:
                        raise InvalidInputError(f"{path} holds too many files for an image archive")
    except tarfile.TarError as error:
        if files:
            raise CorruptError(f"{path} is damaged or cut off: {error}") from error
        raise InvalidInputError(f"{path} is not an image archive (no tar)") from error
    except OSError as error:
        raise from_oserror(error, f"read {path}") from error
    return ArchiveFiles(path, files, links)


def open_docker_archive(path: Path, tag: str = "") -> ImageSource:
    """The image in the archive at `path`; `tag` chooses where it holds several.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError.
    """
    archive = list_archive(path)
    if "manifest.json" in archive:
        return _open_old_layout(archive, tag)
    if "index.json" in archive:
        name, image = read_layout(archive.open, tag, str(path))
        return ImageSource(
            name or name_of(path.with_suffix("")), image.identity, image.config, image.layers
        )
    if "repositories" in archive:
        raise UnknownFormatError(
            f"{path} was written by a Docker older than 1.10, which is not read"
        )
    raise InvalidInputError(
        f"{path} is not an image archive: it has neither manifest.json nor index.json"
    )


def _open_old_layout(archive: ArchiveFiles, tag: str) -> ImageSource:
    """`manifest.json` is present in both layouts and alone has the image's names."""
    where = str(archive.archive)
    images = parse_archive_manifest(
        read_document(archive.open, "manifest.json", where), f"{where}: manifest.json"
    )
    if tag:
        images = [image for image in images if tag in image.tags]
    if not images:
        raise NotFoundError(f"{where} has no image {tag or 'at all'!r}")
    if len(images) > 1:
        names = ", ".join(sorted(name for image in images for name in image.tags))
        raise InvalidInputError(f"{where} holds several images ({names}); save just one")
    image = images[0]
    data = read_document(archive.open, image.config, where)
    identity = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if _named_digest(image.config) not in (None, identity):
        raise CorruptError(f"{where}: {image.config} does not have the digest that names it")
    config = parse_config(data, f"{where}: {image.config}")
    layer_count_checked(len(image.layers), config, where)
    layers = [
        TarLayer(
            diff_id, archive.size_bytes(path), _named_digest(path), partial(archive.open, path)
        )
        for diff_id, path in zip(config.diff_ids, image.layers, strict=True)
    ]
    return ImageSource(
        image.tags[0] if image.tags else name_of(archive.archive.with_suffix("")),
        identity,
        config,
        layers,
    )


def _named_digest(path: str) -> str | None:
    """The digest of a file's bytes, where its name is one: `<hex>.json`, `blobs/sha256/<hex>`.

    An old layer's directory is named by something else, and its bytes by nothing: there the
    digest in the configuration has to do.
    """
    stem = posixpath.basename(path).removesuffix(".json")
    return f"sha256:{stem}" if _HEX.fullmatch(stem) else None
