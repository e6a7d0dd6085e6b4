"""Several writers and readers, another node and restarts of the server, against a model."""

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.fuse.striped.support.harness import (
    CALLER,
    UNIT,
    Driver,
    Restartable,
    refused_with,
    storage_on,
)

NAMES = st.sampled_from(["a", "b", "c"])
SIZES = st.one_of(
    st.sampled_from([1, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT, 5 * UNIT + 17]),
    st.integers(1, 4 * UNIT),
)


@dataclass(eq=False)
class Writer:
    """File that is being written, in the model."""

    file: tuple[int, int]
    name: str
    data: bytes
    expects: int | None
    """Generation that must still be the file's when this is published."""
    is_dirty: bool = True
    is_detached: bool = False
    is_resumed: bool = False
    """Whether a new server must read the bytes written before."""
    doomed: int = 0

    @property
    def will_expect(self) -> bool:
        return self.expects is not None or len(self.data) > UNIT


class Writers(RuleBasedStateMachine):
    """State machine: `files` is what every node must see, by name: generation and content."""

    writers = Bundle("writers")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="bootseer-writers-"))
        self.here = Restartable(self.root)
        self.there = Driver(storage_on(self.root / "backend"))
        self.before: list[Driver] = []
        self.files: dict[str, tuple[int, bytes]] = {}
        self.open: list[Writer] = []
        self.generation = 0

    def teardown(self) -> None:
        try:
            self.here.fs.destroyed()
            self.there.fs.destroyed()
            for driver in (self.here, self.there, *self.before):
                driver.storage.close()
        finally:
            shutil.rmtree(self.root)

    # ---- the model ------------------------------------------------------------------------

    def new_generation(self) -> int:
        self.generation += 1
        return self.generation

    def expect(self, code: int, call: Callable[[], object]) -> None:
        with refused_with(code):
            call()

    def is_stale(self, writer: Writer) -> bool:
        if writer.doomed or not writer.is_dirty or writer.is_detached or writer.expects is None:
            return False
        return self.files.get(writer.name, (0, b""))[0] != writer.expects

    def publish(self, writer: Writer, call: Callable[[], object]) -> None:
        """Publish by calling `call`."""
        if self.is_stale(writer):
            writer.doomed = errno.ESTALE
        if writer.doomed:
            self.expect(writer.doomed, call)
            return
        call()
        if writer.is_dirty and not writer.is_detached:
            self.note_published(writer)
        elif writer.is_detached and len(writer.data) > UNIT:
            # Stored, to be read back by processes that have it open.
            writer.is_dirty = False

    def note_published(self, writer: Writer) -> None:
        generation = self.new_generation()
        self.files[writer.name] = (generation, writer.data)
        writer.expects = generation if writer.will_expect else None
        writer.is_dirty = False

    # ---- writers --------------------------------------------------------------------------

    @rule(target=writers, name=NAMES, appends=st.booleans(), size=SIZES, seed=st.integers(0, 99))
    def begin(self, name: str, appends: bool, size: int, seed: int) -> object:
        if len(self.open) >= 4:
            return multiple()
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if appends else os.O_TRUNC)
        file = self.here.open(name, flags)
        generation, data = self.files.get(name, (None, b"")) if appends else (None, b"")
        writer = Writer(file, name, data, generation)
        self.open.append(writer)
        self.add(writer, size, seed)
        return writer

    @rule(writer=writers, size=SIZES, seed=st.integers(0, 99))
    def write(self, writer: Writer, size: int, seed: int) -> None:
        if writer in self.open:
            self.add(writer, size, seed)

    def add(self, writer: Writer, size: int, seed: int) -> None:
        piece = random.Random(seed).randbytes(size)

        def call() -> None:
            self.here.pwrite(writer.file, len(writer.data), piece)

        self.read_what_was(writer)
        if writer.doomed:
            self.expect(writer.doomed, call)
            return
        call()
        writer.data += piece
        writer.is_dirty = True

    @rule(writer=writers)
    def fsync(self, writer: Writer) -> None:
        if writer in self.open:
            self.publish(writer, lambda: self.here.fs.fsync(CALLER, *writer.file, False))

    @rule(writer=consumes(writers))
    def finish(self, writer: Writer) -> None:
        if writer in self.open:
            self.publish(writer, lambda: self.here.close(writer.file))
            self.open.remove(writer)

    def read_what_was(self, writer: Writer) -> None:
        """Read the file that a writer adds to, which must still exist."""
        is_there = self.files.get(writer.name, (0, b""))[0] == writer.expects
        if writer.is_resumed and not (writer.is_detached or writer.doomed or is_there):
            writer.doomed = errno.ESTALE
        writer.is_resumed = False

    # ---- names ----------------------------------------------------------------------------

    @rule(name=NAMES)
    def unlink(self, name: str) -> None:
        mine = [w for w in self.open if w.name == name]
        if name in self.files:
            for writer in mine:
                self.read_what_was(writer)
            self.here.unlink(name)
            del self.files[name]
        elif not any(not w.is_detached and not w.doomed for w in mine):
            return
        else:
            for writer in mine:
                self.read_what_was(writer)
            self.here.unlink(name)
        for writer in mine:
            writer.is_detached = True

    @rule(name=NAMES, new=NAMES)
    def rename(self, name: str, new: str) -> None:
        moving = [w for w in self.open if w.name == name and not w.is_detached]
        if name not in self.files or name == new:
            return
        if any(w.doomed or self.is_stale(w) for w in moving) or len(moving) > 1:
            return
        for writer in self.open:
            if writer.name == new:
                self.read_what_was(writer)
        for writer in moving:
            if writer.is_dirty:
                self.note_published(writer)
        self.here.rename(name, new)
        self.files[new] = self.files.pop(name)
        for writer in self.open:
            if writer.name == new:
                writer.is_detached = True
        for writer in moving:
            writer.name, writer.is_detached = new, False

    # ---- readers, here and elsewhere ------------------------------------------------------

    @rule(name=NAMES)
    def read_elsewhere(self, name: str) -> None:
        if name in self.files:
            assert self.there.read(name) == self.files[name][1]
        else:
            self.expect(errno.ENOENT, lambda: self.there.read(name))

    @rule(target=readers, name=NAMES)
    def open_reader(self, name: str) -> object:
        if name not in self.files:
            return multiple()
        return self.here.open(name, os.O_RDONLY), self.files[name][1]

    @rule(reader=consumes(readers), step=st.sampled_from([999, UNIT, 9 * UNIT]))
    def read_on(self, reader: tuple[tuple[int, int], bytes], step: int) -> None:
        file, data = reader
        result = b""
        while piece := self.here.pread(file, len(result), step):
            result += piece
        assert result == data
        self.here.close(file)

    # ---- restarts -------------------------------------------------------------------------

    @rule()
    def kill_and_go_on(self) -> None:
        """Replace the server's process; its memory is lost, and the kernel's handles are not."""
        self.here.journal.close()
        self.before.append(self.here)
        self.here = Restartable(self.root)
        for writer in self.open:
            if writer.is_dirty or writer.doomed:
                writer.doomed = errno.EIO
            elif writer.is_detached:
                writer.doomed = errno.ESTALE
            else:
                writer.is_resumed = True
                if writer.expects is None:
                    # It goes on from the published file, which must still exist then.
                    writer.expects = self.files.get(writer.name, (-1, b""))[0]

    @invariant()
    def everybody_sees_the_same_names(self) -> None:
        assert self.there.names("") == sorted(self.files)


@pytest.mark.parametrize("size", [1, 3 * UNIT + 1], ids=["plain", "striped"])
def test_a_writer_hears_after_a_restart_that_its_renamed_file_was_replaced(size: int) -> None:
    """Regression (state machine): EIO instead of ESTALE."""
    state = Writers()
    try:
        writer = state.begin(name="a", appends=False, size=size, seed=1)
        state.fsync(writer=writer)
        state.kill_and_go_on()
        state.rename(name="a", new="b")
        other = state.begin(name="b", appends=False, size=size, seed=2)
        state.finish(writer=other)
        state.write(writer=writer, size=1, seed=3)
        assert isinstance(writer, Writer)
        assert writer.doomed == errno.ESTALE
        state.finish(writer=writer)
        state.read_elsewhere(name="b")
    finally:
        state.teardown()


Writers.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
test_writers = Writers.TestCase
