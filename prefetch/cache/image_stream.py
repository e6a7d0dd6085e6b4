"""One stream as one image reads it: bytes that are proven, and bytes that are only claimed.

Alone decides which of the two a reader gets (docs/format/cache.md, "Proven and claimed"). *Proven*
bytes came out of frames with the digests that the image's index gives; they are shared with every
image that has the same frames. *Claimed* are those that a bundle brought, or a registry in place of
the store: the index cannot vouch for pages. They serve this image alone, from a stream of its own,
until the frame that holds them has come; then they are compared with it.

Threading: every method from any thread at once, but `close`, which comes last.
"""

import threading
from collections.abc import Callable, Iterable, Iterator

from bootseer.errors import CorruptError
from bootseer.prefetch.cache.stream_cache import StreamCache

_WINDOW_BYTES = 2**26


class ImageStream:
    """What the node has of one stream, for one image."""

    def __init__(
        self,
        proven: StreamCache,
        opener: Callable[[bool], StreamCache | None] = lambda make: None,
    ) -> None:
        """`opener(make)` opens what is claimed of the stream; None where nothing is, unless
        it is to be made. Raises: BootseerError; then `proven` is closed."""
        self.proven = proven
        self._opener = opener
        self._opening = threading.Lock()
        self._is_refuted = False
        self._claimed: StreamCache | None = None
        self._dropped: StreamCache | None = None
        try:
            self._claimed = opener(False)
        except BaseException:
            proven.close()
            raise

    # ---- what is here ---------------------------------------------------------------------

    def has(self, offset: int, length: int) -> bool:
        """Returns whether the bytes are here, proven or claimed (see `StreamCache.has`)."""
        if self.proven.has(offset, length):
            return True
        claimed = self._claimed
        if claimed is None:
            return False
        return all(claimed.has(*gap) for gap in self.proven.missing(offset, length))

    def holds(self, offset: int, length: int) -> bool:
        """Returns whether the bytes are here, by either kind (see `StreamCache.holds`)."""
        if self.proven.holds(offset, length):
            return True
        claimed = self._claimed
        if claimed is None:
            return False
        # Of a bundle's page mostly nothing is proven, which is told without looking for gaps.
        if self.proven.lacks_all(offset, length):
            return claimed.holds(offset, length)
        return all(claimed.holds(*gap) for gap in self.proven.missing(offset, length))

    def holds_now(self, offset: int, length: int) -> bool:
        """Returns whether all bytes are here as one kind (see `StreamCache.holds_now`)."""
        claimed = self._claimed
        return self.proven.holds_now(offset, length) or (
            claimed is not None and claimed.holds_now(offset, length)
        )

    def missing(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """As `StreamCache.missing`: what is here of neither kind."""
        claimed = self._claimed
        for gap in self.proven.missing(offset, length):
            if claimed is None:
                yield gap
            else:
                yield from claimed.missing(*gap)

    def unproven(self) -> Iterator[tuple[int, int]]:
        """What is claimed and not proven, ascending."""
        claimed = self._claimed
        if claimed is not None:
            length = self.proven.stream_length
            for start in range(0, length, _WINDOW_BYTES):
                for part in claimed.here(start, min(_WINDOW_BYTES, length - start)):
                    yield from self.proven.missing(*part)

    def present_bytes(self) -> int:
        """How much of the stream is here, of either kind."""
        return self.proven.present_bytes() + sum(length for _, length in self.unproven())

    @property
    def is_full(self) -> bool:
        """Whether the disk refused a write."""
        claimed = self._claimed
        return self.proven.is_full or (claimed is not None and claimed.is_full)

    # ---- reading and writing --------------------------------------------------------------

    def get(self, offset: int, length: int) -> bytes | memoryview | None:
        """The bytes where `has` says that all of them are here, else None. Raises: OSError."""
        data = self.proven.get(offset, length)
        claimed = self._claimed
        if data is not None or claimed is None:
            return data
        if self.proven.lacks_all(offset, length):
            return claimed.get(offset, length)
        pieces = []
        position, end = offset, offset + length
        for start, stop in _within(offset, end, self.proven.missing(offset, length)):
            if position < start:
                pieces.append(self.proven.get(position, start - position))
            pieces.append(claimed.get(start, stop - start))
            position = stop
        if position < end:
            pieces.append(self.proven.get(position, end - position))
        found = [piece for piece in pieces if piece is not None]
        return b"".join(found) if len(found) == len(pieces) else None

    def read_ahead(self, offset: int, length: int) -> None:
        """As `StreamCache.read_ahead`."""
        claimed = self._claimed
        if claimed is not None and not self.proven.holds_now(offset, length):
            claimed.read_ahead(offset, length)
        else:
            self.proven.read_ahead(offset, length)

    def prove(self, offset: int, content: bytes) -> bool:
        """Keep the content of a frame, which was found right; False when the disk takes no more.

        Raises: CorruptError where something else was claimed of it; the frame is kept then, too.
        """
        is_kept = self.proven.write(offset, content)
        claimed = self._claimed
        if claimed is not None:
            end = offset + len(content)
            for start, stop in _within(offset, end, claimed.here(offset, len(content))):
                # What the disk has damaged was nobody's claim.
                data = claimed.get(start, stop - start)
                if data is not None and bytes(data) != content[start - offset : stop - offset]:
                    raise CorruptError(
                        f"bytes {start} to {stop} of a stream are not those of the image"
                    )
        return is_kept

    def claim(self, offset: int, content: bytes | memoryview) -> bool:
        """Keep bytes that nothing in the index vouches for; False when the disk takes no more, or
        when such claims were found wrong. Raises: BootseerError."""
        if self._claimed is None:
            self.open_claimed()
        claimed = self._claimed
        return claimed is not None and claimed.write(offset, content)

    def open_claimed(self, *, make: bool = True) -> None:
        """Know what is claimed from now on, in whatever process; without `make`, only if something
        is by now. Nothing where claims were found wrong. Raises: BootseerError."""
        with self._opening:
            if self._claimed is None and not self._is_refuted:
                self._claimed = self._opener(make)

    def refute(self) -> list[tuple[int, int]]:
        """Believe no claim any more, in no process; the ranges that were believed so far."""
        with self._opening:
            self._is_refuted = True
            claimed, self._claimed = self._claimed, None
            if claimed is None:
                return []
            # A thread may be reading it: closed at the end.
            self._dropped = claimed
        ranges = list(claimed.here(0, claimed.stream_length))
        claimed.forget()
        return ranges

    # ---- the rest -------------------------------------------------------------------------

    def verify_all(self, may_go_on: Callable[[], bool]) -> None:
        """As `StreamCache.verify_all`."""
        for stream in (self.proven, self._claimed):
            if stream is not None:
                stream.verify_all(may_go_on)

    def close(self, *, durable: bool = True) -> None:
        """As `StreamCache.close`."""
        for stream in (self.proven, self._claimed, self._dropped):
            if stream is not None:
                stream.close(durable=durable)


def _within(offset: int, end: int, parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What of the parts, given by whole sectors, lies in `[offset, end)`, as (start, stop)."""
    for start, count in parts:
        if max(start, offset) < min(start + count, end):
            yield max(start, offset), min(start + count, end)
