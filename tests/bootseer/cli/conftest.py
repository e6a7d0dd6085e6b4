"""A runner of the command line, and a world with a store to use and to damage."""

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
    """Exit code and output of a command."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str
    in_time: bool

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document."""
        return json.loads(self.out)


def _run(
    folder: Path,
    arguments: tuple[object, ...],
    environment: Mapping[str, str],
    *,
    cwd: Path,
    nobody: bool,
) -> Result:
    """Run `bootseer ARGUMENTS` to its end, or until TIMEOUT_S.

    The output goes to files, since servers that the command starts may keep it open.
    """
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
    """Node, and a store with an image, a snapshot and a record, and invalid files."""

    base: Path
    output: Path
    """Folder of the commands' output."""
    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: object, nobody: bool = False, **variables: str) -> Result:
        environment = {**self.environment, **self.variables, **variables}
        return _run(self.output, arguments, environment, cwd=self.base, nobody=nobody)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the commands."""
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
        """Return a path in the world."""
        return self.base / name

    def forget(self) -> None:
        """Remove the node's cache and state, as if the node were new."""
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
    """Return a world that is made once, and copied for tests that change it."""
    return _make(tmp_path_factory.mktemp("pristine"), tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="module")
def world(pristine: World) -> World:
    """Return the world for tests whose commands change nothing."""
    return pristine


def _passing(folder: str, names: list[str]) -> list[str]:
    """Return names that a publisher may still remove: its notes and temporaries."""
    return names if Path(folder).name in ("timelines", ".tmp") else []


@pytest.fixture
def own_world(pristine: World, tmp_path: Path) -> World:
    """Return a copy of the world for one test."""
    base = tmp_path / "world"
    shutil.copytree(pristine.base, base, symlinks=True, ignore=_passing)
    return World(base, pristine.output)
