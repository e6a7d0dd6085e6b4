"""Extraction of images on nodes where none can be mounted."""

import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.linux.locks import lock_within
from bootseer.prefetch.container import extracted
from bootseer.prefetch.container.extracted import prepare_extracted
from bootseer.prefetch.images.find import resolve_image
from bootseer.prefetch.index.catalogue import publish_image
from bootseer.settings.config import Settings
from bootseer.store import Store, open_store
from testbed.mounts.image_mounts import index, settings_at
from testbed.users import as_ordinary_user, give_to_nobody, make_reachable


def plain(base: Path, name: str, word: str) -> Path:
    root = base / name
    for number in range(20):
        (root / f"folder{number}").mkdir(parents=True)
        (root / f"folder{number}" / "file").write_text(word)
    return root


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    found = settings_at(tmp_path / "node")
    before = set(os.listdir("/proc/self/fd"))
    yield found
    # Locks that a job would inherit.
    for fd in set(os.listdir("/proc/self/fd")) - before:
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
                os.close(int(fd))
        except FileNotFoundError:
            pass


def words(settings: Settings, reference: str) -> set[str]:
    tree = prepare_extracted(settings, resolve_image(settings, reference)).image.directory
    files = list(tree.glob("*/file"))
    return {path.read_text() for path in files} | {str(len(files))}


def let_go(settings: Settings) -> None:
    """Release the locks, as at the end of the job."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and "/extracted/" in os.readlink(path):
            os.close(int(name))


def test_a_record_with_a_stolen_identity_brings_no_other_image(
    settings: Settings, tmp_path: Path
) -> None:
    good = index(settings, plain(tmp_path, "good", "good"), "good")
    evil = index(settings, plain(tmp_path, "evil", "evil"), "evil")
    with open_store(settings.store_url) as store:
        publish_image(store, replace(evil, identity=good.identity))
    assert words(settings, "evil") == {"evil", "20"}
    assert words(settings, "good") == {"good", "20"}


def test_the_store_is_read_in_several_threads(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = plain(tmp_path, "root", "word")
    for number in range(8):
        (root / f"large{number}").write_bytes(os.urandom(2 * 2**20))
    index(settings, root, "image")
    first, together = threading.Semaphore(2), threading.Barrier(2)
    read = Store.read_verified

    def reading(self: Store, key: str, *arguments: Any) -> int:
        if key.startswith("blobs/") and first.acquire(blocking=False):
            together.wait(5)
        return read(self, key, *arguments)

    monkeypatch.setattr(Store, "read_verified", reading)
    assert words(settings, "image") == {"word", "20"}


@pytest.mark.needs("root", "mount")
def test_an_ordinary_user_gets_an_image_without_its_device_nodes(
    settings: Settings, tmp_path: Path
) -> None:
    """Images made by debootstrap have /dev/console and other nodes."""
    root = plain(tmp_path, "root", "word")
    (root / "dev").mkdir()
    os.mknod(root / "dev/console", stat.S_IFCHR | 0o600, os.makedev(5, 1))
    index(settings, root, "debian")
    give_to_nobody(tmp_path)
    make_reachable(tmp_path)
    code = """
import json, logging, os, sys
from bootseer.prefetch.container.extracted import prepare_extracted
from bootseer.prefetch.images.find import resolve_image
from bootseer.settings.config import Settings
from bootseer.base.documents import from_line
logging.basicConfig()
settings = from_line(sys.argv[1], Settings)
container = prepare_extracted(settings, resolve_image(settings, "debian"))
print(os.listdir(container.image.directory / "dev"), len(os.listdir(container.image.directory)))
"""
    done = subprocess.run(
        [*as_ordinary_user(), sys.executable, "-c", code, to_line(settings)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[] 21\n"), done.stderr
    assert "dev/console" in done.stderr


def test_a_remover_that_is_killed_leaves_no_half_of_an_image(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(settings, plain(tmp_path, "one", "one"), "one")
    index(settings, plain(tmp_path, "two", "two"), "two")
    assert words(settings, "one") == {"one", "20"}
    let_go(settings)

    def die_half_way(directory: Path) -> None:
        for path in list(directory.glob("folder1*/file")):
            path.unlink()
        os._exit(9)

    pid = os.fork()
    if not pid:
        monkeypatch.setattr(extracted, "remove_scratch", die_half_way)
        prepare_extracted(settings, resolve_image(settings, "two"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert words(settings, "one") == {"one", "20"}


def test_a_tree_that_is_removed_meanwhile_is_extracted_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(settings, plain(tmp_path, "one", "one"), "one")
    tree = prepare_extracted(settings, resolve_image(settings, "one")).image.directory
    let_go(settings)
    fd = os.open(tree, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)

    waits = threading.Event()

    def wait(fd: int, timeout_s: float, *, is_shared: bool = False) -> None:
        waits.set()
        lock_within(fd, timeout_s, is_shared=is_shared)

    monkeypatch.setattr(extracted, "lock_within", wait)

    def remove() -> None:
        assert waits.wait(60)
        tree.rename(tree.with_name("removed-by-another"))
        os.close(fd)

    thread = threading.Thread(target=remove)
    thread.start()
    assert words(settings, "one") == {"one", "20"}
    thread.join()


def test_a_tree_of_an_earlier_boot_may_be_torn(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(settings, plain(tmp_path, "one", "one"), "one")
    tree = prepare_extracted(settings, resolve_image(settings, "one")).image.directory
    (tree / "folder3/file").write_bytes(b"")
    let_go(settings)
    monkeypatch.setattr(extracted, "boot_id", lambda: "another-boot")
    assert words(settings, "one") == {"one", "20"}
    assert not tree.exists()


def test_what_a_killed_extraction_of_another_image_left_is_removed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(settings, plain(tmp_path, "one", "one"), "one")
    left = settings.cache_dir / "extracted" / ".another.extracting-x"
    left.mkdir(parents=True)
    assert words(settings, "one") == {"one", "20"}
    assert left.exists()
    monkeypatch.setattr(extracted, "YOUNG_S", 0.0)
    assert words(settings, "one") == {"one", "20"}
    assert not left.exists()
