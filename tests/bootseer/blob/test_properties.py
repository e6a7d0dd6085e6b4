"""Random trees survive GNU tar, extraction and random reads unchanged."""

import os
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.blob import index
from bootseer.blob.extract.extraction import extract
from bootseer.blob.read import BlobReader, verify
from bootseer.errors import BootseerError
from tests.bootseer.blob.trees import can_set_xattrs, packed, reader_of, state

IS_ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class File:
    kind: str
    pieces: tuple[tuple[int, bytes], ...]
    """Pairs of a hole's size and the content behind it; only of a regular file."""
    tail: int
    mode: int
    mtime_ns: int
    owner: int
    xattrs: tuple[tuple[str, bytes], ...]
    target: bytes


component = (
    st.one_of(
        st.binary(min_size=1, max_size=12),
        st.integers(90, 255).map(lambda n: b"long" * 64)
        | st.integers(1, 127).map(lambda n: b"\xfe" * n),
        st.sampled_from([b"a", b"b", b"a.", b"a-", b"\xc3\xa9", b"'", b'"', b"$x", b"-C"]),
    )
    .map(lambda b: b.replace(b"/", b"_").replace(b"\0", b"_")[:255])
    .filter(lambda b: b not in (b".", b".."))
)
files = st.builds(
    File,
    kind=st.sampled_from(["file", "file", "file", "directory", "symlink", "fifo", "hard link"]),
    pieces=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 4096, 5000, 300_000]),
            st.builds(
                bytes.__mul__, st.binary(max_size=9), st.sampled_from([1, 100, 5000, 30_000])
            ),
        ),
        max_size=3,
    ).map(tuple),
    tail=st.sampled_from([0, 0, 1, 70_000]),
    mode=st.integers(0, 0o7777),
    mtime_ns=st.one_of(
        st.integers(-(2**31) * 10**9, 2**33 * 10**9), st.integers(0, 9).map(lambda s: s * 10**9)
    ),
    owner=st.sampled_from([0, 0, 1000, 2**21, 2**31]),
    xattrs=st.dictionaries(
        st.sampled_from(["user.a", "user.b=%", "user.\u00e9"]), st.binary(max_size=50), max_size=2
    ).map(lambda d: tuple(sorted(d.items()))),
    target=st.binary(min_size=1, max_size=200).map(lambda b: b.replace(b"\0", b"/")),
)
trees = st.lists(st.tuples(st.lists(component, min_size=1, max_size=3), files), max_size=8)


def build(root: bytes, spec: list[tuple[list[bytes], File]], xattrs: bool) -> None:
    made: list[tuple[bytes, File]] = []
    regular: list[bytes] = []
    for parts, file in spec:
        parent = os.path.join(root, *parts[:-1])
        path = os.path.join(parent, parts[-1])
        try:
            os.makedirs(parent, exist_ok=True)
        except OSError:
            continue
        if os.path.lexists(path):
            continue
        if file.kind == "directory":
            os.mkdir(path)
        elif file.kind == "symlink":
            os.symlink(file.target, path)
        elif file.kind == "fifo":
            os.mkfifo(path)
        elif file.kind == "hard link":
            if regular:
                os.link(regular[0], path)
            continue
        else:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            position = 0
            for hole, content in file.pieces:
                position += hole
                os.pwrite(fd, content, position)
                position += len(content)
            os.ftruncate(fd, position + file.tail)
            os.close(fd)
            regular.append(path)
        made.append((path, file))
    for path, file in reversed(made):
        if IS_ROOT:
            os.chown(path, file.owner, file.owner // 2, follow_symlinks=False)
        if xattrs and file.kind in ("file", "directory"):
            for name, value in file.xattrs:
                os.setxattr(path, name, value)
        if file.kind != "symlink":
            # An unprivileged user cannot pack unreadable files.
            os.chmod(path, file.mode if IS_ROOT else file.mode | 0o700)
        os.utime(path, ns=(0, file.mtime_ns), follow_symlinks=False)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    spec=trees,
    frame_bytes=st.sampled_from([4096, 10_000, 128 * 1024]),
    threads=st.sampled_from([1, 2]),
    reads=st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 200_000)), max_size=6),
)
def test_pack_and_everything_that_reads_it(
    spec: list[tuple[list[bytes], File]],
    frame_bytes: int,
    threads: int,
    reads: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "in").mkdir()
        build(os.fsencode(base / "in"), spec, can_set_xattrs(base))
        before = state(base / "in")
        tree, blob = packed(base / "in", frame_bytes=frame_bytes, threads=threads)
        again, same = packed(base / "in", frame_bytes=frame_bytes, threads=3 - threads)
        assert same == blob
        assert index.encode(again) == index.encode(tree)
        tree = index.decode(index.encode(tree))
        read = reader_of(blob)
        verify(tree, read)

        extract(tree, read, base / "ours", processes=threads)
        assert state(base / "ours") == before

        (base / "blob").write_bytes(blob)
        (base / "tar").mkdir()
        subprocess.run(
            [
                "tar", "--xattrs", "--xattrs-include=*", "--use-compress-program=zstd",
                "-xpf", "../blob",
            ],
            cwd=base / "tar",
            check=True,
            timeout=60,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert state(base / "tar") == before

        reader = BlobReader(tree, read, cache_bytes=50_000)
        for path, number in tree.walk():
            if stat.S_ISREG(tree.mode(number)):
                content = (base / "in" / os.fsdecode(path)).read_bytes()
                for offset, length in reads:
                    assert reader.read(number, offset, length) == content[offset : offset + length]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    root = tmp_path_factory.mktemp("small")
    (root / "d").mkdir()
    (root / "d/text").write_bytes(b"words and words " * 3000)
    (root / "noise").write_bytes(os.urandom(6000))
    return root, packed(root, frame_bytes=8192)[1]


@settings(max_examples=120)
@given(position=st.integers(0, 10**9), value=st.integers(1, 255), data=st.data())
def test_no_damage_to_a_blob_gives_wrong_bytes(
    small: tuple[Path, bytes], position: int, value: int, data: st.DataObject
) -> None:
    root, blob = small
    tree, same = packed(root, frame_bytes=8192)
    assert same == blob
    position %= len(blob)
    if data.draw(st.booleans()):
        damaged = blob[:position] + bytes([blob[position] ^ value]) + blob[position + 1 :]
    else:
        damaged = blob[:position]
    with pytest.raises(BootseerError):
        verify(tree, reader_of(damaged))
    reader = BlobReader(tree, reader_of(damaged))
    for path, number in tree.walk():
        if stat.S_ISREG(tree.mode(number)):
            try:
                content = reader.read(number, 0, 10**6)
            except BootseerError:
                continue
            assert content == (root / os.fsdecode(path)).read_bytes()
