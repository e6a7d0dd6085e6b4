"""What every image source becomes: a reference, a configuration, and layers that can be packed.

The joint between the kinds of source (directory, OCI layout, archive, engine, and whatever comes
later) and `publish.indexing`, which knows none of them. A new kind is one function that returns
an `ImageSource`, mostly of `TarLayer`s whose `open_stored` reads the layer from wherever it is.

Threading: layers of one source may be packed from several threads at once, each layer by one.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from msgspec import Struct, field

from bootseer.base.closing import Closing
from bootseer.base.content_digest import ContentHasher
from bootseer.blob.tar.inflate import ExpansionLimits
from bootseer.blob.tar.reader import ReadableStream
from bootseer.errors import CorruptError, InvalidInputError, UnsupportedError
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.sources.layer_tar import index_layer, pack_layer
from bootseer.prefetch.sources.stream import Expected, TarStream

_log = logging.getLogger(__name__)

Sink = Callable[[bytes], None]
"""Takes the next bytes of a stream."""


class Layer(Protocol):
    """One layer of an image, not yet packed."""

    @property
    def digest(self) -> str | None:
        """SHA-256 of the uncompressed tar, known beforehand: what the store shares the layer by,
        however it was compressed. None where only packing tells (a directory)."""
        ...

    @property
    def size_bytes(self) -> int | None:
        """What packing will report as progress in all, where that is known."""
        ...

    @property
    def registry_digest(self) -> str | None:
        """Digest of the stored bytes in the registry that the image is read from, if it is."""
        ...

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """Write the layer to `sink`, an empty file that can be read, too, as a blob, or the seek
        points of the layer; the result's only blob is the one written, or the layer, with every
        digest of the source verified. `on_progress` is called from any thread and may raise to end
        the packing.

        Raises: CorruptError, NotFoundError, UnavailableError, NoSpaceError.
        """
        ...

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """Give `sink` the layer's tar stream piece by piece; the result's only blob is that stream,
        on this node alone. Only when this returns has the stream been verified.

        Files may lack a digest in the tree, which else is the one that `pack` gives.
        `on_progress` and what is raised: as for `pack`; and what `sink` raises.
        """
        ...


class _Kept:
    """What is read from `stream` is given to `sink`, too."""

    def __init__(self, stream: ReadableStream, sink: Sink, *, is_hashed: bool) -> None:
        self._stream = stream
        self._sink = sink
        self._hash = ContentHasher() if is_hashed else None

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        if self._hash is not None:
            self._hash.update(data)
        if data:
            self._sink(data)
        return data

    @property
    def digest(self) -> str | None:
        """Returns the digest of what was read, where the cache knows it by no other."""
        return None if self._hash is None else f"blake3:{self._hash.hexdigest()}"


class TarLayer(Struct, frozen=True):
    """A layer that is kept as a tar, gzip- or zstd-compressed or not."""

    digest: str
    """The `diff_id` in the image's configuration."""
    size_bytes: int
    """The size of the stored (compressed) bytes, which progress counts."""
    stored_digest: str | None
    """The digest of the stored bytes; None where the source does not know it."""
    open_stored: Callable[[], BinaryIO]
    """Opens the stored bytes for one read from start to end."""
    limits: ExpansionLimits = field(default_factory=ExpansionLimits)
    registry_digest: str | None = None
    """`stored_digest`, where the layer can be read from a registry by ranges."""
    is_copied: bool = True
    """Whether `pack` copies the layer; else it only finds the seek points of what the registry has,
    where it can."""

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pack`."""
        if not self.is_copied and self.registry_digest is not None:
            # Imported late: not every start comes here.
            from bootseer.prefetch.sources.seekable import write_seek_points

            try:
                with self._named():
                    return write_seek_points(
                        self.open_stored(), self._expected, sink, self.limits, on_progress
                    )
            except UnsupportedError as error:
                _log.info("the layer is copied: %s", error)
                sink.seek(0)
                sink.truncate()
        with self._stream(on_progress) as stream, self._named():
            known = self.digest if self.digest.startswith("sha256:") else None
            layer = pack_layer(stream, sink, diff_id=known)
            # The digests are compared at the very end, which is reached only by asking for more.
            stream.finish()
            return layer

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pull`."""
        with self._stream(on_progress) as stream, self._named():
            kept = _Kept(stream, sink, is_hashed=not self.digest.startswith("sha256:"))
            layer = index_layer(kept, lambda: kept.digest or self.digest)
            stream.finish()
            return layer

    @property
    def _expected(self) -> Expected:
        return Expected(self.digest, self.size_bytes, self.stored_digest)

    def _stream(self, on_progress: Callable[[int], None]) -> TarStream:
        return TarStream(self.open_stored(), self._expected, self.limits, on_progress)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """What refuses the tar says which layer it is."""
        name = self._expected.name
        try:
            yield
        except (CorruptError, UnsupportedError) as error:
            if name in str(error):
                raise
            raise type(error)(f"the {name} cannot be used: {error}") from error


class ImageSource(Closing, Struct, frozen=True):
    """An opened image. Close it: an engine's image lies in a temporary file until then."""

    reference: str
    """The name it is catalogued under unless the user gives one."""
    identity: str | None
    """Digest of the image's configuration, as Docker shows it; None for a directory."""
    config: ImageConfig
    layers: Sequence[Layer]
    """The lowest first."""
    release: Callable[[], None] = field(default=lambda: None)
    manifest_digest: str | None = None
    """What a registry knows this image, for this platform, by; None for other sources."""

    def close(self) -> None:
        """Give up files and connections."""
        self.release()


def name_of(path: Path) -> str:
    """A reference for an image that has no name of its own, from the name of its file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-._")
    return name[:100] or "image"


def layer_count_checked(count: int, config: ImageConfig, where: str) -> None:
    """Raises InvalidInputError unless each of `count` layers has its digest in `config`."""
    if count != len(config.diff_ids):
        raise InvalidInputError(
            f"{where}: the manifest lists {count} layers, the configuration "
            f"{len(config.diff_ids)}; it is not a container image"
        )
