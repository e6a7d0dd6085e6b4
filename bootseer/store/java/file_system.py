"""HDFS as Hadoop's own client shows it to Java programs: the one place that names its classes.

Each function is one or a few calls of `DistributedFileSystem`, made with a `Java` of the calling
thread. Paths are absolute. They raise JavaError. Reference: Hadoop's API documentation of
org.apache.hadoop.fs.FileSystem and org.apache.hadoop.hdfs.DistributedFileSystem (2.9 and later).
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from bootseer.store.backend import FileInfo
from bootseer.store.java.calls import Java

_FS = "org/apache/hadoop/fs/"
_CONF = "org/apache/hadoop/conf/Configuration"
_DFS = "org/apache/hadoop/hdfs/DistributedFileSystem"
_READING = "org/apache/hadoop/hdfs/client/HdfsDataInputStream"
_STATUS = f"{_FS}FileStatus"
_PERMISSION = f"{_FS}permission/FsPermission"
_PATH_L, _STRING_L = f"L{_FS}Path;", "Ljava/lang/String;"


class Status(Struct, frozen=True):
    """The status of a file or folder."""

    info: FileInfo
    mode: int
    replication: int


def connect(java: Java, cluster: str, settings: Mapping[str, str]) -> int:
    """A new client of `cluster`, with the site's configuration and `settings`; to be dropped."""
    configuration = java.new(_CONF, "")
    for key, value in settings.items():
        java.call(
            configuration, f"{_CONF}.set({_STRING_L}{_STRING_L})V", java.text(key), java.text(value)
        )
    address = java.new("java/net/URI", _STRING_L, java.text(cluster))
    found = java.call_static(
        f"{_FS}FileSystem.newInstance(Ljava/net/URI;L{_CONF};)L{_FS}FileSystem;",
        address, configuration,
    )  # fmt: skip
    return java.keep(found)


def is_hdfs(java: Java, system: int) -> bool:
    """Whether it is what all else here is made for."""
    return java.is_a(system, _DFS)


def disconnect(java: Java, system: int) -> None:
    """Close and drop a client."""
    try:
        java.call(system, f"{_FS}FileSystem.close()V")
    finally:
        java.drop(system)


def status(java: Java, system: int, full: str, path: str) -> Status:
    """What is at `full`, to be called `path`."""
    found = java.call(system, f"{_DFS}.getFileStatus({_PATH_L})L{_STATUS};", _path(java, full))
    permission = java.call(found, f"{_STATUS}.getPermission()L{_PERMISSION};")
    mode = java.call(permission, f"{_PERMISSION}.toShort()S")
    replication = java.call(found, f"{_STATUS}.getReplication()S")
    return Status(_info(java, found, path), mode & 0o7777, replication)


def entries(java: Java, system: int, full: str, path: str) -> Iterator[FileInfo]:
    """What is in a folder; of a file, itself under its own name."""
    found = java.call(system, f"{_DFS}.listStatus({_PATH_L})[L{_STATUS};", _path(java, full))
    for index in range(java.length(found)):
        with java:
            each = java.item(found, index)
            where = java.call(each, f"{_STATUS}.getPath(){_PATH_L}")
            name = java.text_of(java.call(where, f"{_FS}Path.getName(){_STRING_L}"))
            info = _info(java, each, f"{path}/{name}" if path else name)
        yield info


def _info(java: Java, found: int, path: str) -> FileInfo:
    modified_ns = 1_000_000 * java.call(found, f"{_STATUS}.getModificationTime()J")
    if java.call(found, f"{_STATUS}.isDirectory()Z"):
        return FileInfo(path, 0, modified_ns, True)
    size_bytes = java.call(found, f"{_STATUS}.getLen()J")
    block_bytes = java.call(found, f"{_STATUS}.getBlockSize()J")
    return FileInfo(path, size_bytes, modified_ns, False, block_bytes)


def make_folder(java: Java, system: int, full: str, mode: int) -> None:
    """Make a folder with its parents; no error where it exists."""
    java.call(
        system, f"{_DFS}.mkdirs({_PATH_L}L{_PERMISSION};)Z", _path(java, full), _mode(java, mode)
    )


def delete(java: Java, system: int, full: str, *, recursive: bool) -> None:
    """No error where there is nothing."""
    java.call(system, f"{_DFS}.delete({_PATH_L}Z)Z", _path(java, full), recursive)


def rename(java: Java, system: int, source: str, target: str, *, overwrite: bool) -> None:
    """Rename in one step of the NameNode. The target's folder must exist."""
    kind = f"{_FS}Options$Rename"
    option = java.call_static(
        f"{kind}.valueOf({_STRING_L})L{kind};", java.text("OVERWRITE" if overwrite else "NONE")
    )
    java.call(
        system, f"{_DFS}.rename({_PATH_L}{_PATH_L}[L{kind};)V",
        _path(java, source), _path(java, target), java.array(kind, [option]),
    )  # fmt: skip


def concatenate(java: Java, system: int, target: str, sources: Sequence[str]) -> None:
    """Join files in one step of the NameNode."""
    paths = java.array(f"{_FS}Path", [_path(java, source) for source in sources])
    java.call(system, f"{_DFS}.concat({_PATH_L}[{_PATH_L})V", _path(java, target), paths)


def create(
    java: Java,
    system: int,
    full: str,
    *,
    overwrite: bool,
    mode: int,
    replication: int | None,
    block_bytes: int | None,
) -> int:
    """A new file, and missing folders above it; to be closed and dropped. Exclusive, unless
    `overwrite`."""
    where = _path(java, full)
    if replication is None:
        replication = java.call(system, f"{_DFS}.getDefaultReplication({_PATH_L})S", where)
    if block_bytes is None:
        block_bytes = java.call(system, f"{_DFS}.getDefaultBlockSize({_PATH_L})J", where)
    stream = java.call(
        system,
        f"{_DFS}.create({_PATH_L}L{_PERMISSION};ZISJLorg/apache/hadoop/util/Progressable;)"
        f"L{_FS}FSDataOutputStream;",
        where, _mode(java, mode), overwrite, 4096, replication, block_bytes, None,
    )  # fmt: skip
    return java.keep(stream)


def write(java: Java, stream: int, array: int, count: int) -> None:
    """Append the first `count` bytes of a `byte[]`."""
    java.call(stream, "java/io/OutputStream.write([BII)V", array, 0, count)


def close(java: Java, stream: int) -> None:
    """Close what is read or written; not dropped."""
    java.call(stream, "java/io/Closeable.close()V")


def is_closed(java: Java, system: int, full: str) -> bool:
    """Whether a file is not being written; a dead writer's is closed an hour later at most."""
    return bool(java.call(system, f"{_DFS}.isFileClosed({_PATH_L})Z", _path(java, full)))


def open_file(java: Java, system: int, full: str) -> tuple[int, int]:
    """A file to be read, to be closed and dropped; and its size in bytes."""
    stream = java.call(
        system, f"{_DFS}.open({_PATH_L}I)L{_FS}FSDataInputStream;", _path(java, full), 4096
    )
    size_bytes = java.call(stream, f"{_READING}.getVisibleLength()J")
    return java.keep(stream), size_bytes


def read(java: Java, stream: int, offset: int, array: int, count: int) -> int:
    """Up to `count` bytes into a `byte[]`; -1 at the end. Several threads may read a stream."""
    taken: int = java.call(stream, f"{_FS}FSDataInputStream.read(J[BII)I", offset, array, 0, count)
    return taken


def capacity(java: Java, system: int, full: str) -> tuple[int, int]:
    """What the cluster has, and what of it is free, in bytes."""
    kind = f"{_FS}FsStatus"
    found = java.call(system, f"{_DFS}.getStatus({_PATH_L})L{kind};", _path(java, full))
    total_bytes = java.call(found, f"{kind}.getCapacity()J")
    return total_bytes, java.call(found, f"{kind}.getRemaining()J")


def quota(java: Java, system: int, full: str) -> tuple[int, int] | None:
    """A folder's quota of space, and what of it is used, in bytes; None where it has none."""
    kind = f"{_FS}QuotaUsage"
    found = java.call(system, f"{_DFS}.getQuotaUsage({_PATH_L})L{kind};", _path(java, full))
    total_bytes = java.call(found, f"{kind}.getSpaceQuota()J")
    if total_bytes < 0:
        return None
    return total_bytes, java.call(found, f"{kind}.getSpaceConsumed()J")


def default_block_bytes(java: Java, system: int, full: str) -> int:
    """The block size of new files."""
    found: int = java.call(system, f"{_DFS}.getDefaultBlockSize({_PATH_L})J", _path(java, full))
    return found


def _path(java: Java, full: str) -> int:
    return java.new(f"{_FS}Path", _STRING_L, java.text(full))


def _mode(java: Java, mode: int) -> int:
    return java.new(_PERMISSION, "S", mode)
