"""Writes files of an extraction: what several processes do at once. `blob.extract` starts them.

Each is a process of its own (`extract_process`), so this imports next to nothing; a small
extraction uses a `Worker` in its own process. Few system calls per file, and no objects but its
descriptor: what the kernel does is most of it.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import zstandard
from blake3 import blake3

from bootseer.blob.extract_directories import Directories
from bootseer.blob.extract_sections import SETTINGS

Stored: TypeAlias = Callable[[int, int], "bytes | memoryview"]
"""(offset, length) in the stored bytes of all blobs, one behind the other."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REOPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class DamagedError(Exception):
    """A stored frame is not what the tree says; the message says how."""


class UnreadError(Exception):
    """The file of a blob cannot be read; `error` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.error = error


class StoppedError(Exception):
    """Nobody wants the rest."""


class Worker:
    """Carries out tasks: groups of whole files, then parts of large ones. For one thread."""

    def __init__(
        self,
        columns: Mapping[str, Any],
        stored: Stored,
        root_fd: int,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`columns`: those of `extract_sections`, and `name_list`, the names split."""
        self._c = columns
        self._stored = stored
        self._is_stopped = is_stopped
        self._settings = dict(zip(SETTINGS, columns["settings"], strict=True))
        self._directories = Directories(
            columns["name_list"], columns["name_parent"], columns["directory_name"], root_fd
        )
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = -1
        self._content: bytes = b""
        self.current = 0
        """Index of the name that is written; for messages."""

    def close(self) -> None:
        """The end of its descriptors."""
        self._directories.close()

    def run(self, task: int) -> None:
        """Raises: OSError, of the name `current`; DamagedError; StoppedError."""
        group_count = len(self._c["group_start"]) - 1
        if task < group_count:
            self._write_group(self._c["group_start"][task], self._c["group_start"][task + 1])
        else:
            self._write_part(task - group_count)

    def _write_group(self, first: int, end: int) -> None:
        c = self._c
        names, inodes, parents = c["name_list"], c["name_inode"], c["name_parent"]
        modes, mtimes, sizes, starts = c["mode"], c["mtime_ns"], c["size_bytes"], c["extent_start"]
        uids, gids = c["uid"], c["gid"]
        file_offsets, lengths = c["extent_file_offset"], c["extent_length"]
        blobs, blob_offsets = c["extent_blob"], c["extent_blob_offset"]
        settings = self._settings
        owners, uid, gid = settings["owners"], settings["uid"], settings["gid"]
        kept_bits, atime = ~settings["umask"], settings["atime_ns"]
        last_parent, directory = -1, -1
        for i in c["files"][first:end]:
            self.current = i
            number, parent = inodes[i], parents[i]
            if parent != last_parent:
                if self._is_stopped():
                    raise StoppedError
                directory, last_parent = self._directories.get(parent), parent
            mode = modes[number] & 0o7777
            fd = os.open(names[i], _CREATE, mode & 0o777, dir_fd=directory)
            try:
                end_bytes = 0
                for k in range(starts[number], starts[number + 1]):
                    offset, length = file_offsets[k], lengths[k]
                    self._write(fd, offset, blobs[k], blob_offsets[k], length)
                    end_bytes = offset + length
                if end_bytes != sizes[number]:
                    os.ftruncate(fd, sizes[number])
                has_changed = False
                if owners and (uids[number] != uid or gids[number] != gid):
                    # Takes set-ID bits away, so it comes first.
                    os.chown(fd, uids[number], gids[number])
                    has_changed = True
                if has_changed or mode != mode & 0o777 & kept_bits:
                    os.chmod(fd, mode)
                os.utime(fd, ns=(atime, mtimes[number]))
            finally:
                os.close(fd)

    def _write_part(self, number: int) -> None:
        """The file is there already; its attributes come last."""
        c = self._c
        i = self.current = c["part_name"][number]
        directory = self._directories.get(c["name_parent"][i])
        fd = os.open(c["name_list"][i], _REOPEN, dir_fd=directory)
        try:
            places = c["places"]
            for k in range(4 * c["part_start"][number], 4 * c["part_start"][number + 1], 4):
                self._write(fd, *places[k : k + 4])
        finally:
            os.close(fd)

    def _write(self, fd: int, offset: int, blob: int, blob_offset: int, length: int) -> None:
        c = self._c
        starts = c["frame_stream_offset"]
        first, end = c["blob_frame"][blob], c["blob_frame"][blob + 1]
        if first == end:
            # Stored as the stream itself.
            _write_all(fd, self._stored(c["blob_base"][blob] + blob_offset, length), offset)
            return
        # Each blob has one offset more than frames: that of its end.
        frame = self._frame
        first, end = first + blob, end + blob
        if not (first <= frame < end and starts[frame] <= blob_offset < starts[frame + 1]):
            frame = bisect_right(starts, blob_offset, first, end) - 1
        while length:
            content = self._content if frame == self._frame else self._decoded(frame, blob)
            start = blob_offset - starts[frame]
            count = min(length, len(content) - start)
            whole = count == len(content)
            _write_all(fd, content if whole else memoryview(content)[start : start + count], offset)
            offset, blob_offset, length = offset + count, blob_offset + count, length - count
            frame += 1
            if length and self._is_stopped():
                raise StoppedError

    def _decoded(self, frame: int, blob: int) -> bytes:
        """Frame `frame` of the columns, which is of `blob`. Raises: DamagedError."""
        c = self._c
        offset, end = c["frame_offset"][frame], c["frame_offset"][frame + 1]
        wanted = c["frame_stream_offset"][frame + 1] - c["frame_stream_offset"][frame]
        place = f"the frame at offset {offset - c['blob_base'][blob]}"
        data = self._stored(offset, end - offset)
        if len(data) != end - offset:
            raise DamagedError(f"{place} has {len(data)} bytes instead of {end - offset}")
        if not self._settings["is_verified"]:
            at = 32 * (frame - blob)
            if blake3(data).digest() != c["frame_digests"][at : at + 32]:
                raise DamagedError(f"{place} does not match its digest")
        try:
            # Before anything is allocated for it.
            if zstandard.frame_content_size(data) != wanted:
                raise DamagedError(f"{place} announces a wrong length")
            content = self._decompressor.decompress(
                data, max_output_size=wanted, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise DamagedError(f"{place} cannot be decompressed: {error}") from error
        if len(content) != wanted:
            raise DamagedError(f"{place} has a wrong length")
        self._frame, self._content = frame, content
        return content


def _write_all(fd: int, data: "bytes | memoryview", offset: int) -> None:
    count = os.pwrite(fd, data, offset)
    while count < len(data):
        offset += count
        data = memoryview(data)[count:]
        count = os.pwrite(fd, data, offset)
