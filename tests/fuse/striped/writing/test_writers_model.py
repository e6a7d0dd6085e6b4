"""Files written while parts fail, hang, find a full disk or lack memory, against a model.

A name holds the content of its last successful `publish` after any fault. A writer whose storage
recovers succeeds; a failed writer goes on failing, and leaves nothing behind.
"""

import errno
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from bootseer.errors import BootseerError, DeadlineError, NoSpaceError, UnavailableError
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.fuse.striped.writing.file_writer import FileWriter
from bootseer.store.local.backend import LocalBackend
from testbed.waiting import wait_for
from tests.fuse.striped.support.faulty import FaultyBackend, Rule, failing
from tests.fuse.striped.support.harness import UNIT, Driver, storage_on
from tests.fuse.striped.support.stored import find_garbage

NAMES = st.sampled_from(["a", "b"])
INDEXES = st.integers(0, 2)
SIZES = st.one_of(
    st.sampled_from([1, UNIT - 1, UNIT, UNIT + 1, 4 * UNIT, 20 * UNIT + 17]),
    st.integers(UNIT, 40 * UNIT),
)
STEPS = st.sampled_from(["create", "write", "close"])
PASSING = st.sampled_from(
    [
        lambda: UnavailableError("reset"),
        lambda: OSError(errno.EIO, "5"),
        lambda: BaseException("a panic"),  # as hdfs-native's are no Exception
    ]
)
FATAL: st.SearchStrategy[tuple[str, Callable[[], BaseException]]] = st.one_of(
    st.tuples(STEPS, st.just(lambda: NoSpaceError("the disk is full"))),
    st.tuples(STEPS, st.just(lambda: DeadlineError("no answer"))),
    # It accepts bytes and loses them: the part is written four times.
    st.just(("close", lambda: UnavailableError("down"))),
)
Disturbance = Callable[["Saves"], None]
AFTER = st.integers(0, 9)
DISTURBANCES: st.SearchStrategy[Disturbance] = st.one_of(
    st.builds(lambda *how: lambda saves: saves.fail_once(*how), STEPS, PASSING, AFTER),
    st.builds(lambda *how: lambda saves: saves.be_slow(*how), AFTER),
    st.builds(
        lambda *how: lambda saves: saves.fail(*how), FATAL, AFTER, st.sampled_from(["", "/01"])
    ),
    st.just(lambda saves: saves.press_for_memory()),
    st.just(lambda saves: saves.recover()),
)


@dataclass(eq=False)
class Save:
    """File that is being written, in the model."""

    writer: FileWriter
    name: str
    data: bytes = b""
    may_fail: bool = False
    """Whether a part may have failed since this file was begun, by the storage's faults."""
    published: bytes | None = None
    """Content of the last `publish`."""
    error: str = ""
    """Error of the first failed call."""


class Saves(RuleBasedStateMachine):
    """State machine: `files` is what every node must see."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="bootseer-saves-"))
        self.backend = FaultyBackend(LocalBackend(self.root))
        self.storage = storage_on(self.backend, memory_bytes=24 * UNIT, deadline_s=60.0)
        self.files: dict[str, bytes] = {}
        self.open: list[Save] = []
        self.is_deadly = False
        """Whether a writer may fail until the storage is repaired."""
        self.failure_count = 0

    def teardown(self) -> None:
        try:
            for save in self.open:
                save.writer.close(5.0)
            self.recover()
            wait_for(lambda: not find_garbage(self.backend.inner, ""), "the parts' end")
            budget = self.storage.memory
            wait_for(lambda: budget.try_charge(budget.limit_bytes), "all memory to be given back")
        finally:
            self.storage.close()
            shutil.rmtree(self.root)

    def attempt(self, save: Save, call: Callable[[], object]) -> bool:
        """Make a call of a writer; return whether it succeeded. A failed writer always fails."""
        message = ""
        try:
            call()
        except (BootseerError, OSError) as error:
            message = str(error)
        assert save.writer.has_failed == bool(message)
        assert not message or save.may_fail, message
        assert save.error in ("", message), "another outcome than the first failure"
        save.error = message
        return not message

    # ---- writers ------------------------------------------------------------------------------

    def begin(self, name: str, index: int) -> None:
        """Begin another file; of three, one is closed without its unpublished bytes."""
        if len(self.open) == 3:
            save = self.open.pop(index)
            save.writer.close()
            with pytest.raises((BootseerError, OSError)):
                save.writer.publish()
        self.open.append(Save(self.storage.writer(name), name, may_fail=self.is_deadly))

    @rule(
        name=NAMES,
        begins=st.booleans(),
        index=INDEXES,
        size=SIZES,
        seed=st.integers(0, 2**16),
        publishes=st.booleans(),
        disturbances=st.lists(DISTURBANCES, max_size=2),
    )
    def write(
        self,
        name: str,
        begins: bool,
        index: int,
        size: int,
        seed: int,
        publishes: bool,
        disturbances: list[Disturbance],
    ) -> None:
        if begins or not self.open:
            self.begin(name, index)
        for disturb in disturbances:
            disturb(self)
        save = self.open[index % len(self.open)]
        data = random.Random(seed).randbytes(size)
        for at in range(0, size, 3 * UNIT):
            piece = data[at : at + 3 * UNIT]
            if not self.attempt(save, partial(save.writer.append, piece)):
                return
            save.data += piece
        if not publishes:
            return
        if save.published is not None and self.files[save.name] != save.published:
            # The file to add to must still exist.
            save.may_fail = True
        if self.attempt(save, save.writer.publish):
            self.files[save.name] = save.published = save.data

    # ---- the storage --------------------------------------------------------------------------

    def add_rule(self, rule: Rule) -> None:
        """Call `rule` before each operation on a part."""

        def ask(operation: str, path: str) -> None:
            if PARTS_FOLDER in path and not path.endswith(("layout", ".plain")):
                rule(operation, path)

        self.backend.rules.append(ask)

    def fail_once(self, step: str, error: Callable[[], BaseException], after: int) -> None:
        """Make a part fail once; it is written again, up to three times."""
        self.add_rule(later(after, step, failing(step, error, times=1)))
        self.failure_count += 1
        if self.failure_count > 3:
            self.be_deadly()

    def be_slow(self, after: int) -> None:
        """Make one write slow."""
        left = [1]

        def wait(operation: str, path: str) -> None:
            if operation == "write" and left[0]:
                left[0] = 0
                threading.Event().wait(0.03)

        self.add_rule(later(after, "write", wait))

    def fail(self, how: tuple[str, Callable[[], BaseException]], after: int, within: str) -> None:
        """Make one or all of the servers fail until the storage is repaired."""
        step, error = how
        self.add_rule(later(after, step, failing(step, error, within=within)))
        self.be_deadly()

    def be_deadly(self) -> None:
        self.is_deadly = True
        for save in self.open:
            save.may_fail = True

    def press_for_memory(self) -> None:
        """Request all memory that writers can free, at each use of the storage."""
        budget = self.storage.memory

        def squeeze(operation: str, path: str) -> None:
            if budget.try_charge(budget.limit_bytes):
                budget.give(budget.limit_bytes)

        self.add_rule(squeeze)

    def recover(self) -> None:
        """Repair the storage, and read the files from another node."""
        self.backend.rules.clear()
        self.is_deadly, self.failure_count = False, 0
        with storage_on(self.root) as elsewhere:
            driver = Driver(elsewhere)
            assert driver.names("") == sorted(self.files)
            for name, data in self.files.items():
                assert driver.read(name, step=10 * UNIT) == data


def later(count: int, step: str, rule: Rule) -> Rule:
    """Return `rule` for operations from number `step` on, after `count` others."""
    left = [count]
    lock = threading.Lock()

    def ask(operation: str, path: str) -> None:
        with lock:
            left[0] -= operation == step
            is_due = left[0] < 0
        if is_due:
            rule(operation, path)

    return ask


Saves.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
test_saves = Saves.TestCase
