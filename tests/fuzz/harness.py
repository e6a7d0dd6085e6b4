"""Runs a target in a child with bounded memory and CPU time, and keeps the input that fails.

The child runs Hypothesis, which shrinks an input that makes the target raise. An input whose child
is killed by a limit cannot be shrunk, and is kept as it is.
"""

import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from msgspec import Struct

from testbed.bounded import succeeds_bounded

FAILURES = Path(".fuzz")
_INPUT_BYTES_MAX = 2**24
_LENGTH = struct.Struct("<Q")


class Target(Struct, frozen=True):
    """Parser to fuzz."""

    name: str
    inputs: st.SearchStrategy[bytes]
    read: Callable[[bytes], Any]
    """Parses an input, and checks the result against the documented bounds."""
    refusals: tuple[type[Exception], ...]
    """Documented errors."""
    memory_bytes: int = 2**28
    """Limit of memory beyond the process's own."""


class FuzzError(Exception):
    """Failure of a target; the input is in a file."""


def fuzz(target: Target, count: int, seed_or_none: int | None, cpu_s: int) -> None:
    """Read `count` inputs; without a seed, the same ones each time. Raises: FuzzError."""
    current = mmap.mmap(-1, _LENGTH.size + _INPUT_BYTES_MAX)

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=seed_or_none is None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(target.inputs)
    def run(data: bytes) -> None:
        current[: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        try:
            target.read(data)
        except target.refusals:
            pass

    call = run if seed_or_none is None else seed(seed_or_none)(run)
    if succeeds_bounded(call, memory_bytes=target.memory_bytes, cpu_s=cpu_s):
        return
    (length,) = _LENGTH.unpack_from(current)
    data = current[_LENGTH.size : _LENGTH.size + length]
    FAILURES.mkdir(exist_ok=True)
    path = FAILURES / f"{target.name}-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    raise FuzzError(
        f"{target.name} failed with seed {seed_or_none} after at most {count} inputs; replay it: "
        f"{os.path.basename(sys.executable)} -m tests.fuzz {target.name} {path}"
    )


def replay(target: Target, data: bytes) -> None:
    """Read one input without limits. Raises: the target's errors other than its refusals."""
    try:
        target.read(data)
    except target.refusals as error:
        print(f"refused: {error}", file=sys.stderr)  # noqa: T201
