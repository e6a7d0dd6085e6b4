"""Sizes that are set before the bytes are written, as safetensors does."""

import errno
import os
import random
from pathlib import Path

import pytest

from bootseer.fuse.kernel.operations import SetAttributes
from bootseer.fuse.striped.storage import StripedStorage
from tests.fuse.striped.support.harness import CALLER, UNIT, Driver, refused_with, storage_on


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(storage_on(tmp_path))


def _grow(driver: Driver, file: tuple[int, int], size_bytes: int) -> None:
    driver.fs.setattr(CALLER, file[0], SetAttributes(size_bytes=size_bytes, handle=file[1]))


@pytest.mark.parametrize("size", [1, UNIT, UNIT + 1, 3 * UNIT, 7 * UNIT + 5])
def test_a_size_set_in_advance(driver: Driver, size: int) -> None:
    data = random.Random(size).randbytes(size)
    file = driver.open("f", os.O_RDWR | os.O_CREAT)
    _grow(driver, file, size)
    assert driver.size("f") == size
    assert driver.pread(file, size - 1, 9) == b"\0"
    for at in range(0, size, 5000):
        driver.pwrite(file, at, data[at : at + 5000])
        assert driver.size("f") == size
    driver.close(file)
    assert driver.read("f") == data
    driver.storage.close()


def test_what_was_announced_and_not_written(driver: Driver) -> None:
    driver.write("f", b"old")
    # Up to a unit is filled with zeros, also after the size went up and down again.
    file = driver.open("g", os.O_WRONLY | os.O_CREAT)
    driver.pwrite(file, 0, b"x" * (2 * UNIT))
    _grow(driver, file, 9 * UNIT)
    _grow(driver, file, 3 * UNIT)
    driver.close(file)
    assert driver.read("g") == b"x" * (2 * UNIT) + bytes(UNIT)
    # More bytes were announced: half a file must not replace the old one.
    file = driver.open("f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _grow(driver, file, 3 * UNIT)
    driver.pwrite(file, 0, b"x" * UNIT)
    with refused_with(errno.EOPNOTSUPP):
        driver.close(file)
    assert driver.read("f") == b"old"
    driver.storage.close()


def test_a_writer_without_a_mount_counts_alike(tmp_path: Path) -> None:
    storage: StripedStorage = storage_on(tmp_path)
    with storage:
        writer = storage.writer("f")
        writer.truncate(4 * UNIT)
        writer.write(0, bytes(range(256)) * (4 * UNIT // 256))
        assert writer.size_bytes == 4 * UNIT
        writer.append(b"end")
        writer.publish()
        writer.close()
        assert storage.tree.stored.view("f").size_bytes == 4 * UNIT + 3
