"""Backend for a bucket of S3, Google Cloud Storage or Azure, by obstore.

An object appears whole, when its writer is closed. Of several creators of a new object one wins
(`If-None-Match: *`; see `BucketWriter` for large objects). A rename is a copy and a delete. Folders
are key prefixes; an empty folder has an object `_MARKER` in it, which listings hide. Folders that
other tools have made (an object "folder/") are listed but cannot be deleted.

Requests: a small object is read by one GET and written by one PUT. Failed requests are repeated
here, not by obstore, except for parts of a multipart upload, which obstore repeats by the same
policy.

Every call runs in a helper thread, and its caller stops waiting when nothing has arrived for the
deadline. Thread-safe. A process forked from one that has used a bucket cannot use buckets, since
the threads of obstore stayed in the parent: its calls are refused at once.
"""

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from bootseer.base.redact import public_url
from bootseer.base.requests import BUCKET, count_request
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.store.backend import Backend, FileInfo, Piece, Traits, Writer
from bootseer.store.buckets.access import (
    Address,
    address_of,
    load_obstore,
    open_bucket,
)
from bootseer.store.buckets.answers import (
    is_beyond_end,
    is_conflict,
    is_no_bucket,
    is_odd_name,
    parse_answer,
    translated_errors,
)
from bootseer.store.deadline import (
    DEFAULT_DEADLINE_S,
    SLOWEST_BYTES_PER_S,
    Call,
    DeadlineCaller,
)
from bootseer.store.paths import check_deadline, check_range, split_path
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import STALL_S, ByteProgress, floor_bytes_per_s
from bootseer.transfer.policy import REQUEST, Attempts

Result = TypeVar("Result")

SINGLE_BYTES = 64 << 20
"""Largest object that is kept in memory and sent by a single PUT."""
PART_BYTES = 16 << 20
"""Size of a part. S3 accepts ten thousand parts, so an object may have 160 GB."""
PARTS_AT_ONCE = 4
LAST_PARTS_S = PARTS_AT_ONCE * PART_BYTES / SLOWEST_BYTES_PER_S
_QUEUE_BYTES = 2 * PART_BYTES
_MARKER = ".bootseer-folder"
# Size of the pieces in which a body is taken: progress is measured after each piece.
_PIECE_BYTES = 64 << 10
# A smaller object is sent without asking first whether it exists: the PUT itself decides.
_UNSEEN_BYTES = 256 << 10
_Kind = Literal["read", "put", "upload"]
# Most bytes that one request of each kind sends, for its timeouts (`access.open_bucket`).
_SENT_BYTES: dict[_Kind, int] = {"read": 0, "put": SINGLE_BYTES, "upload": PART_BYTES}
# Largest object that is read back to find out whether a PUT whose answer was lost succeeded.
_COMPARED_BYTES = 1 << 20


class _ObstoreProcess:
    """Process that runs obstore's threads; `pid` is 0 before the first use."""

    pid = 0


class BucketBackend(Backend):
    """Files below one prefix of a bucket."""

    traits = Traits(one_step_replace=True)
    writer_bytes = PARTS_AT_ONCE * PART_BYTES

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Parse the URL; no request is sent.

        `options`: as fsspec's file system for this kind of URL takes them. A URL without a bucket
        stands for all buckets: the first component of each path is then the bucket.
        """
        self.url = public_url(url)
        self._address = address_of(url)
        split_path(self._address.prefix)
        self._options = dict(options or {})
        self._deadline_s = DEFAULT_DEADLINE_S if deadline_s is None else deadline_s
        check_deadline(self._deadline_s)
        self._stall_s = min(STALL_S, self._deadline_s)
        self._caller = DeadlineCaller("bootseer-bucket")
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, _Kind], Any] = {}
        # Buckets known to exist: a 404 from one of them means that the object is missing.
        self._known_buckets: set[str] = set()

    # ---- requests -----------------------------------------------------------------------------

    def _bucket(self, path: str, kind: _Kind = "read") -> tuple[Any, str, str]:
        """Return the obstore store for a path and kind of request, the path's key, and the bucket.

        Raises: InvalidInputError, UnsupportedError, PermissionDeniedError.
        """
        names = split_path(path)
        bucket = self._address.bucket
        if self._address.kind == "azure" and "\\" in path:
            raise InvalidInputError(f"{self._name(path)}: in Azure no name has a backslash")
        if not bucket:
            if not names:
                raise UnsupportedError(f"{self.url} names no bucket")
            bucket, names = names[0], names[1:]
        _ObstoreProcess.pid = _ObstoreProcess.pid or os.getpid()
        # Checked before a lock is taken, which another thread may have held during the fork.
        if _ObstoreProcess.pid != os.getpid():
            raise UnsupportedError(
                f"cannot reach {self.url} in a process that was forked from one which has used a "
                "bucket: start it by spawn or forkserver (DataLoader: "
                'multiprocessing_context="forkserver")'
            )
        with self._lock:
            store = self._opened.get((bucket, kind))
            if store is None:
                address = Address(self._address.kind, bucket, self._address.prefix)
                store = open_bucket(
                    address,
                    self._options,
                    self._deadline_s,
                    _SENT_BYTES[kind],
                    is_upload=kind == "upload",
                )
                self._opened[bucket, kind] = store
        return store, "/".join(filter(None, (self._address.prefix, *names))), bucket

    def _run(
        self,
        verb: str,
        path: str,
        work: Callable[[Any, str, Call[Any]], Result],
        *,
        attempts: bool = True,
        kind: _Kind = "read",
        size_bytes: int = 0,
    ) -> Result:
        """Call `work` with the store and the key of `path`; return its result within the deadline.

        Args:
            verb: Operation, for messages.
            path: Path below the root.
            work: Function that sends one request.
            attempts: Whether to call `work` again after a transient failure.
            kind: Kind of request.
            size_bytes: Bytes that the request sends or copies, without reporting progress.

        Raises: BootseerError.
        """
        what = f"{verb} {self._name(path)}"
        store, key, bucket = self._bucket(path, kind)
        limit_s = self._deadline_s + size_bytes / SLOWEST_BYTES_PER_S

        def guarded(call: Call[Any]) -> Result:
            left = Attempts(REQUEST, limit_s, wait_budget=WAIT_BUDGET)
            while True:
                count_request(BUCKET)
                try:
                    with translated_errors(what, bucket):
                        return work(store, key, call)
                except BootseerError as error:
                    if error.__cause__ is not None and parse_answer(error.__cause__).status:
                        WAIT_BUDGET.answered()  # also by "too many requests"
                    if not attempts or call.abandoned:
                        raise
                    left.wait(error)

        result: Result = self._caller.run(guarded, limit_s, what)
        self._known_buckets.add(bucket)
        return result

    # ---- names and attributes -----------------------------------------------------------------

    def stat(self, path: str) -> FileInfo:
        return self._stat(path, is_file=False)

    def stat_file(self, path: str) -> FileInfo:
        """Return the attributes of a file; one request if the bucket is known to exist."""
        return self._stat(path, is_file=True)

    def _stat(self, path: str, *, is_file: bool) -> FileInfo:
        bucket = self._bucket(path)[2]

        def head(store: Any, key: str, call: Call[Any]) -> FileInfo:
            if key:
                try:
                    return _info(path, load_obstore().head(store, key))
                except FileNotFoundError:
                    call.progress()  # an answer; the listing is a request of its own
            if not (is_file and bucket in self._known_buckets):
                # The listing also fails if the bucket does not exist.
                is_folder = self._has_below(store, key) or not key
                self._known_buckets.add(bucket)
                if is_folder and not is_file:
                    return FileInfo(path, 0, 0, True)
            raise NotFoundError(f"cannot look at {self._name(path)}: it does not exist")

        return self._run("look at", path, head)

    def _has_below(self, store: Any, key: str) -> bool:
        try:
            return any(page for page in load_obstore().list(store, key or None, chunk_size=1))
        except Exception as error:
            if is_odd_name(error):
                return True
            raise

    def list(self, path: str) -> Iterator[FileInfo]:
        def list_folder(store: Any, key: str, _: Call[Any]) -> list[FileInfo]:
            found = load_obstore().list_with_delimiter(store, key or None)
            folder = f"{path}/" if path else ""
            infos = [
                FileInfo(folder + name, 0, 0, True)
                for name in map(_last, found["common_prefixes"])
                if _is_name(name)
            ]
            is_there = bool(infos) or not key
            for meta in found["objects"]:
                is_there = True
                name = _last(meta["path"])
                # An object with the folder's own key marks the folder for another tool.
                if meta["path"] != key and name != _MARKER and _is_name(name):
                    infos.append(_info(folder + name, meta))
            if not is_there:
                raise NotFoundError(f"cannot list {self._name(path)}: it does not exist")
            infos.sort(key=lambda info: info.path)
            return infos

        split_path(path)
        return iter(self._run("list", path, list_folder))

    def list_tree(self, path: str) -> Iterator[FileInfo]:
        """Return all files below a folder, by one request per thousand files."""

        def list_all(store: Any, key: str, call: Call[Any]) -> list[FileInfo]:
            skip = len(key) + 1 if key else 0
            infos = []
            for page in load_obstore().list(store, key or None, chunk_size=1000):
                call.progress()
                for meta in page:
                    name = meta["path"][skip:]
                    if _last(name) != _MARKER and _is_path(name):
                        infos.append(_info(f"{path}/{name}" if path else name, meta))
            infos.sort(key=lambda info: info.path)
            return infos

        split_path(path)
        return iter(self._run("list", path, list_all))

    # ---- reading ------------------------------------------------------------------------------

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        if length == 0:
            self.stat(path)
            return b""

        def read() -> bytes:
            # One request for all of it, so that all bytes belong to the same version.
            pieces: list[bytes] = []
            self._get_range(path, offset, length, lambda data: pieces.append(bytes(data)))
            return b"".join(pieces)

        attempts = Attempts(REQUEST, self._deadline_s, wait_budget=WAIT_BUDGET)
        return attempts.repeat(read, UnavailableError)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        if not buffer or offset < 0:
            return super().read_into(path, offset, buffer, attempt)
        current = attempt or Attempt()
        done = 0

        def put(data: memoryview) -> bool:
            nonlocal done
            if not current.put(done, buffer, data[: len(buffer) - done]):
                return True
            done = current.done_bytes
            return done == len(buffer)

        try:
            self._get_range(path, offset, len(buffer), put)
        except BaseException:
            # A late answer must not touch the buffer, which the caller may use for something else.
            current.stop()
            raise
        return done

    def _get_range(
        self, path: str, offset: int, length: int | None, take: Callable[[memoryview], object]
    ) -> None:
        """Send one GET and pass its bytes to `take` as they arrive, until it returns True.

        Raises: BootseerError; UnavailableError if the body is silent or too slow.
        """
        options: Any = {}
        if length is not None:
            options["range"] = (offset, offset + length)
        elif offset:
            options["range"] = {"offset": offset}

        def ask(store: Any, key: str, _: Call[Any]) -> Any:
            if not key:
                raise InvalidInputError(f"{self._name(path)} is a folder")
            try:
                return load_obstore().get(store, key, options=options)
            except Exception as error:
                if is_beyond_end(error):
                    return None
                raise

        answer = self._run("read", path, ask, attempts=False)
        if answer is None:
            return
        what = f"read {self._name(path)}"

        def body(call: Call[None]) -> None:
            floor = floor_bytes_per_s(math.inf if length is None else length, self._deadline_s)
            progress, came = ByteProgress(time.monotonic(), floor), 0
            with translated_errors(what, self._bucket(path)[2]):
                for chunk in answer.stream(min_chunk_size=_PIECE_BYTES):
                    data = memoryview(chunk)
                    came += len(data)
                    if call.abandoned or take(data):
                        return
                    silent_s = progress.silent_s(came, time.monotonic())
                    if silent_s >= self._stall_s:
                        raise UnavailableError(
                            f"cannot {what}: only a trickle came for {self._stall_s:g} s"
                        )
                    if not silent_s:
                        call.progress()
            start, end = answer.range
            if came < end - start:
                raise UnavailableError(f"cannot {what}: the connection ended early")

        self._caller.run(body, self._stall_s, what, failure=UnavailableError)

    # ---- writing ------------------------------------------------------------------------------

    def create(self, path: str, *, overwrite: bool = False) -> "BucketWriter":
        self._names_of_file(path)
        return BucketWriter(
            self, path, self._name(path), overwrite=overwrite, deadline_s=self._deadline_s
        )

    def refuse_existing(self, path: str) -> None:
        """Raise AlreadyExistsError if there is an object at `path`."""

        def head(store: Any, key: str, _: Call[Any]) -> None:
            try:
                load_obstore().head(store, key)
            except FileNotFoundError:
                return
            raise AlreadyExistsError(f"cannot create {self._name(path)}: it exists already")

        self._run("create", path, head)

    def put(self, path: str, pieces: Sequence[Piece], size_bytes: int, overwrite: bool) -> None:
        """Create an object by one PUT."""
        if not overwrite and size_bytes > _UNSEEN_BYTES:
            self.refuse_existing(path)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        mode: Any = "overwrite" if overwrite else "create"
        is_again = False

        def send(store: Any, key: str, _: Call[Any]) -> None:
            nonlocal is_again
            was_sent, is_again = is_again, True
            try:
                load_obstore().put(store, key, data, mode=mode, use_multipart=False)
            except load_obstore().exceptions.AlreadyExistsError as error:
                if overwrite or is_conflict(parse_answer(error)):
                    # The next attempt finds out which writer was first.
                    raise UnavailableError(
                        f"cannot write {self._name(path)}: another writer is at work on it"
                    ) from error
                # An earlier attempt may have created the object, and its answer was lost.
                if not (was_sent and self._is_there(store, key, data)):
                    raise

        self._run("write", path, send, kind="put", size_bytes=size_bytes)

    def _is_there(self, store: Any, key: str, data: Piece) -> bool:
        meta = load_obstore().head(store, key)
        if meta["size"] != len(data) or len(data) > _COMPARED_BYTES:
            return False
        return bytes(load_obstore().get(store, key).bytes()) == data

    def upload(self, path: str, pieces: Iterator[Piece]) -> None:
        """Create an object by a multipart upload."""
        store, key, bucket = self._bucket(path, "upload")
        with translated_errors(f"write {self._name(path)}", bucket):
            load_obstore().put(
                store,
                key,
                pieces,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self._names_of_file(target)
        info = self.stat(source)
        if info.is_dir:
            raise UnsupportedError(f"{self.url} cannot rename a folder in one step")
        if not overwrite and info.size_bytes <= SINGLE_BYTES:
            with self.create(target) as writer:
                writer.write(self.read(source))
        else:
            if not overwrite:
                self.refuse_existing(target)
            old = self._bucket(source)[1]
            self._run(
                f"rename {self._name(source)} to",
                target,
                lambda store, key, _: load_obstore().copy(store, old, key),
                size_bytes=info.size_bytes,
            )
        self.delete_files([source])

    def mkdir(self, path: str) -> None:
        if not self._bucket(path)[1]:
            self.stat(path)  # buckets are not created here; fail if this one is missing
            return
        names = split_path(path)
        for count in range(1 if self._address.bucket else 2, len(names) + 1):
            above = "/".join(names[:count])
            if self._is_file(above):
                raise InvalidInputError(f"{self._name(above)} is a file and no folder")
        self.put(f"{path}/{_MARKER}" if path else _MARKER, [b""], 0, overwrite=True)

    def _is_file(self, path: str) -> bool:
        try:
            self.refuse_existing(path)
        except AlreadyExistsError:
            return True
        return False

    # ---- deleting -----------------------------------------------------------------------------

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._names_of_file(path)

        def keys_below(store: Any, key: str, call: Call[Any]) -> list[str]:
            """Return the keys to delete."""
            found: list[str] = []
            for page in load_obstore().list(store, key, chunk_size=1000):
                call.progress()
                found += [meta["path"] for meta in page]
                if not recursive and any(_last(one) != _MARKER for one in found if one != key):
                    break
            return found

        # Most paths are files, which need no listing.
        if not recursive:
            try:
                is_file = not self.stat(path).is_dir
            except NotFoundError:
                return
            if is_file:
                self.delete_files([path])
                return
        keys = self._run("delete", path, keys_below)
        own = self._bucket(path)[1]
        if not recursive and any(key not in (own, f"{own}/{_MARKER}") for key in keys):
            raise AlreadyExistsError(f"cannot delete {self._name(path)}: the folder is not empty")
        self._delete_keys(path, [*keys, own] if recursive else keys)

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files by one request per thousand files of a bucket."""
        by_bucket: dict[str, tuple[str, list[str]]] = {}
        for path in paths:
            self._names_of_file(path)
            _, key, bucket = self._bucket(path)
            by_bucket.setdefault(bucket, (path, []))[1].append(key)
        for first, keys in by_bucket.values():
            self._delete_keys(first, keys)

    def _delete_keys(self, path: str, keys: Sequence[str]) -> None:
        def delete(store: Any, _: str, call: Call[Any]) -> None:
            for some in _batches(keys):
                try:
                    load_obstore().delete(store, some[0] if len(some) == 1 else some)
                except FileNotFoundError as error:
                    if is_no_bucket(parse_answer(error)):
                        raise
                call.progress()

        if keys:
            self._run("delete", path, delete)

    def close(self) -> None:
        """Release the helper threads; obstore keeps its connections until the process ends."""
        self._caller.close()
        with self._lock:
            self._opened.clear()


def _batches(keys: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), 1000):
        yield list(keys[start : start + 1000])


def _is_name(name: str) -> bool:
    """Return whether a name that a server sent can be a component of a path."""
    return "/" not in name and _is_path(name)


def _is_path(text: str) -> bool:
    try:
        return bool(split_path(text))
    except InvalidInputError:
        return False


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _info(path: str, meta: Mapping[str, Any]) -> FileInfo:
    when = meta["last_modified"]
    modified_ns = int(when.timestamp() * 1e9) if when else 0
    version = (meta["e_tag"] or "").strip('"')
    return FileInfo(path, meta["size"], modified_ns, False, version=version)


# ---- writer --------------------------------------------------------------------------------------


class BucketWriter(Writer):
    """Writer of one object: a single PUT for a small object, a multipart upload for a large one.

    A writer that dies leaves no visible object. The parts that a killed writer has uploaded stay in
    the bucket, invisible, until a rule of the bucket removes them (docs/stores/s3.md). Of several
    writers of a new key exactly one wins if the object is sent by a single PUT (`SINGLE_BYTES`).
    Multipart uploads cannot be made conditional everywhere (Ceph RGW ignores the condition), so of
    several writers of a larger object that found no object when they began, the last one wins.
    """

    def __init__(
        self, backend: "BucketBackend", path: str, name: str, *, overwrite: bool, deadline_s: float
    ) -> None:
        """Prepare to write `path`, which messages call `name`.

        `deadline_s`: longest time that a write may wait without progress.
        """
        self._backend = backend
        self._path = path
        self._name = name
        self._overwrite = overwrite
        self._deadline_s = deadline_s
        self._pieces: list[Piece] = []
        self._size_bytes = 0
        self._upload: _MultipartUpload | None = None
        self._is_closed = False

    def write(self, data: Piece) -> None:
        if self._is_closed:
            raise InvalidInputError(f"cannot write {self._name}: closed")
        self._size_bytes += len(data)
        if self._upload is not None:
            self._upload.put(data, self._deadline_s)
            return
        self._pieces.append(data)
        if self._size_bytes > SINGLE_BYTES:
            if not self._overwrite:
                self._backend.refuse_existing(self._path)
            kept, self._pieces = self._pieces, []
            self._upload = _MultipartUpload(
                lambda pieces: self._backend.upload(self._path, pieces), self._name
            )
            for piece in kept:
                self._upload.put(piece, self._deadline_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._upload is not None:
            self._upload.finish(self._deadline_s)
            return
        pieces, self._pieces = self._pieces, []
        self._backend.put(self._path, pieces, self._size_bytes, self._overwrite)

    def abort(self) -> None:
        self._is_closed = True
        self._pieces = []
        if self._upload is not None:
            self._upload.abort(self._deadline_s)
            self._upload = None

    @property
    def held_bytes(self) -> int:
        return min(self._size_bytes, SINGLE_BYTES if self._upload is None else _QUEUE_BYTES)


class _AbortedError(Exception):
    """Raised in the upload's thread to end the upload without an object."""


class _MultipartUpload:
    """Multipart upload in its own thread, which takes pieces from a queue of bounded size."""

    def __init__(self, send: Callable[[Iterator[Piece]], None], name: str) -> None:
        self._send = send
        self._name = name
        self._queue: queue.SimpleQueue[Piece | type[_AbortedError] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._queued_bytes = 0
        self._taken_count = 0
        self._is_over = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="bootseer-upload", daemon=True).start()

    def put(self, data: Piece, deadline_s: float) -> None:
        """Queue one piece, after waiting until the queue has room. Raises: BootseerError."""
        self._wait(lambda: self._queued_bytes < _QUEUE_BYTES, deadline_s)
        with self._changed:
            self._queued_bytes += len(data)
        self._queue.put(data)

    def finish(self, deadline_s: float) -> None:
        """Wait until the object is complete. Raises: BootseerError."""
        self._queue.put(None)
        # The last parts are being sent, and report no progress.
        self._wait(lambda: False, deadline_s + LAST_PARTS_S)

    def abort(self, deadline_s: float) -> None:
        """End the upload without an object, and wait for its end. Never raises."""
        self._queue.put(_AbortedError)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, deadline_s)

    def _wait(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `is_ready` returns True or the upload has ended.

        Raises: the upload's error; DeadlineError if no piece was taken for `deadline_s`.
        """
        with self._changed:
            while not (self._is_over or is_ready()):
                seen_count = self._taken_count
                if not self._changed.wait(deadline_s) and self._taken_count == seen_count:
                    self._queue.put(_AbortedError)
                    raise DeadlineError(
                        f"cannot write {self._name}: nothing was taken for {deadline_s:g} s"
                    )
            if self._error is not None:
                raise self._error

    def _pieces(self) -> Iterator[Piece]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, type):
                raise piece
            with self._changed:
                self._queued_bytes -= len(piece)
                self._taken_count += 1
                self._changed.notify_all()
            yield piece

    def _run(self) -> None:
        try:
            self._send(self._pieces())
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
