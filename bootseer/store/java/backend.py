"""`java+hdfs://`: HDFS by Hadoop's own client in a Java machine of this process, as a backend.

For sites where hdfs-native does not do: what Hadoop's client can (encryption zones, routers, its
forms of login, the site's own classes), this can. It is called by JNI, as libhdfs and pyarrow call
it, but directly: through those a file cannot be created exclusively, nor replaced in one step, and
times are in seconds. Options in the URL's query are those of `hdfs://`. Permissions: those of the
root folder; a root made here is private.

Every method is thread-safe.
"""

from collections.abc import Iterator, Sequence

from bootseer.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from bootseer.store.backend import FileInfo, Space
from bootseer.store.deadline import Call
from bootseer.store.java import file_system as java_fs
from bootseer.store.java.calls import Java, JavaError
from bootseer.store.java.connection import JavaHdfsConnection
from bootseer.store.java.reader import JavaHdfsReader, fill
from bootseer.store.java.writer import JavaHdfsWriter
from bootseer.transfer.attempt import Attempt


class JavaHdfsBackend(JavaHdfsConnection):
    """Files beneath one folder of an HDFS."""

    has_atomic_rename = True
    has_atomic_put = False
    # dfs.client.write.max-packets-in-flight (80) of 64 KiB, in the machine's own memory.
    writer_bytes = 6 << 20

    def stat(self, path: str) -> FileInfo:
        full = self.full(path)
        return self.call(
            lambda java, system: java_fs.status(java, system, full, path).info, "look at", path
        )

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidInputError(f"the range ({offset}, {length}) is negative")
        full = self.full(path)

        def work(call: Call[bytes], java: Java, system: int) -> bytes:
            stream, size_bytes = java_fs.open_file(java, system, full)
            try:
                wanted = max(0, size_bytes - offset)
                data = bytearray(wanted if length is None else min(wanted, length))
                file = stream, size_bytes
                done = fill(call, java, file, offset, memoryview(data), Attempt())
                return bytes(memoryview(data)[:done])
            finally:
                self.drop(stream)

        return self.run(work, "read", path)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        return JavaHdfsReader(self, path).read_into(offset, buffer, attempt or Attempt())

    def open_reader(self, path: str, *, is_checked: bool = False) -> JavaHdfsReader:
        """As `OpensReaders.open_reader`; Hadoop's client checks HDFS's own checksums always."""
        return JavaHdfsReader(self, path)

    def create(self, path: str, *, overwrite: bool = False) -> JavaHdfsWriter:
        return JavaHdfsWriter(self, path).open(overwrite=overwrite)

    def is_closed(self, path: str) -> bool:
        """As `KnowsClosed.is_closed`."""
        full = self.full(path, file=True)
        return self.call(
            lambda java, system: java_fs.is_closed(java, system, full), "look at", path
        )

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = self.full(source, file=True), self.full(target, file=True)

        def work(java: Java, system: int) -> None:
            try:
                java_fs.rename(java, system, old, new, overwrite=overwrite)
            except JavaError as error:
                if not str(error).startswith("FileNotFoundException"):
                    raise
                java_fs.status(java, system, old, source)  # the same, if the source is missing
                folder = new.rpartition("/")[0] or "/"
                java_fs.make_folder(java, system, folder, self.mode(java, system))
                java_fs.rename(java, system, old, new, overwrite=overwrite)

        self.call(work, f"rename {self.name(source)} to", target)

    def list(self, path: str) -> Iterator[FileInfo]:
        full = self.full(path)

        def work(java: Java, system: int) -> list[FileInfo]:
            if not java_fs.status(java, system, full, path).info.is_dir:
                raise NotFoundError("not a folder")
            return list(java_fs.entries(java, system, full, path))

        return iter(sorted(self.call(work, "list", path), key=lambda info: info.path))

    def can_join(self) -> bool:
        """Always: every HDFS can."""
        return True

    def join(self, target: str, sources: Sequence[str]) -> None:
        """As `JoinsFiles.join`."""
        full = self.full(target, file=True)
        others = [self.full(source, file=True) for source in sources]
        self.call(
            lambda java, system: java_fs.concatenate(java, system, full, others),
            "join files to",
            target,
        )

    def mkdir(self, path: str) -> None:
        full = self.full(path)

        def work(java: Java, system: int) -> None:
            java_fs.make_folder(java, system, full, self.mode(java, system))

        try:
            self.call(work, "create", path)
        except AlreadyExistsError as error:
            raise InvalidInputError(str(error)) from error

    def delete(self, path: str, *, recursive: bool = False) -> None:
        full = self.full(path, file=True)
        try:
            self.call(
                lambda java, system: java_fs.delete(java, system, full, recursive=recursive),
                "delete",
                path,
            )
        except NotFoundError:
            pass

    def space(self) -> Space | None:
        """The quota of the directory, else the cluster."""
        return self._space.space(self.full(""))
