"""Which stripe unit and count are the best defaults?"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from bench.checkpoint.cluster import CappedHdfs, data_folder
from bench.checkpoint.files import NAME, STRIPED, ensure, write
from bench.checkpoint.limits import limiter
from bench.checkpoint.measure import derive, our_mount, run_client, sample
from bench.containers.services import assemble_hdfs
from bench.machine.page_cache import evict_everything
from bench.model import (
    Case,
    Column,
    Figure,
    Ratio,
    Sample,
    TakeSample,
    Variant,
    Workspace,
)

_FULL_BYTES, _QUICK_BYTES = 2**29, 2**27
_DATANODES, _BYTES_PER_S = 8, 30e6
# Two files, and what was just deleted.
_KEPT_SIZES = 8
_UNITS_MIB = (1, 2, 4, 8, 16)
_COUNTS = (2, 4, 8, 16)
_DEFAULT = "4 MiB x 8"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    size_bytes = _QUICK_BYTES if workspace.is_quick else _FULL_BYTES
    workspace.shared["size_bytes"] = size_bytes
    assemble_hdfs()
    with (
        data_folder(workspace, _KEPT_SIZES * size_bytes) as (folder, where),
        limiter() as limits,
        CappedHdfs(folder / "hdfs", _DATANODES, _BYTES_PER_S, limits) as cluster,
    ):
        workspace.shared["cluster"] = cluster
        ensure(workspace, cluster, STRIPED)  # lets the JVM compile what it will need
        workspace.shared["notes"] = [
            f"Real HDFS with {_DATANODES} DataNodes of {_BYTES_PER_S / 1e6:g} MB/s each way: "
            f"{limits.note}",
            where,
            f"Replication 1; a file of {size_bytes >> 20} MiB is written through the mount and "
            "read through another one",
            "Placement allows: the bytes of the busiest DataNode over its rate, as share of the "
            "time taken; evenly: all bytes over all rates",
            "CPU is that of the mount",
        ]
        yield


def _variant(unit_mib: int, count: int) -> Variant:
    flags = ("--stripe-unit", f"{unit_mib}MiB", "--stripe-count", str(count))
    kind = replace(STRIPED, folder=f"striped-{unit_mib}-{count}", flags=flags)

    def take(workspace: Workspace) -> Sample:
        cluster: CappedHdfs = workspace.shared["cluster"]
        evict_everything([])
        written = write(workspace, cluster, kind)
        with our_mount(workspace, kind.url(cluster), "--read-only") as server:
            arguments = {
                "path": str(server.mountpoint / NAME),
                "size_bytes": workspace.shared["size_bytes"],
            }
            read = sample(cluster, lambda: run_client("read_file", arguments), server)
        cluster.empty_folder(f"/{kind.folder}")
        figures: dict[str, float] = {}
        for verb, each in (("read", read), ("write", written)):
            figures |= {f"{verb}_{name}": value for name, value in derive(each).items()}
            figures[f"{verb}_s"] = each.wall_s
            figures[f"{verb}_mount_cpu_s"] = each.cpu_s["server"]
        # One after the other: a save and a load.
        return Sample(read.wall_s + written.wall_s, figures=figures)

    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        yield lambda: take(workspace)

    name = f"{unit_mib} MiB x {count}"
    return Variant(name, f"stripe unit {unit_mib} MiB, {count} parts", session)


def _ratios() -> Iterator[Ratio]:
    for figure, what in (("read_s", "read time"), ("write_s", "write time")):
        for other in (f"{unit} MiB x 8" for unit in _UNITS_MIB if unit != 4):
            yield Ratio(
                f"{other} / {_DEFAULT}, {what}", Figure(other, figure), Figure(_DEFAULT, figure)
            )
        for other in (f"4 MiB x {count}" for count in _COUNTS if count != 8):
            yield Ratio(
                f"{other} / {_DEFAULT}, {what}", Figure(other, figure), Figure(_DEFAULT, figure)
            )


CASE = Case(
    name="checkpoint-sweep",
    description="Stripe unit and stripe count through the mount, on 8 capped DataNodes.",
    prepare=_prepare,
    variants=tuple(_variant(unit_mib, count) for unit_mib in _UNITS_MIB for count in _COUNTS),
    ratios=tuple(_ratios()),
    columns=(
        Column("read MB/s", "read_mb_per_s", digits=0),
        Column("placement allows, share", "read_allowed_share"),
        Column("evenly, share", "read_even_share"),
        Column("write MB/s", "write_mb_per_s", digits=0),
        Column("placement allows, share", "write_allowed_share"),
        Column("evenly, share", "write_even_share"),
        Column("read CPU s", "read_mount_cpu_s"),
        Column("write CPU s", "write_mount_cpu_s"),
    ),
    runs=2,
    quick_runs=1,
    warmups=0,
)
