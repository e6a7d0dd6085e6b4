"""Loading a training job's checkpoint by several loaders, through several file systems."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.checkpoint.cluster import CappedHdfs
from bench.checkpoint.files import FileKind, Writer
from bench.checkpoint.limits import limiter
from bench.checkpoint.loading import DCP, SAFETENSORS, TORCH
from bench.checkpoint.measure import (
    derive,
    fresh_mountpoint,
    log_of,
    our_mount,
    run_client,
    sample,
)
from bench.checkpoint.peers import add_note, fetch_once, program, rclone_mount
from bench.checkpoint.torch_environment import BASE, FASTSAFETENSORS, RUNAI, TorchEnvironment
from bench.machine.page_cache import evict_everything
from bench.model import Case, Column, Ratio, Sample, TakeSample, Variant, Workspace, ratio
from bench.site import assemble_hdfs
from testbed.needs import MissingError
from testbed.processes import FuseProcess

_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES = 2**30, 2**27, 2**25
_DATANODES, _BYTES_PER_S = 4, 50e6
_DEADLINE_S = 120.0
_STRIPED = FileKind("striped", Writer.MOUNT)
_ORDINARY = FileKind("ordinary", Writer.STREAM)
_RCLONE = ("rclone", "rclone")

Action = Callable[[Workspace, CappedHdfs, TorchEnvironment], Sample]


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    size_bytes = workspace.sized(_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES)
    environment = TorchEnvironment(workspace.kept)
    environment.build()
    _fetch(workspace, environment)
    with (
        limiter() as limits,
        CappedHdfs(workspace.directory / "hdfs", _DATANODES, _BYTES_PER_S, limits) as cluster,
    ):
        workspace.shared.update(size_bytes=size_bytes, cluster=cluster, torch=environment)
        workspace.shared["notes"] = [
            f"A model of at least {size_bytes >> 20} MiB of bfloat16 as {SAFETENSORS}, {TORCH} "
            f"(torch.save) and {DCP} (torch.distributed.checkpoint, one rank), on a real HDFS with "
            f"{_DATANODES} DataNodes of {_BYTES_PER_S / 1e6:g} MB/s each way, replication 1: "
            "striped for bootseer mount, ordinary files for the others",
            f"Of the DataNodes, {limits.note}",
            "Loaded to the CPU by a process of its own from a mount of its own, imports not "
            "counted; each page of each tensor is touched",
            "runai-model-streamer and fastsafetensors read file systems and object stores, not "
            "HDFS: they get bootseer mount, and the rclone mount that one would give them else",
            f"{', '.join(BASE).replace('==', ' ')}, CPU only",
        ]
        saved = workspace.directory / "saved"
        saved.mkdir()
        arguments = {"directory": str(saved), "size_bytes": size_bytes}
        environment.run("save", arguments, ours=False, timeout_s=_DEADLINE_S)
        with cluster.uncapped():
            _copy_in(workspace, cluster, saved)
        shutil.rmtree(saved)
        yield


def _fetch(workspace: Workspace, environment: TorchEnvironment) -> None:
    """Fetch programs from outside; a variant whose program is missing is skipped later."""
    assemble_hdfs()
    with contextlib.suppress(MissingError):
        program(workspace, *_RCLONE)
    for requirement in (RUNAI, FASTSAFETENSORS):
        with contextlib.suppress(MissingError):
            _add(workspace, environment, requirement)


def _add(workspace: Workspace, environment: TorchEnvironment, requirement: str) -> None:
    fetch_once(workspace, requirement, lambda: environment.add(requirement))


def _copy_in(workspace: Workspace, cluster: CappedHdfs, saved: Path) -> None:
    files = [path for path in sorted(saved.rglob("*")) if path.is_file()]
    for path in files:
        arguments = {"source": str(path), "url": cluster.url}
        target = f"/{_ORDINARY.folder}/{path.relative_to(saved)}"
        run_client("native_copy", {**arguments, "path": target})
    cluster.empty_folder(f"/{_STRIPED.folder}")
    with our_mount(workspace, _STRIPED.url(cluster)) as server:
        (server.mountpoint / DCP).mkdir()
        for path in files:
            shutil.copyfile(path, server.mountpoint / path.relative_to(saved))


def _variant(
    name: str, description: str, action: Action, requirement: str | None = None
) -> Variant:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        environment: TorchEnvironment = workspace.shared["torch"]
        if requirement is not None:
            _add(workspace, environment, requirement)
            add_note(workspace, requirement.replace("==", " "))

        def take() -> Sample:
            evict_everything([])
            return action(workspace, workspace.shared["cluster"], environment)

        yield take

    return Variant(name, description, session)


def _load(
    workspace: Workspace,
    action: str,
    arguments: Mapping[str, object],
    server: FuseProcess | None = None,
    *,
    ours: bool = False,
) -> Sample:
    full = {**arguments, "size_bytes": workspace.shared["size_bytes"]}
    environment: TorchEnvironment = workspace.shared["torch"]
    return sample(
        workspace.shared["cluster"],
        lambda: environment.run(action, full, ours=ours, timeout_s=_DEADLINE_S),
        server,
    )


def _mounted(action: str) -> Action:
    def take(workspace: Workspace, cluster: CappedHdfs, environment: TorchEnvironment) -> Sample:
        with our_mount(workspace, _STRIPED.url(cluster), "--read-only") as server:
            return _load(workspace, action, {"path": str(server.mountpoint)}, server)

    return take


def _rclone_mounted(action: str) -> Action:
    def take(workspace: Workspace, cluster: CappedHdfs, environment: TorchEnvironment) -> Sample:
        rclone = program(workspace, *_RCLONE)
        mountpoint = fresh_mountpoint(workspace)
        folder = f"/{_ORDINARY.folder}"
        with rclone_mount(
            rclone, cluster.address, folder, mountpoint, log_of(mountpoint)
        ) as server:
            return _load(workspace, action, {"path": str(mountpoint)}, server)

    return take


def _unmounted(action: str) -> Action:
    def take(workspace: Workspace, cluster: CappedHdfs, environment: TorchEnvironment) -> Sample:
        return _load(workspace, action, {"url": _STRIPED.url(cluster)}, ours=True)

    return take


def _stream(workspace: Workspace, cluster: CappedHdfs, environment: TorchEnvironment) -> Sample:
    arguments = {"url": cluster.url, "path": f"/{_ORDINARY.folder}"}
    return _load(workspace, "safetensors_stream", arguments, ours=True)


def _ratio(top: str, bottom: str) -> Ratio:
    return ratio(top, bottom, "wall_s", "time")


_OURS, _THEIRS = "through bootseer mount", "through rclone mount"

CASE = Case(
    name="checkpoint-load",
    description="A model is loaded from an HDFS whose DataNodes are capped, by several loaders.",
    prepare=_prepare,
    variants=(
        _variant("safetensors", f"load_file (mmap) {_OURS}", _mounted("safetensors_load_file")),
        _variant("safetensors read", f"read, then load, {_OURS}", _mounted("safetensors_load")),
        _variant(
            "safetensors fsspec",
            "read by Bootseer's fsspec, then load",
            _unmounted("safetensors_fsspec"),
        ),
        _variant("torch.load", f"torch.load {_OURS}", _mounted("torch_load")),
        _variant("torch.load mmap", f"torch.load(mmap) {_OURS}", _mounted("torch_load_mmap")),
        _variant("dcp", f"FileSystemReader {_OURS}", _mounted("dcp")),
        _variant("dcp fsspec", "FsspecReader by Bootseer's fsspec", _unmounted("dcp_fsspec")),
        _variant("runai", f"runai-model-streamer {_OURS}", _mounted("runai"), RUNAI),
        _variant(
            "fastsafetensors",
            f"fastsafetensors (nogds) {_OURS}",
            _mounted("fastsafetensors"),
            FASTSAFETENSORS,
        ),
        _variant("stream", "read by one stream of hdfs-native, then load", _stream),
        _variant(
            "rclone safetensors",
            f"load_file (mmap) {_THEIRS}",
            _rclone_mounted("safetensors_load_file"),
        ),
        _variant("rclone torch.load", f"torch.load {_THEIRS}", _rclone_mounted("torch_load")),
        _variant(
            "rclone runai", f"runai-model-streamer {_THEIRS}", _rclone_mounted("runai"), RUNAI
        ),
        _variant(
            "rclone fastsafetensors",
            f"fastsafetensors (nogds) {_THEIRS}",
            _rclone_mounted("fastsafetensors"),
            FASTSAFETENSORS,
        ),
        _variant("rclone dcp", f"FileSystemReader {_THEIRS}", _rclone_mounted("dcp")),
    ),
    ratios=(
        _ratio("safetensors", "stream"),
        _ratio("safetensors", "rclone safetensors"),
        _ratio("safetensors", "rclone runai"),
        _ratio("safetensors", "rclone fastsafetensors"),
        _ratio("safetensors", "runai"),
        _ratio("safetensors", "fastsafetensors"),
        _ratio("runai", "rclone runai"),
        _ratio("fastsafetensors", "rclone fastsafetensors"),
        _ratio("torch.load", "rclone torch.load"),
        _ratio("dcp", "rclone dcp"),
        _ratio("dcp fsspec", "dcp"),
    ),
    columns=(
        Column("s", "wall_s"),
        Column("MB/s", "mb_per_s", digits=0),
        Column("placement allows, share", "allowed_share"),
        Column("network MB", "network_bytes", scale=1e-6, digits=0),
        Column("loader CPU s", "client_cpu_s"),
        Column("mount CPU s", "server_cpu_s"),
    ),
    runs=2,
    quick_runs=1,
    warmups=0,
    derive=derive,
    audience="reader",
)
