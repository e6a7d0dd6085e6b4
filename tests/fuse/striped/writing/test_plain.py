"""Plain layout: one ordinary file that every tool reads, joined by concat on real HDFS."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError, NotFoundError, UnsupportedError
from bootseer.fuse.striped.layout import MAGIC
from bootseer.fuse.striped.stripe_settings import DIRECTORY_RULE
from bootseer.store import Backend, open_backend
from testbed.hdfs.cluster import MiniHdfs
from testbed.needs import MissingError
from tests.fuse.striped.support.harness import CALLER, Driver, refused_with, storage_on
from tests.fuse.striped.support.stored import find_garbage

# This HDFS allows no blocks of less than 64 KiB.
UNIT = 64 * 2**10
RUN = 8 * UNIT
DATA = random.Random(6).randbytes(5 * RUN + 3 * UNIT + 77)


@pytest.fixture(params=["file", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Backend that holds the plain files."""
    url = (tmp_path / "stored").as_uri()
    if request.param == "hdfs":
        url = str(request.getfixturevalue("hdfs_url"))
    made = open_backend(url, deadline_s=20)
    made.mkdir("")
    yield made
    made.close()


@pytest.fixture
def driver(backend: Backend) -> Iterator[Driver]:
    storage = storage_on(backend, unit=UNIT, memory_bytes=32 * 2**20, layout="plain")
    made = Driver(storage)
    yield made
    made.fs.destroyed()
    storage.tree.close()


def test_a_plain_file_is_an_ordinary_file(driver: Driver, backend: Backend) -> None:
    driver.write("f", b"old")
    driver.write("f", DATA, step=50_000)
    # As other tools see it.
    assert backend.read("f") == DATA
    assert driver.read("f", step=100_000) == DATA
    assert driver.size("f") == len(DATA)
    assert find_garbage(backend, "") == []


@pytest.mark.parametrize("size", [UNIT + 1, RUN, RUN + 1])
def test_plain_files_of_sizes_at_the_edges(driver: Driver, backend: Backend, size: int) -> None:
    driver.write("f", DATA[:size], step=30_000)
    assert backend.read("f") == DATA[:size]


def test_a_plain_file_can_be_appended_to_where_files_can_be_joined(
    driver: Driver, backend: Backend
) -> None:
    driver.write("f", DATA[: 2 * UNIT], step=50_000)
    if not backend.can_join():
        with pytest.raises(UnsupportedError, match="not appended"):
            driver.write("f", b"more", flags=os.O_APPEND)
        return
    driver.write("f", DATA[2 * UNIT : 5 * UNIT + 9], flags=os.O_APPEND, step=50_000)
    driver.write("f", DATA[5 * UNIT + 9 :], flags=os.O_APPEND, step=50_000)
    assert backend.read("f") == DATA
    assert driver.read("f", step=100_000) == DATA
    assert find_garbage(backend, "") == []


def test_fsync_in_the_middle_of_a_plain_file(driver: Driver, backend: Backend) -> None:
    file = driver.open("f", os.O_WRONLY | os.O_CREAT)
    driver.pwrite(file, 0, DATA[: 3 * UNIT])
    driver.fs.fsync(CALLER, *file, False)
    assert backend.read("f") == DATA[: 3 * UNIT]
    driver.pwrite(file, 3 * UNIT, DATA[3 * UNIT : 4 * UNIT])
    if not backend.can_join():
        with pytest.raises(UnsupportedError, match="not appended"):
            driver.close(file)
        assert backend.read("f") == DATA[: 3 * UNIT]
        return
    driver.close(file)
    assert backend.read("f") == DATA[: 4 * UNIT]


def test_a_plain_file_that_somebody_replaced_is_not_added_to(
    driver: Driver, backend: Backend
) -> None:
    if not backend.can_join():
        raise MissingError("this storage cannot join files")
    driver.write("f", DATA[: 3 * UNIT], step=50_000)
    file = driver.open("f", os.O_WRONLY | os.O_APPEND)
    driver.pwrite(file, 3 * UNIT, DATA[3 * UNIT : 5 * UNIT])
    with backend.create("f", overwrite=True) as writer:
        writer.write(b"somebody else's")
    with refused_with(errno.ESTALE):
        driver.close(file)
    assert backend.read("f") == b"somebody else's"


def test_a_save_that_ends_early_leaves_nothing_under_the_name(
    driver: Driver, backend: Backend
) -> None:
    file = driver.open("f", os.O_WRONLY | os.O_CREAT)
    for at in range(0, 3 * RUN, UNIT):
        driver.pwrite(file, at, DATA[at : at + UNIT])
    with pytest.raises(NotFoundError):
        backend.stat("f")
    for writer in driver.fs._nodes.writers():
        writer.close(5.0)
    assert find_garbage(backend, "") == []


def test_what_looks_like_a_layout_is_striped_all_the_same(driver: Driver, backend: Backend) -> None:
    trap = MAGIC + DATA
    driver.write("trap", trap, step=50_000)
    assert driver.read("trap", step=100_000) == trap
    assert backend.stat("trap").size_bytes < len(trap)


def test_a_directory_has_a_rule_of_its_own(backend: Backend) -> None:
    with storage_on(backend, unit=UNIT, memory_bytes=32 * 2**20) as storage:
        driver = Driver(storage)
        for name in ("plain", "striped", "odd"):
            driver.mkdir(name)
            driver.write(f"{name}/{DIRECTORY_RULE}", name.encode() + b"\n")
        driver.write("plain/f", DATA, step=50_000)
        driver.write("striped/f", DATA, step=50_000)
        assert backend.read("plain/f") == DATA
        assert backend.stat("striped/f").size_bytes < len(DATA)
        with pytest.raises(InvalidInputError, match="striped or plain"):
            driver.write("odd/f", DATA, step=50_000)


@pytest.mark.hdfs
def test_a_namenode_that_restarts_under_the_join(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path
) -> None:
    backend = open_backend(hdfs_url, deadline_s=30)
    for name in ("a", "b", "c"):
        with backend.create(name) as writer:
            writer.write(name.encode() * 100_000)
    assert backend.can_join()
    hdfs.stop_namenode()
    hdfs.start_namenode()
    hdfs.wait_for_datanodes(hdfs.datanode_count)
    backend.join("a", ["b", "c"])
    assert backend.read("a") == b"a" * 100_000 + b"b" * 100_000 + b"c" * 100_000
    with pytest.raises(NotFoundError):
        backend.join("a", ["b"])
    backend.close()


def test_a_cluster_that_wants_kerberos_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>hadoop.security.authentication</name>"
        "<value>kerberos</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert not open_backend("hdfs://127.0.0.1:1/x?deadline_s=1").can_join()


def test_nobody_at_the_namenodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    assert not open_backend("hdfs://127.0.0.1:1/x?deadline_s=0.5").can_join()
