"""Targets that read other programs' records of a start."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from bootseer.errors import CorruptError
from bootseer.report.explain import StartModel, break_down
from bootseer.report.export import analysis_document
from bootseer.report.graph import StartGraph
from bootseer.report.others.kubernetes import WithPods
from bootseer.report.others.placing import ADAPTERS, ForeignStages
from bootseer.report.sources import TimelineFolder
from bootseer.timeline import otlp
from tests.fuzz.harness import Target
from tests.fuzz.mutations import mutated, mutated_json_bytes

_SAMPLES = Path(__file__).parents[1] / "bootseer/report/others/samples"
_KUBERNETES = json.loads((_SAMPLES / "kubernetes-v1.json").read_bytes())
_SLURM = {
    "jobs": [
        {
            "job_id": 2,
            "array": {"job_id": 1, "task_id": {"number": 3}},
            "time": {"submission": 1795432413, "eligible": 1795432415, "start": 1795432421},
        }
    ]
}
_TABLE = (
    b"JobID|Submit|Eligible|Start\n2|1795432413|1795432415|1795432421\n",
    b"JobId=2 JobState=RUNNING\n SubmitTime=2026-11-23T11:13:33 EligibleTime=2026-11-23T11:13:35\n"
    b" StartTime=2026-11-23T11:13:41\n",
)
_NODE = "node1"


def _own() -> list[otlp.Stage]:
    began = 1795435539 * 10**9
    launcher: dict[str, otlp.Value] = {"host.name": _NODE, "bootseer.submission": "2"}
    rank = {**launcher, "bootseer.rank": 0, otlp.PROCESS: "p", otlp.ROLE: "train.py"}
    met: dict[str, otlp.Value] = {otlp.BARRIER: "first collective"}
    return [
        otlp.Stage("start", "0" * 32, "1" * 16, "", began, began + 10**9, resource=launcher),
        otlp.Stage("meet", "0" * 32, "2" * 16, "", began, began + 9 * 10**9, False, "", met, rank),
    ]


def _spans() -> list[Any]:
    own = _own()[0]
    resource: dict[str, otlp.Value] = {"service.name": "vllm", "host.name": _NODE}
    span = own._replace(name="load", span_id="3" * 16, parent_id="1" * 16, resource=resource)
    return [json.loads(otlp.encode_end(span)), json.loads(otlp.encode_start(span))]


def _target(adapter: str, *inputs: st.SearchStrategy[bytes]) -> Target:
    def read(data: bytes) -> None:
        known = ADAPTERS[adapter](data)
        graph = StartGraph()
        graph.add_node([*_own(), *ForeignStages({adapter: known}).for_node(_own())], 0)
        analysis = StartModel(graph).analyse()
        found = [msgspec.to_builtins(break_down(graph)), analysis_document(analysis)]
        json.dumps(found, allow_nan=False)

    return Target(f"adapter {adapter}", st.one_of(*inputs), read, (CorruptError,))


def _logs(name: str) -> Sequence[bytes]:
    return ((_SAMPLES / name).read_bytes(),)


def _pods() -> dict[str, Any]:
    """Return the adapter's record of a start without a timeline."""
    found: dict[str, Any] = json.loads((_SAMPLES / "kubernetes-v1.json").read_bytes())
    told = [{"name": "BOOTSEER_JOB", "value": "llm"}, {"name": "RANK", "value": "1"}]
    state = {"running": {"startedAt": "2026-11-23T12:05:39Z"}}
    for item in found["items"]:
        if item["kind"] == "Pod":
            item["spec"] |= {"nodeName": _NODE, "containers": [{"env": told}]}
            item["status"]["containerStatuses"] = [{"state": state, "restartCount": 1}]
    return found


def _read_pods(data: bytes) -> None:
    for start in WithPods(TimelineFolder(_SAMPLES), data).starts("llm"):
        graph = StartGraph()
        for stages in start.nodes():
            graph.add_node(stages, 0)
        json.dumps(msgspec.to_builtins(break_down(graph)), allow_nan=False)


ADAPTER_TARGETS = (
    Target("pods", mutated_json_bytes([_pods()]), _read_pods, (CorruptError,)),
    _target("slurm", mutated_json_bytes([_SLURM]), mutated(_TABLE)),
    _target("kubernetes", mutated_json_bytes([_KUBERNETES])),
    _target("nccl", mutated(_logs("nccl.log"))),
    _target("otlp", mutated_json_bytes(_spans())),
)
