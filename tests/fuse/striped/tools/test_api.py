"""Functions that copy into, out of and between trees, and into buffers; folders and URLs."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.checkpoints import (
    copy_across,
    copy_in,
    copy_out,
    open_checkpoints,
    read_into,
    size_of,
)
from bootseer.errors import AlreadyExistsError, BusyError, InvalidInputError, NotFoundError
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools.copy_tree import (
    CopyPlace,
    copy_one,
    copy_tree,
    sizes_below,
    split_url,
)
from tests.fuse.striped.support.harness import UNIT
from tests.fuse.striped.support.stored import DATA, load, save


def test_read_into(storage: StripedStorage) -> None:
    # Imported here: its threads would keep the workers of pytest from being forks.
    import numpy as np

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


def test_the_size_of_a_file_is_that_of_its_content(storage: StripedStorage) -> None:
    for size in (0, 5, len(DATA)):
        save(storage, f"x/{size}", DATA[:size])
        assert size_of(storage, f"x/{size}") == size
    with pytest.raises(InvalidInputError, match="x is a directory"):
        size_of(storage, "x")
    with pytest.raises(NotFoundError):
        size_of(storage, "y")


def test_torch_is_imported_for_nobody_who_does_not_load_as_a_group() -> None:
    code = """
import sys
sys.modules["torch"] = None
from bootseer.checkpoints import *
import bootseer.checkpoints
assert read_into is bootseer.checkpoints.read_into
try:
    bootseer.checkpoints.GroupReader
except ModuleNotFoundError as error:
    sys.stdout.write(error.name.partition(".")[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "torch"), done.stderr


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


def test_directories_are_copied_whole(storage: StripedStorage, tmp_path: Path) -> None:
    (tmp_path / "src/sub/empty").mkdir(parents=True)
    for name in ("a", "sub/b", "sub/new\nline", "sub/ü"):
        (tmp_path / "src" / name).write_bytes(DATA)
    source, target = CopyPlace(None, str(tmp_path / "src")), CopyPlace(storage, "step-1")
    copied = copy_tree(source, target, sizes_below(source), lambda count: None)
    assert (copied.file_count, copied.size_bytes) == (4, 4 * len(DATA))
    assert storage.tree.stored.status("step-1/sub/empty").is_dir
    back = CopyPlace(None, str(tmp_path / "back"))
    copy_tree(target, back, sizes_below(target), lambda count: None)
    for name in ("a", "sub/b", "sub/new\nline", "sub/ü"):
        assert (tmp_path / "back" / name).read_bytes() == DATA
    assert sizes_below(back) == sizes_below(source)
    assert [info.path for info in storage.backend.list("")] == ["step-1"]


def test_a_directory_appears_whole_or_not_at_all(local: StripedStorage, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for number in range(9):
        (tmp_path / "src" / str(number)).write_bytes(DATA)
    source, target = CopyPlace(None, str(tmp_path / "src")), CopyPlace(local, "step-1")

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
        sizes_below(CopyPlace(None, str(tmp_path)))
    with pytest.raises(InvalidInputError, match="not a regular file"):
        copy_in(local, tmp_path / "fifo", "f")
    with pytest.raises(InvalidInputError, match="use cp"):
        copy_one(CopyPlace(None, "/a"), CopyPlace(None, "/b"), lambda count: None)


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
