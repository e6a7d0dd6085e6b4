"""The functions: into, out of and between trees, into buffers; verify, fsck and convert."""

import itertools
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bootseer.checkpoints import copy_across, copy_in, copy_out, open_checkpoints, read_into
from bootseer.errors import (
    AlreadyExistsError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.fuse.striped import layout
from bootseer.fuse.striped.doors import fsck
from bootseer.fuse.striped.doors.convert import convert_file, is_stored_as
from bootseer.fuse.striped.doors.copy_tree import Place, copy_one, copy_tree, sizes_below
from bootseer.fuse.striped.doors.fsck import check_tree, delete_garbage
from bootseer.fuse.striped.doors.locating import split_url
from bootseer.fuse.striped.doors.verify import verify_file
from bootseer.fuse.striped.layout import PARTS_FOLDER, decode_layout, encode_layout
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.store import open_backend
from tests.fuse.striped.harness import UNIT, storage_on

DATA = random.Random(3).randbytes(7 * UNIT + 77)


@pytest.fixture
def storage(url: str) -> Iterator[StripedStorage]:
    """A tree of small units, on a local disk and on HDFS, whose client has its own measure."""
    with storage_on(open_backend(url), memory_bytes=2**28) as opened:
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Iterator[StripedStorage]:
    with storage_on(tmp_path / "stored") as opened:
        yield opened


def save(storage: StripedStorage, path: str, data: bytes = DATA) -> None:
    writer = storage.writer(path)
    writer.append(data)
    writer.publish()
    writer.close()


def load(storage: StripedStorage, path: str) -> bytes:
    buffer = bytearray(storage.tree.stored.status(path).size_bytes)
    assert read_into(storage, path, buffer) == len(buffer)
    return bytes(buffer)


def part_of(root: Path, name: str) -> Path:
    (found,) = root.glob(f"**/{PARTS_FOLDER}/*/{name}")
    return found


# ---- functions ----------------------------------------------------------------------------


def test_read_into(storage: StripedStorage) -> None:
    save(storage, "a/f")
    array = np.zeros((9, 1000), dtype=np.float64)
    assert read_into(storage, "a/f", array) == len(DATA)
    assert array.tobytes()[: len(DATA)] == DATA
    assert not array.tobytes()[len(DATA) :].strip(b"\0")
    small = bytearray(UNIT + 5)
    assert read_into(storage, "a/f", small, 11) == len(small)
    assert small == DATA[11 : 11 + len(small)]
    assert read_into(storage, "a/f", bytearray(10), len(DATA)) == 0
    assert read_into(storage, "a/f", bytearray(0)) == 0
    for buffer, offset in ((b"123", 0), (bytearray(3), -1), (array[:, ::2], 0)):
        with pytest.raises(InvalidInputError, match="writable"):
            read_into(storage, "a/f", buffer, offset)
    with pytest.raises(NotFoundError):
        read_into(storage, "a/g", bytearray(1))


def test_into_out_of_and_across(storage: StripedStorage, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)
    seen: list[int] = []
    assert copy_in(storage, tmp_path / "f", "x/f", on_progress=seen.append) == len(DATA)
    with open_checkpoints((tmp_path / "other").as_uri()) as other:
        assert copy_across(storage, "x/f", other, "y/g", on_progress=seen.append) == len(DATA)
        assert copy_out(other, "y/g", tmp_path / "g", on_progress=seen.append) == len(DATA)
    assert (tmp_path / "g").read_bytes() == DATA
    assert sum(seen) == 3 * len(DATA)


def test_a_source_that_changes_is_not_stored(local: StripedStorage, tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(bytes(9 * 2**20))

    def change(count: int) -> None:
        os.utime(source, ns=(1, 1))

    with pytest.raises(BusyError, match="copy it again"):
        copy_in(local, source, "f", on_progress=change)
    with pytest.raises(NotFoundError):
        local.tree.stored.status("f")


def test_a_file_that_is_replaced_while_it_is_copied_is_copied_as_it_was(
    local: StripedStorage, tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(9 * 2**20)
    save(local, "f", data)
    replaced: list[int] = []

    def replace(count: int) -> None:
        if not replaced:
            replaced.append(count)
            save(local, "f", b"new")

    copy_out(local, "f", tmp_path / "f", on_progress=replace)
    assert (tmp_path / "f").read_bytes() == data
    assert load(local, "f") == b"new"


def test_directories(storage: StripedStorage, tmp_path: Path) -> None:
    (tmp_path / "src/sub/empty").mkdir(parents=True)
    for name in ("a", "sub/b", "sub/new\nline", "sub/ü"):
        (tmp_path / "src" / name).write_bytes(DATA)
    source, target = Place(None, str(tmp_path / "src")), Place(storage, "step-1")
    copied = copy_tree(source, target, sizes_below(source), lambda count: None)
    assert (copied.file_count, copied.size_bytes) == (4, 4 * len(DATA))
    assert storage.tree.stored.status("step-1/sub/empty").is_dir
    back = Place(None, str(tmp_path / "back"))
    copy_tree(target, back, sizes_below(target), lambda count: None)
    for name in ("a", "sub/b", "sub/new\nline", "sub/ü"):
        assert (tmp_path / "back" / name).read_bytes() == DATA
    assert sizes_below(back) == sizes_below(source)
    assert [info.path for info in storage.backend.list("")] == ["step-1"]


def test_a_directory_appears_whole_or_not_at_all(local: StripedStorage, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for number in range(9):
        (tmp_path / "src" / str(number)).write_bytes(DATA)
    source, target = Place(None, str(tmp_path / "src")), Place(local, "step-1")

    def fail(count: int) -> None:
        assert not target.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_tree(source, target, sizes_below(source), fail)
    assert list(local.backend.list("")) == []

    def hurry(count: int) -> None:
        local.backend.mkdir("step-1")

    with pytest.raises(AlreadyExistsError, match="meanwhile"):
        copy_tree(source, target, sizes_below(source), hurry)
    assert [info.path for info in local.backend.list("")] == ["step-1"]


def test_odd_sources(local: StripedStorage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Exception, match="neither a file nor a directory"):
        sizes_below(Place(None, str(tmp_path)))
    with pytest.raises(InvalidInputError, match="not a regular file"):
        copy_in(local, tmp_path / "fifo", "f")
    with pytest.raises(InvalidInputError, match="use cp"):
        copy_one(Place(None, "/a"), Place(None, "/b"), lambda count: None)


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("hdfs://nn:1/a/b?replication=2", "hdfs://nn:1/a?replication=2", "b"),
        ("hdfs://nn", "hdfs://nn/", ""),
        ("hdfs:///a/", "hdfs:///", "a"),
        ("file:///a/b%20c%3F", "file:///a", "b c?"),
        ("file:///", "file:///", ""),
        ("s3://bucket/a?b", "s3://bucket/", "a?b"),
        ("s3://bucket", "s3://bucket/", ""),
        ("limit+file:///a/b?latency_s=1", "limit+file:///a?latency_s=1", "b"),
    ],
)
def test_split_url(url: str, folder: str, name: str) -> None:
    assert split_url(url) == (folder, name)


def test_split_url_refuses() -> None:
    for url in ("/a/b", "hdfs://nn/a/.."):
        with pytest.raises(InvalidInputError):
            split_url(url)


# ---- verify -------------------------------------------------------------------------------


def verified(storage: StripedStorage, path: str) -> list[tuple[str, int, int, str]]:
    with ThreadPoolExecutor(4) as threads:
        found = verify_file(storage.backend, storage.tree.stored.view(path), threads)
    return [(one.stored_path[-2:], one.offset, one.length, one.reason) for one in found]


def test_verify_names_every_damaged_block(local: StripedStorage, tmp_path: Path) -> None:
    save(local, "f")
    save(local, "small", b"1")
    assert verified(local, "f") == verified(local, "small") == []
    first, second = (part_of(tmp_path, name) for name in ("00", "01"))
    for path, at in ((first, 5), (first, UNIT + 1), (second, 0)):
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    assert verified(local, "f") == [
        ("00", 0, UNIT, "checksum"),
        ("01", UNIT, UNIT, "checksum"),
        ("00", 3 * UNIT, UNIT, "checksum"),
    ]
    part_of(tmp_path, "02").unlink()
    os.truncate(second, UNIT + 9)
    assert verified(local, "f")[-3:] == [
        ("02", 2 * UNIT, 2 * UNIT, "missing"),
        ("00", 3 * UNIT, UNIT, "checksum"),
        ("01", 4 * UNIT + 9, UNIT + 77 - 9, "short"),
    ]


@pytest.mark.hdfs
def test_verify_on_hdfs(hdfs_url: str) -> None:
    with storage_on(open_backend(hdfs_url)) as storage:
        save(storage, "d/f")
        assert verified(storage, "d/f") == []


# ---- fsck ---------------------------------------------------------------------------------


@pytest.fixture
def young(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets garbage be old after no time."""
    monkeypatch.setattr(fsck, "MIN_AGE_S", 0.0)
    return lambda: time.sleep(0.02)


def test_what_a_crashed_saver_left_is_deleted_when_it_is_old(
    storage: StripedStorage, young: Callable[[], None]
) -> None:
    save(storage, "d/f")
    left = f"d/{PARTS_FOLDER}/{'ab' * 16}/00"
    with storage.backend.create(left) as writer:
        writer.write(DATA)
    (_, report) = check_tree(storage)
    assert (report.path, report.file_count, report.troubles) == ("d", 1, ())
    assert [(one.path, one.size_bytes) for one in report.garbage] == [
        (left.rpartition("/")[0], len(DATA))
    ]
    assert delete_garbage(storage, report, 3600) == []
    young()
    assert delete_garbage(storage, report, 0) == list(report.garbage)
    assert [report.garbage for report in check_tree(storage)] == [(), ()]
    assert load(storage, "d/f") == DATA


def test_a_save_that_goes_on_is_spared(storage: StripedStorage, young: Callable[[], None]) -> None:
    """On HDFS the time of a part stands still while it is written; its lease tells."""
    # The parts' threads have not made it yet.
    storage.backend.mkdir("")
    writer = storage.writer("f")
    writer.append(DATA[: 5 * UNIT])
    while not list(garbage_of(storage)):
        time.sleep(0.01)
    young()
    (report,) = check_tree(storage)
    is_hdfs = storage.backend.url.startswith("hdfs")
    assert len(report.garbage) == 1
    assert delete_garbage(storage, report, 0.0 if is_hdfs else 5.0) == []
    writer.append(DATA[5 * UNIT :])
    # The report is old by now: what it calls garbage is a file.
    writer.publish()
    writer.close()
    young()
    assert delete_garbage(storage, report, 0) == []
    assert load(storage, "f") == DATA


def garbage_of(storage: StripedStorage) -> Iterator[fsck.Garbage]:
    for report in check_tree(storage):
        yield from report.garbage


def test_an_unfinished_copy_is_garbage(local: StripedStorage, young: Callable[[], None]) -> None:
    name = ".bootseer-copy-0123456789abcdef"
    save(local, f"{name}/f")
    young()
    (report,) = check_tree(local)
    assert [one.path for one in report.garbage] == [name]
    assert delete_garbage(local, report, 0) == list(report.garbage)
    assert list(local.backend.list("")) == []


def test_what_is_replaced_but_open_stays_young(local: StripedStorage, tmp_path: Path) -> None:
    save(local, "f")
    folder = part_of(tmp_path, "00").parent
    for path in (*folder.iterdir(), folder):
        os.utime(path, (1, 1))
    opened = local.reader.open(local.tree.stored.view("f"))
    save(local, "f", b"new")
    deadline_s = time.monotonic() + 20
    while not list(folder.glob("open-*")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    (report,) = check_tree(local)
    assert len(report.garbage) == 1
    assert delete_garbage(local, report, 3600) == []
    assert local.reader.read_bytes(opened, 0, len(DATA)) == DATA
    local.reader.close(opened)


def test_missing_parts_are_told_and_nothing_is_deleted_beside_a_damaged_layout(
    local: StripedStorage, tmp_path: Path
) -> None:
    save(local, "f")
    os.truncate(part_of(tmp_path, "01"), 5)
    part_of(tmp_path, "02").unlink()
    (report,) = check_tree(local)
    assert [(one.path, one.part[-2:], one.reason, one.found_bytes) for one in report.troubles] == [
        ("f", "01", "short", 5),
        ("f", "02", "missing", None),
    ]
    with (tmp_path / "stored/f").open("r+b") as file:
        file.seek(200)
        file.write(b"????")
    (report,) = check_tree(local)
    assert [one.reason for one in report.troubles] == ["damaged layout"]
    assert report.garbage == ()


# ---- convert ------------------------------------------------------------------------------


def test_convert_there_and_back(storage: StripedStorage) -> None:
    save(storage, "d/f")
    save(storage, "d/small", b"1")
    plain = StripeSettings(UNIT, 3, 20.0, "plain")
    wide = StripeSettings(2 * UNIT, 4, 20.0)
    for settings, parts in ((plain, 0), (wide, 4), (storage.settings, 3), (plain, 0)):
        assert convert_file(storage, "d/f", settings)
        assert not convert_file(storage, "d/f", settings)
        view = storage.tree.stored.view("d/f")
        assert is_stored_as(view, settings)
        assert len(view.layout.segments[0].parts if view.layout else ()) == parts
        assert load(storage, "d/f") == DATA
    assert storage.backend.read("d/f") == DATA
    assert not convert_file(storage, "d/small", plain)


def test_a_directorys_rule_does_not_overrule_what_is_asked_for(local: StripedStorage) -> None:
    with local.backend.create(".bootseer-layout") as writer:
        writer.write(b"striped\n")
    save(local, "f")
    assert convert_file(local, "f", StripeSettings(UNIT, 3, 20.0, "plain"))
    assert local.backend.read("f") == DATA


def test_of_two_converts_at_once_one_says_that_it_was_late(
    local: StripedStorage, tmp_path: Path
) -> None:
    save(local, "f")
    with storage_on(tmp_path / "stored") as other:
        inside = threading.Event()

        def wait(count: int) -> None:
            if not inside.is_set():
                inside.set()
                assert convert_file(other, "f", StripeSettings(2 * UNIT, 2, 20.0))

        with pytest.raises(BusyError, match="replaced while"):
            convert_file(local, "f", StripeSettings(UNIT, 2, 20.0), wait)
    view = local.tree.stored.view("f")
    assert view.layout is not None
    assert view.layout.segments[0].stripe_unit_bytes == 2 * UNIT
    assert load(local, "f") == DATA
    assert list(garbage_of(local)) == []


def killed_after(step: int, work: Callable[[Callable[[int], None]], object]) -> None:
    """Run `work` in a process that is killed (9) when it has made `step` steps."""
    child = os.fork()
    if child == 0:
        steps = itertools.count(1)

        def count(_: int) -> None:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(count)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("step", [1, 5, 8])
def test_a_convert_or_copy_that_is_killed_leaves_what_was_there(
    step: int, tmp_path: Path, young: Callable[[], None]
) -> None:
    (tmp_path / "src").mkdir()
    for number in range(8):
        (tmp_path / "src" / str(number)).write_bytes(DATA)
    with storage_on(tmp_path / "stored") as storage:
        save(storage, "f")
        identity = storage.tree.stored.status("f").identity

    def convert(count: Callable[[int], None]) -> None:
        with storage_on(tmp_path / "stored") as storage:
            convert_file(storage, "f", StripeSettings(2 * UNIT, 2, 20.0), count)

    def copy(count: Callable[[int], None]) -> None:
        with storage_on(tmp_path / "stored") as storage:
            source = Place(None, str(tmp_path / "src"))
            copy_tree(source, Place(storage, "step-1"), sizes_below(source), count)

    killed_after(step, convert)
    killed_after(step, copy)
    young()
    with storage_on(tmp_path / "stored") as storage:
        assert storage.tree.stored.status("f").identity == identity
        for report in check_tree(storage):
            assert not report.troubles
            delete_garbage(storage, report, 0)
        assert [info.path for info in storage.tree.stored.entries("")] == ["f"]
        assert not list(garbage_of(storage))
        assert load(storage, "f") == DATA


# ---- hostile ------------------------------------------------------------------------------


def test_a_layout_cannot_name_parts_elsewhere_or_claim_what_it_likes(
    local: StripedStorage, tmp_path: Path
) -> None:
    save(local, "f")
    path = tmp_path / "stored/f"
    good = decode_layout(path.read_bytes(), "f")
    (tmp_path / "secret").write_bytes(DATA)
    for name in ("../../../secret", "/secret", "00/../00", ""):
        fake = bytearray(encode_layout(good))
        at = fake.index(b"00".ljust(16, b"\0"))
        fake[at : at + 16] = name.encode().ljust(16, b"\0")[:16]
        path.write_bytes(resealed(fake))
        with pytest.raises(CorruptError):
            load(local, "f")
        assert [one.reason for report in check_tree(local) for one in report.troubles] == [
            "damaged layout"
        ]
    # Segment count, size, unit, block and part count, each as large as it can be written.
    for field in (56, 144, 152, 160, 164):
        fake = bytearray(encode_layout(good))
        fake[field : field + 4] = b"\xff" * 4
        path.write_bytes(resealed(fake))
        with pytest.raises(CorruptError):
            load(local, "f")


def resealed(data: bytearray) -> bytes:
    """A layout with the checksums of what it says."""
    (body_bytes,) = struct.unpack_from("<Q", data, 40)
    body = bytes(data[layout.HEADER_BYTES : layout.HEADER_BYTES + body_bytes])
    struct.pack_into("<Q", data, 48, xxhash.xxh3_64_intdigest(body))
    struct.pack_into("<Q", data, 120, xxhash.xxh3_64_intdigest(bytes(data[:120])))
    return bytes(data)
