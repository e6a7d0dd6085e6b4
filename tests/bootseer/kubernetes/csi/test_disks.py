"""Volumes of a node whose disk is full or damaged: right bytes, or an error."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import checksums_in_child, drop_cache, index
from tests.bootseer.kubernetes.csi.conftest import Kubelet, refused

pytestmark = pytest.mark.needs("mount", "fuse")

_COUNT = 8
_IMAGE = {"kind": "image", "image": "data:1"}


def contents() -> dict[str, bytes]:
    """Return files that do not compress, each of two megabytes."""
    return {
        f"part-{number}": b"".join(
            hashlib.sha256(f"{number} {place}".encode()).digest() for place in range(65536)
        )
        for number in range(_COUNT)
    }


@pytest.fixture
def wanted(local: Kubelet, tmp_path: Path) -> list[str]:
    """Return the digests of files that the node lacks, of an indexed image."""
    files = contents()
    members = [Member(name, data=data) for name, data in files.items()]
    write_layout(tmp_path / "layout", [members])
    index(local.settings, tmp_path / "layout", "data:1")
    drop_cache(local.settings)
    local.settings.cache_dir.mkdir()
    return [hashlib.sha256(files[name]).hexdigest() for name in sorted(files)]


def read(target: Path) -> list[str]:
    return checksums_in_child([target / f"part-{number}" for number in range(_COUNT)])


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of some kilobytes on the folder."""
    options = "size=256k,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_costs_a_pod_no_byte(local: Kubelet, wanted: list[str], tmp_path: Path) -> None:
    (tmp_path / "stored").mkdir()
    folder = {"kind": "checkpoint", "source": (tmp_path / "stored").as_uri()}
    context = {"kind": "environment", "environment": "torch"}
    local.make_environment("torch", {"a": b"a"})
    with full_disk(local.settings.cache_dir):
        assert read(local.publish("a", _IMAGE)) == wanted
        saved = b"saved" * 2**20
        checkpoints = local.publish("b", folder)
        (checkpoints / "step").write_bytes(saved)
        assert (checkpoints / "step").read_bytes() == saved
        for pod in ("a", "b"):
            local.unpublish(pod)
        private = local.publish("c", {**context, "writable": "true", "size": "8MiB"})
        # Not lost without a word.
        with pytest.raises(OSError, match="No space"):
            (private / "mine").write_bytes(bytes(2**24))
        local.unpublish("c")
        local.kill_servers()


def test_what_the_disk_changes_while_a_pod_reads_reaches_it_not(
    local: Kubelet, wanted: list[str]
) -> None:
    """A server verifies content from the disk when it first uses it."""
    assert read(local.publish("a", _IMAGE)) == wanted
    local.kill_servers()
    target = local.publish("b", _IMAGE)
    # The start of a file, up to where the server has compared more than it was asked for.
    with (target / "part-0").open("rb") as file:
        digest = hashlib.sha256(file.read(2**16))
        assert flip(local.settings.cache_dir, from_byte=2**20) > len(wanted)
        digest.update(file.read())
    assert [digest.hexdigest(), *read(target)[1:]] == wanted
    for pod in ("a", "b"):
        local.unpublish(pod)


def flip(cache: Path, from_byte: int) -> int:
    """Change a byte of every page from `from_byte` on of each content file; return their number."""
    count = 0
    for path in cache.rglob("data"):
        with path.open("r+b", buffering=0) as file:
            for place in range(from_byte, path.stat().st_size, 4096):
                (byte,) = os.pread(file.fileno(), 1, place)
                count += os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), place)
    return count


def test_a_private_layer_larger_than_the_disk_is_refused(kubelet: Kubelet) -> None:
    """A layer that the disk cannot hold would be in memory."""
    kubelet.make_environment("torch", {"a": b"a"})
    context = {"kind": "environment", "environment": "torch", "writable": "true", "size": "4000TiB"}
    code, said = refused(kubelet.publish, "a", context)
    assert (code, "whole disk" in said) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True), said
    assert not kubelet.target("a").exists()
