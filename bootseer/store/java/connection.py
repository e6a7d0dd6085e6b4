"""The connection to one folder of an HDFS by Hadoop's own client: calls within the deadline.

Alone owns that client and how its failures become ours. Thread-safe. It is made by the first call,
and not in a process that was forked from one that has called Java (`java_machine`).
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    UnsupportedError,
)
from bootseer.store.deadline import Call
from bootseer.store.hdfs.errors import refused_datanode_count, translate
from bootseer.store.hdfs.folder import HdfsFolder, HdfsOptions
from bootseer.store.hdfs.space import HdfsSpace
from bootseer.store.java import file_system as java_fs
from bootseer.store.java.calls import Java, JavaError
from bootseer.store.java.machine import caller, machine

Result = TypeVar("Result")
Work = Callable[[Java, int], Result]

_PREFIX = "java+"
_DEADLINE_S = 60.0
_CLOSE_S = 5.0
_REPLACE_DATANODE = "dfs.client.block.write.replace-datanode-on-failure.best-effort"


class JavaHdfsConnection(HdfsFolder):
    """What files, folders and writers of one folder are reached through."""

    def __init__(self, url: str, *, deadline_s: float | None = None) -> None:
        self.options = HdfsOptions(url, deadline_s or _DEADLINE_S)
        self.deadline_s = self.options.deadline_s
        super().__init__(url)
        parts = urlsplit(url, allow_fragments=False)
        if "@" in parts.netloc:
            raise InvalidInputError(
                f"{self.url}: the user is not named in the URL, but by HADOOP_USER_NAME or by a "
                "Kerberos ticket"
            )
        # Without a host, that of the site's configuration.
        self._cluster = f"{parts.scheme.removeprefix(_PREFIX)}://{parts.netloc}/"
        self._lock = threading.Lock()
        self._system = 0
        self._mode: int | None = None
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._space = HdfsSpace(self)

    def call(self, work: Work[Result], verb: str, path: str) -> Result:
        """What `work` returns, within the deadline; errors say `verb` and `path`."""
        return self.run(lambda _, java, system: work(java, system), verb, path)

    def run(
        self,
        work: Callable[[Call[Result], Java, int], Result],
        verb: str,
        path: str,
    ) -> Result:
        """As `call`, for work that reports its progress."""
        what = f"{verb} {self.name(path)}"

        def translated(call: Call[Result]) -> Result:
            try:
                with Java(machine()) as java:
                    system = self._connected(java)
                    self._close_dropped(java)
                    return work(call, java, system)
            except UnsupportedError:
                raise
            except (JavaError, UnicodeError, BootseerError) as error:
                raise translate(_builtin(error), what) from error

        try:
            return caller().run(translated, self.deadline_s)
        except UnsupportedError:
            raise
        except DeadlineError as error:
            raise translate(error, what) from error
        except BootseerError as error:
            raise self._told_apart(error) from error

    def _connected(self, java: Java) -> int:
        with self._lock:
            if not self._system:
                settings = {
                    # As hdfs-native: what is asked for is what a file gets.
                    "fs.permissions.umask-mode": "000",
                    # A DataNode that hangs is left in time for another replica to be tried.
                    "dfs.client.socket-timeout": str(int(self.deadline_s * 500)),
                    # With no DataNode to spare a write goes on with those that are left.
                    _REPLACE_DATANODE: "true",
                }
                system = java_fs.connect(java, self._cluster, settings)
                if not java_fs.is_hdfs(java, system):
                    java_fs.disconnect(java, system)
                    raise UnsupportedError(
                        f"{self._cluster} is no HDFS for Hadoop's client: what it is cannot "
                        "replace a file in one step"
                    )
                self._system = system
            return self._system

    def _told_apart(self, error: BootseerError) -> BootseerError:
        """`error`, or that all DataNodes are full, where it may mean that, and they are."""
        count = refused_datanode_count(error)
        if count and self._space.is_full(count, self.options.block_size_bytes):
            return NoSpaceError(f"{error} No DataNode has room: remove files, or add DataNodes")
        return error

    def drop(self, stream: int) -> None:
        """Have a stream that was read closed with the next call. From anywhere, at any time."""
        self._dropped.put(stream)

    def _close_dropped(self, java: Java) -> None:
        while not self._dropped.empty():
            try:
                stream = self._dropped.get_nowait()
            except queue.Empty:
                return
            try:
                java_fs.close(java, stream)
            except JavaError:
                pass
            finally:
                java.drop(stream)

    def mode(self, java: Java, system: int) -> int:
        """Permission bits for folders: the root's, but never write for others."""
        if self._mode is None:
            try:
                mode = java_fs.status(java, system, self._root, "").mode
            except JavaError as error:
                if not isinstance(_builtin(error), FileNotFoundError):
                    raise
                mode = 0o700
                java_fs.make_folder(java, system, self._root, mode)
            self._mode = mode & 0o775 | 0o700
        return self._mode

    # ---- what `HdfsSpace` asks ------------------------------------------------------------

    def hurried(self) -> "JavaHdfsConnection":
        """The file system that answers the questions below."""
        return self

    def capacity(self) -> tuple[int, int]:
        """Returns the cluster's bytes in all, and its free bytes."""
        return self.call(
            lambda java, system: java_fs.capacity(java, system, self._root), "measure", ""
        )

    def quota(self, path: str) -> tuple[int, int] | None:
        """The space quota of a folder and what it has used; None where it has none."""
        return self.call(lambda java, system: java_fs.quota(java, system, path), "measure", "")

    def default_block_bytes(self) -> int:
        """The block size of files whose writer names none."""
        return self.call(
            lambda java, system: java_fs.default_block_bytes(java, system, self._root),
            "measure",
            "",
        )

    def close(self) -> None:
        """End the connection, and with it what is still being written. Idempotent."""
        with self._lock:
            system, self._system = self._system, 0
        if not system:
            return

        def work(_: Call[None]) -> None:
            with Java(machine()) as java:
                self._close_dropped(java)
                java_fs.disconnect(java, system)

        try:
            caller().run(work, min(self.deadline_s, _CLOSE_S))
        except (BootseerError, JavaError):
            pass  # its threads end with the process


def _builtin(error: Exception) -> Exception:
    """What Python calls it."""
    text = str(error)
    name = text.partition(":")[0]
    if name == "FileNotFoundException":
        return FileNotFoundError(text)
    if name == "FileAlreadyExistsException":
        return FileExistsError(text)
    return error
