"""Main program of a worker process of an extraction.

The process imports few modules, so that it is ready within about 30 ms. It gets the columns of the
tree as plain arrays in a memory file (`sections`), task numbers through a pipe, and stored frames
from a second memory file, which the parent fills, or from the files of the blobs. It reports each
task through another pipe, and exits when the pipe of tasks ends, so also when the parent is killed.
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
from bootseer.blob.extract.worker import DamagedError, ExtractionWorker, Stored, UnreadError

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
