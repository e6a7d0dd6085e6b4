"""Promises of every backend (`bootseer.store.backend`), checked on each real one."""

import concurrent.futures
import os
import threading
from collections.abc import Callable

import pytest

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.store import Backend, open_backend
from bootseer.transfer.attempt import Attempt
from testbed.needs import MissingError
from tests.bootseer.store.conftest import ALL
from tests.bootseer.store.using import put, race

pytestmark = pytest.mark.parametrize("backend_url", ALL, indirect=True)

ODD_NAMES = (
    "with space",
    "ünï-日本-😀",
    "percent%20%41",
    "hash#tag",
    "question?mark=1&b",
    "plus+star*[x]{y}",
    "back\\slash",
    "quote'\"",
    ".hidden",
    "a" * 255,
)


def test_reads_ranges(backend: Backend) -> None:
    data = os.urandom(100_000)
    put(backend, "a/b/file", data)
    assert backend.stat("a/b/file").size_bytes == len(data)
    assert backend.read("a/b/file") == data
    for offset, length in ((0, 0), (0, 1), (5, 70_000), (99_999, 1), (99_990, 100), (1, None)):
        end = None if length is None else offset + length
        assert backend.read("a/b/file", offset, length) == data[offset:end]


def test_reads_nothing_behind_the_end(backend: Backend) -> None:
    put(backend, "file", b"abc")
    assert backend.read("file", 3, 10) == b""
    assert backend.read("file", 4000, 10) == b""
    assert backend.read("file", 4000) == b""
    for attempt in (None, Attempt()):
        buffer = bytearray(b"_____")
        assert backend.read_into("file", 1, memoryview(buffer), attempt) == 2
        assert buffer == b"bc___"
        assert backend.read_into("file", 99, memoryview(buffer), Attempt()) == 0


def test_refuses_a_negative_range(backend: Backend) -> None:
    put(backend, "file", b"abc")
    for offset, length in ((-1, 1), (0, -1)):
        with pytest.raises(InvalidInputError):
            backend.read("file", offset, length)


def test_keeps_an_empty_file(backend: Backend) -> None:
    put(backend, "empty", b"")
    assert backend.read("empty") == b""
    info = backend.stat("empty")
    assert (info.path, info.size_bytes, info.is_dir) == ("empty", 0, False)


def test_keeps_a_large_file_written_in_odd_pieces(backend: Backend) -> None:
    block = os.urandom(1 << 20)
    data = b"".join(block[i:] + block[:i] for i in range(64))
    with backend.create("large") as writer:
        for start in range(0, len(data), 5_000_011):
            writer.write(data[start : start + 5_000_011])
    assert backend.stat("large").size_bytes == len(data)
    assert backend.read("large") == data
    attempt = Attempt()
    for told in (None, attempt):
        buffer = bytearray(20 << 20)
        assert backend.read_into("large", 12_345_678, memoryview(buffer), told) == len(buffer)
        assert buffer == data[12_345_678 : 12_345_678 + len(buffer)]
    assert attempt.done_bytes == len(buffer)
    attempt.give_up()
    assert backend.read_into("large", 0, memoryview(buffer), attempt) <= len(buffer)


def test_what_is_missing_is_not_found(backend: Backend) -> None:
    put(backend, "file", b"x")
    for path in ("no", "no/such/file", "file/below"):
        with pytest.raises(NotFoundError):
            backend.stat(path)
        with pytest.raises(NotFoundError):
            backend.read(path)
        with pytest.raises(NotFoundError):
            backend.read_into(path, 0, memoryview(bytearray(1)))
        with pytest.raises(NotFoundError):
            backend.read_into(path, 0, memoryview(bytearray(1)), Attempt())
        with pytest.raises(NotFoundError):
            list(backend.list(path))
        with pytest.raises(NotFoundError):
            backend.rename(path, "elsewhere")
        backend.delete(path)
        backend.delete(path, recursive=True)


def test_errors_name_the_url(backend: Backend) -> None:
    with pytest.raises(NotFoundError, match="no/such") as caught:
        backend.read("no/such")
    assert backend.url in str(caught.value)


def test_a_folder_is_no_file_and_a_file_no_folder(backend: Backend) -> None:
    put(backend, "folder/file", b"x")
    with pytest.raises(BootseerError):
        backend.read("folder")
    with pytest.raises(NotFoundError):
        list(backend.list("folder/file"))
    assert backend.stat("folder").is_dir
    assert backend.stat("folder").size_bytes == 0


def test_a_look_for_a_file_finds_no_folder(backend: Backend) -> None:
    put(backend, "folder/file", b"abc")
    assert backend.stat_file("folder/file").size_bytes == 3
    for path in ("folder", "none", "folder/none"):
        with pytest.raises(NotFoundError):
            backend.stat_file(path)


def test_a_tree_is_listed_as_its_folders_are(backend: Backend) -> None:
    paths = ["a/x", "a/b/c", "a-", "a/b-", *(f"a/{name}" for name in ODD_NAMES[:3])]
    for path in paths:
        put(backend, path, b"abc")
    if (tree := backend.list_tree("a")) is not None:
        found = {info.path: info.size_bytes for info in tree}
        assert list(found) == sorted(path for path in paths if path.startswith("a/"))
        assert set(found.values()) == {3}
    if (tree := backend.list_tree("none")) is not None:
        assert list(tree) == []


@pytest.mark.parametrize(
    "path", ["/absolute", "../up", "a/../b", "a//b", "a/", "./a", "nul\0", "a" * 256, "x/" * 2500]
)
def test_refuses_paths_that_are_none(backend: Backend, path: str) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: backend.stat(path),
        lambda: backend.read(path),
        lambda: backend.create(path),
        lambda: backend.mkdir(path),
        lambda: backend.delete(path),
        lambda: backend.list(path),
        lambda: backend.rename(path, "x"),
    )
    for call in calls:
        with pytest.raises(InvalidInputError):
            call()


def test_keeps_odd_names(backend: Backend) -> None:
    names = [name for name in ODD_NAMES if not (backend.url.startswith("az:") and "\\" in name)]
    for name in names:
        put(backend, f"odd/{name}", name.encode())
        put(backend, f"folders/{name}/x", b"")
    assert [info.path for info in backend.list("odd")] == sorted(f"odd/{n}" for n in names)
    for name in names:
        assert backend.read(f"odd/{name}") == name.encode()
        assert [info.path for info in backend.list(f"folders/{name}")] == [f"folders/{name}/x"]
        backend.rename(f"odd/{name}", f"moved/{name}", overwrite=True)
        assert backend.stat(f"moved/{name}").size_bytes == len(name.encode())
        backend.delete(f"moved/{name}")
        with pytest.raises(NotFoundError):
            backend.stat(f"moved/{name}")


def test_only_one_of_many_creates_a_file(backend: Backend) -> None:
    def create(index: int) -> bool:
        try:
            put(backend, "new/one", b"%d" % index * 1000)
        except AlreadyExistsError:
            return False
        return True

    assert race(8, create) == 1
    data = backend.read("new/one")
    assert len(data) == 1000
    assert len(set(data)) == 1
    with pytest.raises(AlreadyExistsError):
        put(backend, "new/one", b"again")
    put(backend, "new/one", b"overwritten", overwrite=True)
    assert backend.read("new/one") == b"overwritten"


def test_an_aborted_file_leaves_nothing(backend: Backend) -> None:
    writer = backend.create("a/aborted")
    writer.write(b"x" * 100_000)
    writer.abort()
    writer.abort()
    with pytest.raises(NotFoundError):
        backend.stat("a/aborted")

    def fail() -> None:
        with backend.create("a/failed") as failing:
            failing.write(b"x")
            raise RuntimeError("the caller fails")

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(NotFoundError):
        backend.stat("a/failed")


def test_a_closed_writer_stays_closed(backend: Backend) -> None:
    writer = backend.create("file")
    writer.write(b"abc")
    writer.close()
    writer.close()
    writer.abort()
    with pytest.raises(InvalidInputError):
        writer.write(b"more")
    assert backend.read("file") == b"abc"


def test_renames_a_file(backend: Backend) -> None:
    put(backend, "a/old", b"1")
    put(backend, "a/other", b"2")
    backend.rename("a/old", "deep/er/new")
    assert backend.read("deep/er/new") == b"1"
    with pytest.raises(NotFoundError):
        backend.read("a/old")
    with pytest.raises(AlreadyExistsError):
        backend.rename("a/other", "deep/er/new")
    assert backend.read("a/other") == b"2"
    assert backend.read("deep/er/new") == b"1"
    backend.rename("a/other", "deep/er/new", overwrite=True)
    assert backend.read("deep/er/new") == b"2"
    with pytest.raises(NotFoundError):
        backend.read("a/other")


def test_renames_a_folder(backend: Backend) -> None:
    put(backend, "a/b/file", b"1")
    try:
        backend.rename("a", "c")
    except UnsupportedError:
        assert not backend.traits.one_step_rename
        return
    assert backend.read("c/b/file") == b"1"
    with pytest.raises(NotFoundError):
        backend.stat("a")


def test_only_one_of_many_renames_to_a_new_name(backend: Backend) -> None:
    for index in range(8):
        put(backend, f"from/{index}", b"%d" % index)

    def rename(index: int) -> bool:
        try:
            backend.rename(f"from/{index}", "to")
        except AlreadyExistsError:
            return False
        return True

    assert race(8, rename) == 1
    winner = backend.read("to").decode()
    left = {info.path for info in backend.list("from")}
    assert left == {f"from/{index}" for index in range(8)} - {f"from/{winner}"}


def test_only_one_of_many_renames_a_file_away(backend: Backend) -> None:
    if not backend.traits.one_step_rename:
        raise MissingError("this backend has no atomic rename")
    put(backend, "only", b"x")

    def rename(index: int) -> bool:
        try:
            backend.rename("only", f"to/{index}")
        except NotFoundError:
            return False
        return True

    assert race(8, rename) == 1
    assert len(list(backend.list("to"))) == 1


def test_a_reader_sees_one_whole_version(backend: Backend) -> None:
    """A rename while others read replaces a file at once: it is never half, mixed or missing."""
    if not backend.traits.one_step_rename:
        raise MissingError("this backend has no atomic rename")
    size = 300_000
    put(backend, "file", bytes(size))
    stop = threading.Event()

    def read(_: int) -> int:
        count = 0
        while not stop.is_set():
            try:
                data = backend.read("file")
            except UnavailableError:
                continue  # HDFS: the version being read was deleted meanwhile
            assert len(data) == size
            assert data.count(data[0]) == size
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, index) for index in range(3)]
        try:
            for version in range(1, 6):
                put(backend, "next", bytes([version]) * size)
                backend.rename("next", "file", overwrite=True)
        finally:
            stop.set()
        assert all(reader.result(30) for reader in readers)
    assert backend.read("file", 0, 1) == b"\5"


def test_lists_names_in_order(backend: Backend) -> None:
    for name in ("b", "a/x", "c-", "c/y", "Z"):
        put(backend, name, b"12")
    names = [(info.path, info.is_dir, info.size_bytes) for info in backend.list("")]
    expected = [("Z", False, 2), ("a", True, 0), ("b", False, 2), ("c", True, 0), ("c-", False, 2)]
    assert names == expected
    assert [info.path for info in backend.list("a")] == ["a/x"]


def test_makes_and_deletes_folders(backend: Backend) -> None:
    backend.mkdir("a/b/c")
    backend.mkdir("a/b/c")
    put(backend, "a/b/file", b"")
    with pytest.raises(AlreadyExistsError):
        backend.delete("a/b")
    assert backend.stat("a/b/file").size_bytes == 0
    backend.delete("a", recursive=True)
    with pytest.raises(NotFoundError):
        backend.stat("a/b/file")


def test_a_new_folder_is_listed_and_empty(backend: Backend) -> None:
    """The object of an empty folder in a bucket is hidden."""
    if backend.url.startswith("oci:"):
        raise MissingError("a registry keeps no empty folders")
    backend.mkdir("a/b")
    assert [(info.path, info.is_dir) for info in backend.list("a")] == [("a/b", True)]
    assert list(backend.list("a/b")) == []
    assert list(backend.list_tree("a") or ()) == []


def test_a_file_is_no_parent(backend: Backend) -> None:
    if backend.url.startswith("memory:"):
        raise MissingError("fsspec's memory file system allows names below a file")
    put(backend, "file", b"x")
    calls: list[Callable[[], object]] = [
        lambda: backend.mkdir("file/below"),
        lambda: backend.mkdir("file"),
    ]
    if not backend.url.startswith(
        ("s3:", "az:")
    ):  # a look would be one more request for each object
        calls.append(lambda: backend.create("file/below"))
    for call in calls:
        with pytest.raises(InvalidInputError):
            call()
    assert backend.read("file") == b"x"


def test_many_threads_at_once(backend: Backend) -> None:
    datas = {f"many/{index}": os.urandom(10_000 + index) for index in range(16)}

    def work(path: str) -> bool:
        put(backend, path, datas[path])
        return all(backend.read(path, at, 100) == datas[path][at : at + 100] for at in range(20))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, datas, timeout=60))
    assert [info.path for info in backend.list("many")] == sorted(datas)


def test_space_is_sensible(backend: Backend) -> None:
    space = backend.space()
    if space is not None:
        assert 0 <= space.free_bytes <= space.total_bytes


def test_close_is_idempotent(backend_url: str) -> None:
    backend = open_backend(backend_url)
    put(backend, "x", b"")
    backend.close()
    backend.close()
