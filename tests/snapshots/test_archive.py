"""Snapshots as archives that other tools read, and other tools' archives as snapshots."""

import gzip
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from bootseer.blob.keys import blob_key
from bootseer.blob.tar.inflate import ExpansionLimits
from bootseer.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from bootseer.settings.config import Settings
from bootseer.snapshots import archive, catalogue
from bootseer.snapshots.archive import create_snapshot, export_snapshot, import_archive
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.manifest import Manifest
from bootseer.snapshots.restore import restore_snapshot
from bootseer.store import Store, open_store
from testbed.images.building import Member, tar_of
from testbed.needs import require
from testbed.trees import describe, differences
from tests.snapshots.conftest import MakeNode


@pytest.fixture
def node(make_node: MakeNode) -> Settings:
    return make_node("a")


@pytest.fixture
def store(node: Settings) -> Iterator[Store]:
    with open_store(node.store_url) as opened:
        yield opened


def _ignore(count: int) -> None:
    pass


def _import(node: Settings, store: Store, file: Path, target: Path, name: str = "") -> Manifest:
    return import_archive(node, store, file, str(target), name, _ignore)


def _make(env: Path) -> None:
    (env / "bin").mkdir(parents=True)
    (env / "bin/tool").write_text("#!/bin/sh\n")
    (env / "bin/tool").chmod(0o755)
    os.link(env / "bin/tool", env / "bin/other")
    (env / "lib").symlink_to("bin")
    (env / "large").write_bytes(os.urandom(300_000))
    with (env / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
        file.truncate(2 << 20)
    (env / "empty").touch()
    os.setxattr(env / "empty", "user.note", b"x")
    os.utime(env / "large", ns=(1, 1_234_567_890_123_456_789))


def _unpack(file: Path, directory: Path) -> None:
    directory.mkdir()
    command = ["tar", "--zstd", "--xattrs", "-xpf", str(file), "-C", str(directory)]
    require(programs=["zstd"])
    subprocess.run(command, check=True)


def test_an_exported_directory_is_what_tar_unpacks_and_comes_back(
    tmp_path: Path, node: Settings, store: Store
) -> None:
    env, file = tmp_path / "env", tmp_path / "env.tar.zst"
    _make(env)
    original = describe(env)
    manifest = create_snapshot(node, [str(env)])
    size_bytes = export_snapshot(store, manifest, file, _ignore)
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (size_bytes, 0o600)
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    _unpack(file, tmp_path / "unpacked")
    assert differences(original, describe(tmp_path / "unpacked")) == []
    with pytest.raises(AlreadyExistsError):
        export_snapshot(store, manifest, file, _ignore)
    again = _import(node, store, file, env, "again")
    # Exactly the same tree and blob.
    assert (again.targets, again.name) == (manifest.targets, "again")
    shutil.rmtree(env)
    restore_snapshot(node, "again")
    assert differences(original, describe(env)) == []


def test_several_directories_and_differences_are_one_archive(
    tmp_path: Path, node: Settings, store: Store
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (one / "before").touch()
    (one / "removed").touch()
    _make(tmp_path / "made")
    script = f"rm {one}/removed; cp -a {tmp_path}/made {one}/new; cp -a {tmp_path}/made {other}"
    request = SetupRequest(command=["sh", "-ec", script], targets=[str(one), str(other)])
    found = catalogue.find(store, run_setup(node, request).fingerprint)
    file = tmp_path / "both.tar.zst"
    export_snapshot(store, found, file, _ignore)
    _unpack(file, tmp_path / "root")
    inside = tmp_path / "root" / str(tmp_path)[1:]
    assert sorted(path.name for path in inside.iterdir()) == ["one", "other"]
    assert differences(describe(other), describe(inside / "other")) == []
    assert differences(describe(one / "new"), describe(inside / "one/new")) == []
    assert sorted(path.name for path in (inside / "one").iterdir()) == ["new"]


def test_nothing_is_exported_from_a_damaged_blob(
    tmp_path: Path, node: Settings, store: Store
) -> None:
    _make(tmp_path / "env")
    manifest = create_snapshot(node, [str(tmp_path / "env")])
    blob = tmp_path / "store" / blob_key(manifest.targets[0].blob.digest)
    data = bytearray(blob.read_bytes())
    data[1000] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CorruptError):
        export_snapshot(store, manifest, tmp_path / "x.tar.zst", _ignore)
    assert not list(tmp_path.glob("*x.tar.zst*"))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst"])
def test_archives_of_other_tools(tmp_path: Path, node: Settings, store: Store, suffix: str) -> None:
    env = tmp_path / "env"
    _make(env)
    original = describe(env)
    plain = tmp_path / "plain"
    subprocess.run(
        ["tar", "--format=posix", "--xattrs", "--sparse", "-cf", plain, "-C", env, "."], check=True
    )
    data = plain.read_bytes()
    file = tmp_path / f"env.{suffix}"
    if suffix == "tar.gz":
        data = gzip.compress(data)
    elif suffix == "tar.zst":
        data = zstandard.compress(data)
    file.write_bytes(data)
    manifest = _import(node, store, file, env)
    shutil.rmtree(env)
    restore_snapshot(node, manifest.fingerprint)
    assert differences(original, describe(env)) == []


def _archive(tmp_path: Path, *members: Member, data: bytes | None = None) -> Path:
    file = tmp_path / "hostile.tar"
    file.write_bytes(tar_of(members) if data is None else data)
    return file


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([Member("../escape")], "not allowed"),
        ([Member("a/../../escape")], "not allowed"),
        ([Member("null", "c", device=(1, 3))], "device node null"),
        ([Member("deep/disk", "b", device=(8, 0))], "device node deep/disk"),
        ([Member(".bootseer-1/x")], "reserved name"),
        ([Member("b", "h", link="/etc/passwd")], "no file that precedes"),
        ([], "empty"),
    ],
)
def test_hostile_archives_are_refused(
    tmp_path: Path, node: Settings, store: Store, members: list[Member], said: str
) -> None:
    with pytest.raises((CorruptError, InvalidInputError), match=said):
        _import(node, store, _archive(tmp_path, *members), tmp_path / "env")
    assert not list(store.list("snapshots/"))
    assert not list(store.list("blobs/"))


def test_a_link_leads_nowhere_outside(tmp_path: Path, node: Settings, store: Store) -> None:
    outside, env = tmp_path / "outside", tmp_path / "env"
    outside.mkdir()
    members = (Member("link", "l", link=str(outside)), Member("link/file", data=b"x"))
    manifest = _import(node, store, _archive(tmp_path, *members), env)
    restore_snapshot(node, manifest.fingerprint)
    assert list(outside.iterdir()) == []


def test_garbage_bombs_and_other_compressions_are_refused(
    tmp_path: Path, node: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tar_of([Member("a", data=b"x" * 50_000)])
    packed = zstandard.compress(whole)
    for data, error in (
        (b"no archive at all" * 100, CorruptError),
        (whole[:-30_000], CorruptError),
        (packed[:-10], CorruptError),
        (gzip.compress(whole)[:-9], CorruptError),
        (packed[:100] + b"\0" * 50 + packed[150:], CorruptError),
        (b"BZh91AY", UnsupportedError),
        (b"", CorruptError),
    ):
        with pytest.raises(error, match=r"hostile\.tar"):
            _import(node, store, _archive(tmp_path, data=data), tmp_path / "env")
    monkeypatch.setattr(archive, "LIMITS", ExpansionLimits(free_bytes=1 << 20))
    bomb = zstandard.compress(tar_of([Member("zeros", data=bytes(64 << 20))]))
    with pytest.raises(CorruptError, match="bomb"):
        _import(node, store, _archive(tmp_path, data=bomb), tmp_path / "env")
    with pytest.raises(NotFoundError):
        _import(node, store, tmp_path / "absent", tmp_path / "env")
    with pytest.raises(InvalidInputError, match="name"):
        _import(node, store, tmp_path / "absent", tmp_path / "env", "../x")
    assert not list(store.list("snapshots/"))


def test_an_archive_that_was_cut_anywhere_is_refused(
    tmp_path: Path, node: Settings, store: Store
) -> None:
    env = tmp_path / "env"
    env.mkdir()
    for number in range(60):
        # Each file is a frame of its own, so that many cuts are near the end of one.
        (env / f"{number:03}").write_bytes(os.urandom(300_000 if number % 20 == 0 else 300))
    exported = tmp_path / "env.tar.zst"
    export_snapshot(store, create_snapshot(node, [str(env)]), exported, _ignore)
    packed = exported.read_bytes()
    plain = tmp_path / "plain"
    subprocess.run(["tar", "-b", "1", "-cf", plain, "-C", env, "."], check=True)
    whole = plain.read_bytes()
    members = b"".join(
        gzip.compress(whole[at : at + 65_536]) for at in range(0, len(whole), 65_536)
    )
    before = [found.path for found in store.list("snapshots/")]
    dice = random.Random(1)
    # The index in the last frame is not needed, and one of the two blocks at a tar's end is enough.
    ends = {"zst": _end_of_content(packed), "gz": len(members) - 1, "tar": len(whole) - 1024}
    for suffix, data in (("zst", packed), ("gz", members), ("tar", whole)):
        cuts = [dice.randrange(len(data) // 10, ends[suffix]) for _ in range(15)]
        if suffix == "zst":
            cuts += _frame_ends(packed)[1:-1]
        if suffix == "tar":
            cuts += [cut - cut % 512 for cut in cuts]
        for cut in cuts:
            file = tmp_path / f"cut.tar.{suffix}"
            file.write_bytes(data[:cut])
            with pytest.raises(CorruptError, match=r"cut\.tar.*"):
                _import(node, store, file, env)
    assert [found.path for found in store.list("snapshots/")] == before


def _frame_ends(packed: bytes) -> list[int]:
    """Return the ends of the frames with content in the seekable archive `packed`."""
    ends, position = [], 0
    while packed[position : position + 4] == b"\x28\xb5\x2f\xfd":
        frame = zstandard.ZstdDecompressor().decompressobj()
        frame.decompress(packed[position:])
        position = len(packed) - len(frame.unused_data)
        ends.append(position)
    return ends


def _end_of_content(packed: bytes) -> int:
    return _frame_ends(packed)[-1]


def test_an_archive_without_the_blocks_that_end_it_is_refused(
    tmp_path: Path, node: Settings, store: Store
) -> None:
    whole = tar_of([Member("a", data=b"x" * 512), Member("b", data=b"y" * 512)])
    assert not whole[2048:].strip(b"\0")
    for end in (1024, 2048):
        with pytest.raises(CorruptError, match=r"hostile\.tar.*cut off"):
            _import(node, store, _archive(tmp_path, data=whole[:end]), tmp_path / "env")
    assert not list(store.list("snapshots/"))
    # One of the two is enough for GNU tar, too: it warns of "a lone zero block".
    manifest = _import(node, store, _archive(tmp_path, data=whole[:2560]), tmp_path / "env")
    restore_snapshot(node, manifest.fingerprint)
    assert sorted(path.name for path in (tmp_path / "env").iterdir()) == ["a", "b"]


def test_the_exported_archive_is_plain_for_the_standard_library(
    tmp_path: Path, node: Settings, store: Store
) -> None:
    _make(tmp_path / "env")
    _make(tmp_path / "more")
    manifest = create_snapshot(node, [str(tmp_path / "env"), str(tmp_path / "more")])
    file = tmp_path / "x.tar.zst"
    export_snapshot(store, manifest, file, _ignore)
    with (
        file.open("rb") as source,
        zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True) as reader,
        tarfile.open(fileobj=reader, mode="r|") as tar,
    ):
        names = tar.getnames()
    assert f"{str(tmp_path)[1:]}/env/bin/tool" in names
    assert not any(name.startswith("/") for name in names)
