"""What was claimed of an image's streams, and what becomes of it when one claim was wrong.

Alone says so (docs/format/bundle.md, "Trust"), once. Any thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from bootseer.errors import CorruptError
from bootseer.prefetch.cache.claims_mark import ClaimsMark
from bootseer.prefetch.cache.image_stream import ImageStream

_log = logging.getLogger(__name__)


class Claims:
    """The claims of all streams of one image."""

    def __init__(
        self,
        streams: Sequence[ImageStream],
        mark: ClaimsMark | None,
        refuse: Callable[[], None],
        on_refuted: Callable[[Sequence[tuple[int, int, int]]], None],
    ) -> None:
        """`mark` tells the other servers of the image; None where nothing is claimed. `refuse` is
        called where this server has found a claim wrong, before any other is told. `on_refuted`
        gets the ranges, each (number of a stream, offset, length), of which wrong bytes may have
        been read, whoever found them."""
        self._streams = streams
        self._mark = mark
        self._refuse = refuse
        self._on_refuted = on_refuted
        self._lock = threading.Lock()
        self._is_refuted = False

    def unproven(self) -> list[tuple[int, int, int]]:
        """What is claimed and not proven, each (number of a stream, offset, length)."""
        return [
            (number, *part)
            for number, stream in enumerate(self._streams)
            for part in stream.unproven()
        ]

    def refute(self, error: CorruptError) -> bool:
        """One was found wrong: believe none any more. Whether this is the first time."""
        if not self._is_first():
            return False
        _log.error(
            "a bundle (or the registry, in place of the store) brought bytes that are not those of "
            "the image: %s. It is not used any more, and the image is read without it. What has "
            "read the image so far may have got wrong bytes: start it again, and find out who can "
            "write to `hot/` and `bundles/` of the store",
            error,
        )
        # In this order: a server that starts under the new mark must not find the bundle.
        self._refuse()
        if self._mark is not None:
            self._mark.refute()
        self._forget(self._drop())
        return True

    def look(self) -> CorruptError | None:
        """Believe no claim any more if another server of the image has found one wrong. Return what
        to say of it, at the first time."""
        if self._mark is None or not self._mark.is_refuted or not self._is_first():
            return None
        error = CorruptError(
            "another server of the image on this node found that bytes of a bundle are not those "
            "of the image"
        )
        _log.error(
            "%s. The image is read without it. What has read the image so far may have got wrong "
            "bytes: start it again",
            error,
        )
        self._drop()
        # The finder has cleared the map that we share, which would tell the ranges.
        self._forget([(n, 0, one.proven.stream_length) for n, one in enumerate(self._streams)])
        return error

    def _is_first(self) -> bool:
        with self._lock:
            before, self._is_refuted = self._is_refuted, True
            return not before

    def _drop(self) -> list[tuple[int, int, int]]:
        return [
            (number, *part)
            for number, stream in enumerate(self._streams)
            for part in stream.refute()
        ]

    def _forget(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        # Not here: a reader waits for this thread, and the kernel for the reader.
        threading.Thread(
            target=self._on_refuted, args=(ranges,), name="refuted", daemon=True
        ).start()
