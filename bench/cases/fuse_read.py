"""Reading a file through FUSE: throughput, and CPU time of the server."""

import contextlib
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.machine.environment import kernel_version
from bench.machine.libfuse import build_passthrough
from bench.machine.page_cache import evict_everything, evict_file
from bench.machine.tmpfs import tmpfs
from bench.model import (
    Case,
    Column,
    Sample,
    Session,
    TakeSample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio,
    variant,
)
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import mounted, python_command, run_json, tree_cpu_s

_BLOCK_BYTES = 2**20
_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES = 2**31, 2**29, 2**23
_READ_DEADLINE_S = 120.0
_NAME = "data"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    size_bytes = workspace.sized(_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES)
    with tmpfs(workspace.directory, size_bytes) as source:
        block = os.urandom(_BLOCK_BYTES)
        with (source / _NAME).open("wb") as file:
            for _ in range(size_bytes // _BLOCK_BYTES):
                file.write(block)
        workspace.shared["source"] = source
        workspace.shared["size_bytes"] = size_bytes
        # In a smoke run, other programs of the machine keep their cache: `make test` has one.
        evicted = (
            evict_file(source / _NAME) if workspace.is_smoke else evict_everything([source / _NAME])
        )
        workspace.shared["notes"] = [
            f"A file of {size_bytes >> 20} MiB in tmpfs, read once from start to end in blocks of "
            "1 MiB by a process of its own",
            "Before each read its pages are dropped from FUSE's page cache by "
            "posix_fadvise(DONTNEED); tmpfs itself stays in memory",
            f"Page cache dropped at the start of the case: {evicted}",
            "CPU of the server and of the reader are counted apart",
        ]
        yield


def _read(workspace: Workspace, path: Path, server_pid: int | None) -> Sample:
    server_before_s = tree_cpu_s(server_pid) if server_pid is not None else 0.0
    command = python_command("-m", "bench.reader", str(path), str(_BLOCK_BYTES))
    reader = run_json(command, timeout_s=_READ_DEADLINE_S)
    size_bytes = workspace.shared["size_bytes"]
    if reader["read_bytes"] != size_bytes:
        raise RuntimeError(f"read {reader['read_bytes']} of {size_bytes} bytes")
    if workspace.is_smoke:
        _compare(workspace, path)
    cpu_s = {"reader": float(reader["cpu_s"])}
    if server_pid is not None:
        cpu_s["server"] = tree_cpu_s(server_pid) - server_before_s
    return Sample(reader["wall_s"], cpu_s, moved_bytes=size_bytes)


def _compare(workspace: Workspace, path: Path) -> None:
    """Compare the file at `path` with the source. Raises: RuntimeError if they differ."""
    command = ["cmp", str(path), str(workspace.shared["source"] / _NAME)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_READ_DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def _native(workspace: Workspace) -> Sample:
    return _read(workspace, workspace.shared["source"] / _NAME, None)


def _served(name: str, command: Callable[[Workspace, Path], Sequence[str]]) -> Session:
    """Return a session with the server that `command(workspace, mountpoint)` starts."""

    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        mountpoint = workspace.directory / f"mount-{name}"
        log = workspace.directory / f"{name}.log"
        with mounted(command(workspace, mountpoint), mountpoint, log) as server:
            yield lambda: _read(workspace, mountpoint / _NAME, server.pid)

    return session


def _ours(mode: str) -> Callable[[Workspace, Path], Sequence[str]]:
    def command(workspace: Workspace, mountpoint: Path) -> Sequence[str]:
        if mode == "passthrough" and os.geteuid() != 0:
            raise MissingError("FUSE passthrough needs root")
        if mode == "passthrough" and kernel_version() < (6, 9):
            raise MissingError("FUSE passthrough needs Linux 6.9")
        source = str(workspace.shared["source"])
        return _peer("ours_passthrough", source, str(mountpoint), "--mode", mode)

    return command


def _mfusepy(*flags: str) -> Callable[[Workspace, Path], Sequence[str]]:
    def command(workspace: Workspace, mountpoint: Path) -> Sequence[str]:
        if importlib.util.find_spec("mfusepy") is None:
            raise MissingError("mfusepy is not installed; pip install mfusepy")
        source = str(workspace.shared["source"])
        return _peer("mfusepy_passthrough", source, str(mountpoint), *flags)

    return command


def _libfuse(*flags: str) -> Callable[[Workspace, Path], Sequence[str]]:
    def command(workspace: Workspace, mountpoint: Path) -> Sequence[str]:
        program = str(build_passthrough(workspace.directory))
        source = f"source={workspace.shared['source']}"
        return [program, "-f", *flags, "-o", source, str(mountpoint)]

    return command


def _peer(name: str, *arguments: str) -> Sequence[str]:
    if not (REPOSITORY / "bench" / "peers" / f"{name}.py").exists():
        raise MissingError(f"bench/peers/{name}.py is missing")
    return python_command("-m", f"bench.peers.{name}", *arguments)


def _derive(sample: Sample) -> Mapping[str, float]:
    gib = (sample.moved_bytes or 0) / 2**30
    derived = {"gib_per_s": gib / sample.wall_s}
    for who, seconds in sample.cpu_s.items():
        derived[f"{who}_cpu_s_per_gib"] = seconds / gib
    derived["cpu_s_per_gib"] = sum(sample.cpu_s.values()) / gib
    return derived


CASE = Case(
    name="fuse-read",
    description="Sequential read of a file in memory through FUSE, against no FUSE at all.",
    prepare=_prepare,
    variants=(
        variant("native", "the tmpfs itself", _native),
        Variant(
            "cached",
            "Bootseer's server, through the page cache",
            _served("cached", _ours("cached")),
        ),
        Variant(
            "direct_io",
            "Bootseer's server, FOPEN_DIRECT_IO",
            _served("direct_io", _ours("direct_io")),
        ),
        Variant(
            "passthrough",
            "Bootseer's server, FOPEN_PASSTHROUGH: the kernel reads the file behind",
            _served("passthrough", _ours("passthrough")),
        ),
        Variant("mfusepy", "a mirror in Python over libfuse3", _served("mfusepy", _mfusepy())),
        Variant(
            "mfusepy_direct",
            "the same with direct_io, which has to be asked for",
            _served("mfusepy_direct", _mfusepy("--direct-io")),
        ),
        Variant("libfuse", "C libfuse's passthrough_ll example", _served("libfuse", _libfuse())),
        Variant(
            "libfuse_s",
            "the same with one thread (-s)",
            _served("libfuse_s", _libfuse("-s")),
        ),
    ),
    ratios=(
        ratio("direct_io", "mfusepy", "gib_per_s", "throughput", at_least(2)),
        ratio("direct_io", "mfusepy", "server_cpu_s_per_gib", "server CPU", at_most(0.5)),
        ratio("direct_io", "mfusepy", "cpu_s_per_gib", "server and reader CPU"),
        ratio("passthrough", "native", "wall_s", "time", at_most(1.15)),
        ratio("cached", "mfusepy", "gib_per_s", "throughput"),
        ratio("direct_io", "mfusepy_direct", "gib_per_s", "throughput"),
        ratio("direct_io", "mfusepy_direct", "server_cpu_s_per_gib", "server CPU"),
        ratio("direct_io", "libfuse", "gib_per_s", "throughput"),
        ratio("direct_io", "libfuse_s", "gib_per_s", "throughput"),
        ratio("direct_io", "native", "wall_s", "time"),
    ),
    columns=(
        Column("GiB/s", "gib_per_s"),
        Column("server CPU s/GiB", "server_cpu_s_per_gib"),
        Column("reader CPU s/GiB", "reader_cpu_s_per_gib"),
    ),
    derive=_derive,
    audience="reader",
)
