"""The command line under test: a runner, and a world with a store to use and to damage."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bootseer.store import TEST_NETWORK
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.users import NOBODY

DEADLINE_S = 5
# A command may use its deadline twice (one wait, then giving up), on a loaded machine.
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str
    in_time: bool

    @property
    def json(self) -> Any:
        """stdout as the one JSON document that it must be."""
        return json.loads(self.out)


def _run(
    folder: Path,
    arguments: tuple[object, ...],
    environment: Mapping[str, str],
    *,
    cwd: Path,
    nobody: bool,
) -> Result:
    """Run `bootseer ARGUMENTS` to its end, or until TIMEOUT_S. Its output goes to files: servers
    that it starts may keep it open."""
    out, err = folder / "out", folder / "err"
    texts = tuple(os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments)
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if nobody else {}
    try:
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "bootseer", *texts],
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                cwd=cwd,
                env=dict(environment),
                start_new_session=True,
                **user,
            )
    except PermissionError as error:
        raise MissingError(f"another user cannot start this interpreter: {error}") from None
    in_time = True
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        in_time = False
        process.kill()
        process.wait()
    return Result(
        texts,
        process.returncode,
        out.read_text(encoding="utf-8", errors="backslashreplace"),
        err.read_text(encoding="utf-8", errors="backslashreplace"),
        in_time,
    )


@dataclass(slots=True)
class World:
    """A node, a store with an image, a snapshot and a record, and things that are none of that."""

    base: Path
    output: Path
    """The folder of what its commands print."""
    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: object, nobody: bool = False, **variables: str) -> Result:
        environment = {**self.environment, **self.variables, **variables}
        return _run(self.output, arguments, environment, cwd=self.base, nobody=nobody)

    @property
    def environment(self) -> dict[str, str]:
        """What the commands run with."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.base / "home"),
            "PYTHONPATH": str(REPOSITORY),
            TEST_NETWORK: os.environ[TEST_NETWORK],
            "BOOTSEER_STORE": (self.base / "store").as_uri(),
            "BOOTSEER_CACHE_DIR": str(self.base / "cache"),
            "BOOTSEER_RUN_DIR": str(self.base / "run"),
            "BOOTSEER_TIMELINE_DIR": str(self.base / "timeline"),
            "BOOTSEER_DEADLINE": str(DEADLINE_S),
        }

    def path(self, name: str) -> Path:
        """A path in the world."""
        return self.base / name

    def forget(self) -> None:
        """As on a node that has never seen anything."""
        for name in ("cache", "run"):
            shutil.rmtree(self.base / name, ignore_errors=True)


def _make(base: Path, output: Path) -> World:
    for name in ("home", "mnt", "empty", "src/bin", "src/lib"):
        (base / name).mkdir(parents=True)
    (base / "src/bin/program").write_bytes(b"#!/bin/sh\n")
    (base / "src/lib/data").write_bytes(os.urandom(200_000))
    (base / "text").write_text("no image, no folder\n")
    (base / "random").write_bytes(os.urandom(20_000))
    world = World(base, output)
    for arguments in (
        ("image", "index", "src", "--name", "image:1"),
        ("snapshot", "create", "--target", base / "src", "--name", "env"),
    ):
        result = world(*arguments)
        assert result.code == 0, result
    return world


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Made once; copied for whoever changes it."""
    return _make(tmp_path_factory.mktemp("pristine"), tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="module")
def world(pristine: World) -> World:
    """For tests whose commands change nothing."""
    return pristine


def _passing(folder: str, names: list[str]) -> list[str]:
    """What a publisher may still remove: its notes, and what it is writing."""
    return names if Path(folder).name in ("timelines", ".tmp") else []


@pytest.fixture
def own_world(pristine: World, tmp_path: Path) -> World:
    """A copy of the test's own."""
    base = tmp_path / "world"
    shutil.copytree(pristine.base, base, symlinks=True, ignore=_passing)
    return World(base, pristine.output)
