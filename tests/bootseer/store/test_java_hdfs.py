"""`java+hdfs://`: what the conformance suite does not ask of Hadoop's own client."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import (
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    QuotaExceededError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.served.forked import may_fork
from bootseer.store import Backend, Space, open_backend
from bootseer.store.abilities import is_being_written, joiner, open_reader
from bootseer.transfer.attempt import Attempt
from testbed.hdfs.cluster import MiniHdfs
from testbed.needs import require
from tests.bootseer.store.conftest import JAVA_HDFS
from tests.bootseer.store.hdfs.quota import set_space_quota
from tests.bootseer.store.using import put

on_hdfs = pytest.mark.parametrize("backend_url", [JAVA_HDFS], indirect=True)


@on_hdfs
def test_keeps_a_file_open_that_is_replaced(backend: Backend) -> None:
    put(backend, "file", b"old" * 1000)
    reader = open_reader(backend, "file")
    put(backend, "next", b"newer" * 1000)
    backend.rename("next", "file", overwrite=True)
    info = reader.current()
    assert info.size_bytes == 3000
    assert info.block_bytes == 8 << 20
    assert backend.stat("file").modified_ns % 10**9 % 10**6 == 0
    assert open_reader(backend, "file").current() == backend.stat("file") != info


@on_hdfs
def test_reads_stop_when_they_are_given_up(backend: Backend) -> None:
    put(backend, "file", bytes(3 << 20))
    buffer, attempt = bytearray(3 << 20), Attempt()
    attempt.give_up()
    assert open_reader(backend, "file").read_into(0, memoryview(buffer), attempt) == 0
    attempt = Attempt()
    assert open_reader(backend, "file").read_into(1, memoryview(buffer), attempt) == (3 << 20) - 1
    assert attempt.done_bytes == (3 << 20) - 1


@on_hdfs
def test_joins_files(backend: Backend) -> None:
    for name in "abc":
        put(backend, f"parts/{name}", name.encode() * 70_000)
    joins = joiner(backend)
    assert joins is not None
    joins.join("parts/a", ["parts/b", "parts/c"])
    assert backend.read("parts/a") == b"a" * 70_000 + b"b" * 70_000 + b"c" * 70_000
    assert [info.path for info in backend.list("parts")] == ["parts/a"]
    with pytest.raises(NotFoundError):
        joins.join("parts/a", ["parts/b"])


@on_hdfs
def test_knows_what_is_being_written(backend: Backend) -> None:
    """`stripe fsck --delete` spares it."""
    assert not is_being_written(backend, "file")
    with backend.create("file") as writer:
        writer.write(b"x")
        assert is_being_written(backend, "file")
    assert not is_being_written(backend, "file")


@on_hdfs
def test_a_writer_that_is_forgotten_may_be_read(backend: Backend) -> None:
    writer = backend.create("file")
    writer.write(b"x" * 100_000)
    writer.abandon()
    assert backend.read("file") == b"x" * 100_000


@on_hdfs
def test_a_quota_is_the_space_that_there_is(backend_url: str, backend: Backend) -> None:
    backend.mkdir("")
    cluster = backend.space()
    assert cluster is not None
    assert 0 < cluster.free_bytes <= cluster.total_bytes
    set_space_quota(backend_url.removeprefix("java+"), 16 << 20)
    limited = open_backend(backend_url)
    assert limited.space() == Space(16 << 20, 16 << 20)
    with pytest.raises(QuotaExceededError), limited.create("file") as writer:
        writer.write(bytes(17 << 20))
    with pytest.raises(NotFoundError):
        limited.stat("file")
    limited.close()


@on_hdfs
def test_a_copy_of_the_process_is_refused(backend: Backend) -> None:
    """A Java machine's threads stay in the parent: the child would wait for them for ever."""
    put(backend, "file", b"abc")
    reader = open_reader(backend, "file")
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 1
        try:
            backend.read("file")
        except UnsupportedError as error:
            del reader
            # A process that is begun there is none of its copies.
            code = 0 if "forked" in str(error) and not may_fork() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reader.read_into(0, memoryview(bytearray(9)), Attempt()) == 3


@on_hdfs
def test_a_cluster_that_hangs_is_given_up(backend_url: str, hdfs: MiniHdfs) -> None:
    patient, hasty = open_backend(backend_url), open_backend(backend_url + "&deadline_s=1")
    put(patient, "file", b"abc")
    hdfs.pause()
    try:
        with pytest.raises(DeadlineError, match=r"cannot look at java\+hdfs://\S+/file: no answer"):
            hasty.stat("file")
    finally:
        hdfs.resume()
    assert patient.read("file") == b"abc"
    hasty.close()
    patient.close()


@on_hdfs
def test_a_namenode_that_is_not_there_is_named(backend_url: str) -> None:
    """After it has been looked for as long as the site's configuration says, or the deadline."""
    with pytest.raises((UnavailableError, DeadlineError), match=r"java\+hdfs://127\.0\.0\.1:1"):
        open_backend("java+hdfs://127.0.0.1:1/x?deadline_s=2").stat("a")


@on_hdfs
def test_a_url_without_a_host_means_the_sites_own_cluster(
    backend_url: str, hdfs: MiniHdfs, tmp_path: Path
) -> None:
    put(open_backend(backend_url), "file", b"abc")
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name>"
        f"<value>{hdfs.url}</value></property></configuration>"
    )
    path = backend_url.partition("?")[0].removeprefix(f"java+{hdfs.url}")
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "checkpoint", "ls", f"java+hdfs://{path}"],
        env=os.environ | {"HADOOP_CONF_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "file\n"), done.stderr


@pytest.mark.parametrize(
    "url", ["java+hdfs://me@namenode/x", "java+hdfs://namenode/x?blocksize=1", "java+hdfs://n:x/"]
)
def test_refuses_urls_that_it_would_misread(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_backend(url)


@pytest.fixture
def bare_environment(tmp_path: Path) -> dict[str, str]:
    """One in which Java is found, and Hadoop is not."""
    require(programs=["java"])
    left_out = ("CLASSPATH", "HADOOP_HOME", "JAVA_HOME", "LIBHDFS_OPTS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("set_to", "words"),
    [
        (
            {"JAVA_HOME": "/nowhere"},
            "libjvm.so, which is not in /nowhere/lib/server: let JAVA_HOME",
        ),
        ({}, "Hadoop's jars, which CLASSPATH does not name: set it to what `hadoop classpath"),
        ({"CLASSPATH": "/nowhere/*:/nowhere/a.jar"}, "Hadoop's jars, which CLASSPATH does not"),
        ({"HADOOP_HOME": "{home}"}, "bin/hadoop does not name them"),
    ],
)
def test_says_in_one_line_what_is_missing(
    bare_environment: dict[str, str], tmp_path: Path, set_to: dict[str, str], words: str
) -> None:
    program = tmp_path / "bin/hadoop"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o700)
    given = {name: value.format(home=tmp_path) for name, value in set_to.items()}
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "checkpoint", "ls", "java+hdfs://127.0.0.1:1/x"],
        env=bare_environment | given, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 18
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
