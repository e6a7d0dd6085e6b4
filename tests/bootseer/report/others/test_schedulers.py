"""Records of a start by Slurm and Kubernetes.

Samples are real output of Slurm (22.05) and Kubernetes (1.20, cut); made-up events have the form in
its API's documentation. tests/clusters asks a real Slurm.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import CorruptError
from bootseer.report.others.kubernetes import parse_kubernetes
from bootseer.report.others.placing import ADAPTERS, ask_slurm
from bootseer.report.others.slurm import parse_slurm
from tests.bootseer.report.others.conftest import Start, path_of, rows_of

MakeStart = Callable[..., Start]

SAMPLES = Path(__file__).parent / "samples"
SACCT = b"""JobID|State|Submit|Eligible|Start|End
2|REQUEUED|1795432413|1795432415|1795432421|1795432422
2.batch|CANCELLED|1795432421|1795432421|1795432421|1795432423
2|RUNNING|1795432424|1795432545|1795432592|Unknown
12_3|PENDING|1795432424|Unknown|Unknown|Unknown
13+0|RUNNING|1795432424|1795432424|1795432424|Unknown
13+1|RUNNING|1795432424|1795432424|1795432424|Unknown
"""
SCONTROL = b"""JobId=2 JobName=llama
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0
   SubmitTime=1795432424 EligibleTime=1795432545
   StartTime=1795432592 EndTime=Unknown Deadline=N/A
   Command=/jobs/SubmitTime=1.sh
"""


def _job(**more: Any) -> dict[str, Any]:
    time = {"submission": 1795432424, "eligible": 1795432545, "start": 1795432592}
    return {"job_id": 2, "array": {"job_id": 0}, "het": {"job_id": 0}, "time": time, **more}


def test_a_requeued_job_was_held_and_queued_again(a_start: MakeStart) -> None:
    """Slurm holds a requeued job for two minutes, as the second record says."""
    start = a_start(1795432593.5, "2").explained(slurm=parse_slurm(SACCT))
    assert path_of(start)[:3] == [("held", 121.0), ("queued", 47.0), ("scheduling", 1.5)]
    assert start.analysis.ready_s == pytest.approx(10)
    assert start.analysis.before_s == pytest.approx(169.5)
    assert sum(seconds for _, seconds in path_of(start)) == pytest.approx(179.5)
    rows = {row.name: row for row in start.breakdown.stages}
    assert (rows["queued"].begins_s, rows["queued"].node_count) == (-48.5, 2)
    assert rows["queued"].notes == ("by the clock of slurmctld",)
    assert start.breakdown.ready is not None
    assert start.breakdown.ready.max_s == pytest.approx(10)
    assert not start.analysis.stragglers
    first = a_start(1795432422.0, "2").explained(slurm=parse_slurm(SACCT))
    assert path_of(first)[:2] == [("held", 2.0), ("queued", 6.0)]


def test_sacct_scontrol_and_json_say_the_same() -> None:
    documents = [{"jobs": [_job()]}, {"jobs": [_job(time={**_job()["time"], "end": 0})]}]
    tables = [[one for one in parse_slurm(SACCT) if one.unit == "2 1"], parse_slurm(SCONTROL)]
    said = [parse_slurm(json.dumps(one).encode()) for one in documents] + tables
    times = {tuple((one.name, one.begin_ns, one.end_ns) for one in found) for found in said}
    assert times == {
        (
            ("held", 1795432424 * 10**9, 1795432545 * 10**9),
            ("queued", 1795432545 * 10**9, 1795432592 * 10**9),
        )
    }
    wrapped = _job(array={"job_id": 12, "task_id": {"set": True, "number": 3}})
    (held, _) = parse_slurm(json.dumps({"jobs": [wrapped]}).encode())
    assert held.submission == "12_3"
    submissions = [one.submission for one in parse_slurm(SACCT)]
    assert submissions == ["2", "2", "2", "2", "12_3", "13"]


def test_a_job_of_another_number_or_another_day_is_another_start(a_start: MakeStart) -> None:
    other = a_start(1795432593.0, "3").explained(slurm=parse_slurm(SACCT))
    assert other.analysis.before_s == 0
    later = a_start(1795432593.0 + 86400, "2").explained(slurm=parse_slurm(SACCT))
    assert later.analysis.before_s == 0


def test_a_scheduler_that_does_not_answer_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sacct"
    program.write_text("#!/bin/sh\necho 'sacct: error: Slurm accounting is disabled' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    assert list(ask_slurm("7")) == []
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr("bootseer.report.others.placing.ASKING_S", 0.2)
    assert list(ask_slurm("7")) == []
    assert list(ask_slurm("7; reboot")) == []
    assert list(ask_slurm("")) == []


def _pod(name: str, node: str = "") -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": f"u-{name}", "creationTimestamp": _at(0)},
        "spec": {"nodeName": node} if node else {},
        "status": {"conditions": [{"type": "PodScheduled", "status": "False"}]},
    }


def _at(second: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1795432400 + int(second)))
    return f"{whole}Z" if second == int(second) else f"{whole}.{round(second % 1 * 1e6):06}Z"


def _event(
    pod: str, reason: str, second: float, message: str = "", field: str = "", modern: bool = False
) -> dict[str, Any]:
    """Return an event of core/v1 or events.k8s.io/v1."""
    about = {"kind": "Pod", "name": pod, "uid": f"u-{pod}"}
    if field:
        about["fieldPath"] = field
    if modern:
        return {
            "kind": "Event",
            "apiVersion": "events.k8s.io/v1",
            "reason": reason,
            "regarding": about,
            "note": message,
            "eventTime": _at(second),
            "reportingController": "kubelet",
            "reportingInstance": "" if reason == "Scheduled" else "n1",
            "deprecatedFirstTimestamp": None,
        }
    return {
        "kind": "Event",
        "apiVersion": "v1",
        "reason": reason,
        "involvedObject": about,
        "message": message,
        "eventTime": None,
        "firstTimestamp": _at(second),
        "lastTimestamp": _at(second + 100),
        "source": {"component": "kubelet", "host": "n1"},
    }


def _story(pod: str, modern: bool = False) -> list[dict[str, Any]]:
    init, main = "spec.initContainers{fetch}", "spec.containers{train}"
    pulled = "Successfully pulled image in 29.8s (29.8s including waiting). Image size: 77 bytes."
    return [
        _event(pod, "FailedScheduling", 1, "0/4 nodes are available", modern=modern),
        _event(pod, "Scheduled", 40, f"Successfully assigned ml/{pod} to n1", modern=modern),
        _event(pod, "Pulled", 43, "already present on machine", init, modern),
        _event(pod, "Created", 43, "", init, modern),
        _event(pod, "Started", 44, "", init, modern),
        _event(pod, "Pulling", 49, "", main, modern),
        _event(pod, "Pulled", 79, pulled, main, modern),
        _event(pod, "Created", 80, "", main, modern),
        _event(pod, "Started", 81, "", main, modern),
    ]


def _list(*items: dict[str, Any]) -> bytes:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}).encode()


@pytest.mark.parametrize("modern", [False, True])
def test_a_pod_is_followed_from_its_creation(a_start: MakeStart, modern: bool) -> None:
    known = parse_kubernetes(_list(*_story("llama-0-x", modern), _pod("llama-0-x", "n1")))
    start = a_start(1795432482.0, nodes=["n1"]).explained(kubernetes=known)
    assert path_of(start)[:9] == [
        ("pod scheduling", 40.0),
        ("pod set-up", 3.0),
        ("container start", 1.0),
        ("init container fetch", 5.0),
        ("image pull", 29.8),
        ("container create (2)", 1.2),
        ("container start (2)", 1.0),
        ("scheduling", 1.0),
        ("start", 4.0),
    ]
    assert start.analysis.before_s == 82
    rows = {row.name: row for row in start.breakdown.stages}
    assert rows["image pull"].bytes_moved == 77
    assert rows["pod scheduling"].notes == ("by the clock of kube-scheduler",)
    assert rows["image pull"].notes == ("by the clock of kubelet",)
    text = [one.name for one in start.analysis.what_ifs]
    assert "image pull twice as fast" in text
    assert "pod scheduling twice as fast" not in text


@pytest.mark.parametrize("name", ["kubernetes-v1.json", "kubernetes-events-v1.json"])
def test_what_a_real_cluster_said(a_start: MakeStart, name: str) -> None:
    """Kubernetes 1.20, with a Job that no node could take for five seconds.

    The scheduler's times have microseconds, and the kubelet's are of the second before.
    """
    known = parse_kubernetes((SAMPLES / name).read_bytes())
    began = max(one.end_ns or 0 for one in known) / 1e9
    start = a_start(began + 0.3, nodes=["node1"]).explained(kubernetes=known)
    path = dict(path_of(start))
    assert path["pod scheduling"] == pytest.approx(5.2, abs=0.8)
    assert path["init container fetch"] == pytest.approx(4, abs=0.5)
    assert path["image pull"] == pytest.approx(0.179)
    assert sum(path.values()) == pytest.approx(start.analysis.before_s + 10, abs=0.01)
    names = [one.name for one in known]
    assert names[0] == "pod scheduling"
    assert names[-3:] == ["image pull", "container create", "container start"]


def test_a_node_is_known_by_its_pods_name_too(a_start: MakeStart) -> None:
    """Without `BOOTSEER_NODE`, the host name of a pod is the pod's own."""
    known = parse_kubernetes(_list(*_story("llama-0-x"), *_story("other-0-y")))
    start = a_start(1795432482.0, nodes=["llama-0-x"]).explained(kubernetes=known)
    assert rows_of(start)["image pull"] == 29.8
    assert rows_of(start)["pod scheduling"] == 39


def test_one_slow_pull_is_a_straggler_by_name(a_start: MakeStart) -> None:
    items = []
    nodes = [f"llama-{number}" for number in range(6)]
    for number, node in enumerate(nodes):
        seconds = 30 if number == 3 else 5
        items += [
            _event(node, "Scheduled", 1, f"Successfully assigned ml/{node} to h{number}"),
            _event(node, "Pulling", 2),
            _event(node, "Pulled", 2 + seconds),
            _event(node, "Started", 33),
        ]
    start = a_start(1795432434.0, nodes=nodes).explained(kubernetes=parse_kubernetes(_list(*items)))
    (slow,) = start.analysis.stragglers
    assert (slow.node, str(slow.outliers[0].label)) == ("llama-3", "image pull")


def test_a_pod_that_has_not_started_is_named(a_start: MakeStart) -> None:
    """The other pods wait for it, and no launcher of its node has a timeline."""
    owner = [{"kind": "Job", "uid": "u-job"}]
    items = [
        *_story("llama-0"),
        _event("llama-1", "Scheduled", 40, "Successfully assigned ml/p to n9"),
    ]
    items += [_event("llama-1", "Pulling", 42), _event("other-0", "Pulling", 42)]
    for name in ("llama-0", "llama-1", "llama-2"):
        pod = _pod(name)
        pod["metadata"]["ownerReferences"] = owner
        items.append(pod)
    known = parse_kubernetes(_list(*items, _pod("other-0")))
    start = a_start(1795432482.0, nodes=["llama-0"]).explained(kubernetes=known)
    rows = {row.name: row for row in start.breakdown.stages}
    assert rows["image pull"].open_on == ("n1/0",)  # As its kubelet says.
    assert rows["pod scheduling"].open_on == ("llama-2/0",)
    assert start.breakdown.node_count == 1
    assert start.breakdown.job == "llama"


def test_a_node_whose_clock_is_behind_is_not_late(a_start: MakeStart) -> None:
    """The stages before its launcher seem to come after it, and are taken from another node."""
    made = a_start(1795432593.5, "2", nodes=["n0", "n1", "n2", "n3"])
    made.set_clock("n3", -3600)
    start = made.explained(slurm=parse_slurm(SACCT))
    assert not start.analysis.stragglers
    assert start.analysis.before_s == pytest.approx(169.5, abs=0.1)
    assert start.analysis.clocks.shift_s["n3"] == pytest.approx(3600)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_control_plane_an_hour_off_makes_no_path_of_hours(
    a_start: MakeStart, seconds: int
) -> None:
    known = parse_slurm(SACCT)
    start = a_start(1795432593.5 + seconds, "2").explained(slurm=known)
    # Ahead of it nobody can tell a queue from a wrong clock; behind it the stages are left out.
    assert start.analysis.before_s in (0, pytest.approx(169.5 + 3600))
    assert start.analysis.ready_s == pytest.approx(10)


def test_events_of_another_program_are_bounded() -> None:
    for adapter in ADAPTERS.values():
        for data in (
            b"",
            b"\xff\x00",
            b"[" * 100_000,
            b"{}",
            b'{"items": 5, "jobs": {}}',
            b"a|b\n",
        ):
            with contextlib.suppress(CorruptError):
                assert list(adapter(data)) == []
    late = "9" * 400
    assert parse_slurm(f"JobID|Submit|Eligible|Start\n1|{late}|1|1\n".encode()) == []
    odd = _event("p", "Scheduled", 1)
    for field, value in (("firstTimestamp", 7), ("involvedObject", []), ("message", {})):
        parse_kubernetes(_list({**odd, field: value}))
    items = [_event("p" * 10_000, "Pulling", 1), {"kind": "Pod", "metadata": None}, 7]
    (found,) = parse_kubernetes(json.dumps({"items": items}).encode())
    assert len(found.nodes[-1]) <= 200
    with pytest.raises(CorruptError):
        parse_kubernetes(b'{"items": [')
