"""The promise in full size: 2 GiB are summed through a mount whose worker is killed meanwhile."""

import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.prefetch.mount import MountedImage
from tests.support.image_mounts import index, mounted, settings_at, skip_unless_fuse, wait_for

_MIB = 1 << 20
_FILE_COUNT = 16
_FILE_MIB = 128
_KILLS = 6
_TIMEOUT_S = 100.0


def _write_tree(root: Path) -> str:
    """2 GiB that compress well, no two mebibytes alike; returns the digest over all files."""
    root.mkdir()
    whole = hashlib.blake2b()
    filling = b"0123456789abcdef" * (_MIB // 16)
    for number in range(_FILE_COUNT):
        with (root / f"part-{number:02}").open("wb") as file:
            for index_mib in range(_FILE_MIB):
                label = b"%08d" % (number * _FILE_MIB + index_mib)
                block = label + filling[len(label) :]
                whole.update(block)
                file.write(block)
    return whole.hexdigest()


def _worker_of(image: MountedImage) -> int | None:
    try:
        worker = image.status().get("worker_pid")
    except UnavailableError:
        # Between one worker and the next.
        return None
    return worker if isinstance(worker, int) else None


def test_a_checksum_of_2_gib_survives_kill_9_of_the_worker(tmp_path: Path) -> None:
    skip_unless_fuse()
    release = os.uname().release.split(".")
    if (int(release[0]), int(release[1])) < (6, 9):
        pytest.skip("handing requests to another worker needs Linux 6.9")
    free_bytes = shutil.disk_usage(tmp_path).free
    if free_bytes < 6 << 30:
        pytest.skip(f"needs 6 GiB of disk; {tmp_path} has {free_bytes >> 30}")
    settings = settings_at(tmp_path)
    expected = _write_tree(tmp_path / "tree")
    index(settings, tmp_path / "tree", "large:1")
    shutil.rmtree(tmp_path / "tree")
    try:
        with mounted(settings, "large:1", tmp_path / "mnt") as image:
            # In processes of their own: a reader of a stuck mount could not be killed.
            program = "cat part-* | b2sum"
            reader = subprocess.Popen(
                ["sh", "-c", program], cwd=image.directory, stdout=subprocess.PIPE, text=True
            )
            killed: set[int | None] = {None}
            while len(killed) <= _KILLS and reader.poll() is None:
                wait_for(lambda: _worker_of(image) not in killed)
                worker = _worker_of(image)
                if worker is not None:
                    os.kill(worker, signal.SIGKILL)
                killed.add(worker)
            output, _ = reader.communicate(timeout=_TIMEOUT_S)
            assert reader.returncode == 0
            assert output.split()[0] == expected
            assert len(killed) > 2
    finally:
        # Not for pytest to keep: it is gigabytes.
        shutil.rmtree(settings.cache_dir, ignore_errors=True)
