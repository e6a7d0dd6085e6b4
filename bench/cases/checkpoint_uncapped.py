"""Cost of checkpoints on an HDFS without limits."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from bench.checkpoint.cluster import CappedHdfs
from bench.checkpoint.files import NAME, ORDINARY, PLAIN, STRIPED, FileKind, ensure, write
from bench.checkpoint.measure import derive, our_mount, run_client, sample
from bench.machine.page_cache import evict_everything
from bench.machine.tmpfs import tmpfs
from bench.model import (
    Case,
    Column,
    Sample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio_of,
    variant,
)
from testbed.processes import FuseProcess, tree_peak_bytes

_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES = 2**30, 2**28, 2**25
_DATANODES = 4
_STREAMS = 8
_BUDGET_BYTES = 2**29
_BUDGET_FLAGS = ("--memory", f"{_BUDGET_BYTES >> 20}MiB")
_NO_END = 2**62

Action = Callable[[Workspace], Sample]


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    size_bytes = workspace.sized(_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES)
    workspace.shared["size_bytes"] = size_bytes
    with (
        tmpfs(workspace.directory, 3 * size_bytes) as memory,
        CappedHdfs(workspace.directory / "hdfs", _DATANODES) as cluster,
    ):
        workspace.shared.update(memory=memory, cluster=cluster)
        workspace.shared["notes"] = [
            f"A file of {size_bytes >> 20} MiB in tmpfs (native, file), and on a real HDFS of "
            f"{_DATANODES} DataNodes without limits (hdfs), which shares the machine's two cores",
            "x8: eight files of an eighth of that each, at once; peak memory is the mount's "
            f"resident set at its highest, with a budget of {_BUDGET_BYTES >> 20} MiB",
            "The library is hdfs-native, reading the very parts that the mount reads, with 8 "
            "threads; CPU of the mount apart from that of the reader or writer",
        ]
        run_client("write_file", {"path": str(memory / NAME), "size_bytes": size_bytes})
        yield


def _variant(name: str, description: str, action: Action) -> Variant:
    def take(workspace: Workspace) -> Sample:
        evict_everything([])
        return action(workspace)

    return variant(name, description, take)


def _timed(
    workspace: Workspace,
    action: str,
    arguments: Mapping[str, object],
    server: FuseProcess | None = None,
) -> Sample:
    """Return a sample of one action of the client, by default on the whole size."""
    cluster: CappedHdfs = workspace.shared["cluster"]
    full = {"size_bytes": workspace.shared["size_bytes"], **arguments}
    taken = sample(cluster, lambda: run_client(action, full), server)
    if taken.moved_bytes != workspace.shared["size_bytes"] and full["size_bytes"] != _NO_END:
        each = full.get("paths")
        if not isinstance(each, list) or taken.moved_bytes != full["size_bytes"] * len(each):
            raise RuntimeError(f"moved {taken.moved_bytes} bytes only")
    gib = (taken.moved_bytes or 0) / 2**30
    figures: dict[str, float] = {"gib": gib}
    if server is not None:
        figures |= {
            "peak_bytes": float(tree_peak_bytes(server.pid)),
            "budget_bytes": float(_BUDGET_BYTES),
        }
        library_s_per_gib = workspace.shared.get(_library_of(action))
        if library_s_per_gib is not None:
            figures["over_library_s"] = taken.cpu_s["server"] - library_s_per_gib * gib
    return replace(taken, figures=figures)


def _library_of(action: str) -> str:
    return "library_write" if action.startswith("write") else "library_read"


def _native(workspace: Workspace) -> Sample:
    return _timed(workspace, "read_file", {"path": str(workspace.shared["memory"] / NAME)})


def _file_url(workspace: Workspace, folder: str) -> str:
    """Return the URL to mount; the striped file is made first if it is needed."""
    memory: Path = workspace.shared["memory"]
    if folder and not (memory / folder / NAME).exists():
        (memory / folder).mkdir(exist_ok=True)
        with our_mount(workspace, f"file://{memory}/{folder}") as server:
            path = str(server.mountpoint / NAME)
            run_client("write_file", {"path": path, "size_bytes": workspace.shared["size_bytes"]})
    return f"file://{memory}/{folder}".rstrip("/")


def _file_mounted(folder: str) -> Action:
    def action(workspace: Workspace) -> Sample:
        url = _file_url(workspace, folder)
        # The CPU time of HDFS's library is no reference for local files.
        others = {**workspace.shared, "library_read": None}
        with our_mount(workspace, url, "--read-only") as server:
            arguments = {"path": str(server.mountpoint / NAME)}
            return _timed(replace(workspace, shared=others), "read_file", arguments, server)

    return action


def _file_unmounted(action: str) -> Action:
    def take(workspace: Workspace) -> Sample:
        url = _file_url(workspace, "striped")
        arguments = {"url": url, "name": NAME}
        if action == "read_fsspec":
            arguments = {"url": f"{url}/{NAME}"}
        return _timed(workspace, action, arguments)

    return take


def _hdfs_library(workspace: Workspace) -> Sample:
    cluster: CappedHdfs = workspace.shared["cluster"]
    ensure(workspace, cluster, STRIPED)
    parts = [path for path in cluster.files("/striped") if path != STRIPED.path]
    arguments = {"url": cluster.url, "paths": parts, "threads": 8, "size_bytes": _NO_END}
    taken = _timed(workspace, "native_read", arguments)
    workspace.shared["library_read"] = sum(taken.cpu_s.values()) / taken.figures["gib"]
    return taken


def _hdfs_stream(workspace: Workspace) -> Sample:
    cluster: CappedHdfs = workspace.shared["cluster"]
    ensure(workspace, cluster, ORDINARY)
    return _timed(workspace, "native_read", {"url": cluster.url, "paths": [ORDINARY.path]})


def _hdfs_mounted(kind: FileKind) -> Action:
    def action(workspace: Workspace) -> Sample:
        cluster: CappedHdfs = workspace.shared["cluster"]
        ensure(workspace, cluster, kind)
        with our_mount(workspace, kind.url(cluster), "--read-only", *_BUDGET_FLAGS) as server:
            path = str(server.mountpoint / NAME)
            return _timed(workspace, "read_file", {"path": path}, server)

    return action


def _hdfs_unmounted(action: str) -> Action:
    def take(workspace: Workspace) -> Sample:
        cluster: CappedHdfs = workspace.shared["cluster"]
        ensure(workspace, cluster, STRIPED)
        url = f"{cluster.url}/{STRIPED.folder}"
        arguments = {"url": url, "name": NAME}
        if action == "read_fsspec":
            arguments = {"url": f"{url}/{NAME}"}
        return _timed(workspace, action, arguments)

    return take


def _hdfs_write_library(workspace: Workspace) -> Sample:
    cluster: CappedHdfs = workspace.shared["cluster"]
    taken = write(workspace, cluster, ORDINARY)
    gib = (taken.moved_bytes or 0) / 2**30
    workspace.shared["library_write"] = sum(taken.cpu_s.values()) / gib
    return replace(taken, figures={"gib": gib})


def _hdfs_write_mounted(kind: FileKind) -> Action:
    def action(workspace: Workspace) -> Sample:
        cluster: CappedHdfs = workspace.shared["cluster"]
        cluster.empty_folder(f"/{kind.folder}")
        with our_mount(workspace, kind.url(cluster), *kind.flags, *_BUDGET_FLAGS) as server:
            path = server.mountpoint / NAME
            taken = _timed(workspace, "write_file", {"path": str(path)}, server)
        cluster.written[kind.path] = workspace.shared["size_bytes"]
        return taken

    return action


def _several(workspace: Workspace, directory: Path) -> dict[str, object]:
    return {
        "paths": [str(directory / f"{number}") for number in range(_STREAMS)],
        "size_bytes": workspace.shared["size_bytes"] // _STREAMS,
    }


def _hdfs_several(verb: str) -> Action:
    """Return the action that reads files written before, or writes them anew."""

    def action(workspace: Workspace) -> Sample:
        cluster: CappedHdfs = workspace.shared["cluster"]
        flags = list(_BUDGET_FLAGS)
        if verb == "write":
            cluster.empty_folder("/several")
        else:
            flags.append("--read-only")
        with our_mount(workspace, f"{cluster.url}/several", *flags) as server:
            arguments = _several(workspace, server.mountpoint)
            return _timed(workspace, f"{verb}_files", arguments, server)

    return action


def _derive(taken: Sample) -> Mapping[str, float]:
    gib = taken.figures.get("gib")
    per_gib = {f"{who}_cpu_s_per_gib": s / gib for who, s in taken.cpu_s.items()} if gib else {}
    return {**derive(taken), **per_gib}


_CPU = at_most(0.3)
_NATIVE = at_least(0.6)
_MEMORY = at_most(1)

CASE = Case(
    name="checkpoint-uncapped",
    description="Checkpoints where no DataNode is the limit: throughput, CPU and memory.",
    prepare=_prepare,
    variants=(
        _variant("native", "the tmpfs itself", _native),
        _variant("file", "bootseer mount of file://, ordinary file", _file_mounted("")),
        _variant("file striped", "bootseer mount of file://, striped", _file_mounted("striped")),
        _variant("file fsspec", "Bootseer's fsspec, striped", _file_unmounted("read_fsspec")),
        _variant("file read_into", "Bootseer's read_into, striped", _file_unmounted("read_into")),
        _variant("hdfs write library", "hdfs-native, one stream, written", _hdfs_write_library),
        _variant("hdfs write", "bootseer mount, striped, written", _hdfs_write_mounted(STRIPED)),
        _variant("hdfs write plain", "bootseer mount, plain", _hdfs_write_mounted(PLAIN)),
        _variant("hdfs write x8", "bootseer mount, eight files at once", _hdfs_several("write")),
        _variant("hdfs stream", "hdfs-native, one stream", _hdfs_stream),
        _variant("hdfs library", "hdfs-native, the parts, 8 threads", _hdfs_library),
        _variant("hdfs", "bootseer mount, striped", _hdfs_mounted(STRIPED)),
        _variant("hdfs plain", "bootseer mount, plain", _hdfs_mounted(PLAIN)),
        _variant("hdfs ordinary", "bootseer mount, ordinary file", _hdfs_mounted(ORDINARY)),
        _variant("hdfs fsspec", "Bootseer's fsspec, striped", _hdfs_unmounted("read_fsspec")),
        _variant("hdfs read_into", "Bootseer's read_into, striped", _hdfs_unmounted("read_into")),
        _variant("hdfs x8", "bootseer mount, eight files at once", _hdfs_several("read")),
    ),
    ratios=(
        ratio_of(
            "hdfs: CPU of the mount over the library's, s/GiB",
            ("hdfs", "over_library_s"),
            ("hdfs", "gib"),
            _CPU,
        ),
        ratio_of(
            "hdfs write: CPU of the mount over the library's, s/GiB",
            ("hdfs write", "over_library_s"),
            ("hdfs write", "gib"),
            _CPU,
        ),
        ratio_of(
            "hdfs x8: CPU of the mount over the library's, s/GiB",
            ("hdfs x8", "over_library_s"),
            ("hdfs x8", "gib"),
        ),
        ratio_of("file / native, throughput", ("native", "wall_s"), ("file", "wall_s"), _NATIVE),
        ratio_of(
            "file striped / native, throughput",
            ("native", "wall_s"),
            ("file striped", "wall_s"),
            _NATIVE,
        ),
        ratio_of(
            "hdfs x8: peak memory / budget",
            ("hdfs x8", "peak_bytes"),
            ("hdfs x8", "budget_bytes"),
            _MEMORY,
        ),
        ratio_of(
            "hdfs write x8: peak memory / budget",
            ("hdfs write x8", "peak_bytes"),
            ("hdfs write x8", "budget_bytes"),
            _MEMORY,
        ),
        ratio_of("hdfs / hdfs stream, throughput", ("hdfs stream", "wall_s"), ("hdfs", "wall_s")),
        ratio_of("hdfs / hdfs library, time", ("hdfs", "wall_s"), ("hdfs library", "wall_s")),
    ),
    columns=(
        Column("MB/s", "mb_per_s", digits=0),
        Column("mount CPU s/GiB", "server_cpu_s_per_gib"),
        Column("client CPU s/GiB", "client_cpu_s_per_gib"),
        Column("mount peak MiB", "peak_bytes", scale=2**-20, digits=0),
    ),
    runs=3,
    quick_runs=1,
    warmups=0,
    derive=_derive,
)
