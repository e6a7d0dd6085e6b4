"""A tree with an entry of every kind survives GNU tar, extraction and random reads."""

import io
import os
import subprocess
from pathlib import Path

import pytest

from bootseer.blob import index
from bootseer.blob.extract.extraction import extract
from bootseer.blob.pack.packing import pack_tar
from bootseer.blob.read import BlobReader, verify
from tests.bootseer.blob.trees import make_zoo, packed, reader_of, state

TAR = ["tar", "--xattrs", "--xattrs-include=*", "--numeric-owner"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zoo") / "in"
    make_zoo(root)
    return root


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_gnu_tar_restores_everything(zoo: Path, tmp_path: Path, locale: str) -> None:
    before = state(zoo)
    _, blob = packed(zoo)
    (tmp_path / "blob").write_bytes(blob)
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [*TAR, "--use-compress-program=zstd", "-xpf", str(tmp_path / "blob")],
        cwd=tmp_path / "out",
        env={**os.environ, "LC_ALL": locale},
        timeout=60,
        check=True,
        stderr=subprocess.PIPE,
    )
    # Its own check of the clock may be its only message.
    noise = [line for line in done.stderr.splitlines() if b"in the future" not in line
             and b"implausibly old" not in line]  # fmt: skip
    assert noise == []
    assert state(tmp_path / "out") == before
    assert (tmp_path / "out/only-a-hole").lstat().st_blocks < 100
    assert (tmp_path / "out/sparse").lstat().st_blocks < 100


def test_our_reader_restores_everything(zoo: Path, tmp_path: Path) -> None:
    before = state(zoo)
    tree, blob = packed(zoo)
    decoded = index.decode(index.encode(tree))
    verify(decoded, reader_of(blob))
    extract(decoded, reader_of(blob), tmp_path / "out", allow_devices=True)
    assert state(tmp_path / "out") == before
    reader = BlobReader(decoded, reader_of(blob))
    for path, number in decoded.walk():
        full = zoo / os.fsdecode(path)
        if full.is_file() and not full.is_symlink():
            assert reader.read(number, 0, 10**8) == full.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=gnu", "--sparse"],
        ["--format=oldgnu", "--sparse"],
        ["--format=pax"],
        ["--format=pax", "--sparse", "--sparse-version=0.0"],
        ["--format=pax", "--sparse", "--sparse-version=0.1"],
        ["--format=pax", "--sparse", "--sparse-version=1.0"],
        ["--format=pax", "--pax-option=globexthdr.name=x,gname=everybody"],
    ],
    ids=" ".join,
)
def test_gnu_tars_own_archives_unpack_the_same(
    zoo: Path, tmp_path: Path, options: list[str]
) -> None:
    archive = tmp_path / "archive.tar"
    xattrs = ["--xattrs"] if "--format=pax" in options else []
    create = ["tar", *xattrs, *options, "-cf", str(archive), "--sort=name", "."]
    if "--format=pax" not in options:
        # Attributes that these formats cannot represent.
        create += ["--mtime=@1234567890"]
    subprocess.run(create, cwd=zoo, check=True, timeout=60, stderr=subprocess.DEVNULL)
    (tmp_path / "expected").mkdir()
    subprocess.run(
        [*TAR, "-xpf", str(archive)],
        cwd=tmp_path / "expected",
        check=True,
        timeout=60,
        stderr=subprocess.DEVNULL,
    )
    sink = io.BytesIO()
    with archive.open("rb") as f:
        tree = pack_tar(f, sink)
    blob = sink.getvalue()
    verify(tree, reader_of(blob))
    extract(tree, reader_of(blob), tmp_path / "out", allow_devices=True)
    assert state(tmp_path / "out") == state(tmp_path / "expected")
    plain = subprocess.run(["zstd", "-dc"], input=blob, capture_output=True, check=True, timeout=60)
    assert plain.stdout == archive.read_bytes()
