"""Backend of `limit+URL`: another backend behind a rate limit that stands for a shared network.

A process opens such URLs only if its environment names this module (`BOOTSEER_TEST_NETWORK`), as
the demo's launches and the tests do; a start of a job never does. Each path is served at
`stream_bytes_per_s` per direction and process, as by one disk or DataNode. All processes of a node
share `node_bytes_per_s` through a small locked file, the account, which also counts. Bytes are
metered in slices, in turn, so that parallel streams get equal shares. Thread-safe.
"""

import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Meta, Struct

from bootseer.base.redact import public_url
from bootseer.errors import DeadlineError, InvalidInputError, from_oserror
from bootseer.linux.locks import lock_within, unlock
from bootseer.store import open_backend
from bootseer.store.backend import Backend, FileInfo, Piece, Space, Writer
from bootseer.transfer.attempt import Attempt

# Small enough that 64 streams at 50 MB/s each wait less than a third of a second for their turn.
SLICE_BYTES = 256 << 10
# Paths whose next free moment is remembered; the path that was idle for longest is forgotten.
_PATHS_MAX = 4096
_LATENCY_MAX_S = 60.0
# magic; CLOCK_MONOTONIC (ns) at which the node's link is free; bytes read, written; requests
_ACCOUNT = struct.Struct("<8sqqqq")
_MAGIC = b"BSACCT1\0"
# Longest reservation: a later moment was written before the machine's last boot.
_AHEAD_MAX_NS = 600 * 1_000_000_000
_ACCOUNT_LOCK_S = 60.0


_Rate = Annotated[float, Meta(gt=0, lt=1e15)]


class Account(Struct, frozen=True):
    """Bytes and requests of all processes that share an account file."""

    bytes_read: int
    bytes_written: int
    requests: int


class NetworkLimits(Struct, frozen=True):
    """Rates in bytes per second; None is no limit. `latency_s` is added to each request."""

    stream_bytes_per_s: _Rate | None = None
    node_bytes_per_s: _Rate | None = None
    latency_s: Annotated[float, Meta(ge=0, lt=_LATENCY_MAX_S)] = 0.0
    account: str = ""
    tally: str = ""
    """Path of a second account, which only counts the bytes of this URL."""


def open_limited(url: str, *, deadline_s: float | None = None) -> "LimitedBackend":
    """Return the backend of a `limit+URL?...`, which slows another backend down.

    Options: `stream_bytes_per_s=N`, `node_bytes_per_s=N`, `latency_s=F`, `account=PATH`,
    `tally=PATH`. Other options of the query are the inner URL's. Raises: InvalidInputError.
    """
    inner, _, query = url[len("limit+") :].partition("?")
    try:
        values = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        own = {key: value for key, value in values if key in NetworkLimits.__struct_fields__}
        limits = msgspec.convert(own, NetworkLimits, strict=False)
    except ValueError as error:
        raise InvalidInputError(f"{public_url(url)!r} is not a usable URL: {error}") from error
    if limits.node_bytes_per_s and not limits.account:
        raise InvalidInputError(f"{public_url(url)!r}: node_bytes_per_s needs account=PATH")
    if others := [(key, value) for key, value in values if key not in own]:
        inner += "?" + urlencode(others)
    return LimitedBackend(open_backend(inner, deadline_s=deadline_s), limits, deadline_s)


def read_account(path: Path) -> Account:
    """Return the counts of an account; zeros if the file is missing. Raises: InvalidInputError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Account(0, 0, 0)
    except OSError as error:
        raise from_oserror(error, f"read the account {path}") from error
    if not data:
        return Account(0, 0, 0)
    _, bytes_read, bytes_written, requests = _parse(data, path)
    return Account(bytes_read, bytes_written, requests)


class LimitedBackend(Backend):
    """Backend that delays and counts the requests to another one."""

    def __init__(
        self, inner: Backend, limits: NetworkLimits, deadline_s: float | None = None
    ) -> None:
        self.url = inner.url
        self.traits = inner.traits
        self._inner = inner
        self._meter = Meter(limits, deadline_s)

    def stat(self, path: str) -> FileInfo:
        self._meter.request()
        return self._inner.stat(path)

    def stat_file(self, path: str) -> FileInfo:
        self._meter.request()
        return self._inner.stat_file(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._meter.request()
        # In one piece: reading slice by slice could mix two versions of a file.
        data = self._inner.read(path, offset, length)
        self._meter.move("r", path, len(data))
        return data

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        self._meter.request()
        count = self._inner.read_into(path, offset, buffer, attempt)
        self._meter.move("r", path, count)
        return count

    def create(self, path: str, *, overwrite: bool = False) -> "_LimitedWriter":
        self._meter.request()
        return _LimitedWriter(self._inner.create(path, overwrite=overwrite), self._meter, path)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self._meter.request()
        self._inner.rename(source, target, overwrite=overwrite)

    def list(self, path: str) -> Iterator[FileInfo]:
        self._meter.request()
        return self._inner.list(path)

    def mkdir(self, path: str) -> None:
        self._meter.request()
        self._inner.mkdir(path)

    def list_tree(self, path: str) -> Iterator[FileInfo] | None:
        self._meter.request()
        return self._inner.list_tree(path)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._meter.request()
        self._inner.delete(path, recursive=recursive)

    def space(self) -> Space | None:
        self._meter.request()
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()
        self._meter.close()


class _LimitedWriter(Writer):
    def __init__(self, inner: Writer, meter: "Meter", path: str) -> None:
        self._inner = inner
        self._meter = meter
        self._path = path

    def write(self, data: Piece) -> None:
        self._meter.move("w", self._path, len(data))
        self._inner.write(data)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def abandon(self) -> bool:
        return self._inner.abandon()


class Meter:
    """Queue of callers for each path and direction, and one for the whole node."""

    def __init__(self, limits: NetworkLimits, deadline_s: float | None = None) -> None:
        self._limits = limits
        self._deadline_s = _LATENCY_MAX_S if deadline_s is None else deadline_s
        self._lock = threading.Lock()
        self._free_ns: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._account = _AccountFile(limits.account) if limits.account else None
        self._tally = _AccountFile(limits.tally) if limits.tally else None

    def request(self) -> None:
        """Count one request and wait its latency. Raises: DeadlineError."""
        self._reserve_node(0, 0, 1)
        latency_s = self._limits.latency_s
        if latency_s:
            time.sleep(min(latency_s, self._deadline_s))
        if latency_s > self._deadline_s:
            raise DeadlineError(
                f"no answer within {self._deadline_s:g} s: the simulated network takes "
                f"{latency_s:g} s for each request"
            )

    def move(self, direction: str, path: str, size_bytes: int) -> None:
        """Wait until `size_bytes` have passed the limits."""
        while size_bytes > 0:
            count = min(size_bytes, SLICE_BYTES)
            size_bytes -= count
            until_ns = self._reserve_stream((direction, path), count)
            read, written = (count, 0) if direction == "r" else (0, count)
            until_ns = max(until_ns, self._reserve_node(read, written, 0))
            wait_ns = until_ns - time.monotonic_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / 1e9)

    def _reserve_stream(self, stream: tuple[str, str], count: int) -> int:
        rate = self._limits.stream_bytes_per_s
        if rate is None:
            return 0
        with self._lock:
            start_ns = max(self._free_ns.pop(stream, 0), time.monotonic_ns())
            self._free_ns[stream] = end_ns = start_ns + int(count / rate * 1e9)
            if len(self._free_ns) > _PATHS_MAX:
                self._free_ns.popitem(last=False)
            return end_ns

    def _reserve_node(self, read: int, written: int, requests: int) -> int:
        # The lock of an account excludes other processes, but no threads of this process.
        with self._lock:
            if self._tally:
                self._tally.add(read, written, requests, None)
            if not self._account:
                return 0
            return self._account.add(read, written, requests, self._limits.node_bytes_per_s)

    def close(self) -> None:
        """Close the accounts. Idempotent."""
        with self._lock:
            accounts, self._account, self._tally = (self._account, self._tally), None, None
        for account in accounts:
            if account:
                account.close()


class _AccountFile:
    """Account file that several processes share. Not thread-safe."""

    def __init__(self, path: str) -> None:
        """Raises: BootseerError for a file that cannot be opened."""
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise from_oserror(error, f"open the account {path}") from error

    def add(self, read: int, written: int, requests: int, rate: float | None) -> int:
        """Add to the counts; return the time (CLOCK_MONOTONIC, ns) at which the bytes have passed.

        Without a `rate`, which is in bytes per second, and without bytes 0 is returned.
        """
        is_limited = rate is not None and read + written > 0
        lock_within(self._fd, _ACCOUNT_LOCK_S)
        try:
            data = os.pread(self._fd, _ACCOUNT.size, 0)
            free_ns, *counts = _parse(data, self._path) if data else (0, 0, 0, 0)
            if rate is not None and is_limited:
                now_ns = time.monotonic_ns()
                start_ns = max(free_ns, now_ns) if free_ns < now_ns + _AHEAD_MAX_NS else now_ns
                free_ns = start_ns + int((read + written) / rate * 1e9)
            counts = [counts[0] + read, counts[1] + written, counts[2] + requests]
            os.pwrite(self._fd, _ACCOUNT.pack(_MAGIC, free_ns, *counts), 0)
        finally:
            unlock(self._fd)
        return free_ns if is_limited else 0

    def close(self) -> None:
        os.close(self._fd)


def _parse(data: bytes, path: Path | str) -> tuple[int, int, int, int]:
    if len(data) != _ACCOUNT.size or not data.startswith(_MAGIC):
        raise InvalidInputError(f"{path} is not an account of bytes moved; name another file")
    _, free_ns, bytes_read, bytes_written, requests = _ACCOUNT.unpack(data)
    return free_ns, bytes_read, bytes_written, requests
