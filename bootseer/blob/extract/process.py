"""A worker process of an extraction: what it is given, what it reports, and its end.

It imports nothing else of Bootseer than what it needs, so that it is there within some 30 ms: it
gets columns of the tree as plain arrays in a file in memory (`extract_sections`), the numbers of
tasks through a pipe, and the stored frames in a second file in memory, which its parent fills, or
in the files that hold them. It reports each task through another pipe, and ends when the first one
is closed, so also when its parent is killed.
"""

import errno
import gc
import json
import mmap
import os
from array import array
from bisect import bisect_right
from struct import Struct

from bootseer.blob.extract.sections import SETTINGS, read_columns
from bootseer.blob.extract.worker import DamagedError, Stored, UnreadError, Worker

TASK = Struct("<I")
RESULT = Struct("<II")
"""The head of a report: the length of the JSON that follows, and the task."""

# What a worker's descriptors are.
TASKS_FD, RESULTS_FD, COLUMNS_FD, STORED_FD, RECORDS_FD, ROOT_FD, FILES_FD = range(3, 10)
"""The last is the first of `file_count` files, one for each blob, to read instead of STORED_FD."""

_MEMORY_BYTES = 1 << 20
"""What most frames fit in that are read together."""
_MESSAGE_CHARS_MAX = 500  # with its JSON within PIPE_BUF, which is written in one piece


def _stored_in(bases: "array[int]", has_files: bool) -> Stored:
    """What reads the stored bytes of all blobs, each time into the same memory."""
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
            # A mapping would fault on each of its pages, show what others write there meanwhile,
            # and end this process where another one cuts the file.
            count = os.preadv(file, (data,), offset)
        except OSError as error:
            raise UnreadError(error) from error
        return data[:count]

    return stored


def _worker() -> Worker:
    columns = read_columns(memoryview(mmap.mmap(COLUMNS_FD, 0, prot=mmap.PROT_READ)))
    records = memoryview(mmap.mmap(RECORDS_FD, 0)) if columns["recorded"] else bytearray()
    has_files = bool(columns["settings"][SETTINGS.index("file_count")])
    stored = _stored_in(columns["blob_base"], has_files)
    return Worker(columns, stored, ROOT_FD, records, looks_ahead=True)


def main() -> None:
    """A worker process, until its pipe of tasks ends."""
    os.umask(0)
    # Nothing that is made for each file refers to itself.
    gc.disable()
    worker: Worker | None = None
    while data := os.read(TASKS_FD, TASK.size):
        (task,) = TASK.unpack(data)
        report: dict[str, object] = {}
        try:
            # With the first task everything that it needs has been written.
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
