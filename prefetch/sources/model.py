"""Image sources and their layers: the interface between kinds of source and `publish.indexing`.

A kind of source (directory, OCI layout, archive, engine, registry) is one function that returns an
`ImageSource`. Its layers are mostly `TarLayer`s, whose `open_stored` opens the layer's bytes.

Several threads may pack layers of one source at once, each layer by one thread.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
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
from bootseer.prefetch.sources.stream import ExpectedLayer, ReadAhead, tar_stream

_log = logging.getLogger(__name__)

Sink = Callable[[bytes], None]
"""Takes the next bytes of a stream."""


class Layer(Protocol):
    """Layer of an image, not yet packed."""

    @property
    def digest(self) -> str | None:
        """Digest of the uncompressed tar, by which images in a store share the layer.

        None for a directory, whose digest is known only after packing.
        """
        ...

    @property
    def size_bytes(self) -> int | None:
        """Sum of the progress that packing reports, or None if unknown."""
        ...

    @property
    def registry_digest(self) -> str | None:
        """Digest of the stored bytes in the image's registry; None for any other source."""
        ...

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """Write the layer's blob, or its seek points, to `sink`, and verify the source's digests.

        Args:
            sink: An empty file that can be read as well.
            on_progress: Gets counts of bytes from any thread; may raise to end the packing.

        Returns: The layer's tree. Its only blob is the one written, or the layer in its registry.
        Raises: CorruptError, NotFoundError, UnavailableError, NoSpaceError.
        """
        ...

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """Pass the layer's tar stream to `sink` piece by piece; verified once this returns.

        Files in the tree may lack digests that `pack` computes. `on_progress`: as for `pack`.

        Returns: The layer's tree. Its only blob is that stream, which is on this node alone.
        Raises: as `pack`, and any error of `sink`.
        """
        ...


class _TeeStream:
    """Stream that copies its bytes to a sink as they are read."""

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
        """Return the BLAKE3 digest of the bytes read, or None if they are not hashed."""
        return None if self._hash is None else f"blake3:{self._hash.hexdigest()}"


class TarLayer(Struct, frozen=True):
    """A layer stored as a tar: plain, or compressed with gzip or zstd."""

    digest: str
    """The `diff_id` in the image's configuration."""
    size_bytes: int
    """Size of the stored (compressed) bytes, which progress counts."""
    stored_digest: str | None
    """Digest of the stored bytes, or None if the source has none."""
    open_stored: Callable[[], BinaryIO]
    """Opens the stored bytes for one read from start to end."""
    limits: ExpansionLimits = field(default_factory=ExpansionLimits)
    registry_digest: str | None = None
    """See `Layer.registry_digest`."""
    is_copied: bool = True
    """Whether `pack` copies the layer; if not, it finds seek points, where the layer has any."""

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pack`."""
        if not self.is_copied and self.registry_digest is not None:
            # Imported late: most starts copy their layers.
            from bootseer.prefetch.sources.seekable import write_seek_points

            try:
                with self._errors_name_layer():
                    return write_seek_points(
                        self.open_stored(), self._expected, sink, self.limits, on_progress
                    )
            except UnsupportedError as error:
                _log.info("the layer is copied: %s", error)
                sink.seek(0)
                sink.truncate()
        with self._stream(on_progress) as stream, self._errors_name_layer():
            known = self.digest if self.digest.startswith("sha256:") else None
            layer = pack_layer(stream, sink, diff_id=known)
            stream.finish()
            return layer

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pull`."""
        with self._stream(on_progress) as stream, self._errors_name_layer():
            # The node cache finds streams by SHA-256 or BLAKE3 only.
            tee = _TeeStream(stream, sink, is_hashed=not self.digest.startswith("sha256:"))
            layer = index_layer(tee, lambda: tee.digest or self.digest)
            stream.finish()
            return layer

    @property
    def _expected(self) -> ExpectedLayer:
        return ExpectedLayer(self.digest, self.size_bytes, self.stored_digest)

    def _stream(self, on_progress: Callable[[int], None]) -> ReadAhead:
        return tar_stream(self.open_stored(), self._expected, self.limits, on_progress)

    @contextlib.contextmanager
    def _errors_name_layer(self) -> Iterator[None]:
        name = self._expected.name
        try:
            yield
        except (CorruptError, UnsupportedError) as error:
            if name in str(error):
                raise
            raise type(error)(f"the {name} cannot be used: {error}") from error


class ImageSource(Closing, Struct, frozen=True):
    """An opened image. Close it: an image of a Docker engine holds a temporary file until then."""

    reference: str
    """Name of the image in a catalogue, unless the user gives one."""
    identity: str | None
    """Digest of the image's configuration, as Docker shows it; None for a directory."""
    config: ImageConfig
    layers: Sequence[Layer]
    """The layers from the lowest up."""
    release: Callable[[], None] = field(default=lambda: None)
    manifest_digest: str | None = None
    """Digest of the platform's manifest in a registry; None for other sources."""

    def close(self) -> None:
        """Release files and connections."""
        self.release()


def layer_count_checked(count: int, config: ImageConfig, where: str) -> None:
    """Raise InvalidInputError unless `config` has the digests of exactly `count` layers."""
    if count != len(config.diff_ids):
        raise InvalidInputError(
            f"{where}: the manifest lists {count} layers, the configuration "
            f"{len(config.diff_ids)}; it is not a container image"
        )
