"""Real training formats on a mounted tree and by fsspec; supported and refused calls."""

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootseer.fuse.striped.mounted.status import mount_status
from testbed.mounts import fuse_mount
from testbed.needs import MissingError, require
from tests.fuse.formats.host import TorchHost
from tests.fuse.striped.support.mounting import MIB, checkpoints, settings_in, shell

pytestmark = pytest.mark.needs("fuse")


@dataclass(frozen=True)
class Tree:
    """Tree that is mounted and used by fsspec."""

    folder: Path
    url: str
    run_dir: Path

    def fetched_bytes(self) -> int:
        """Return the number of bytes that the mount has read from the storage."""
        return int(mount_status(self.run_dir, self.folder)["statistics"]["fetched_bytes"])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    require("fuse")
    folder = tmp_path_factory.mktemp("formats")
    mountpoint = folder / "mnt"
    mountpoint.mkdir()
    url = (folder / "stored").as_uri()
    with checkpoints(folder, mountpoint, url, stripe_unit_bytes=MIB, stripe_count=4):
        yield Tree(mountpoint, f"bootseer::{url}", settings_in(folder).run_dir)


# ---- torch, safetensors, Hugging Face -----------------------------------------------------


@pytest.mark.parametrize("name", ["torch_files", "safetensors_files", "consolidated"])
def test_files_by_path(torch_host: TorchHost, tree: Tree, name: str) -> None:
    torch_host.check(f"format_checks:{name}", tree.folder / name)


def test_a_file_larger_than_the_memory(torch_host: TorchHost, tree: Tree) -> None:
    torch_host.check("format_checks:large_torch_file", tree.folder, 160 * MIB)


def test_a_model_of_hugging_face(torch_host: TorchHost, tree: Tree) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingError("transformers is not installed: pip install 'bootseer[formats]'")
    torch_host.check("format_checks:pretrained", tree.folder / "pretrained")


def test_files_by_fsspec(torch_host: TorchHost, tree: Tree) -> None:
    torch_host.check("format_checks:by_fsspec", tree.url, tree.folder)


@pytest.mark.parametrize("way", ["mount", "fsspec"])
def test_distributed_checkpoints(torch_host: TorchHost, tree: Tree, way: str) -> None:
    place = str(tree.folder / "dcp") if way == "mount" else f"{tree.url}/dcp-fsspec"
    torch_host.check("format_checks:save_distributed", place, ranks=4)
    for ranks in (2, 3) if way == "mount" else (2,):
        torch_host.check("format_checks:load_distributed", place, ranks=ranks)


@pytest.mark.parametrize("how", ["read", "mmap"])
def test_ranks_of_a_node_share_the_fetches(torch_host: TorchHost, tree: Tree, how: str) -> None:
    path = tree.folder / f"same-{how}.pt"
    torch_host.check("format_checks:save_full", path)
    before = tree.fetched_bytes()
    sizes = torch_host.check("format_checks:load_same", path, how, ranks=4)
    # Some blocks are read twice: alone for the reader of the zip index, and in their unit later.
    assert tree.fetched_bytes() - before <= 1.3 * sizes[0]


# ---- NumPy and the usual tools ------------------------------------------------------------

NUMPY = """
import errno, sys
import numpy as np
folder = sys.argv[1]
x = np.random.default_rng(1).random(500_000)
np.save(folder + "/x.npy", x)
assert np.array_equal(np.load(folder + "/x.npy"), x)
assert np.array_equal(np.load(folder + "/x.npy", mmap_mode="r"), x)
assert np.array_equal(np.load(folder + "/x.npy", mmap_mode="c")[5:900], x[5:900])
x.tofile(folder + "/x.raw")
assert np.array_equal(np.fromfile(folder + "/x.raw"), x)
np.savez(folder + "/small.npz", x=x[:100], y=x[100:200])
assert np.array_equal(np.load(folder + "/small.npz")["y"], x[100:200])
# zipfile seeks back to a member's begin, which is refused: the old file stays.
def change():
    np.load(folder + "/x.npy", mmap_mode="r+")[5:] = 1
    mapped = np.load(folder + "/x.npy", mmap_mode="r+")
    mapped[5] = 1
    mapped.flush()
for call in (
    lambda: np.savez(folder + "/small.npz", x=x),
    change,
    lambda: np.lib.format.open_memmap(folder + "/new.npy", "w+", "f8", x.shape),
):
    try:
        call()
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP, error
    else:
        raise AssertionError("not refused")
assert np.array_equal(np.load(folder + "/small.npz")["y"], x[100:200])
assert np.array_equal(np.load(folder + "/x.npy"), x)
"""


def test_numpy(tree: Tree) -> None:
    fuse_mount.check_python(NUMPY, tree.folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder to copy, with a file of several units."""
    folder = tmp_path_factory.mktemp("source") / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "big").write_bytes(random.Random(3).randbytes(5 * MIB + 77))
    (folder / "deep" / "small").write_text("small")
    (folder / "empty").touch()
    return folder


def test_cp_copies_in_out_and_within(tree: Tree, source: Path) -> None:
    shell("cp -a {s} {d}/cp-a; diff -r {s} {d}/cp-a", s=source, d=tree.folder)
    shell("cp -a {s} {d}/cp-a/; cp -a {d}/cp-a/source {o}", s=source, d=tree.folder, o=_out(source))
    shell("diff -r {s} {o}; rm -r {o}", s=source, o=_out(source))
    shell(
        "tar cf {d}/t.tar -C {s} .; mkdir {d}/t; tar xf {d}/t.tar -C {d}/t; diff -r {s} {d}/t;"
        "tar tf {d}/t.tar > /dev/null; tar cz -C {d}/t . | tar tz > /dev/null",
        s=source,
        d=tree.folder,
    )
    shell(
        "install -m 600 {s}/deep/er/big {d}/i; cmp {s}/deep/er/big {d}/i", s=source, d=tree.folder
    )


def test_dd_with_and_without_syncs(tree: Tree, source: Path) -> None:
    for number, options in enumerate(
        ("bs=1M conv=fsync", "bs=64k conv=fdatasync", "bs=3M oflag=append", "bs=77777")
    ):
        shell(
            f"dd if={{s}}/deep/er/big of={{d}}/dd{number} status=none {options};"
            f"cmp {{s}}/deep/er/big {{d}}/dd{number}",
            s=source,
            d=tree.folder,
        )
    shell(
        "dd if={d}/dd0 iflag=direct bs=1M status=none | cmp - {s}/deep/er/big;"
        "dd if={d}/dd0 iflag=skip_bytes skip=4000000 bs=64k status=none |"
        " cmp - <(tail -c +4000001 {s}/deep/er/big);"
        "head -c 5M {s}/deep/er/big |"
        " dd of={d}/direct oflag=direct iflag=fullblock bs=1M status=none;"
        "cmp {d}/direct <(head -c 5M {s}/deep/er/big)",
        s=source,
        d=tree.folder,
    )


@pytest.mark.needs(programs=["rsync"])
def test_rsync(tree: Tree, source: Path) -> None:
    shell("rsync -a {s}/ {d}/rs/; diff -r {s} {d}/rs", s=source, d=tree.folder)
    # rsync replaces a changed file as a whole; --append adds to it; and back again.
    shell("echo more >> {s}/deep/er/big; rsync -a {s}/ {d}/rs/", s=source, d=tree.folder)
    shell("diff -r {s} {d}/rs", s=source, d=tree.folder)
    shell("echo more >> {s}/deep/er/big; rsync -a --append {s}/ {d}/rs/", s=source, d=tree.folder)
    shell("diff -r {s} {d}/rs", s=source, d=tree.folder)
    shell(
        "rsync -a {d}/rs/ {o}/; diff -r {s} {o}; rm -r {o}", s=source, d=tree.folder, o=_out(source)
    )
    # rsync --inplace writes wherever bytes differ: refused, and the old file stays.
    shell(
        "printf x | dd of={s}/deep/er/big conv=notrunc bs=1 seek=5 status=none;"
        "cp {d}/rs/deep/er/big {o};"
        "! rsync -a --inplace --no-whole-file --ignore-times {s}/ {d}/rs/ 2> /dev/null;"
        "cmp {o} {d}/rs/deep/er/big; rm {o}",
        s=source,
        d=tree.folder,
        o=_out(source),
    )


def _out(source: Path) -> Path:
    return source.parent / "out"
