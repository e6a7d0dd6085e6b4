"""The file system against a simple model in memory, by random sequences of operations."""

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from bootseer.fuse.striped.layout import PARTS_FOLDER
from tests.fuse.striped.support.harness import CALLER, UNIT, Driver, refused_with, storage_on
from tests.fuse.striped.support.stored import find_garbage

NAMES = st.sampled_from(["a", "b", "c"])
SIZES = st.one_of(
    st.sampled_from([0, 1, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT, 6 * UNIT + 17]),
    st.integers(0, 5 * UNIT),
)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Tree(RuleBasedStateMachine):
    """State machine: `files` and `dirs` are the model, `readers` open files with their content."""

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="bootseer-striped-"))
        self.driver = Driver(storage_on(self.root / "backend"))
        self.files: dict[str, bytes] = {}
        self.dirs: set[str] = {""}
        self.striped: set[str] = set()
        self.open_count = 0

    def teardown(self) -> None:
        try:
            self.driver.fs.destroyed()
            backend = self.driver.storage.backend
            if self.open_count == 0 and (self.root / "backend").exists():
                for directory in self.dirs:
                    assert find_garbage(backend, directory) == []
            self.driver.storage.close()
        finally:
            shutil.rmtree(self.root)

    # ---- helpers --------------------------------------------------------------------------

    def note_written(self, path: str, data: bytes, was_striped: bool = False) -> None:
        self.files[path] = data
        if was_striped or len(data) > UNIT:
            self.striped.add(path)
        else:
            self.striped.discard(path)

    def expect(self, code: int, call: Callable[[], object]) -> None:
        with refused_with(code):
            call()

    def path(self, directory: str, name: str) -> str:
        return f"{directory}/{name}" if directory else name

    def some_dir(self, seed: int) -> str:
        return sorted(self.dirs)[seed % len(self.dirs)]

    # ---- rules ----------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        self.driver.mkdir("d")
        self.dirs.add("d")

    @rule(where=st.integers(0, 9), name=NAMES, size=SIZES, seed=st.integers(0, 99))
    def write(self, where: int, name: str, size: int, seed: int) -> None:
        path = self.path(self.some_dir(where), name)
        data = content(seed, size)
        if path in self.dirs:
            return
        self.driver.write(path, data)
        self.note_written(path, data)

    @rule(where=st.integers(0, 9), name=NAMES, size=SIZES, seed=st.integers(0, 99))
    def append(self, where: int, name: str, size: int, seed: int) -> None:
        path = self.path(self.some_dir(where), name)
        data = content(seed, size)
        if path in self.dirs:
            return
        self.driver.write(path, data, os.O_APPEND)
        self.note_written(path, self.files.get(path, b"") + data, path in self.striped)

    @rule(where=st.integers(0, 9), name=NAMES, parts=st.lists(SIZES, max_size=4))
    def write_with_fsyncs(self, where: int, name: str, parts: list[int]) -> None:
        path = self.path(self.some_dir(where), name)
        if path in self.dirs:
            return
        file = self.driver.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        data = b""
        for number, size in enumerate(parts):
            piece = content(number, size)
            self.driver.pwrite(file, len(data), piece)
            data += piece
            self.driver.fs.fsync(CALLER, *file, False)
            assert self.driver.read(path) == data
        self.driver.close(file)
        self.note_written(path, data)

    @rule(where=st.integers(0, 9), name=NAMES, at=st.integers(0, 9**9), length=SIZES)
    def read(self, where: int, name: str, at: int, length: int) -> None:
        path = self.path(self.some_dir(where), name)
        if path in self.dirs:
            return
        if path not in self.files:
            self.expect(errno.ENOENT, lambda: self.driver.read(path))
            return
        data = self.files[path]
        assert self.driver.size(path) == len(data)
        assert self.driver.read(path) == data
        file = self.driver.open(path, os.O_RDONLY)
        offset = at % (len(data) + 10)
        assert self.driver.pread(file, offset, length) == data[offset : offset + length]
        self.driver.close(file)

    @rule(target=readers, where=st.integers(0, 9), name=NAMES)
    def open_reader(self, where: int, name: str) -> object:
        path = self.path(self.some_dir(where), name)
        if path not in self.files:
            return multiple()
        self.open_count += 1
        return self.driver.open(path, os.O_RDONLY), self.files[path]

    @rule(reader=consumes(readers))
    def read_and_close(self, reader: tuple[tuple[int, int], bytes]) -> None:
        file, data = reader
        result = b""
        while piece := self.driver.pread(file, len(result), 7000):
            result += piece
        assert result == data
        self.driver.close(file)
        self.open_count -= 1

    @rule(where=st.integers(0, 9), name=NAMES)
    def unlink(self, where: int, name: str) -> None:
        path = self.path(self.some_dir(where), name)
        if path in self.files:
            self.driver.unlink(path)
            del self.files[path]
            self.striped.discard(path)
        elif path not in self.dirs:
            self.expect(errno.ENOENT, lambda: self.driver.unlink(path))

    @rule(where=st.integers(0, 9), name=NAMES)
    def truncate(self, where: int, name: str) -> None:
        path = self.path(self.some_dir(where), name)
        if path in self.files:
            self.driver.truncate(path, 0)
            # Truncating to the same size changes nothing: an empty file was an ordinary one before.
            self.note_written(path, b"")

    @rule(where=st.integers(0, 9), name=NAMES)
    def mkdir(self, where: int, name: str) -> None:
        parent = self.some_dir(where)
        path = self.path(parent, name)
        if path.count("/") > 2:
            return
        if path in self.dirs or path in self.files:
            self.expect(errno.EEXIST, lambda: self.driver.mkdir(path))
        else:
            self.driver.mkdir(path)
            self.dirs.add(path)

    @rule(where=st.integers(0, 9))
    def rmdir(self, where: int) -> None:
        path = self.some_dir(where)
        if not path:
            return
        if self.children(path):
            self.expect(errno.ENOTEMPTY, lambda: self.driver.rmdir(path))
        else:
            self.driver.rmdir(path)
            self.dirs.discard(path)

    def children(self, path: str) -> set[str]:
        start = path + "/" if path else ""
        return {
            name[len(start) :]
            for name in [*self.files, *self.dirs]
            if name.startswith(start) and name != path and "/" not in name[len(start) :]
        }

    @rule(one=st.integers(0, 9), name=NAMES, two=st.integers(0, 9), new=NAMES)
    def rename(self, one: int, name: str, two: int, new: str) -> None:
        source = self.path(self.some_dir(one), name)
        target = self.path(self.some_dir(two), new)

        def go() -> None:
            self.driver.rename(source, target)

        if source in self.files:
            if source == target:
                go()
            elif target in self.dirs:
                self.expect(errno.EISDIR, go)
            elif source in self.striped and os.path.dirname(source) != os.path.dirname(target):
                self.expect(errno.EXDEV, go)
            else:
                go()
                was_striped = source in self.striped
                self.striped.discard(source)
                self.note_written(target, self.files.pop(source), was_striped)
        elif source in self.dirs:
            if source == target:
                go()
            elif target.startswith(source + "/"):
                self.expect(errno.EINVAL, go)
            elif target in self.files:
                self.expect(errno.ENOTDIR, go)
            elif target in self.dirs and self.children(target):
                self.expect(errno.ENOTEMPTY, go)
            else:
                go()
                self.dirs.discard(target)
                for path in [p for p in self.dirs if p == source or p.startswith(source + "/")]:
                    self.dirs.discard(path)
                    self.dirs.add(target + path[len(source) :])
                for path in [p for p in self.files if p.startswith(source + "/")]:
                    moved = target + path[len(source) :]
                    was_striped = path in self.striped
                    self.striped.discard(path)
                    self.note_written(moved, self.files.pop(path), was_striped)
        elif source != target:
            self.expect(errno.ENOENT, go)

    @invariant()
    def listings_agree(self) -> None:
        for directory in self.dirs:
            names = self.driver.names(directory)
            assert set(names) == self.children(directory)
            assert PARTS_FOLDER not in names


Tree.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_tree = Tree.TestCase
