"""Reading and writing checkpoints on an HDFS whose DataNodes are the bottleneck."""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping

from bench.checkpoint.cluster import CappedHdfs, data_folder
from bench.checkpoint.content import BLOCK_BYTES, Content
from bench.checkpoint.files import (
    CODED_3_2,
    CODED_6_3,
    CODED_XOR,
    NAME,
    ORDINARY,
    PLAIN,
    SHORT,
    STRIPED,
    STRIPED_TWICE,
    FileKind,
    ensure,
    write,
)
from bench.checkpoint.limits import limiter
from bench.checkpoint.measure import (
    derive,
    fresh_mountpoint,
    log_of,
    our_mount,
    run_client,
    run_timed,
    sample,
)
from bench.checkpoint.peers import libhdfs_environment, program, rclone_mount, rclone_remote
from bench.machine.page_cache import evict_everything
from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio_of,
    variant,
)
from bench.site import assemble_hdfs
from testbed.needs import MissingError

_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES = 2**30, 2**28, 2**25
# Room for all files of all kinds on both clusters, and for deleted blocks that are not freed yet.
_KEPT_SIZES = 14
# HDFS reserves a whole block for each block that is being written: 8 parts, twice, of 128 MiB.
_LEAST_BYTES = 3 * 2**30
# In sum below half of the rate at which two cores move bytes between clients and DataNodes.
_RATES = {4: 50e6, 8: 30e6}
_SLOWER = 10
_RANGE_BYTES, _RANGE_THREADS = 8 << 20, 16
_RCLONE, _HDFS_CLI = ("rclone", "rclone"), ("hdfs-cli", "hdfs")


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["size_bytes"] = workspace.sized(_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES)
    _fetch(workspace)
    with contextlib.ExitStack() as stack:
        size_bytes = workspace.shared["size_bytes"]
        folder, where = stack.enter_context(
            data_folder(workspace, max(_KEPT_SIZES * size_bytes, _LEAST_BYTES))
        )
        limits = stack.enter_context(limiter())
        clusters = {
            count: stack.enter_context(CappedHdfs(folder / f"hdfs-{count}", count, rate, limits))
            for count, rate in _RATES.items()
        }
        workspace.shared["clusters"] = clusters
        # This also makes the JVMs compile the code that they need.
        for cluster in clusters.values():
            ensure(workspace, cluster, ORDINARY)
            ensure(workspace, cluster, SHORT)
        size_mib = size_bytes >> 20
        workspace.shared["notes"] = [
            "Real HDFS 3.3.6 (one NameNode; its DataNodes in one JVM); DataNodes, each way: "
            + ", ".join(f"{count} of {rate / 1e6:g} MB/s" for count, rate in _RATES.items())
            + f"; {limits.note}",
            where,
            f"Files of {size_mib} MiB at replication 1, blocks of 128 MiB, read from start to end; "
            f"clients of one stream move {SHORT.size_bytes(workspace) >> 20} MiB and coded files "
            f"have {CODED_3_2.size_bytes(workspace) >> 20} MiB, since what counts is their rate",
            "Placement allows: the bytes of the busiest DataNode over its rate, as share of the "
            "time taken; evenly: all bytes over all rates",
            "Each run has a process and a mount of its own; ours reads what ours wrote in the same "
            "round; CPU is that of client and mount",
        ]
        yield


def _fetch(workspace: Workspace) -> None:
    """Fetch programs from outside; a variant whose program is missing is skipped later."""
    assemble_hdfs()
    for package, name in (_RCLONE, _HDFS_CLI):
        with contextlib.suppress(MissingError):
            program(workspace, package, name)
    with contextlib.suppress(MissingError):
        libhdfs_environment(workspace)


Action = Callable[[Workspace, CappedHdfs], Sample]


def _variant(count: int, name: str, description: str, action: Action) -> Variant:
    def take(workspace: Workspace) -> Sample:
        evict_everything([])
        taken = action(workspace, workspace.shared["clusters"][count])
        if workspace.is_smoke and taken.figures["network_bytes"] < (taken.moved_bytes or 0):
            raise RuntimeError("the links of the DataNodes counted fewer bytes than were moved")
        return taken

    return variant(f"{count}: {name}", f"{description} ({count} DataNodes)", take)


def _write(kind: FileKind) -> Action:
    return lambda workspace, cluster: write(workspace, cluster, kind)


def _read_mounted(kind: FileKind) -> Action:
    def action(workspace: Workspace, cluster: CappedHdfs) -> Sample:
        ensure(workspace, cluster, kind)
        with our_mount(workspace, kind.url(cluster), "--read-only") as server:
            arguments = {"path": str(server.mountpoint / NAME)}
            return sample(cluster, lambda: _client("read_file", kind, workspace, arguments), server)

    return action


def _read_unmounted(action_name: str, kind: FileKind) -> Action:
    def action(workspace: Workspace, cluster: CappedHdfs) -> Sample:
        ensure(workspace, cluster, kind)
        url = f"{cluster.url}/{kind.folder}"
        arguments = {"url": url, "name": NAME}
        if action_name == "read_fsspec":
            arguments = {"url": f"{url}/{NAME}"}
        return sample(cluster, lambda: _client(action_name, kind, workspace, arguments))

    return action


def _read_native(kind: FileKind, *, ranged: bool = False) -> Action:
    def action(workspace: Workspace, cluster: CappedHdfs) -> Sample:
        ensure(workspace, cluster, kind)
        arguments: dict[str, object] = {"url": cluster.url, "paths": [kind.path]}
        if ranged:
            arguments |= {"threads": _RANGE_THREADS, "range_bytes": _RANGE_BYTES}
        return sample(cluster, lambda: _client("native_read", kind, workspace, arguments))

    return action


def _read_slowed(kind: FileKind) -> Action:
    inner = _read_mounted(kind)

    def action(workspace: Workspace, cluster: CappedHdfs) -> Sample:
        ensure(workspace, cluster, kind)
        rates = [cluster.bytes_per_s] * cluster.count
        rates[0] = (cluster.bytes_per_s or 0) / _SLOWER
        with cluster.at_rates(rates):
            return inner(workspace, cluster)

    return action


def _client(
    action: str,
    kind: FileKind,
    workspace: Workspace,
    arguments: Mapping[str, object],
    env: Mapping[str, str] | None = None,
) -> Mapping[str, float]:
    size_bytes = kind.size_bytes(workspace)
    outcome = run_client(action, {**arguments, "size_bytes": size_bytes}, env)
    if outcome["moved_bytes"] != size_bytes:
        raise RuntimeError(f"read {outcome['moved_bytes']} of {size_bytes} bytes")
    return outcome


def _read_rclone_mounted(workspace: Workspace, cluster: CappedHdfs) -> Sample:
    rclone = program(workspace, *_RCLONE)
    ensure(workspace, cluster, SHORT)
    mountpoint = fresh_mountpoint(workspace)
    folder = f"/{SHORT.folder}"
    with rclone_mount(rclone, cluster.address, folder, mountpoint, log_of(mountpoint)) as server:
        arguments = {"path": str(mountpoint / NAME)}
        return sample(cluster, lambda: _client("read_file", SHORT, workspace, arguments), server)


def _read_hdfs_cli(workspace: Workspace, cluster: CappedHdfs) -> Sample:
    hdfs = program(workspace, *_HDFS_CLI)
    ensure(workspace, cluster, SHORT)
    command = ["sh", "-c", f"{shlex.quote(str(hdfs))} cat {SHORT.path} > /dev/null"]
    return sample(cluster, lambda: _program(workspace, command, _go_environment(cluster)))


def _read_libhdfs(workspace: Workspace, cluster: CappedHdfs) -> Sample:
    env = libhdfs_environment(workspace)
    ensure(workspace, cluster, SHORT)
    arguments = {"address": cluster.address, "path": SHORT.path}
    return sample(cluster, lambda: _client("libhdfs_read", SHORT, workspace, arguments, env))


def _write_rclone(workspace: Workspace, cluster: CappedHdfs) -> Sample:
    rclone = program(workspace, *_RCLONE)
    cluster.empty_folder("/peer")
    target = rclone_remote(cluster.address, f"/peer/{NAME}")
    command = [str(rclone), "copyto", "--config", "/dev/null", str(_local(workspace)), target]
    return sample(cluster, lambda: _program(workspace, command, {}))


def _write_hdfs_cli(workspace: Workspace, cluster: CappedHdfs) -> Sample:
    hdfs = program(workspace, *_HDFS_CLI)
    cluster.empty_folder("/peer")
    command = [str(hdfs), "put", str(_local(workspace)), f"/peer/{NAME}"]
    return sample(cluster, lambda: _program(workspace, command, _go_environment(cluster)))


def _go_environment(cluster: CappedHdfs) -> dict[str, str]:
    return {"HADOOP_NAMENODE": cluster.address, "HADOOP_USER_NAME": "hdfs"}


def _program(
    workspace: Workspace, command: list[str], env: Mapping[str, str]
) -> Mapping[str, float]:
    return {**run_timed(command, env), "moved_bytes": SHORT.size_bytes(workspace)}


def _local(workspace: Workspace) -> str:
    """Return the path of a local file of the size of the short one, made once."""
    path = workspace.directory / "local"
    if not path.exists():
        content = Content()
        with path.open("wb") as file:
            for index in range(SHORT.size_bytes(workspace) // BLOCK_BYTES):
                file.write(content.block(index))
    return str(path)


def _variants(count: int) -> Iterator[Variant]:
    def one(name: str, description: str, action: Action) -> Variant:
        return _variant(count, name, description, action)

    yield one("write mount", "bootseer mount, striped, written", _write(STRIPED))
    yield one("write mount plain", "bootseer mount, plain layout, written", _write(PLAIN))
    yield one("write stream", "hdfs-native, one stream, written", _write(SHORT))
    yield one("write rclone", "rclone copyto", _write_rclone)
    if count == 8:
        yield one("write RS-3-2", "hdfs-native, erasure coded, written", _write(CODED_3_2))
    else:
        yield one("write hdfs-cli", "hdfs put (Go)", _write_hdfs_cli)
    yield one("mount", "bootseer mount, striped", _read_mounted(STRIPED))
    yield one("mount plain", "bootseer mount, plain layout", _read_mounted(PLAIN))
    yield one("mount ordinary", "bootseer mount, ordinary file", _read_mounted(ORDINARY))
    yield one("fsspec", "Bootseer's fsspec, striped", _read_unmounted("read_fsspec", STRIPED))
    yield one("read_into", "Bootseer's read_into, striped", _read_unmounted("read_into", STRIPED))
    yield one("stream", "hdfs-native, one stream", _read_native(SHORT))
    yield one(
        "ranges",
        f"hdfs-native, {_RANGE_THREADS} threads, ranges of 8 MiB of an ordinary file",
        _read_native(ORDINARY, ranged=True),
    )
    yield one("rclone mount", "rclone mount, its defaults", _read_rclone_mounted)
    if count == 8:
        yield one("RS-3-2", "hdfs-native, RS-3-2-1024k", _read_native(CODED_3_2))
        yield one("RS-6-3", "hdfs-native, RS-6-3-1024k", _read_native(CODED_6_3))
        yield one("mount twice", "striped, replication 2", _read_mounted(STRIPED_TWICE))
        yield one(
            "mount twice, one slow",
            f"the same with one DataNode {_SLOWER} times slower",
            _read_slowed(STRIPED_TWICE),
        )
    else:
        yield one("XOR-2-1", "hdfs-native, XOR-2-1-1024k", _read_native(CODED_XOR))
        yield one("hdfs-cli", "hdfs cat (Go)", _read_hdfs_cli)
        yield one("pyarrow", "pyarrow over libhdfs, one stream", _read_libhdfs)


def _ratios(count: int) -> Iterator[Ratio]:
    def rate(top: str, bottom: str, limit: float | None = None) -> Ratio:
        return ratio_of(
            f"{count}: {top} / {bottom}, throughput",
            (f"{count}: {top}", "mb_per_s"),
            (f"{count}: {bottom}", "mb_per_s"),
            at_least(limit) if limit else None,
        )

    def share(name: str, limit: float | None = None) -> Ratio:
        return ratio_of(
            f"{count}: {name}, of what the placement allows",
            (f"{count}: {name}", "allowed_s"),
            (f"{count}: {name}", "wall_s"),
            at_least(limit) if limit else None,
        )

    over_stream = {4: 3.3, 8: 5.0}[count]
    yield share("mount", 0.9)
    yield share("write mount", 0.9)
    yield rate("mount", "stream", over_stream)
    yield rate("write mount", "write stream", 3.0)
    for name in ("mount plain", "mount ordinary", "fsspec", "read_into"):
        yield share(name)
        yield rate(name, "stream")
    yield share("write mount plain")
    yield rate("write mount plain", "write stream")
    yield rate("write mount", "write rclone")
    yield rate("mount ordinary", "ranges")
    yield rate("mount", "rclone mount")
    if count == 8:
        yield rate("mount", "RS-3-2", 1.3)
        yield rate("mount", "RS-6-3")
        yield rate("write mount", "write RS-3-2")
        yield ratio_of(
            f"8: mount twice, one DataNode {_SLOWER} times slower / none, time",
            ("8: mount twice, one slow", "wall_s"),
            ("8: mount twice", "wall_s"),
            at_most(1.3),
        )
    else:
        yield rate("mount", "XOR-2-1")
        yield rate("mount", "hdfs-cli")
        yield rate("mount", "pyarrow")


CASE = Case(
    name="checkpoint",
    description="Checkpoints on an HDFS whose DataNodes are capped: read and written.",
    prepare=_prepare,
    variants=tuple(variant for count in _RATES for variant in _variants(count)),
    ratios=tuple(ratio for count in _RATES for ratio in _ratios(count)),
    columns=(
        Column("MB/s", "mb_per_s", digits=0),
        Column("placement allows, share", "allowed_share"),
        Column("evenly, share", "even_share"),
        Column("busiest DataNode MB", "busiest_bytes", scale=1e-6, digits=0),
        Column("network MB", "network_bytes", scale=1e-6, digits=0),
        Column("CPU s/GiB", "cpu_s_per_gib"),
        Column("mount CPU s", "server_cpu_s"),
    ),
    runs=2,
    quick_runs=1,
    warmups=0,
    derive=derive,
    audience="reader",
)
