"""The ratios that the README and docs/benchmarks.md show are those of bench/results."""

import json
import re

import pytest

from testbed.paths import REPOSITORY

PAGES = {name: (REPOSITORY / name).read_text() for name in ("README.md", "docs/benchmarks.md")}
PEERS = "docs/benchmarks.md"
# Page, a part of the row, the figure in that row, the case and its ratio.
FIGURES = [
    ("README.md", "second launch of one job", "5.9x", "launch", "first / second, whole launch"),
    (
        "README.md",
        "containerd 2.1, pull and run",
        "0.13x",
        "image",
        "replay / containerd 2.1, time",
    ),
    ("README.md", "containerd 1.6: ", "0.11x", "image", "replay / containerd 1.6, time"),
    ("README.md", "| eStargz |", "0.62x", "image-shell", "replay / estargz, time"),
    ("README.md", "| SOCI |", "0.35x", "image", "replay / soci, time"),
    ("README.md", "| SOCI |", "0.19x", "image", "replay / soci, bytes"),
    ("README.md", "uv with an empty cache", "4.7x", "env", "uv line / mount, until imported"),
    ("README.md", "read by the mount", "7.5x", "checkpoint", "8: mount / stream, throughput"),
    (
        "README.md",
        "written by the mount",
        "7.6x",
        "checkpoint",
        "8: write mount / write stream, throughput",
    ),
    (PEERS, "second launch of one job", "5.9x", "launch", "first / second, whole launch"),
    (PEERS, "image stage / env", "4.0x", "launch", "first / second, image"),
    (PEERS, "image stage / env", "7.5x", "launch", "first / second, environment"),
    (PEERS, "image stage / env", "5.3x", "launch", "first / second, checkpoint"),
    (PEERS, "moved", "9 %", "launch", "bytes moved by the second image stage / image"),
    (PEERS, "`import torch` in a", "0.13x", "image", "replay / containerd 2.1, time"),
    (PEERS, "| | containerd 1.6, pull", "0.11x", "image", "replay / containerd 1.6, time"),
    (PEERS, "| SOCI |", "0.35x", "image", "replay / soci, time"),
    (PEERS, "| SOCI |", "0.19x", "image", "replay / soci, bytes"),
    (PEERS, "all on the node already", "1.19x", "image", "replay / containerd local, time"),
    (PEERS, "never recorded", "0.61x", "image", "lazy / soci, time"),
    (PEERS, "nobody has indexed it", "0.39x", "image", "unindexed / containerd 1.6, time"),
    (PEERS, "at 200 Mbit", "0.31x", "image-slow-line", "replay / soci, time"),
    (PEERS, "at 200 Mbit", "0.09x", "image-slow-line", "replay / containerd 1.6, time"),
    (PEERS, "torch and pandas", "0.41x", "image-pandas", "replay / soci, time"),
    (PEERS, "torch and pandas", "1.15x", "image-pandas", "replay / containerd local, time"),
    (PEERS, "a shell in that", "0.28x", "image-shell", "replay / soci, time"),
    (PEERS, "a shell in that", "0.02x", "image-shell", "replay / containerd 2.1, time"),
    (PEERS, "a shell in that", "0.62x", "image-shell", "replay / estargz, time"),
    (PEERS, "read by the mount", "7.5x", "checkpoint", "8: mount / stream, throughput"),
    (
        PEERS,
        "written by the mount",
        "7.6x",
        "checkpoint",
        "8: write mount / write stream, throughput",
    ),
    (PEERS, "on 4 DataNodes of 50", "3.9x", "checkpoint", "4: mount / stream, throughput"),
    (
        PEERS,
        "on 4 DataNodes of 50",
        "4.2x",
        "checkpoint",
        "4: write mount / write stream, throughput",
    ),
    (PEERS, "read, 8 / 4", "93 %", "checkpoint", "8: mount, of what the placement allows"),
    (PEERS, "read, 8 / 4", "98 %", "checkpoint", "4: mount, of what the placement allows"),
    (PEERS, "read, 8 / 4", "95 %", "checkpoint", "8: read_into, of what the placement allows"),
    (PEERS, "written, 8 / 4", "94 %", "checkpoint", "8: write mount, of what the placement allows"),
    (PEERS, "erasure coding", "2.5x", "checkpoint", "8: mount / RS-3-2, throughput"),
    (PEERS, "erasure coding", "1.30x", "checkpoint", "8: mount / RS-6-3, throughput"),
    (PEERS, "rclone mount | 7.5x", "7.5x", "checkpoint", "8: mount / rclone mount, throughput"),
    (
        PEERS,
        "ten times slower",
        "1.21x",
        "checkpoint",
        "8: mount twice, one DataNode 10 times slower / none, time",
    ),
    (PEERS, "pip with its wheels", "20x", "env", "pip / mount, until imported"),
    (PEERS, "pip with its wheels", "6 %", "env", "mount, bytes / stored snapshot"),
    (PEERS, "behind the same line", "4.7x", "env", "uv line / mount, until imported"),
    (PEERS, "the same, wheels on the node", "2.8x", "env", "uv / mount, until imported"),
    (PEERS, "behind one line", "5.3x", "env-nodes", "uv line / mount, all nodes"),
    (PEERS, "slowest node / fastest", "1.03x", "env-nodes", "mount, slowest node / fastest"),
    (PEERS, "the import alone", "1.04x", "env", "mount / local, import"),
    (PEERS, "`cp -al`", "1.10x", "env", "link / cp -al"),
    (PEERS, "the least that C can do", "1.14x", "env", "zstd tar / extract near"),
    (PEERS, "the least that C can do", "1.37x", "env", "extract near / C floor"),
    (PEERS, "| tmpfs itself |", "1.08x", "checkpoint-uncapped", "file / native, throughput"),
    (PEERS, "as it comes", "3.3x", "fuse-read", "direct_io / mfusepy, throughput"),
    (PEERS, "as it comes", "0.24x", "fuse-read", "direct_io / mfusepy, server CPU"),
    (PEERS, "its `direct_io` on", "2.1x", "fuse-read", "direct_io / mfusepy_direct, throughput"),
    (PEERS, "its `direct_io` on", "0.43x", "fuse-read", "direct_io / mfusepy_direct, server CPU"),
    (PEERS, "passthrough example", "3.4x", "fuse-read", "direct_io / libfuse, throughput"),
    (PEERS, "no FUSE at all", "0.99x", "fuse-read", "passthrough / native, time"),
]


def _median(case: str, ratio: str) -> float:
    document = json.loads((REPOSITORY / f"bench/results/{case}.json").read_text())
    (found,) = [one["median"] for one in document["ratios"] if one["name"] == ratio]
    return float(found)


@pytest.mark.parametrize(("page", "row", "shown", "case", "ratio"), FIGURES)
def test_a_ratio_is_the_measured_one(
    page: str, row: str, shown: str, case: str, ratio: str
) -> None:
    text = PAGES[page].partition("## Against its peers")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|") and row in line]
    assert any(re.search(rf"(?<![\d.]){re.escape(shown)}", line) for line in rows), (
        f"{page} has no row {row!r} with {shown}"
    )
    number = shown.rstrip("x %")
    scale = 100 if shown.endswith("%") else 1
    digits = len(number.partition(".")[2])
    measured = _median(case, ratio)
    assert f"{measured * scale:.{digits}f}" == number, (
        f"{case}: {ratio} is {measured:.4f}; {page} says {shown}"
    )
