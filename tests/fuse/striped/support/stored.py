"""Files of a striped tree, saved and loaded without a mount, and their parts."""

import random
from collections.abc import Iterator
from pathlib import Path

from bootseer.checkpoints import read_into, size_of
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.fuse.striped.names.stored import StoredNames
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools import fsck
from bootseer.fuse.striped.tools.fsck import check_folder, check_tree
from bootseer.store import Backend
from tests.fuse.striped.support.harness import UNIT

DATA = random.Random(3).randbytes(7 * UNIT + 77)


def save(storage: StripedStorage, path: str, data: bytes = DATA) -> None:
    writer = storage.writer(path)
    writer.append(data)
    writer.publish()
    writer.close()


def load(storage: StripedStorage, path: str) -> bytes:
    buffer = bytearray(size_of(storage, path))
    assert read_into(storage, path, buffer) == len(buffer)
    return bytes(buffer)


def part_of(root: Path, name: str) -> Path:
    (found,) = root.glob(f"**/{PARTS_FOLDER}/*/{name}")
    return found


def garbage_of(storage: StripedStorage) -> Iterator[fsck.Garbage]:
    for report in check_tree(storage):
        yield from report.garbage


def find_garbage(backend: Backend, directory: str) -> list[fsck.Garbage]:
    """Return the stored files of a directory that none of its files needs."""
    return list(check_folder(backend, StoredNames(backend), directory).garbage)
