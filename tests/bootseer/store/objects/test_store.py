"""The store's promises: objects appear whole, once, and a listing shows keys only."""

import errno
import os
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bootseer.errors import (
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.linux.removal import remove_tree
from bootseer.store import Store, open_store
from bootseer.store.backend import HasDescriptor
from bootseer.store.local.backend import LocalBackend
from bootseer.transfer.attempt import Attempt
from testbed.needs import MissingError
from testbed.trees import make_deep_folder
from testbed.waiting import wait_for
from tests.bootseer.store.using import race


def left_behind(store: Store) -> list[str]:
    """Return the names in the hidden folder, which some backends do not have."""
    if not store.backend.traits.one_step_rename:
        return []
    return [info.path for info in store.backend.list(".tmp")]


def test_publishes_bytes_files_and_streams(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"from a file" * 1000)
    assert store.publish("a/bytes", b"abc")
    assert store.publish("a/file", file)
    assert store.publish("a/stream", (b"%d," % number for number in range(100)))
    assert store.read("a/bytes") == b"abc"
    assert store.read("a/bytes", 1, 1) == b"b"
    assert store.read("a/file") == file.read_bytes()
    assert store.read("a/stream") == b"".join(b"%d," % number for number in range(100))
    assert store.size("a/file") == 11_000
    assert store.exists("a/file")
    assert not store.exists("a")
    buffer = bytearray(2)
    assert store.read_into("a/bytes", 1, memoryview(buffer)) == 2
    assert buffer == b"bc"


def test_publishes_a_key_once_unless_told_to_replace(store: Store) -> None:
    assert store.publish("key", b"1")
    assert not store.publish("key", b"2")
    assert store.read("key") == b"1"
    assert store.publish("key", b"3", replace=True)
    assert store.read("key") == b"3"
    assert store.publish("new", b"4", replace=True)


def test_one_of_many_publishers_wins(store: Store) -> None:
    assert race(8, lambda index: store.publish("raced", b"%d" % index * 50_000)) == 1
    data = store.read("raced")
    assert len(data) == 50_000
    assert len(set(data)) == 1
    assert left_behind(store) == []


def test_a_stream_that_fails_leaves_nothing(store: Store) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise UnavailableError("the source is gone")

    for replace in (False, True):
        with pytest.raises(UnavailableError, match="the source is gone"):
            store.publish("half", pieces(), replace=replace)
    assert not store.exists("half")
    assert list(store.list()) == []
    assert left_behind(store) == []


class _Twice:
    """Pieces whose first writing fails."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[bytes]:
        self.count += 1
        yield b"x" * 100_000
        if self.count == 1:
            raise UnavailableError("a DataNode is gone")


def test_pieces_that_can_be_read_again_are_written_again(tmp_path: Path) -> None:
    with open_store((tmp_path / "store").as_uri()) as store:
        assert store.publish("key", _Twice())
        assert store.read("key") == b"x" * 100_000


@pytest.mark.parametrize("failure", [UnavailableError("gone"), KeyboardInterrupt()])
def test_a_publish_that_fails_at_its_last_step_leaves_nothing(
    tmp_path: Path, failure: BaseException
) -> None:
    class Failing(LocalBackend):
        def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
            raise failure

    store = Store(Failing(tmp_path / "root"))
    for replace in (False, True):
        with pytest.raises(type(failure)):
            store.publish("key", b"x" * 1000, replace=replace)
    assert left_behind(store) == []
    assert list(store.list()) == []


def test_a_missing_file_is_not_published(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        store.publish("key", tmp_path / "missing")
    assert not store.exists("key")


def test_lists_keys_by_prefix_in_order(store: Store) -> None:
    keys = ["a/1", "a/2/x", "a-b", "a/2-", "b", "ab/c", "a/10"]
    for key in keys:
        store.publish(key, key.encode())
    assert [info.path for info in store.list()] == sorted(keys)
    assert [info.path for info in store.list("a/")] == ["a/1", "a/10", "a/2-", "a/2/x"]
    assert [info.path for info in store.list("a/2")] == ["a/2-", "a/2/x"]
    assert [info.path for info in store.list("a")] == sorted(set(keys) - {"b"})
    assert list(store.list("none/")) == []
    assert {info.path: info.size_bytes for info in store.list("a/2/")} == {"a/2/x": 5}


def test_deletes_objects_and_only_those(store: Store) -> None:
    store.publish("a/b", b"x")
    store.delete("a")
    store.delete("a/none")
    assert store.read("a/b") == b"x"
    store.delete("a/b")
    assert not store.exists("a/b")
    with pytest.raises(NotFoundError):
        store.read("a/b")
    with pytest.raises(NotFoundError):
        store.size("a/b")


@pytest.mark.parametrize(
    "key", ["", "/a", "a/../b", ".tmp/x", ".tmp", "a//b", "a" * 1025, "\udcff", "a/" * 33 + "a"]
)
def test_refuses_what_is_no_key(store: Store, key: str) -> None:
    for call in (
        lambda: store.publish(key, b""),
        lambda: store.read(key),
        lambda: store.delete(key),
        lambda: store.lease(key, ttl_s=1, owner="me"),
    ):
        with pytest.raises(InvalidInputError):
            call()


def test_a_folder_of_objects_is_no_object(store: Store) -> None:
    if store.url.startswith(("s3:", "az:")):
        raise MissingError("a bucket has no folders; to look would cost each object a request")
    store.publish("folder/key", b"x")
    with pytest.raises(InvalidInputError, match="folder of other objects"):
        store.publish("folder", b"y")


def test_sweeps_only_what_is_old(store: Store) -> None:
    if not store.backend.traits.one_step_rename:
        raise MissingError("this backend has no temporaries")
    with store.backend.create(".tmp/left-behind") as writer:
        writer.write(b"x")
    assert store.sweep() == 0
    store.publish("key", b"kept")
    wait_for(lambda: store.sweep(older_than_s=0) == 1, "some age")
    assert left_behind(store) == []
    assert store.read("key") == b"kept"


_PUBLISHER = """
import os, sys
from bootseer.store import open_store
def pieces():
    for number in range(100):
        if number == 50:
            print("half", flush=True)
            sys.stdin.read()
        yield b"x" * 100_000
open_store(sys.argv[1]).publish("killed", pieces(), replace=sys.argv[2] == "replace")
"""


@pytest.mark.parametrize("how", ["new", "replace"])
def test_a_publisher_that_is_killed_shows_nothing(backend_url: str, how: str) -> None:
    if backend_url.startswith("memory:"):
        raise MissingError("a memory file system ends with its process")
    with open_store(backend_url) as store:
        if how == "replace":
            store.publish("killed", b"old")
        process = subprocess.Popen(
            [sys.executable, "-c", _PUBLISHER, backend_url, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"half\n"
            os.kill(process.pid, signal.SIGKILL)
        assert [info.path for info in store.list()] == (["killed"] if how == "replace" else [])
        if how == "replace":
            assert store.read("killed") == b"old"
        # The next run is not hindered, and the sweep finds the remains, where there can be any.
        assert store.publish("killed", b"whole", replace=True)
        assert store.read("killed") == b"whole"
        assert store.sweep(older_than_s=-5) == int(store.backend.traits.one_step_rename)


class StoreModel(RuleBasedStateMachine):
    """State machine that compares a store with a dict."""

    url = ""
    # No key is the folder of another: "a" and "a/a" never meet.
    keys = st.text(alphabet="ab-", min_size=1, max_size=2).flatmap(
        lambda name: st.sampled_from([f"top-{name}", f"deep/{name}/x", f"deep/er/{name}/y z"])
    )
    datas = st.binary(max_size=300)

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store(self.url)
        for info in list(self.store.list()):
            self.store.delete(info.path)
        self.model: dict[str, bytes] = {}

    @rule(key=keys, data=datas, replace=st.booleans())
    def publish(self, key: str, data: bytes, replace: bool) -> None:
        fresh = replace or key not in self.model
        assert self.store.publish(key, data, replace=replace) == fresh
        if fresh:
            self.model[key] = data

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=keys, offset=st.integers(0, 400), length=st.none() | st.integers(0, 400))
    def read(self, key: str, offset: int, length: int | None) -> None:
        if key not in self.model:
            with pytest.raises(NotFoundError):
                self.store.read(key, offset, length)
            return
        end = None if length is None else offset + length
        assert self.store.read(key, offset, length) == self.model[key][offset:end]
        assert self.store.size(key) == len(self.model[key])

    @rule(prefix=st.sampled_from(["", "top", "deep/", "deep/a", "deep/er/", "none/"]))
    def list(self, prefix: str) -> None:
        expected = sorted(key for key in self.model if key.startswith(prefix))
        assert [info.path for info in self.store.list(prefix)] == expected

    @invariant()
    def sizes_are_right(self) -> None:
        sizes = {info.path: info.size_bytes for info in self.store.list()}
        assert sizes == {key: len(data) for key, data in self.model.items()}

    def teardown(self) -> None:
        self.store.close()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_is_like_a_dict(tmp_path: Path, scheme: str) -> None:
    class Machine(StoreModel):
        url = (tmp_path / "store").as_uri() if scheme == "file" else f"memory://{tmp_path.name}"

    case = Machine.TestCase
    case.settings = settings(
        max_examples=25,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()


def test_a_store_is_private_by_default(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "new" / "store")) as store:
        store.publish("a/b", b"x")
    root = tmp_path / "new" / "store"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (root, root / "a", root / "a/b")}
    assert modes == {"store": 0o700, "a": 0o700, "b": 0o600}


def test_a_shared_root_shares_what_is_in_it(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o2777)
    with open_store(str(root)) as store:
        store.publish("a/b", b"x")
    assert (root / "a").stat().st_mode & 0o7777 == 0o2775, "never writable for all"
    assert (root / "a/b").stat().st_mode & 0o7777 == 0o664


def test_what_is_nested_without_end_ends_no_listing(tmp_path: Path) -> None:
    """A named fault: one such folder ended `image list`, `snapshot list` and every `gc`."""
    make_deep_folder(tmp_path / "images", 1200)
    with open_store(str(tmp_path)) as store:
        store.publish("images/a", b"x")
        assert [info.path for info in store.list("images/")] == ["images/a"]
        assert list(store.backend.list("images/d/d"))
    remove_tree(tmp_path / "images")


def test_symbolic_links_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    os.mkfifo(root / "fifo")
    with open_store(str(root)) as store:
        for key in ("folder/secret", "file", "fifo"):
            with pytest.raises(NotFoundError):
                store.read(key)
        with pytest.raises(InvalidInputError):
            store.publish("folder/planted", b"x", replace=True)
        assert list(store.list()) == []
        assert store.publish("file", b"replaces the link", replace=True)
        store.backend.delete("folder", recursive=True)
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with open_store(str(tmp_path / "link")) as store:
        assert store.publish("key", b"x")
    assert (tmp_path / "real/key").read_bytes() == b"x"


def test_a_refused_write_is_a_permission_error() -> None:
    with (
        open_store("/proc/bootseer-store") as store,
        pytest.raises((PermissionDeniedError, NotFoundError)),
    ):
        store.publish("key", b"x")


@pytest.mark.parametrize("name", [*sorted(set(string.punctuation) - {"/"}), "ü %41"])
def test_file_urls_name_any_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"x{name}x"
    with open_store(folder.as_uri()) as store:
        store.publish("key", b"x")
        assert store.url == folder.as_uri()
    assert (folder / "key").read_bytes() == b"x"


@pytest.mark.parametrize(
    "url", ["", "file://host/x", "file://", "a\0b", "nosuchscheme://x", "hdfs://nn/x?wrong=1"]
)
def test_refuses_unusable_urls(url: str) -> None:
    with pytest.raises(InvalidInputError), open_store(url) as store:
        store.read("x")


@pytest.mark.usefixtures("fresh_interpreters")
def test_importing_is_cheap() -> None:
    code = (
        "import sys; import bootseer.store\n"
        "heavy = ('fsspec', 'hdfs_native', 'obstore', 'google.protobuf', 'ctypes', 'asyncio')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "[]"


def test_an_object_of_which_damage_came_is_no_more_read_past_the_storages_checks(
    tmp_path: Path,
) -> None:
    """A damaged disk once doubled each later read of the object."""
    opened: list[str] = []

    class Watched(LocalBackend):
        def open_reader(self, path: str, *, is_checked: bool = False) -> HasDescriptor:
            if is_checked:
                opened.append(path)
            return super().open_reader(path, is_checked=is_checked)

    with Store(Watched(tmp_path)) as store:
        for key in ("a", "b"):
            store.publish(key, b"12345")
        for key in ("a", "b"):
            for damage in (False, True, False, False):
                buffer, attempt = bytearray(5), Attempt()
                attempt.asks_elsewhere = attempt.follows_damage = damage and key == "a"
                assert store.read_verified(key, 0, memoryview(buffer), attempt) == 5
                assert buffer == b"12345"
    assert opened == ["a", "b"]


def test_an_object_that_several_threads_read_is_opened_once(tmp_path: Path) -> None:
    opened = []

    class Slow(LocalBackend):
        def open_reader(self, path: str, *, is_checked: bool = False) -> HasDescriptor:
            if is_checked:
                opened.append(path)
                Event().wait(0.1)
            return super().open_reader(path, is_checked=is_checked)

    def read(_: int) -> bool:
        return store.read_verified("a", 0, memoryview(bytearray(5)), Attempt()) == 5

    with Store(Slow(tmp_path)) as store:
        store.publish("a", b"12345")
        assert race(8, read) == 8
    assert opened == ["a"]


def test_a_folder_without_links_keeps_the_first_of_two_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with open_store(str(tmp_path / "store")) as store:
        assert store.publish("key", b"first")
        assert not store.publish("key", b"second")
        assert store.read("key") == b"first"
        assert not left_behind(store)
