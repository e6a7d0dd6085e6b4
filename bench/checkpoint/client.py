"""Moves files in a process of its own, and prints the time and CPU time as JSON.

    python -m bench.checkpoint.client ACTION '{"path": ...}'

The start of the interpreter, imports and connecting are not measured; opening the file is. The
bytes read are checked against `content`. Each action returns the function that is measured.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.checkpoint.content import BLOCK_BYTES, Check, Content
from bench.machine.page_cache import evict_file

Timed = Callable[[], int]
"""Measured function; returns the number of bytes it moved."""


def read_file(path: str, size_bytes: int) -> Timed:
    """Read the first `size_bytes` of a file in steps of 1 MiB."""
    evict_file(Path(path))
    buffer = memoryview(bytearray(b"\1" * BLOCK_BYTES))

    def work() -> int:
        check = Check()
        descriptor = os.open(path, os.O_RDONLY)
        while check.read_bytes < size_bytes and (count := os.readv(descriptor, [buffer])):
            check.feed(check.read_bytes, buffer[:count])
        os.close(descriptor)
        return check.read_bytes

    return work


def read_files(paths: list[str], size_bytes: int) -> Timed:
    """Read several files at once, a thread for each."""
    reads = [read_file(path, size_bytes) for path in paths]
    pool = ThreadPoolExecutor(len(paths))

    def work() -> int:
        return sum(future.result() for future in [pool.submit(read) for read in reads])

    return work


def write_file(path: str, size_bytes: int) -> Timed:
    """Write a new file in steps of 1 MiB, with fsync and close."""
    content = Content()

    def work() -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for index in range(size_bytes // BLOCK_BYTES):
            block = memoryview(content.block(index))
            while block:
                block = block[os.write(descriptor, block) :]
        os.fsync(descriptor)
        os.close(descriptor)
        return size_bytes

    return work


def write_files(paths: list[str], size_bytes: int) -> Timed:
    """Write several new files at once, a thread for each."""
    writes = [write_file(path, size_bytes) for path in paths]
    pool = ThreadPoolExecutor(len(paths))

    def work() -> int:
        return sum(future.result() for future in [pool.submit(write) for write in writes])

    return work


def read_fsspec(url: str, size_bytes: int) -> Timed:
    """Read a file by Bootseer's fsspec file system in steps of 1 MiB; `url` is the target's."""
    import fsspec

    from bootseer.fuse.striped.fsspec_system import CheckpointFileSystem

    fsspec.register_implementation("bootseer", CheckpointFileSystem, clobber=True)
    system, path = fsspec.core.url_to_fs(f"bootseer::{url}")
    buffer = memoryview(bytearray(b"\1" * BLOCK_BYTES))

    def work() -> int:
        check = Check()
        with system.open(path, "rb") as file:
            while check.read_bytes < size_bytes and (count := file.readinto(buffer)):
                check.feed(check.read_bytes, buffer[:count])
        return check.read_bytes

    return work


def read_into(url: str, name: str, size_bytes: int) -> Timed:
    """Read a whole file into one buffer by `copy.read_into`."""
    from bootseer.fuse.striped.tools import copy
    from bootseer.settings.config import load_settings

    storage = copy.open_storage(load_settings(), url)
    buffer = bytearray(b"\1" * size_bytes)

    def work() -> int:
        count = copy.read_into(storage, name, buffer)
        Check().feed(0, memoryview(buffer)[:count])
        return count

    return work


def native_read(
    url: str, paths: list[str], size_bytes: int, *, threads: int = 1, range_bytes: int = 0
) -> Timed:
    """Read files by hdfs-native: as streams, or in ranges that `threads` take from a queue.

    `size_bytes` are read of each file. Several files are parts, whose content is not checked.
    """
    import hdfs_native

    client = hdfs_native.Client(url)

    def read_range(path: str, offset: int, length: int) -> int:
        check = Check()
        reader = client.read(path)
        length = min(length, len(reader) - offset)
        for chunk in reader.read_range_stream(offset, length) if length > 0 else ():
            if len(paths) == 1:
                check.feed(offset + check.read_bytes, chunk)
            else:
                check.read_bytes += len(chunk)
        return check.read_bytes

    def ranges() -> Iterator[tuple[str, int, int]]:
        for path in paths:
            for offset in range(0, size_bytes, range_bytes or size_bytes):
                yield path, offset, min(range_bytes or size_bytes, size_bytes - offset)

    def work() -> int:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(lambda each: read_range(*each), ranges()))

    return work


def native_write(url: str, path: str, size_bytes: int) -> Timed:
    """Write a file by hdfs-native in one stream."""
    import hdfs_native

    client = hdfs_native.Client(url)
    content = Content()

    def work() -> int:
        writer = client.create(path, hdfs_native.WriteOptions(overwrite=True))
        for index in range(size_bytes // BLOCK_BYTES):
            writer.write(content.block(index))
        writer.close()
        return size_bytes

    return work


def native_copy(url: str, path: str, source: str) -> Timed:
    """Copy a local file into HDFS by hdfs-native in one stream."""
    import hdfs_native

    client = hdfs_native.Client(url)

    def work() -> int:
        moved_bytes = 0
        writer = client.create(path, hdfs_native.WriteOptions(overwrite=True))
        with Path(source).open("rb") as file:
            while data := file.read(BLOCK_BYTES):
                writer.write(data)
                moved_bytes += len(data)
        writer.close()
        return moved_bytes

    return work


def libhdfs_read(address: str, path: str, size_bytes: int) -> Timed:
    """Read a file by pyarrow over libhdfs in one stream; the JVM is started before."""
    from pyarrow.fs import HadoopFileSystem

    host, _, port = address.partition(":")
    system = HadoopFileSystem(host, int(port), user="hdfs")
    buffer = memoryview(bytearray(b"\1" * BLOCK_BYTES))

    def work() -> int:
        check = Check()
        with system.open_input_file(path) as file:
            while check.read_bytes < size_bytes and (count := file.readinto(buffer)):
                check.feed(check.read_bytes, buffer[:count])
        return check.read_bytes

    return work


_ACTIONS: dict[str, Callable[..., Timed]] = {
    action.__name__: action
    for action in (
        read_file,
        read_files,
        write_file,
        write_files,
        read_fsspec,
        read_into,
        native_read,
        native_write,
        native_copy,
        libhdfs_read,
    )
}


def measure(work: Timed) -> None:
    """Print {"wall_s", "cpu_s", "moved_bytes", "peak_bytes"} of `work`, and end the process."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    started_ns = time.monotonic_ns()
    moved_bytes = work()
    wall_s = (time.monotonic_ns() - started_ns) / 1e9
    after = resource.getrusage(resource.RUSAGE_SELF)
    outcome = {
        "wall_s": wall_s,
        "cpu_s": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "moved_bytes": moved_bytes,
        # ru_maxrss is in KiB (getrusage(2)).
        "peak_bytes": after.ru_maxrss * 1024,
    }
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()
    # Exit without waiting for the threads of client libraries and of the JVM.
    os._exit(0)


if __name__ == "__main__":
    measure(_ACTIONS[sys.argv[1]](**json.loads(sys.argv[2])))
