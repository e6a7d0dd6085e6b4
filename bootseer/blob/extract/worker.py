"""Writer of an extraction's files, in worker processes, and in-process for a small tree.

A worker process imports few modules, so that it is ready within about 30 ms. It gets the columns of
the tree as plain arrays in a memory file (`sections`), task numbers through a pipe, and stored
frames from a second memory file, which the parent fills, or from the files of the blobs. It reports
each task through another pipe, and exits when the pipe of tasks ends, so also when the parent is
killed. The writer makes few system calls per file and few objects: most of the time is spent in the
kernel.
"""

import errno
import gc
import json
import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeAlias

import zstandard
from blake3 import blake3

from bootseer.blob.extract.sections import SETTINGS, pick, read_columns
from bootseer.blob.extract.writer import DirectoryCache
from bootseer.blob.pack.stat_record import Records, put_record

Stored: TypeAlias = Callable[[int, int], "bytes | memoryview"]
"""Function of (offset, length) in the concatenated stored bytes of all blobs. The result is valid
until the next call, and the caller may modify it if it is writable."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Checksum flag of a zstd frame (RFC 8878, 3.1.1), in the byte after its magic number.
_FLAGS, _HAS_CHECKSUM, _CHECKSUM_BYTES = 4, 1 << 2, 4
_REOPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_TOGETHER_BYTES = 4 << 20
"""Content that is decoded at once before its files are written, enough for most groups: switching
between decoding and writing costs cache misses."""


class DamagedError(Exception):
    """Raised if a stored frame does not match the tree; the message says how."""


class UnreadError(Exception):
    """Raised if the file of a blob cannot be read; `error` is the reason."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.error = error


class ExtractionWorker:
    """Writer of the files of tasks: groups of whole files, and parts of large files. One thread."""

    def __init__(
        self,
        columns: Mapping[str, Any],
        stored: Stored,
        root_fd: int,
        records: Records,
        *,
        looks_ahead: bool,
    ) -> None:
        """Prepare to run tasks.

        Args:
            columns: Columns of `sections`, and `name_list`, the list of names.
            stored: Function that reads stored bytes.
            root_fd: Descriptor of the root directory.
            records: Memory with a record per name, filled where the column `recorded` is nonzero.
            looks_ahead: Whether `stored` may be asked for frames that are not needed yet, which
                costs nothing, but may return incomplete frames.
        """
        self._c = columns
        self._stored = stored
        self._records = records
        self._settings = dict(zip(SETTINGS, columns["settings"], strict=True))
        self._directories = DirectoryCache(
            columns["name_list"], columns["name_parent"], columns["directory_name"], root_fd
        )
        self._decompressor = zstandard.ZstdDecompressor()
        # Decoded content of the next frames, and the frames that may be decoded ahead.
        self._ready: dict[int, bytes] = {}
        self._may_decode_ahead = range(0)
        self._looks_ahead = looks_ahead
        # The current frame: its blob, its range in the stream, and its content.
        self._blob = -1
        self._start = self._end = 0
        self._content = memoryview(b"")
        self.current = 0
        """Index of the name that is being written, for messages."""

    def close(self) -> None:
        """Close all descriptors."""
        self._directories.close()

    def run(self, task: int) -> None:
        """Run one task. Raises: OSError for the name `current`; DamagedError."""
        group_count = len(self._c["group_start"]) - 1
        if task < group_count:
            self._write_group(self._c["group_start"][task], self._c["group_start"][task + 1])
        else:
            self._write_part(task - group_count)

    def _write_group(self, first: int, end: int) -> None:
        c = self._c
        ids = c["files"][first:end]
        inodes = pick(c["name_inode"], ids)
        columns = (
            *(pick(c[name], ids) for name in ("name_parent", "name_list")),
            *(pick(c[name], inodes) for name in ("mode", "uid", "gid", "mtime_ns", "size_bytes")),
        )
        starts, recorded, records = c["extent_start"], c["recorded"], self._records
        file_offsets, lengths = c["extent_file_offset"], c["extent_length"]
        blobs, blob_offsets = c["extent_blob"], c["extent_blob_offset"]
        settings = self._settings
        owners, own_uid, own_gid = settings["owners"], settings["uid"], settings["gid"]
        kept_bits, atime = 0o777 & ~settings["umask"], settings["atime_ns"]
        # Frames that another task decoded ahead may have been incomplete.
        self._ready.clear()
        self._may_decode_ahead = self._frames_of(inodes, sum(columns[-1]))
        last_parent, directory = -1, -1
        for i, number, parent, name, mode, uid, gid, mtime, size in zip(
            ids, inodes, *columns, strict=True
        ):
            self.current = i
            if parent != last_parent:
                directory, last_parent = self._directories.get(parent), parent
            fd = os.open(name, _CREATE, mode & 0o777, dir_fd=directory)
            try:
                end_bytes = 0
                for k in range(starts[number], starts[number + 1]):
                    offset, length = file_offsets[k], lengths[k]
                    self._write(fd, offset, blobs[k], blob_offsets[k], length)
                    end_bytes = offset + length
                if end_bytes != size:
                    os.ftruncate(fd, size)
                has_changed = False
                if owners and (uid != own_uid or gid != own_gid):
                    # chown comes first, since it clears the set-ID bits.
                    os.chown(fd, uid, gid)
                    has_changed = True
                if has_changed or mode & 0o7777 != mode & kept_bits:
                    os.chmod(fd, mode & 0o7777)
                os.utime(fd, ns=(atime, mtime))
                if recorded and recorded[i]:
                    put_record(os.fstat(fd), records, i)
            finally:
                os.close(fd)

    def _write_part(self, number: int) -> None:
        """Write a part of a large file, which exists; its attributes are set at the end."""
        c = self._c
        self._ready.clear()
        self._may_decode_ahead = range(0)
        i = self.current = c["part_name"][number]
        directory = self._directories.get(c["name_parent"][i])
        fd = os.open(c["name_list"][i], _REOPEN, dir_fd=directory)
        try:
            places = c["places"]
            for k in range(4 * c["part_start"][number], 4 * c["part_start"][number + 1], 4):
                self._write(fd, *places[k : k + 4])
        finally:
            os.close(fd)

    def _frames_of(self, inodes: Sequence[int], size_bytes: int) -> range:
        """Return the frames of files, if the files are close to one another in one blob."""
        c = self._c
        first, last = c["extent_start"][inodes[0]], c["extent_start"][inodes[-1] + 1] - 1
        if not self._looks_ahead or last < first:
            return range(0)
        blob = c["extent_blob"][first]
        start, end = c["extent_blob_offset"][first], c["extent_blob_offset"][last]
        if c["extent_blob"][last] != blob or not 0 <= end - start <= 2 * size_bytes:
            return range(0)
        end += c["extent_length"][last]
        return range(self._frame_at(blob, start), self._frame_at(blob, end - 1) + 1)

    def _frame_at(self, blob: int, offset: int) -> int:
        """Return the index in the columns of the frame that contains an offset of a stream."""
        c = self._c
        # Each blob has one more offset than frames, that of its end.
        first, end = c["blob_frame"][blob] + blob, c["blob_frame"][blob + 1] + blob
        return bisect_right(c["frame_stream_offset"], offset, first, end) - 1

    def _write(self, fd: int, offset: int, blob: int, blob_offset: int, length: int) -> None:
        while True:
            # Most files are in the same frame as the file before.
            if blob != self._blob or not self._start <= blob_offset < self._end:
                c = self._c
                if c["blob_frame"][blob] == c["blob_frame"][blob + 1]:
                    # The blob has no frames: its stream is stored uncompressed.
                    base = c["blob_base"][blob]
                    _write_all(fd, memoryview(self._stored(base + blob_offset, length)), offset)
                    return
                self._load_frame(self._frame_at(blob, blob_offset), blob)
            start = blob_offset - self._start
            data = self._content[start : start + length]
            _write_all(fd, data, offset)
            count = len(data)
            if count == length:
                return
            offset, blob_offset, length = offset + count, blob_offset + count, length - count

    def _load_frame(self, frame: int, blob: int) -> None:
        """Make the frame (an index in the columns) the current one. Raises: DamagedError."""
        if frame not in self._ready:
            behind = frame + 1
            if frame in self._may_decode_ahead:
                starts, end = self._c["frame_stream_offset"], self._may_decode_ahead.stop + 1
                limit = bisect_right(starts, starts[frame] + _TOGETHER_BYTES, behind, end) - 1
                behind = max(behind, limit)
            try:
                self._ready = self._all_decoded(range(frame, behind), blob)
            except DamagedError:
                # The damaged frame may be one that is not needed. Decode only the needed one.
                self._may_decode_ahead = range(0)
                self._ready = self._all_decoded(range(frame, frame + 1), blob)
        self._content = memoryview(self._ready.pop(frame))
        self._blob = blob
        self._start, self._end = self._c["frame_stream_offset"][frame : frame + 2]

    def _all_decoded(self, frames: range, blob: int) -> dict[int, bytes]:
        """Return the content of consecutive frames of a blob. Raises: DamagedError."""
        offsets = self._c["frame_offset"]
        start = offsets[frames.start]
        data = memoryview(self._stored(start, offsets[frames.stop] - start))
        content = {}
        for frame in frames:
            piece = data[offsets[frame] - start : offsets[frame + 1] - start]
            content[frame] = self._decoded(frame, blob, piece)
        return content

    def _decoded(self, frame: int, blob: int, data: memoryview) -> bytes:
        """Return the content of a frame from its stored bytes. Raises: DamagedError."""
        c = self._c
        offset, end = c["frame_offset"][frame : frame + 2]
        start_bytes, end_bytes = c["frame_stream_offset"][frame : frame + 2]
        wanted = end_bytes - start_bytes
        place = f"the frame at offset {offset - c['blob_base'][blob]}"
        if len(data) != end - offset:
            raise DamagedError(f"{place} has {len(data)} bytes instead of {end - offset}")
        if not self._settings["is_verified"]:
            at = 32 * (frame - blob)
            if blake3(data).digest() != c["frame_digests"][at : at + 32]:
                raise DamagedError(f"{place} does not match its digest")
        try:
            # Checked before memory is allocated for the content.
            if zstandard.frame_content_size(data) != wanted:
                raise DamagedError(f"{place} announces a wrong length")
            if not data.readonly and data[_FLAGS] & _HAS_CHECKSUM:
                # The digest was verified, so zstd need not verify its checksum.
                data[_FLAGS] &= ~_HAS_CHECKSUM
                data = data[:-_CHECKSUM_BYTES]
            content = self._decompressor.decompress(
                data, max_output_size=wanted, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise DamagedError(f"{place} cannot be decompressed: {error}") from error
        if len(content) != wanted:
            raise DamagedError(f"{place} has a wrong length")
        return content


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    count = os.pwrite(fd, data, offset)
    while count < len(data):
        offset += count
        data = data[count:]
        count = os.pwrite(fd, data, offset)


# ---- main program of a worker process ------------------------------------------------------------

TASK = Struct("<I")
RESULT = Struct("<II")
"""Head of a report: the length of the JSON that follows, and the task."""

# Descriptors of a worker process.
TASKS_FD, RESULTS_FD, COLUMNS_FD, STORED_FD, RECORDS_FD, ROOT_FD, FILES_FD = range(3, 10)
"""FILES_FD is the first of `file_count` blob files, which are read instead of STORED_FD."""

_MEMORY_BYTES = 1 << 20
"""Initial size of the buffer for stored frames; most reads fit."""
_MESSAGE_CHARS_MAX = 500  # a report stays within PIPE_BUF, so that it is written atomically


def _stored_reader(bases: "array[int]", has_files: bool) -> Stored:
    """Return the function that reads stored bytes of all blobs, always into the same buffer."""
    memory = memoryview(bytearray(_MEMORY_BYTES))

    def stored(offset: int, length: int) -> memoryview:
        nonlocal memory
        if length > len(memory):
            memory = memoryview(bytearray(length))
        data = memory[:length]
        file = STORED_FD
        if has_files:
            blob = bisect_right(bases, offset) - 1
            file, offset = FILES_FD + blob, offset - bases[blob]
        try:
            # Not a mapping: it would fault on each page, show writes of other processes, and kill
            # this process with SIGBUS if the file is truncated.
            count = os.preadv(file, (data,), offset)
        except OSError as error:
            raise UnreadError(error) from error
        return data[:count]

    return stored


def _worker() -> ExtractionWorker:
    columns = read_columns(memoryview(mmap.mmap(COLUMNS_FD, 0, prot=mmap.PROT_READ)))
    records = memoryview(mmap.mmap(RECORDS_FD, 0)) if columns["recorded"] else bytearray()
    has_files = bool(columns["settings"][SETTINGS.index("file_count")])
    stored = _stored_reader(columns["blob_base"], has_files)
    return ExtractionWorker(columns, stored, ROOT_FD, records, looks_ahead=True)


def main() -> None:
    """Run tasks until the pipe of tasks ends."""
    os.umask(0)
    # The loop creates no reference cycles.
    gc.disable()
    worker: ExtractionWorker | None = None
    while data := os.read(TASKS_FD, TASK.size):
        (task,) = TASK.unpack(data)
        report: dict[str, object] = {}
        try:
            # The parent has written the columns before it sends the first task.
            worker = worker or _worker()
            worker.run(task)
        except DamagedError as error:
            report = {"damage": str(error)[:_MESSAGE_CHARS_MAX]}
        except UnreadError as error:
            report = {"unread": error.error.errno or errno.EIO}
        except OSError as error:
            current = worker.current if worker is not None else 0
            report = {"errno": error.errno or errno.EIO, "name": current}
        except BaseException as error:
            report = {"failure": repr(error)[:_MESSAGE_CHARS_MAX]}
        encoded = json.dumps(report).encode("ascii") if report else b""
        os.write(RESULTS_FD, RESULT.pack(len(encoded), task) + encoded)
