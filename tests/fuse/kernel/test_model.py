"""Hypothesis state machine: the same operations on the mount and a directory must agree."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from testbed.mounts import fuse_mount
from testbed.mounts.file_agent import FileAgent
from testbed.mounts.passthrough_fs import PassthroughFileSystem
from testbed.mounts.sweeping import sweep

pytestmark = pytest.mark.needs("fuse")

_PATHS = st.sampled_from(["a", "b", "c", "d", "d/a", "d/b", "d/e", "d/e/a", "a/x"])
_KEYS = st.integers(0, 3)
_OFFSETS = st.integers(0, 20_000)
_DATA = st.binary(min_size=1, max_size=200) | st.integers(1, 9000).map(lambda n: b"z" * n)
_FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_TRUNC,
        os.O_RDWR | os.O_CREAT | os.O_APPEND,
        os.O_RDONLY | os.O_NOFOLLOW,
        os.O_RDONLY | os.O_DIRECTORY,
    ]
)
_numbers = itertools.count()


class MountedFiles(RuleBasedStateMachine):
    """State machine that does every step on the mount and on the plain directory."""

    root: Path
    served: Path

    def __init__(self) -> None:
        super().__init__()
        name = f"run-{next(_numbers)}"
        for parent in ("backing", "plain"):
            (self.root / parent / name).mkdir()
        self.ours = FileAgent(self.served / name)
        self.model = FileAgent(self.root / "plain" / name)

    def teardown(self) -> None:
        self.ours.close()
        self.model.close()

    def _both(self, operation: str, *arguments: Any) -> Any:
        expected = self.model.do(operation, *arguments)
        assert self.ours.do(operation, *arguments) == expected, (operation, arguments)
        return expected

    @rule(path=_PATHS)
    def mkdir(self, path: str) -> None:
        self._both("mkdir", path)

    @rule(path=_PATHS)
    def rmdir(self, path: str) -> None:
        self._both("rmdir", path)

    @rule(path=_PATHS)
    def unlink(self, path: str) -> None:
        self._both("unlink", path)

    @rule(path=_PATHS, new=_PATHS)
    def rename(self, path: str, new: str) -> None:
        self._both("rename", path, new)

    @rule(path=_PATHS, mode=st.integers(0, 0o777))
    def chmod(self, path: str, mode: int) -> None:
        # Root ignores modes, so a mode never changes the results of other steps.
        if os.geteuid() == 0:
            self._both("chmod", path, mode)

    @rule(path=_PATHS, size=_OFFSETS)
    def truncate(self, path: str, size: int) -> None:
        self._both("truncate", path, size)

    @rule(key=_KEYS, path=_PATHS, flags=_FLAGS)
    def open(self, key: int, path: str, flags: int) -> None:
        self._both("open", key, path, flags)

    @rule(key=_KEYS)
    def close(self, key: int) -> None:
        self._both("close", key)

    @rule(key=_KEYS, offset=_OFFSETS, data=_DATA)
    def pwrite(self, key: int, offset: int, data: bytes) -> None:
        self._both("pwrite", key, offset, data)

    @rule(key=_KEYS, data=_DATA)
    def append(self, key: int, data: bytes) -> None:
        self._both("append", key, data)

    @rule(key=_KEYS, offset=_OFFSETS, length=_OFFSETS)
    def pread(self, key: int, offset: int, length: int) -> None:
        self._both("pread", key, offset, length)

    @rule(key=_KEYS, size=_OFFSETS)
    def ftruncate(self, key: int, size: int) -> None:
        self._both("ftruncate", key, size)

    @rule(key=_KEYS)
    def fsync(self, key: int) -> None:
        self._both("fsync", key)

    @rule(key=_KEYS)
    def fstat(self, key: int) -> None:
        self._both("fstat", key)

    @rule(path=_PATHS)
    def readlink(self, path: str) -> None:
        self._both("readlink", path)

    @rule(path=_PATHS)
    def content(self, path: str) -> None:
        self._both("content", path)

    @invariant()
    def same_tree(self) -> None:
        for directory in (".", "d", "d/e"):
            names = self._both("list", directory)
            if isinstance(names, list):
                for name in names:
                    self._both("status", f"{directory}/{name}")


@pytest.mark.parametrize("variant", ["cached", "direct_io"])
@pytest.mark.needs("fuse")
def test_the_mount_agrees_with_a_plain_directory(variant: str) -> None:
    root = Path(tempfile.mkdtemp(prefix="bootseer-test-"))
    try:
        for name in ("backing", "plain", "mnt"):
            (root / name).mkdir()
        file_system = PassthroughFileSystem(root / "backing", direct_io=variant == "direct_io")
        with fuse_mount.mounted(file_system, root / "mnt"):

            class Machine(MountedFiles):
                pass

            Machine.root, Machine.served = root, root / "mnt"
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=15,
                    stateful_step_count=40,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    finally:
        sweep(root)
        shutil.rmtree(root, ignore_errors=True)
