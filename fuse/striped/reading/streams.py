"""Detection of sequential readers, and how far to read ahead of them. The caller locks.

A generation of a file has one tracker for all descriptors, because requests do not say which reader
they come from. A tracker holds the offsets at which it expects the next read of each reader.
"""

from msgspec import Struct

MAX_STREAMS = 32
# Reads of one sequential reader may be served slightly out of order by several server threads.
_SLACK_BYTES = 2 * 2**20
# Read-ahead as a multiple of the bytes that a stream has read: a header of a few KiB that is read
# in small pieces must not start megabytes of reads.
_GROWTH = 4
# The least window at the start, and the most that is read ahead for the first large read alone.
START_WINDOW_BYTES = 64 * 2**20
# Bytes of a stream from which on whole stripe units are fetched for it.
_UNITS_FROM_BYTES = 512 * 2**10


class _ReadStream(Struct):
    next: int
    read_bytes: int
    ahead: int
    used_s: float
    is_sequential: bool
    window_bytes: int
    least_bytes: int = 0
    """Read-ahead from the first large read on."""
    widened_until: int = 0
    """Offset up to which the window is not widened again."""


class Advice(Struct, frozen=True):
    """Advice about one read: which bytes to fetch for it and ahead of it."""

    whole_units: bool
    """Whether to fetch whole units for the read, not just blocks."""
    ahead_start: int
    ahead_end: int
    """Read ahead `[ahead_start, ahead_end)`; empty for a random read."""


class StreamTracker:
    """The streams of one file."""

    def __init__(self, window_bytes: int = START_WINDOW_BYTES, first_bytes: int = 0) -> None:
        """Track with windows of `window_bytes`, which `widen_window` widens.

        `first_bytes`: bytes to read ahead at once for a reader that begins at the start of the
        file.
        """
        self._streams: list[_ReadStream] = []
        self._window_bytes = window_bytes
        self._first_bytes = first_bytes

    def observe(self, start: int, end: int, window_max_bytes: int, now_s: float) -> Advice:
        """Note a read of `[start, end)`; return which bytes to fetch for it and ahead of it."""
        stream = self._match(start)
        if stream is None:
            stream = _ReadStream(end, end - start, end, now_s, False, self._window_bytes)
            if not start:
                stream.least_bytes = self._first_bytes
            self._streams.append(stream)
            if len(self._streams) > MAX_STREAMS:
                self._streams.remove(min(self._streams, key=lambda old: old.used_s))
            # A large first read at the start of a file is a reader of the whole file.
            if start > 0 or end < _UNITS_FROM_BYTES:
                return Advice(False, end, end)
            stream.is_sequential = True
        else:
            stream.used_s = now_s
            if start != stream.next:
                # Out of order, or a skip within the slack: still the same reader.
                stream.next = max(stream.next, end)
                return Advice(stream.read_bytes >= _UNITS_FROM_BYTES, end, end)
            stream.is_sequential = True
            stream.read_bytes += end - start
            stream.next = end
        if stream.read_bytes < _UNITS_FROM_BYTES:
            return Advice(False, end, end)
        window_bytes = min(stream.window_bytes, window_max_bytes)
        ahead_end = end + min(stream.least_bytes + _GROWTH * stream.read_bytes, window_bytes)
        ahead_start = max(stream.ahead, end)
        stream.ahead = max(ahead_end, ahead_start)
        return Advice(True, ahead_start, stream.ahead)

    def widen_window(self, end: int) -> None:
        """Widen the window of the stream at `end`, which waits for a slow stored file.

        A wider window keeps the faster stored files busy meanwhile.
        """
        for stream in self._streams:
            if stream.next == end >= stream.widened_until:
                stream.window_bytes += stream.window_bytes // 2
                stream.widened_until = end + stream.window_bytes // 2

    def active_count(self, since_s: float) -> int:
        """Return the number of sequential streams that have read something since then."""
        return sum(1 for s in self._streams if s.is_sequential and s.used_s >= since_s)

    def note_shortfall(self, end: int, reached: int) -> None:
        """Note that read-ahead which was advised up to `end` was started only up to `reached`."""
        for stream in self._streams:
            if stream.ahead == end:
                stream.ahead = reached

    def _match(self, start: int) -> _ReadStream | None:
        best: _ReadStream | None = None
        for stream in self._streams:
            distance = abs(start - stream.next)
            if distance == 0:
                return stream
            # Only a sequential stream gets slack: two random reads that lie close are no stream.
            near = stream.is_sequential and distance <= _SLACK_BYTES
            if near and (best is None or distance < abs(start - best.next)):
                best = stream
        return best
