"""What was claimed of an image's streams, and what becomes of it when one claim was wrong.

Alone says so (docs/format/bundle.md, "Trust"), once. Any thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from bootseer.errors import CorruptError
from bootseer.prefetch.cache.image_stream import ImageStream

_log = logging.getLogger(__name__)


class Claims:
    """The claims of all streams of one image."""

    def __init__(
        self,
        streams: Sequence[ImageStream],
        on_refuted: Callable[[Sequence[tuple[int, int, int]]], None],
    ) -> None:
        """`on_refuted` gets the ranges, each (number of a stream, offset, length), of which wrong
        bytes may have been read."""
        self._streams = streams
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
        with self._lock:
            if self._is_refuted:
                return False
            self._is_refuted = True
        _log.error(
            "a bundle (or the registry, in place of the store) brought bytes that are not those of "
            "the image: %s. It is not used any more, and the image is read without it. What has "
            "read the image so far may have got wrong bytes: start it again, and find out who can "
            "write to `hot/` and `bundles/` of the store",
            error,
        )
        ranges = [
            (number, *part)
            for number, stream in enumerate(self._streams)
            for part in stream.refute()
        ]
        # Not here: a reader waits for this thread, and the kernel for the reader.
        threading.Thread(
            target=self._on_refuted, args=(ranges,), name="refuted", daemon=True
        ).start()
        return True
