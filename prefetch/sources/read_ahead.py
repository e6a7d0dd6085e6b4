"""Pieces of a stream that are made in a thread of their own, a few ahead of their consumer.

The joint between two stages of a pipeline: each stage's work is in libraries that release the GIL,
so the stages overlap. Alone owns these threads; memory is bounded by the pieces in a queue.

Threading: a `ReadAhead` belongs to one taker, who closes it.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator

from bootseer.errors import DeadlineError

_QUEUE_COUNT = 8
WAIT_S = 300.0
"""A source has its own, shorter deadlines; this ends the wait for one that forgot."""
_POLL_S = 0.2
_JOIN_S = 5.0
"""A thread ends after the piece that it is working on; one that is stuck in a source is left."""


class ReadAhead:
    """What `pieces` yields, at most `_QUEUE_COUNT` pieces ahead."""

    def __init__(
        self, pieces: Iterator[bytes], name: str, on_wait: Callable[[], None] | None = None
    ) -> None:
        """`on_wait` is called by the taker a few times per second while nothing comes; what it
        raises ends the wait."""
        self._pieces = pieces
        self._on_wait = on_wait
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUE_COUNT)
        self._stopped = threading.Event()
        self._rest = b""
        self._ended = False
        self._thread = threading.Thread(target=self._produce, name=name, daemon=True)
        self._thread.start()

    def _put(self, item: bytes | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def _produce(self) -> None:
        try:
            for piece in self._pieces:
                if piece and not self._put(piece):
                    return
            self._put(None)
        except BaseException as error:
            # Whatever it is belongs to the taker: it is raised there.
            self._put(error)
        finally:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most `size`, a whole piece where that is not longer; b"" at the end.
        A negative size: all that is left.

        Raises: DeadlineError, and what the pieces or `on_wait` raise.
        """
        if size < 0:
            return b"".join(iter(lambda: self.read(2**62), b""))
        piece = self._rest or self._next()
        if len(piece) <= size:
            self._rest = b""
            return piece
        self._rest = piece[size:]
        return piece[:size]

    def _next(self) -> bytes:
        deadline_s = time.monotonic() + WAIT_S
        while not self._ended:
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if self._on_wait:
                    self._on_wait()
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"the source of an image sent nothing, or too little, for {WAIT_S:.0f} s"
                    ) from None
                continue
            if isinstance(item, bytes):
                return item
            self._ended = True
            if item is not None:
                raise item
        return b""

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stopped.set()
        self._thread.join(_JOIN_S)
