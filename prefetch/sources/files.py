"""Images in files: root file systems, OCI layouts, archives of `docker save`, containerd's store.

Nothing is unpacked, and every file is read where it lies. The kinds of source:

- a directory, as `docker export` or debootstrap leave it: one layer that has no digest beforehand,
  so that it is read whole at every indexing;
- an OCI layout, in a directory or on shared storage, as skopeo, umoci and buildkit write it;
- a tar archive of `docker save`, which holds `manifest.json` and, since Docker 25, an OCI layout;
- containerd's content store: blobs named by digest, without an index and without image names;
- an image in a Docker engine, whose archive is copied to a file first.

Functions and frozen objects; any thread.
"""

import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from msgspec import Struct
from msgspec.structs import replace

from bootseer.blob.pack.packing import pack_directory, tar_directory
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.linux.private_files import make_private_directory
from bootseer.prefetch.index.chains import chain_ids
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.sources.documents import (
    parse_archive_manifest,
    parse_config,
    read_document,
    read_image,
    read_layout,
)
from bootseer.prefetch.sources.model import ImageSource, Sink, TarLayer, layer_count_checked
from bootseer.prefetch.sources.stream import ReadAhead
from bootseer.registry.documents import DOCUMENT_BYTES_MAX, Descriptor
from bootseer.store import Backend, open_backend

if TYPE_CHECKING:
    from docker.client import DockerClient

LAYOUT_MARKER = "oci-layout"
"""The file that marks a directory as an OCI layout."""
# Large enough that a round trip costs little, small enough for two layers' worth of memory.
_READ_BYTES = 4 << 20
_MEMBER_COUNT_MAX = 100_000
_LINK_HOPS_MAX = 8
_HEX = re.compile("[0-9a-f]{64}")
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bunzip2"}


def split_tag(location: str, exists: Callable[[Path], bool]) -> tuple[Path, str]:
    """Split "path:tag" at the shortest path that exists: path and tag may both hold colons."""
    parts = location.split(":")
    for count in range(1, len(parts) + 1):
        path = Path(":".join(parts[:count]))
        if exists(path):
            return path, ":".join(parts[count:])
    return Path(location), ""


def _name_of(path: Path) -> str:
    """Make a reference from a file's name, for an image that has no name of its own."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-._")
    return name[:100] or "image"


# ---- a root file system ----------------------------------------------------------------------


class DirectoryLayer(Struct, frozen=True):
    """The only layer of an image that is a directory. Implements `Layer`."""

    root: Path

    @property
    def digest(self) -> str | None:
        """Return None: the digest is known only after packing."""
        return None

    @property
    def size_bytes(self) -> int | None:
        """Return None: the size is known only after packing."""
        return None

    @property
    def registry_digest(self) -> str | None:
        """Return None: the layer is in no registry."""
        return None

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pack`."""
        # Other file systems mounted below the root (/proc, volumes) are not part of the image.
        tree = pack_directory(self.root, sink, one_file_system=True, on_progress=on_progress)
        return LayerTree(tree, is_changeset=False)

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pull`."""
        tree = tar_directory(self.root, sink, on_progress=on_progress)
        return LayerTree(tree, is_changeset=False)


def open_directory(root: Path) -> ImageSource:
    """Open the root file system in the directory `root`. Raises: NotFoundError."""
    if not root.is_dir():
        raise NotFoundError(f"there is no directory {root}")
    return ImageSource(_name_of(root), None, ImageConfig(), [DirectoryLayer(root)])


# ---- OCI layouts -----------------------------------------------------------------------------


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file unbuffered. Raises: OSError; InvalidInputError for any other file."""
    # O_NONBLOCK: opening a pipe that somebody put there would wait without end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise InvalidInputError(f"{path} is not a regular file")
    return file


def _open_below(directory: Path, path: str) -> BinaryIO:
    """Open a file of a layout by its path in the layout. Raises: BootseerError."""
    try:
        return _open_regular(directory / path)
    except OSError as error:
        raise from_oserror(error, f"read {directory / path}") from error


def _reference_of(tag: str, base: str) -> str:
    """Return the reference of the image with that tag in a layout called `base`."""
    # A tag is either a whole name ("docker.io/library/python:3.12") or only the part after ":".
    if "/" in tag or ":" in tag:
        return tag
    return f"{base}:{tag}" if tag else base


def open_oci_layout(directory: Path, tag: str) -> ImageSource:
    """Open the image with this tag, or the only image, of the OCI layout in `directory`.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError,
    PermissionDeniedError.
    """
    where = str(directory)
    if directory.is_dir() and not (directory / "index.json").exists():
        raise InvalidInputError(f"{where} is not an OCI layout: it has no index.json")
    name, image = read_layout(partial(_open_below, directory), tag, where)
    reference = _reference_of(name, _name_of(directory))
    return ImageSource(reference, image.identity, image.config, image.layers)


class _BackendFile(io.RawIOBase):
    """File of a backend, read from start to end. Belongs to one thread."""

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
    """Open the image with this tag, or the only image, of the OCI layout at the storage URL `url`.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError, UnavailableError,
    PermissionDeniedError.
    """
    backend = open_backend(url)

    def open_file(path: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_BackendFile(backend, path), _READ_BYTES))

    try:
        name, image = read_layout(open_file, tag, backend.url)
    except BaseException:
        backend.close()
        raise
    base = backend.url.rstrip("/").rpartition("/")[2]
    reference = _reference_of(name, base)
    return ImageSource(reference, image.identity, image.config, image.layers, backend.close)


# ---- containerd's content store --------------------------------------------------------------


def open_content(directory: Path, chain_id: str) -> ImageSource:
    """Open the image of containerd's content store whose layers make the chain `chain_id`.

    The store does not record image names, so the reference is made of the image's digest.

    Raises: NotFoundError if there is no such image or its documents are gone;
    PermissionDeniedError.
    """
    for digest, size_bytes in _manifest_candidates(directory):
        try:
            manifest = Descriptor(digest, size_bytes)
            image = read_image(partial(_open_below, directory), manifest, str(directory))
        except BootseerError:
            # The blob is no manifest, or containerd has removed its configuration.
            continue
        if chain_id in chain_ids(image.config.diff_ids)[-1:]:
            name = f"containerd/{image.identity}"
            config, layers = image.config, image.layers
            return ImageSource(name, image.identity, config, layers, manifest_digest=digest)
    raise NotFoundError(f"no image in {directory} has the chain of layers {chain_id}")


def _manifest_candidates(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield (digest, size in bytes) of each blob that may be a manifest, the newest first."""
    folder = directory / "blobs" / "sha256"
    try:
        with os.scandir(folder) as entries:
            found = [(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
    except OSError as error:
        raise from_oserror(error, f"look for images in {folder}") from error
    found.sort(key=lambda each: -each[0].st_mtime_ns)
    for status, name in found:
        if status.st_size <= DOCUMENT_BYTES_MAX and _begins_as_json(folder / name):
            yield f"sha256:{name}", status.st_size


def _begins_as_json(path: Path) -> bool:
    try:
        with _open_regular(path) as file:
            return file.read(1) == b"{"
    except (OSError, BootseerError):
        return False


# ---- archives of docker save -----------------------------------------------------------------


class _FileSlice(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, read with a position of its own."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(offset)
        self._remaining_bytes = length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        count = self._file.readinto(memoryview(buffer)[: self._remaining_bytes]) or 0
        self._remaining_bytes -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class ArchiveFiles(Struct, frozen=True):
    """The regular files of a tar archive, found by path; links in the archive are followed."""

    archive: Path
    files: Mapping[str, tuple[int, int]]
    """Path -> (offset, length) in the archive."""
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
        """Return the size of a file. Raises: NotFoundError."""
        return self._range(path)[1]

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading. Raises: NotFoundError and other BootseerErrors."""
        found = self._range(path)
        try:
            return _FileSlice(self.archive, *found)  # type: ignore[return-value]
        except OSError as error:
            raise from_oserror(error, f"read {self.archive}") from error


def list_archive(path: Path) -> ArchiveFiles:
    """List the files of the tar at `path` in one pass over its headers.

    Raises: InvalidInputError if the file is not a tar; CorruptError if it is cut off.
    """
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
                        # Docker before 25 writes links such as abc/layer.tar -> ../def/layer.tar.
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
    """Open the image in the archive at `path`; `tag` chooses one of several images.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError.
    """
    archive = list_archive(path)
    # Archives with an OCI layout have manifest.json as well, and only there the image's names.
    if "manifest.json" in archive:
        return _open_archive_manifest(archive, tag)
    if "index.json" in archive:
        name, image = read_layout(archive.open, tag, str(path))
        return ImageSource(
            name or _name_of(path.with_suffix("")), image.identity, image.config, image.layers
        )
    if "repositories" in archive:
        raise UnknownFormatError(
            f"{path} was written by a Docker older than 1.10, which is not read"
        )
    raise InvalidInputError(
        f"{path} is not an image archive: it has neither manifest.json nor index.json"
    )


def _open_archive_manifest(archive: ArchiveFiles, tag: str) -> ImageSource:
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
    if _digest_in_name(image.config) not in (None, identity):
        raise CorruptError(f"{where}: {image.config} does not have the digest that names it")
    config = parse_config(data, f"{where}: {image.config}")
    layer_count_checked(len(image.layers), config, where)
    layers = [
        TarLayer(
            diff_id, archive.size_bytes(path), _digest_in_name(path), partial(archive.open, path)
        )
        for diff_id, path in zip(config.diff_ids, image.layers, strict=True)
    ]
    return ImageSource(
        image.tags[0] if image.tags else _name_of(archive.archive.with_suffix("")),
        identity,
        config,
        layers,
    )


def _digest_in_name(path: str) -> str | None:
    """Return the digest in the name of a file, `<hex>.json` or `blobs/sha256/<hex>`, or None.

    Docker before 25 calls each layer `layer.tar`: only the configuration has its digest.
    """
    stem = posixpath.basename(path).removesuffix(".json")
    return f"sha256:{stem}" if _HEX.fullmatch(stem) else None


# ---- images in a Docker engine -------------------------------------------------------------------

# The Docker SDK streams the archive of `docker save` into a temporary file without a name, which is
# then read as an archive. The file vanishes with this process, even if it is killed.


_CHUNK_BYTES = 2**20
_DEADLINE_S = 60
"""Deadline of each read of the engine's answer, not of the whole image. `ReadAhead`, which waits at
most 300 s for each MiB, gives up an engine that sends only a byte now and then."""


def open_docker_image(name: str, work_dir: Path) -> ImageSource:
    """Copy the image `name` out of the engine that DOCKER_HOST names, or the default one.

    Raises: UnavailableError if no engine answers; NotFoundError; NoSpaceError; and as
    `open_docker_archive`.
    """
    # Imported late: the SDK costs more than most commands take.
    import requests
    from docker.client import DockerClient
    from docker.errors import APIError, DockerException, ImageNotFound

    if not name:
        raise InvalidInputError(
            "docker:// needs the name of an image, such as docker://python:3.12"
        )
    with ExitStack() as stack:
        try:
            client = DockerClient.from_env(timeout=_DEADLINE_S)
            stack.callback(client.close)
            ahead = ReadAhead(_archive_chunks(client, name), "docker-save")
            stack.callback(ahead.close)
            path = _copy(iter(lambda: ahead.read(_CHUNK_BYTES), b""), name, work_dir, stack)
        except ImageNotFound as error:
            raise NotFoundError(
                f"the Docker engine has no image {name!r}; docker pull it first"
            ) from error
        except APIError as error:
            raise UnavailableError(f"the Docker engine refused {name!r}: {error}") from error
        except (DockerException, requests.RequestException) as error:
            raise UnavailableError(
                f"no Docker engine answers ({_reason(error)}); start it, or set DOCKER_HOST, or "
                "index a `docker save` archive instead"
            ) from error
        source = open_docker_archive(path)
        keep = stack.pop_all()
        return replace(source, reference=_with_tag(name), release=keep.close)


def _archive_chunks(client: "DockerClient", name: str) -> Iterator[bytes]:
    yield from client.images.get(name).save(_CHUNK_BYTES, named=True)


def _copy(chunks: Iterator[bytes], name: str, work_dir: Path, stack: ExitStack) -> Path:
    try:
        make_private_directory(work_dir)
        file = stack.enter_context(tempfile.TemporaryFile(dir=work_dir))  # noqa: SIM115
        for chunk in chunks:
            file.write(chunk)
        file.flush()
    except OSError as error:
        if error.errno is None:
            raise  # An error of the engine, not of the disk.
        raise from_oserror(error, f"copy the image {name!r} to {work_dir}") from error
    # A file without a name can be opened again by its descriptor.
    return Path(f"/proc/self/fd/{file.fileno()}")


def _with_tag(name: str) -> str:
    """Return "python:latest" for "python", as the engine does."""
    last = name.rpartition("/")[2]
    return name if ":" in last or "@" in last else f"{name}:latest"


def _reason(error: Exception) -> str:
    """Return the innermost cause in one line: the SDK wraps it four times."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
