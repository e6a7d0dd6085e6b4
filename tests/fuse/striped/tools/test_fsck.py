"""Findings of verify and fsck in a striped tree, deletions, and hostile layouts."""

import os
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from bootseer.errors import CorruptError
from bootseer.fuse.striped import layout
from bootseer.fuse.striped.layout import PARTS_FOLDER, decode_layout, encode_layout
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools.fsck import check_tree, delete_garbage
from bootseer.fuse.striped.tools.verify import verify_file
from bootseer.store import open_backend
from bootseer.store.local.backend import LocalBackend
from testbed.trees import make_deep_folder
from testbed.waiting import wait_for
from tests.fuse.striped.support.faulty import FaultyBackend
from tests.fuse.striped.support.harness import UNIT, storage_on
from tests.fuse.striped.support.stored import DATA, garbage_of, load, part_of, save


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


def test_garbage_that_is_nested_without_end(
    local: StripedStorage, young: Callable[[], None], tmp_path: Path
) -> None:
    """Regression: it ended every fsck by recursion."""
    save(local, "f")
    folder = part_of(tmp_path, "00").parent.parent
    make_deep_folder(folder / ("ab" * 16), 1020)
    (report,) = check_tree(local)
    assert [one.is_dir for one in report.garbage] == [True]
    young()
    assert delete_garbage(local, report, 0) == list(report.garbage)
    assert load(local, "f") == DATA


def test_a_save_that_goes_on_is_spared(storage: StripedStorage, young: Callable[[], None]) -> None:
    """On HDFS, the time of a part does not change while it is written; its lease shows the
    writer."""
    # The parts' threads have not made the file yet.
    storage.backend.mkdir("")
    writer = storage.writer("f")
    writer.append(DATA[: 5 * UNIT])
    wait_for(lambda: list(garbage_of(storage)), "the first part")
    young()
    (report,) = check_tree(storage)
    is_hdfs = storage.backend.url.startswith("hdfs")
    assert len(report.garbage) == 1
    assert delete_garbage(storage, report, 0.0 if is_hdfs else 3600.0) == []
    writer.append(DATA[5 * UNIT :])
    # The report is outdated: its garbage is a file by now.
    writer.publish()
    writer.close()
    young()
    assert delete_garbage(storage, report, 0) == []
    assert load(storage, "f") == DATA


@pytest.mark.hdfs
def test_looking_for_writers_changes_nothing(hdfs_url: str) -> None:
    """Regression: writers were found by appending, which sets a file's time."""
    backend = open_backend(hdfs_url)
    with backend.create("f") as writer:
        writer.write(DATA)
        assert backend.is_being_written("f")
    before = backend.stat("f")
    assert not backend.is_being_written("f")
    assert not backend.is_being_written("missing")
    assert backend.stat("f") == before
    backend.close()


def test_deleting_asks_the_storage_in_proportion_to_what_there_is(
    tmp_path: Path, young: Callable[[], None]
) -> None:
    """Regression: the number of requests was the product of files and garbage in a directory."""
    asked: list[Counter[str]] = []
    for count in (20, 40):
        root = tmp_path / str(count)
        with storage_on(root) as storage:
            for index in range(count):
                save(storage, f"f{index}")
                with storage.backend.create(f"{PARTS_FOLDER}/{index:032x}/00") as writer:
                    writer.write(DATA)
        young()
        backend = FaultyBackend(LocalBackend(root))
        with storage_on(backend) as storage:
            (report,) = check_tree(storage)
            checked = Counter(backend.calls)
            assert {checked["read", f"f{index}"] for index in range(count)} == {1}
            assert checked["list", ""] == 2, "for folders, and for files"
            backend.calls.clear()
            assert len(delete_garbage(storage, report, 0)) == count
            assert Counter(backend.calls)["list", ""] == 1
            asked.append(Counter(operation for operation, _ in backend.calls))
            assert load(storage, "f0") == DATA
    few, many = asked
    assert many["list"] <= 2 * few["list"]
    assert many["read"] <= 2 * few["read"]


def test_what_was_named_since_the_report_stays(
    local: StripedStorage, young: Callable[[], None], tmp_path: Path
) -> None:
    save(local, "f")
    layout_file = tmp_path / "stored/f"
    layout_file.rename(tmp_path / "aside")
    young()
    (report,) = check_tree(local)
    assert len(report.garbage) == 1
    (tmp_path / "aside").rename(layout_file)
    assert delete_garbage(local, report, 0) == []
    assert load(local, "f") == DATA


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
    wait_for(lambda: list(folder.glob("open-*")), "the note of who has it open")
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
    # Segment count, size, unit, block and part count, each with its largest value.
    for field in (56, 144, 152, 160, 164):
        fake = bytearray(encode_layout(good))
        fake[field : field + 4] = b"\xff" * 4
        path.write_bytes(resealed(fake))
        with pytest.raises(CorruptError):
            load(local, "f")


def resealed(data: bytearray) -> bytes:
    """Return a layout with right checksums."""
    (body_bytes,) = struct.unpack_from("<Q", data, 40)
    body = bytes(data[layout.HEADER_BYTES : layout.HEADER_BYTES + body_bytes])
    struct.pack_into("<Q", data, 48, xxhash.xxh3_64_intdigest(body))
    struct.pack_into("<Q", data, 120, xxhash.xxh3_64_intdigest(bytes(data[:120])))
    return bytes(data)
