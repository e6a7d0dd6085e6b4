"""A real HDFS with Kerberos, encryption and block tokens, and its KDC.

Each failure ends at once, with one sentence that says what to do.
"""

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.cli.main import main
from bootseer.errors import (
    BootseerError,
    DeadlineError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.store import Store
from bootseer.store.hdfs import native, reading
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.store.hdfs.native import translate
from bootseer.transfer.attempt import Attempt
from testbed.hdfs.secure import SecureHdfs
from testbed.waiting import wait_for

pytestmark = pytest.mark.hdfs

DATA = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureHdfs]:
    with SecureHdfs(tmp_path_factory.mktemp("secure")) as cluster:
        yield cluster


@pytest.fixture
def cache(secure: SecureHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path at which this process looks for tickets; there is no file yet."""
    path = tmp_path / "tickets"
    for name, value in secure.environment(path).items():
        monkeypatch.setenv(name, value)
    return path


@pytest.fixture
def url(secure: SecureHdfs, tmp_path: Path) -> str:
    return f"{secure.hdfs.url}/{tmp_path.name}"


def failure(url: str) -> BootseerError:
    """Return the error of a look at a folder; it must come before the deadline."""
    backend = HdfsBackend(url, deadline_s=60)
    try:
        with pytest.raises(BootseerError) as raised:
            backend.stat("")
    finally:
        backend.close()
    assert not isinstance(raised.value, DeadlineError)
    return raised.value


def get_ticket_that_expires(secure: SecureHdfs, cache: Path) -> None:
    """Put a ticket into `cache`, and wait until the Kerberos library calls it expired."""
    secure.kinit(cache, lifetime="1s")
    wait_for(lambda: subprocess.run(["klist", "-s"], check=False).returncode, "the ticket's end")


def test_a_store_with_a_ticket(
    secure: SecureHdfs, cache: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    secure.kinit(cache)
    with Store(HdfsBackend(url + "?block_size_bytes=1048576")) as store:
        assert store.publish("small", b"1")
        assert not store.publish("small", b"2")
        assert store.publish("large", DATA)
        assert store.read("large") == DATA
        assert [info.path for info in store.list()] == ["large", "small"]
        lease = store.lease("lease", ttl_s=30, owner="me")
        assert lease is not None
        lease.release()
        # Ours are only the calls that a NameNode takes from everybody.
        backend = store.backend
        assert isinstance(backend, HdfsBackend)
        assert backend.space() is None
        assert not backend.can_join()
        assert backend.open_reader("large", is_checked=True).blocks == ()
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.needs("fuse")
def test_commands_and_a_mount(
    secure: SecureHdfs, cache: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure.kinit(cache)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOOTSEER_STORE", f"{url}/store")
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BOOTSEER_RUN_DIR", str(tmp_path / "run"))

    def bootseer(*arguments: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert ended.value.code == 0, arguments

    folder = tmp_path / "mounted"
    folder.mkdir()
    (tmp_path / "model").write_bytes(DATA)
    bootseer("doctor")
    bootseer("checkpoint", "cp", "--stripe-unit", "256KiB", "model", f"{url}/ck/")
    bootseer("checkpoint", "ls", f"{url}/ck")
    bootseer("checkpoint", "verify", f"{url}/ck")
    # The process that serves the mount goes on with the same tickets.
    mount = [sys.executable, "-m", "bootseer", "checkpoint", "mount", f"{url}/ck", str(folder)]
    subprocess.run(mount, check=True, timeout=60, stdout=subprocess.DEVNULL)
    try:
        script = f"cmp model {folder}/model && cp model {folder}/again && cmp model {folder}/again"
        subprocess.run(["sh", "-c", script], check=True, timeout=60)
    finally:
        bootseer("unmount", str(folder))
    make = ["sh", "-c", "mkdir -p env && echo made > env/file && echo >> ran"]
    for _ in range(2):
        subprocess.run(["rm", "-rf", "env"], check=True)
        bootseer("snapshot", "run", "--target", "env", "--", *make)
        assert (tmp_path / "env/file").read_text() == "made\n"
    assert (tmp_path / "ran").read_text() == "\n"


def test_without_a_ticket(cache: Path, url: str) -> None:
    error = failure(url)
    assert isinstance(error, PermissionDeniedError)
    assert str(error) == (
        f"cannot look at {url}: no Kerberos ticket that can be used (No Kerberos credentials "
        f"available (default cache: FILE:{cache})): run kinit, or let KRB5_CLIENT_KTNAME name a "
        "keytab"
    )


def test_a_keytab_is_enough(
    secure: SecureHdfs, cache: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Kerberos library gets tickets by the keytab, and new ones when they expire."""
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(secure.keytab))
    get_ticket_that_expires(secure, cache)
    with Store(HdfsBackend(url)) as store:
        assert store.publish("name", b"1")


def test_a_ticket_that_expires_meanwhile(secure: SecureHdfs, cache: Path, url: str) -> None:
    """A connection outlives its ticket; the next connection uses a new one in the same cache."""
    secure.kinit(cache)
    with Store(HdfsBackend(url)) as store:
        assert store.publish("name", b"1")
        get_ticket_that_expires(secure, cache)
        assert store.read("name") == b"1"
        secure.hdfs.stop_namenode()
        secure.hdfs.start_namenode()
        secure.hdfs.wait_for_datanodes(1)
        with pytest.raises(PermissionDeniedError, match=r"\(Ticket expired\): run kinit"):
            store.read("name")
        secure.kinit(cache)
        assert store.read("name") == b"1"


def test_no_kdc(secure: SecureHdfs, cache: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secure.kinit(cache)
    text = secure.kdc.krb5_conf.read_text(encoding="utf-8")
    config = cache.with_name("krb5.conf")
    monkeypatch.setenv("KRB5_CONFIG", str(config))
    config.write_text(re.sub("kdc = .*", "kdc = 127.0.0.1:1", text), encoding="utf-8")
    error = failure(url)
    assert isinstance(error, UnavailableError)
    assert "no Kerberos server answers (Cannot contact any KDC for realm" in str(error)
    config.write_text(text.partition("[realms]")[0], encoding="utf-8")
    error = failure(url)
    assert isinstance(error, PermissionDeniedError)
    assert 'Cannot find KDC for realm "BOOTSEER.TEST")' in str(error)


def test_without_a_configuration_the_reason_is_said(
    cache: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hdfs-native retried for a minute, and never reported the reason."""
    monkeypatch.delenv("HADOOP_CONF_DIR")
    error = failure(url)
    assert isinstance(error, PermissionDeniedError)
    assert "wants Kerberos: let HADOOP_CONF_DIR name the folder" in str(error)


def test_without_the_kerberos_library_the_reason_is_said(
    cache: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hdfs-native retried for a minute here, too."""
    monkeypatch.setattr(native, "KERBEROS_LIBRARY", "libgssapi-of-nobody.so.2")
    error = failure(url)
    assert isinstance(error, UnsupportedError)
    assert "libgssapi-of-nobody.so.2, which cannot be loaded: install" in str(error)


def test_a_server_that_refuses_the_ticket() -> None:
    """The server's key was changed; the error quotes hdfs-native."""
    error = RuntimeError(
        'FatalRPCError("javax.security.sasl.SaslException", "GSS initiate failed")'
    )
    assert str(translate(error, "look at x")) == (
        "cannot look at x: the server does not accept the Kerberos ticket (GSS initiate failed)"
    )


def test_a_file_that_stays_open_is_opened_again(
    secure: SecureHdfs, cache: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block tokens expire after some hours, and hdfs-native then panicked."""
    secure.kinit(cache)
    monkeypatch.setattr(reading, "OPENED_S", 0.0)
    backend = HdfsBackend(url)

    def put(data: bytes) -> None:
        with backend.create("file", overwrite=True) as writer:
            writer.write(data)

    put(b"old")
    reader = backend.open_reader("file")
    first = reader.opened[0]
    buffer = bytearray(3)
    assert reader.read_into(0, memoryview(buffer), Attempt()) == 3
    assert bytes(buffer) == b"old"
    second = reader.opened[0]
    assert second is not first
    # Another file is not taken for it.
    put(b"newer")
    with contextlib.suppress(BootseerError):  # its blocks may be gone
        assert reader.read_into(0, memoryview(buffer), Attempt()) == 3
    assert bytes(buffer) == b"old"
    assert reader.opened[0] is second
    backend.close()
