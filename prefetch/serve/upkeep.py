"""What an image's server does on the side: verify after a crash, keep the cache below its limit,
write figures, note in the store that the image is in use, look what other servers found wrong.

One thread that does a little now and then, and the fill's own. Nothing here fails a launch.
"""

import threading
import time
from collections.abc import Callable

from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.prefetch.reading.fill import Fill
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.serve.cache_limit import CacheRoom
from bootseer.prefetch.serve.figures import FillFigures, LaunchFigures, render
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.settings.config import Settings

_ROUND_S = 15.0
"""Seconds between two rounds: as often as Prometheus scrapes by default."""
_GROWN_BYTES = 256 * 2**20
"""The growth of the cache after which its limit is checked again."""
_LOOK_S = 1.0
"""Seconds between two looks whether another server found claimed bytes of the image wrong: for so
long its kernel may go on with them."""
_CLOSE_S = 5.0
_NOTE_USE_S = 6 * 3600.0
"""A note that fails is tried again long before a garbage collector would miss it."""


class Upkeep:
    """Runs beside one image's streams. Start it once, close it before them."""

    def __init__(
        self,
        settings: Settings,
        index_digest: str,
        streams: ImageBytes,
        start_is_over: Callable[[], bool],
        note_use: Callable[[], None],
    ) -> None:
        """`start_is_over` says when the background fill may begin; `note_use` is called at once and
        some times a day."""
        self._settings = settings
        self._note_use = note_use
        self._streams = streams
        self._rate = settings.fill_bytes_per_s
        self._room = CacheRoom(settings.cache_dir, settings.cache_limit_bytes)
        self._file = None
        if settings.metrics_dir is not None:
            self._file = FiguresFile(settings.metrics_dir)
        self._fill = None
        if self._rate:
            lock = NodeCache(settings.cache_dir).fill_lock(index_digest)
            self._fill = Fill(streams, start_is_over, self._room.make, lock=lock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._figures: Callable[[], LaunchFigures] | None = None

    def start(self, figures: Callable[[], LaunchFigures]) -> None:
        """`figures` is asked whenever they are written."""
        self._figures = figures
        self._thread.start()
        if self._fill is not None:
            self._fill.start()

    def write_figures(self) -> None:
        """Now, if they are written at all."""
        if self._file is not None and self._figures is not None:
            figures = self._figures()
            name = file_name("image", figures.image, figures.workload)
            self._file.write(name, lambda slot: render(figures, slot))

    def fill_figures(self) -> FillFigures:
        """How far the background fill is."""
        state = "off" if self._fill is None else self._fill.state
        missing_bytes = self._streams.image_bytes - self._streams.proven_bytes
        return FillFigures(state, self._rate, missing_bytes)

    def _run(self) -> None:
        # What publishers left that were killed goes as it looks whether any is at work.
        wait_published(self._settings, 0)
        self._streams.verify(lambda: not self._stopping.is_set())
        trimmed_at_bytes = -_GROWN_BYTES
        note_at_s = time.monotonic()
        while not self._stopping.is_set():
            if time.monotonic() >= note_at_s:
                note_at_s += _NOTE_USE_S
                self._note_use()
            came = self._streams.statistics().delivered_bytes
            if came - trimmed_at_bytes >= _GROWN_BYTES:
                trimmed_at_bytes = came
                self._room.make()
            self.write_figures()
            self._rest()

    def _rest(self) -> None:
        """Wait for the next round."""
        ends_s = time.monotonic() + _ROUND_S
        while (left_s := ends_s - time.monotonic()) > 0:
            self._streams.look_for_refutation()
            if self._stopping.wait(min(_LOOK_S, left_s)):
                return

    def close(self) -> None:
        """End both threads, and with the fill all transfers. Idempotent."""
        self._stopping.set()
        if self._fill is not None:
            self._fill.stop()
        self._streams.fetcher.close()
        if self._fill is not None:
            self._fill.join(_CLOSE_S)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
