"""Rows of the tables of ratios in the README and docs/benchmarks.md.

A row names its ratios by case and name; their values and targets come from bench/results.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.reporting.result import Result
from bench.reporting.summary import RatioResult
from bench.reporting.tables import Row


@dataclass(frozen=True, slots=True)
class Shown:
    """Ratio of a case, and its unit: a multiple ("x"), a share (" %"), or none ("")."""

    case: str
    ratio: str
    unit: str = "x"


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Row of the tables: subject, reference, and a text with a `{}` for each ratio."""

    what: str
    against: str
    text: str
    ratios: tuple[Shown, ...]
    is_in_readme: bool = False


def _row(what: str, against: str, text: str, *ratios: Shown, readme: bool = False) -> PeerRow:
    return PeerRow(what, against, text, ratios, readme)


def _of(case: str, ratio: str) -> Shown:
    return Shown(case, ratio)


def _percent(case: str, ratio: str) -> Shown:
    return Shown(case, ratio, " %")


def _plain(case: str, ratio: str) -> Shown:
    return Shown(case, ratio, "")


_SAME = "the same"
_TORCH = "`import torch` in a 1.2 GB image, new node, 1 Gbit: replay"
_PANDAS = "a script that imports torch and pandas and reads a data file: replay"
_SHELL = "a shell in that image, whose start reads almost nothing: replay"
_ENVIRONMENT = (
    "environment of 1.7 GB and 46,000 files, until `import torch, transformers` is done: "
    "mounted, 1 Gbit"
)

ROWS = (
    _row("second launch of one job, until ready", "its first launch, which records",
         "**{}** faster", _of("launch", "first / second, whole launch"), readme=True),
    _row("&nbsp;&nbsp;image stage / environment / checkpoint", _SAME, "{} / {} / {} faster",
         *(_of("launch", f"first / second, {stage}")
           for stage in ("image", "environment", "checkpoint"))),
    _row("&nbsp;&nbsp;bytes of the image moved", "the whole image", "{}",
         _percent("launch", "bytes moved by the second image stage / image")),
    _row("a start that Bootseer cannot help: bare `bootseer run` / first start with a set-up",
         "the same start without Bootseer", "{} / {} the CPU",
         _of("overhead", "wrapped / plain, CPU"), _of("overhead", "first start / plain, CPU")),
    _row("&nbsp;&nbsp;the store refuses connections / never answers", _SAME, "{} / {} the time",
         _of("overhead", "store refuses / plain, time"),
         _of("overhead", "store silent / plain, time")),
    _row(_TORCH, "containerd 2.1 / 1.6, pull and run", "**{}** / **{}** the time",
         _of("image", "replay / containerd 2.1, time"),
         _of("image", "replay / containerd 1.6, time"), readme=True),
    _row(_SAME, "SOCI", "**{}** the time, {} the bytes", _of("image", "replay / soci, time"),
         _of("image", "replay / soci, bytes"), readme=True),
    _row(_SAME, "containerd, all on the node already", "**{}** the time",
         _of("image", "replay / containerd local, time")),
    _row("&nbsp;&nbsp;indexed, never recorded", "SOCI", "**{}** the time",
         _of("image", "lazy / soci, time")),
    _row("first start of that image, not indexed by Bootseer", "SOCI with its index / without",
         "{} / **{}** the time", _of("image", "unindexed / soci, time"),
         _of("image", "unindexed / soci unindexed, time"), readme=True),
    _row(_SAME, "containerd 1.6, pull and run", "**{}** the time",
         _of("image", "unindexed / containerd 1.6, time")),
    _row("&nbsp;&nbsp;layers left in the registry, with seek points", "SOCI with its index",
         "{} the time, {} the bytes", _of("image", "seek points / soci, time"),
         _of("image", "seek points / soci, bytes")),
    _row("`import torch` at 200 Mbit: replay", "SOCI / containerd 2.1, pull and run",
         "**{}** / **{}** the time", _of("image-slow-line", "replay / soci, time"),
         _of("image-slow-line", "replay / containerd 2.1, time")),
    _row(_PANDAS, "SOCI / containerd, all on the node already", "{} / {} the time",
         _of("image-pandas", "replay / soci, time"),
         _of("image-pandas", "replay / containerd local, time")),
    _row(_SHELL, "eStargz", "**{}** the time",
         _of("image-shell", "replay / estargz, time"), readme=True),
    _row(_SAME, "SOCI / containerd 2.1, pull and run", "{} / {} the time",
         _of("image-shell", "replay / soci, time"),
         _of("image-shell", "replay / containerd 2.1, time")),
    _row("a pod's first line on an empty node, image with torch: replay",
         "the same pod, its image pulled by containerd 1.7", "**{}** faster",
         _of("kubernetes", "pulled / replayed, time"), readme=True),
    _row(_ENVIRONMENT, "uv with an empty cache, wheels behind the same line", "**{}** faster",
         _of("env", "uv line / mount, until imported"), readme=True),
    _row(_SAME, "uv with an empty cache, wheels on the node", "{} faster",
         _of("env", "uv / mount, until imported")),
    _row(_SAME, "pip with its wheels on the node", "**{}** faster",
         _of("env", "pip / mount, until imported")),
    _row(_SAME, "the same tree on the node's disk, the import alone", "**{}** the time",
         _of("env", "mount / local, import")),
    _row("&nbsp;&nbsp;bytes moved", "the stored snapshot", "{}",
         _percent("env", "mount, bytes / stored snapshot")),
    _row("&nbsp;&nbsp;until it is mounted, its files still to be fetched", "0.3 s",
         "{} the time", _of("env", "mount, until ready / 0.3 s")),
    _row("&nbsp;&nbsp;eight nodes at once behind one line", "uv with an empty cache on each",
         "**{}** faster", _of("env-nodes", "uv line / mount, all nodes")),
    _row("&nbsp;&nbsp;the same, slowest node", "the fastest node", "**{}** the time",
         _of("env-nodes", "mount, slowest node / fastest")),
    _row("&nbsp;&nbsp;the same, set-ups run by nodes that start at once", "one", "**{}**",
         _of("env-nodes", "first start, set-ups run / 1")),
    _row("&nbsp;&nbsp;linked from what the node has", "`cp -al`", "**{}** the time",
         _of("env", "link / cp -al")),
    _row("&nbsp;&nbsp;extracted from a store on the node", "`zstd -d | tar x`", "{} as fast",
         _of("env", "zstd tar / extract near")),
    _row(_SAME, "the least that C can do", "{} the time", _of("env", "extract near / C floor")),
    _row("&nbsp;&nbsp;the same, until the import is done",
         "uv with an empty cache, wheels on the node", "**{}** faster",
         _of("env", "uv / extract near, until imported")),
    _row("16 / 64 nodes that begin at once, until the slowest one has an object, by fan-out",
         "one node alone", "{} / {} the time", _of("fanout", "16 nodes / 1 node"),
         _of("fanout", "64 nodes / 1 node"), readme=True),
    _row("&nbsp;&nbsp;bytes that the store sends to 64 nodes", "the object",
         "**{}**", _of("fanout", "64 nodes, copies from the store")),
    _row("&nbsp;&nbsp;32 nodes of which 2 die, 1 freezes and 3 have a tenth of the line",
         "one node alone", "{} the time", _of("fanout", "32, 6 faulty / 1 node")),
    _row("&nbsp;&nbsp;10,000 simulated nodes: all sound / 1 % faulty", "one simulated node alone",
         "{} / {} the time", _of("fanout", "10,000 simulated, times one node"),
         _of("fanout", "10,000 simulated, 1 % faulty, times one node")),
    _row("first training step with TorchInductor, caches kept", "nothing kept", "**{}** faster",
         _of("compile", "nothing / bootseer, until stepped"), readme=True),
    _row("a killed worker of four under torchrun is back: `--preload --linger`",
         "plain torchrun", "**{}** faster", _of("restart", "plain / hot, worker killed"),
         readme=True),
    _row("&nbsp;&nbsp;memory of the four workers after their imports", _SAME, "{}",
         _of("restart", "hot / plain, memory of four workers")),
    _row("checkpoint of 1 GiB, 8 DataNodes of 30 MB/s each: read by the mount",
         "one stream of hdfs-native", "**{}** throughput",
         _of("checkpoint", "8: mount / stream, throughput"), readme=True),
    _row("&nbsp;&nbsp;an ordinary file, read by the mount",
         "one stream / 16 threads of hdfs-native",
         "{} / {} throughput", _of("checkpoint", "8: mount ordinary / stream, throughput"),
         _of("checkpoint", "8: mount ordinary / ranges, throughput"), readme=True),
    _row("&nbsp;&nbsp;written by the mount", "one stream of hdfs-native", "**{}** throughput",
         _of("checkpoint", "8: write mount / write stream, throughput")),
    _row("&nbsp;&nbsp;on 4 DataNodes of 50 MB/s: read / written", _SAME,
         "**{}** / **{}** throughput", _of("checkpoint", "4: mount / stream, throughput"),
         _of("checkpoint", "4: write mount / write stream, throughput")),
    _row("&nbsp;&nbsp;read, 8 / 4 DataNodes", "all that the DataNodes can give", "**{}** / **{}**",
         _percent("checkpoint", "8: mount, of what the placement allows"),
         _percent("checkpoint", "4: mount, of what the placement allows")),
    _row("&nbsp;&nbsp;read straight into a buffer, 8 / 4 DataNodes", _SAME, "{} / {}",
         _percent("checkpoint", "8: read_into, of what the placement allows"),
         _percent("checkpoint", "4: read_into, of what the placement allows")),
    _row("&nbsp;&nbsp;written, 8 / 4 DataNodes", _SAME, "**{}** / **{}**",
         _percent("checkpoint", "8: write mount, of what the placement allows"),
         _percent("checkpoint", "4: write mount, of what the placement allows")),
    _row("&nbsp;&nbsp;read, 8 DataNodes", "HDFS erasure coding RS-3-2 / RS-6-3",
         "**{}** / {} throughput", _of("checkpoint", "8: mount / RS-3-2, throughput"),
         _of("checkpoint", "8: mount / RS-6-3, throughput")),
    _row("&nbsp;&nbsp;read, 8 DataNodes", "rclone mount", "{} throughput",
         _of("checkpoint", "8: mount / rclone mount, throughput")),
    _row("&nbsp;&nbsp;read, one DataNode ten times slower", "none slower", "**{}** the time",
         _of("checkpoint", "8: mount twice, one DataNode 10 times slower / none, time")),
    _row("checkpoint of 256 MiB in a bucket (Ceph's gateway on the same two cores): read / written",
         "boto3", "**{}** / **{}** throughput", _of("s3", "read against boto3, throughput"),
         _of("s3", "write against boto3, throughput"), readme=True),
    _row("&nbsp;&nbsp;the same", "s5cmd / rclone, which copy one object; read",
         "{} / {} throughput", _of("s3", "read against s5cmd, throughput"),
         _of("s3", "read against rclone, throughput"), readme=True),
    _row("&nbsp;&nbsp;the same", "s5cmd / rclone, written", "{} / {} throughput",
         _of("s3", "write against s5cmd, throughput"),
         _of("s3", "write against rclone, throughput")),
    _row("a model of 1 GiB on 4 such DataNodes through the mount: safetensors / torch.load",
         "through rclone mount", "{} / {} the time",
         _of("checkpoint-load", "safetensors / rclone safetensors, time"),
         _of("checkpoint-load", "torch.load / rclone torch.load, time")),
    _row("an ordinary file in a shared folder, read by the checkpoint mount", "tmpfs itself",
         "**{}** throughput", _of("checkpoint-uncapped", "file / native, throughput")),
    _row("&nbsp;&nbsp;a striped file", _SAME, "{} throughput",
         _of("checkpoint-uncapped", "file striped / native, throughput")),
    _row("a thousand files of 4 KiB on a checkpoint mount: made / overwritten / read",
         "the folder itself, in memory", "{} / {} / {} the time",
         *(_of("checkpoint-small", f"mount / folder, {part} files, time")
           for part in ("new", "overwritten", "read"))),
    _row("CPU of the mount, no DataNode capped: reading / writing",
         "the client library, the very same parts", "**{}** / {} s per GiB on top",
         *(_plain("checkpoint-uncapped", f"{of}: CPU of the mount over the library's, s/GiB")
           for of in ("hdfs", "hdfs write"))),
    _row("slow nodes named in generated starts of 10,000, 1 to 100 of them faulty", "",
         "F1 of **{}**, right cause {}", _plain("profile", "1 to 100 faulty, F1 for nodes"),
         _percent("profile", "1 to 100 faulty, right cause of those named")),
    _row("&nbsp;&nbsp;healthy nodes that were slow once counted as wrong",
         "Minder on its own faults: 0.893", "F1 of {}",
         _plain("profile", "1 to 100 faulty, F1, nodes that were slow once counted as wrong")),
    _row("&nbsp;&nbsp;4 million stages reported from a store: time / memory / page",
         "30 s / 2 GiB / 10 MB", "{} / {} / {}",
         *(_of("report", f"4 million stages from a store, {of}")
           for of in ("time / 30 s", "memory / 2 GiB", "page / 10 MB"))),
    _row("&nbsp;&nbsp;the same from a folder, as nodes note them", "30 s", "{} the time",
         _of("report", "4 million stages from a folder, time / 30 s")),
    _row("numpy and pyarrow imported from a slow file system: `bootseer warm`, 4 KiB a request",
         "not warmed", "**{}** faster", _of("warm", "cold_4k / warm_4k, time")),
    _row("FUSE sequential read, `direct_io`", "mfusepy (libfuse 3) as it comes",
         "**{}** throughput at {} the CPU", _of("fuse-read", "direct_io / mfusepy, throughput"),
         _of("fuse-read", "direct_io / mfusepy, server CPU")),
    _row(_SAME, "mfusepy with its `direct_io` on", "{} throughput at {} the CPU",
         _of("fuse-read", "direct_io / mfusepy_direct, throughput"),
         _of("fuse-read", "direct_io / mfusepy_direct, server CPU")),
    _row(_SAME, "C libfuse's passthrough example", "{} throughput",
         _of("fuse-read", "direct_io / libfuse, throughput")),
    _row("FUSE sequential read, passthrough", "no FUSE at all (tmpfs)", "{} the time",
         _of("fuse-read", "passthrough / native, time")),
)  # fmt: skip


def readme_rows(results: Iterable[Result]) -> tuple[Row, list[Row]]:
    """Return header and rows of the README's table."""
    measured = _by_name(results)
    return ("what", "against", "result"), [
        (row.what, row.against, _result(row, measured)) for row in ROWS if row.is_in_readme
    ]


def peer_rows(results: Iterable[Result]) -> tuple[Row, list[Row]]:
    """Return header and rows of the table in docs/benchmarks.md, with the targets."""
    measured = _by_name(results)
    return ("what", "against", "result", "target"), [
        (row.what, row.against, _result(row, measured), _targets(row, measured)) for row in ROWS
    ]


def _by_name(results: Iterable[Result]) -> dict[tuple[str, str], RatioResult]:
    return {(one.case, ratio.ratio.name): ratio for one in results for ratio in one.ratios}


def _result(row: PeerRow, measured: Mapping[tuple[str, str], RatioResult]) -> str:
    return row.text.format(*(_value(shown, measured) for shown in row.ratios))


def _value(shown: Shown, measured: Mapping[tuple[str, str], RatioResult]) -> str:
    found = measured.get((shown.case, shown.ratio))
    if found is None or found.spread is None:
        raise ValueError(f"bench/results has no value of {shown.case}: {shown.ratio}")
    median = found.spread.median
    if shown.unit == " %":
        return f"{median * 100:.0f} %"
    digits = 0 if median >= 10 else 1 if median >= 2 else 2
    return f"{median:.{digits}f}{shown.unit}"


def _targets(row: PeerRow, measured: Mapping[tuple[str, str], RatioResult]) -> str:
    said = []
    for shown in row.ratios:
        found = measured[shown.case, shown.ratio]
        if found.ratio.target is not None:
            target = found.ratio.target
            verdict = "" if found.is_met else ", missed"
            said.append(f"{target.bound.value} {target.limit:.3g}{verdict}")
    return "; ".join(dict.fromkeys(said))
