"""Compares what lies in a cached stream with its checksums, before it is believed.

Alone decides when that is due (docs/format/cache.md, "Verifying"): at the first use of each sector
by this process, since a disk may give other bytes than it was given; and after a crash of the
machine, before a sector counts as present at all. What does not match becomes absent, for all
processes, and is fetched again.

Threading: every method from any thread at once.
"""

import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from bootseer.prefetch.cache.files import SECTOR_BYTES, sectors_of
from bootseer.prefetch.cache.presence import Presence
from bootseer.prefetch.cache.sums import RECORD_BYTES, Sum, Sums, matches

_log = logging.getLogger(__name__)

_LOG_BYTES_MAX = 2**28
"""Enough for 2 TB in whole records; what lies behind is fetched again."""
_LOGS_MAX = 16
"""Parts of the log that are read one by one, as they are written, before all is read as one."""
_VERIFY_BYTES = 8 * 2**20
"""What `verify_all` does between two looks at whether to go on."""
_RECHECK_BYTES = 4 * 2**20
"""Not present for others for as long as it takes to read that much."""
_UNCHECKED, _CHECKED = b"\0", b"\1"


class StreamCheck:
    """What this process has verified of one stream."""

    def __init__(
        self, directory: Path, stream_length: int, present: Presence, data_fd: int, sums_fd: int
    ) -> None:
        """The descriptors stay their owner's."""
        self._directory = directory
        self._stream_length = stream_length
        self._present = present
        self._data_fd = data_fd
        self._sums_fd = sums_fd
        self._marking = threading.Lock()
        self._logs: tuple[Sums, ...] = ()
        self._log_bytes = 0
        self.is_suspect = present.is_suspect
        """Some sectors may have been written before a crash of the machine and not be compared by
        now: `settle` does. An attribute, since each read asks for it."""
        # Zeros that take no memory before they are written.
        self._checked = mmap.mmap(
            -1,
            max(1, -(-stream_length // SECTOR_BYTES)),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )

    def close(self) -> None:
        """Nothing is asked any more."""
        self._checked.close()

    # ---- at the first use -----------------------------------------------------------------

    def wrote(self, offset: int, length: int) -> None:
        """This process has just written these sectors, and their checksums: they are present."""
        first, end = sectors_of(offset, length)
        with self._marking:
            self._checked[first:end] = _CHECKED * (end - first)
            self._present.mark(offset, length)

    def is_due(self, offset: int, length: int) -> bool:
        """Whether any of `[offset, offset + length)` was never compared by this process."""
        # As `sectors_of` has it: each read asks this.
        end = -(-(offset + length) // SECTOR_BYTES)
        return self._checked.find(_UNCHECKED, offset // SECTOR_BYTES, end) >= 0

    def read(self, offset: int, length: int) -> memoryview | None:
        """`[offset, offset + length)`, all of which is present, once what is due of it is compared.
        What no checksum proves is absent from then on, and then this is None."""
        damaged: set[Sum] = set()
        for is_again in (False, True) if self._logs else (True,):
            # What other processes wrote since is in the log's end.
            due = self._due_sums(offset, length, with_end=is_again)
            # One read for what is compared and what is wanted.
            start = min([offset, *[one.offset for one in due]])
            data = self._read(start, max([offset + length, *map(_end_of, due)]))
            damaged.update([one for one in due if not self._compare(one, data, start)])
            if not self.is_due(offset, length):
                if damaged:
                    self._forget(offset, length, damaged)
                return data[offset - start : offset - start + length]
        self._forget(offset, length, damaged)
        return None

    def _due_sums(self, offset: int, length: int, *, with_end: bool) -> list[Sum]:
        """The checksums of a part of `[offset, offset + length)` which is due."""
        end = offset + length
        return [
            one
            for sums in self._sums(with_end=with_end)
            for one in sums.covering(offset, length)
            if self.is_due(start := max(one.offset, offset), min(_end_of(one), end) - start)
        ]

    def _read(self, start: int, stop: int) -> memoryview:
        """As far as the disk gives it."""
        try:
            return memoryview(os.pread(self._data_fd, stop - start, start))
        except OSError:
            return memoryview(b"")

    def _compare(self, one: Sum, data: memoryview, start: int) -> bool:
        """Whether the stream's bytes from `start` on prove `one`, which then is due no more."""
        begin = one.offset - start
        if not matches(data[begin : begin + one.length], one):
            return False
        first, end = sectors_of(one.offset, one.length)
        self._checked[first:end] = _CHECKED * (end - first)
        return True

    def _forget(self, offset: int, length: int, damaged: set[Sum]) -> None:
        _log.warning(
            "bytes %d to %d of %s/data do not match their checksums: the disk has damaged them; "
            "they are fetched again",
            offset,
            offset + length,
            self._directory,
        )
        with self._marking:
            for one in damaged:
                self._forget_unchecked(*sectors_of(one.offset, one.length))
            self._forget_unchecked(*sectors_of(offset, length))

    def _forget_unchecked(self, first: int, end: int) -> None:
        while (lost := self._checked.find(_UNCHECKED, first, end)) >= 0:
            stop = self._checked.find(_CHECKED, lost, end)
            first = end if stop < 0 else stop
            self._present.clear(lost * SECTOR_BYTES, (first - lost) * SECTOR_BYTES)

    def _sums(self, *, with_end: bool = True) -> tuple[Sums, ...]:
        """The log, in parts; `with_end`: as far as it has been written by now."""
        if with_end:
            with self._marking:
                self._read_end()
        return self._logs

    def _read_end(self) -> None:
        size = os.fstat(self._sums_fd).st_size
        stop = min(size - size % RECORD_BYTES, _LOG_BYTES_MAX)
        if stop <= self._log_bytes:
            return
        if len(self._logs) >= _LOGS_MAX:
            self._logs, self._log_bytes = (), 0
        try:
            log = os.pread(self._sums_fd, stop - self._log_bytes, self._log_bytes)
        except OSError as error:
            _log.warning("cannot read %s/sums: %s", self._directory, error)
            return
        self._log_bytes += len(log)
        self._logs = (*self._logs, Sums(log, self._stream_length))

    def _is_intact(self, one: Sum) -> bool:
        return matches(self._read(one.offset, _end_of(one)), one)

    # ---- after a crash --------------------------------------------------------------------

    def suspect_all(self) -> bool:
        """Mark what was written once, in an empty map; whether that is anything."""
        size = os.fstat(self._sums_fd).st_size
        if size % RECORD_BYTES:
            os.ftruncate(self._sums_fd, size - size % RECORD_BYTES)
        for sums in self._sums():
            for one in sums:
                if self._has_room(one):
                    self._present.mark_suspect(one.offset, one.length)
                    self.is_suspect = True
        return self.is_suspect

    def settle(self, offset: int, length: int) -> None:
        """Leave nothing suspect in `[offset, offset + length)`: what a record proves is present,
        the rest is absent. Several may do this at once: each only writes what is true."""
        if not self.is_suspect or not self._present.doubts(offset, length):
            return
        for sums in self._sums():
            for one in sums.covering(offset, length):
                # Another record may have proved these already.
                if (
                    self._present.doubts(one.offset, one.length)
                    and self._is_intact(one)
                    and self._has_room(one)
                ):
                    self.wrote(one.offset, one.length)
        with self._marking:
            self._present.clear_suspects(offset, length)

    def _has_room(self, one: Sum) -> bool:
        """Whether the map takes marks there; without, these bytes are fetched again."""
        try:
            self._present.make_room(one.offset, one.length)
        except OSError as error:
            _log.warning("cannot write to %s/present: %s", self._directory, error)
            return False
        return True

    def verify_all(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Verify all that was written before a crash of the machine, if there was one.

        `may_go_on` is asked now and then. Raises nothing: what cannot be read is absent.
        """
        position: int | None = 0
        while self.is_suspect and may_go_on():
            position = self._present.next_suspect(position or 0)
            if position is None:
                self.is_suspect = self._present.is_suspect = False
                return
            self.settle(position, min(_VERIFY_BYTES, self._stream_length - position))

    def recheck(self) -> int:
        """Compare all that is here with its checksums, as after a crash; how many bytes were
        damaged, which are absent from then on. Readers may go on meanwhile."""
        before = self._present.count_bytes()
        # Should we be killed meanwhile, the next one to open it goes on.
        self._present.is_suspect = self.is_suspect = True
        for start in range(0, self._stream_length, _RECHECK_BYTES):
            length = min(_RECHECK_BYTES, self._stream_length - start)
            with self._marking:
                self._present.suspect(start, length)
            self.settle(start, length)
        self.verify_all()
        return max(0, before - self._present.count_bytes())


def _end_of(one: Sum) -> int:
    return one.offset + one.length
