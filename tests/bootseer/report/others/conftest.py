"""A start of two nodes that began at a known time, and records of it by other programs."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from bootseer.cli.report import ExplainedStart, explained
from bootseer.report.decoding import decode
from bootseer.report.others.foreign_stage import ForeignStage
from bootseer.report.others.placing import ForeignStages
from bootseer.report.sources import TimelineFolder, find_start
from bootseer.timeline.otlp import (
    BARRIER,
    PARENT,
    PROCESS,
    READY,
    ROLE,
    START,
    Stage,
    Value,
    encode_end,
    trace_id_of,
)

_NS = 10**9


class Start:
    """Writer of the timelines of a start whose launchers all begin at `began_s`.

    Reads them back beside the records of other programs.
    """

    def __init__(self, directory: Path, began_s: float, submission: str, nodes: Iterable[str]):
        self.directory = directory
        self.began_s = began_s
        self.submission = submission
        self.trace_id = trace_id_of("llama", 0, submission)
        self.nodes = list(nodes)
        for rank, node in enumerate(self.nodes):
            self._write(node, rank)

    def set_clock(self, node: str, off_s: float) -> None:
        """Set the clock of a node off by so many seconds."""
        self._write(node, self.nodes.index(node), off_s)

    def _write(self, node: str, rank: int, off_s: float = 0.0) -> None:
        launcher: dict[str, Value] = {
            "host.name": node,
            "bootseer.rank": rank,
            "bootseer.job": "llama",
            "bootseer.submission": self.submission,
        }
        worker = {**launcher, PROCESS: f"{node}-worker", PARENT: "", ROLE: "train.py"}
        met: dict[str, Value] = {BARRIER: "first collective of group 0"}
        stages = [
            self._stage(START, node, 0, 4, launcher),
            self._stage("import torch", node, 5, 7, worker),
            self._stage("first collective", node, 7, 8.5, worker, met),
            self._stage("first collective", node, 8.6, 8.9, worker, met | {BARRIER: "2nd"}),
            self._stage(READY, node, 10, 10, worker),
        ]
        folder = self.directory / "llama" / "0" / self.submission
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"20261123T000000Z-1-{node}-{rank}.jsonl"
        off = int(off_s * _NS)
        stages = [
            one._replace(start_ns=one.start_ns + off, end_ns=(one.end_ns or 0) + off)
            for one in stages
        ]
        path.write_bytes(b"".join(map(encode_end, stages)))

    def _stage(
        self,
        name: str,
        node: str,
        begin_s: float,
        end_s: float,
        resource: Mapping[str, Value],
        attributes: Mapping[str, Value] | None = None,
    ) -> Stage:
        began = int(self.began_s * _NS)
        return Stage(
            name=name,
            trace_id=self.trace_id,
            span_id=self.span_id(name, node, begin_s),
            parent_id="",
            start_ns=began + int(begin_s * _NS),
            end_ns=began + int(end_s * _NS),
            attributes=attributes or {},
            resource=resource,
        )

    def stages(self, node: str) -> list[Stage]:
        """Return the stages in the timeline of a node."""
        (path,) = self.directory.glob(f"llama/0/**/*-{node}-*.jsonl")
        return decode(path.read_bytes())

    @staticmethod
    def span_id(name: str, node: str, begin_s: float) -> str:
        return f"{abs(hash((name, node, begin_s))):016x}"[:16]

    def explained(self, **known: Iterable[ForeignStage]) -> ExplainedStart:
        files = find_start(TimelineFolder(self.directory), "llama", 0, self.submission)
        found = explained(files, ForeignStages(known))
        assert found is not None
        assert abs(found.analysis.replay_error_s) < 1e-6
        return found


def path_of(start: ExplainedStart) -> list[tuple[str, float]]:
    """Return the stages of the critical path, with their seconds."""
    return [(str(one.label), round(one.seconds, 3)) for one in start.analysis.path]


def rows_of(start: ExplainedStart, node_count: int | None = None) -> dict[str, float | None]:
    """Return the median of each stage in the table that so many nodes have."""
    return {
        row.name: None if row.median_s is None else round(row.median_s, 3)
        for row in start.breakdown.stages
        if node_count in (None, row.node_count)
    }


@pytest.fixture
def a_start(tmp_path: Path) -> Callable[..., Start]:
    """Return a function that makes a start: its launchers' begin, submission and nodes."""

    def make(began_s: float, submission: str = "", nodes: Iterable[str] = ("n1", "n2")) -> Start:
        return Start(tmp_path / "timelines", began_s, submission, nodes)

    return make
