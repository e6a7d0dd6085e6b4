"""Reads of a large tree while its worker is killed again and again."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.prefetch.images.mount import MountedImage
from testbed.mounts.image_mounts import index, mounted, settings_at, start_program
from testbed.needs import MissingError

_MIB = 1 << 20
_FILE_COUNT = 16
_FILE_MIB = 12
_TIMEOUT_S = 100.0
READ = """
import sys
from pathlib import Path
from tests.prefetch.serve.test_large_tree import read_tree
read_tree(Path(sys.argv[1]))
"""


_FILLING = b"0123456789abcdef" * (_MIB // 16)


def block_of(number: int) -> bytes:
    """Return the mebibyte of this number: all differ, and all compress well."""
    label = b"%08d" % number
    return label + _FILLING[len(label) :]


def _write_tree(root: Path) -> None:
    """Write 192 MiB, mebibyte by mebibyte."""
    root.mkdir()
    for number in range(_FILE_COUNT):
        with (root / f"part-{number:02}").open("wb") as file:
            for block in range(number * _FILE_MIB, (number + 1) * _FILE_MIB):
                file.write(block_of(block))


def read_tree(root: Path) -> None:
    """Print each file whose mebibytes are all right, which costs less than digests."""
    for number, path in enumerate(sorted(root.iterdir())):
        with path.open("rb") as file:
            for block in range(number * _FILE_MIB, (number + 1) * _FILE_MIB):
                assert file.read(_MIB) == block_of(block), f"mebibyte {block} is wrong"
            assert not file.read(1)
        os.write(1, f"{path.name}\n".encode())


def _worker_of(image: MountedImage) -> int | None:
    try:
        worker = image.status().get("worker_pid")
    except UnavailableError:
        # Between one worker and the next.
        return None
    return worker if isinstance(worker, int) else None


@pytest.mark.needs(linux=(6, 9))
@pytest.mark.needs("fuse")
def test_reads_go_on_through_kill_9_of_the_worker(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    if free_bytes < 1 << 30:
        raise MissingError(f"needs 1 GiB of disk; {tmp_path} has {free_bytes >> 30}")
    settings = settings_at(tmp_path)
    _write_tree(tmp_path / "tree")
    index(settings, tmp_path / "tree", "large:1")
    shutil.rmtree(tmp_path / "tree")
    try:
        with mounted(settings, "large:1", tmp_path / "mnt", record="never") as image:
            reader = start_program(READ, image.directory)
            assert reader.stdout is not None
            killed: set[int] = set()
            for number in range(_FILE_COUNT):
                assert reader.stdout.readline() == f"part-{number:02}\n"
                worker = _worker_of(image)
                if number % 2 == 0 and worker is not None:
                    os.kill(worker, signal.SIGKILL)
                    killed.add(worker)
            reader.communicate_checked(_TIMEOUT_S)
            assert len(killed) > 4
    finally:
        # Removed, so that pytest does not keep it.
        shutil.rmtree(settings.cache_dir, ignore_errors=True)
