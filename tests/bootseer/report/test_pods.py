"""Starts of pods without timelines: by `kubectl get pods,events`, as documented."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.errors import CorruptError, NotFoundError
from bootseer.kubernetes.pod_stages import start_of_container
from bootseer.report.others.kubernetes import WithPods
from bootseer.report.sources import TimelineFolder, find_start
from bootseer.settings.config import load_settings
from bootseer.timeline import Timeline

SUBMISSION = "0d0c5a9e-5b8e-4a43-8a22-9b9f7a3f1c11"


def _pod(number: int, *, began: str = "12:00:09", ready: str = "12:00:12") -> dict[str, Any]:
    env = [
        {"name": "BOOTSEER_JOB", "value": "llm"},
        {"name": "BOOTSEER_SUBMISSION", "value": SUBMISSION},
        {"name": "BOOTSEER_RANK", "value": str(number)},
        {"name": "BOOTSEER_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"llm-{number}",
            "namespace": "training",
            "uid": f"pod-{number}",
            "creationTimestamp": "2026-11-23T12:00:00Z",
            "ownerReferences": [{"kind": "Job", "name": "llm", "uid": SUBMISSION}],
        },
        "spec": {"nodeName": f"n{number}", "containers": [{"name": "trainer", "env": env}]},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"state": {"running": {"startedAt": f"2026-11-23T{began}Z"}}}],
            "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": f"2026-11-23T{ready}Z"}
            ],
        },
    }


def _event(number: int, reason: str, when: str, message: str = "") -> dict[str, Any]:
    about = {"kind": "Pod", "name": f"llm-{number}", "uid": f"pod-{number}"}
    about |= {} if reason == "Scheduled" else {"fieldPath": "spec.containers{trainer}"}
    return {
        "kind": "Event",
        "involvedObject": about,
        "reason": reason,
        "firstTimestamp": f"2026-11-23T{when}Z",
        "message": message or reason,
        "source": {"component": "kubelet", "host": f"n{number}"},
    }


def _events(number: int) -> list[dict[str, Any]]:
    return [
        _event(number, "Scheduled", "12:00:01", f"Successfully assigned training/x to n{number}"),
        _event(number, "Pulling", "12:00:03"),
        _event(number, "Pulled", "12:00:07"),
        _event(number, "Created", "12:00:08"),
        _event(number, "Started", "12:00:09"),
    ]


def _data(*items: dict[str, Any]) -> bytes:
    return json.dumps({"kind": "List", "items": items}).encode()


def _report(folder: Path, data: bytes) -> str:
    (folder / "events.json").write_bytes(data)
    done = CliRunner().invoke(
        cli,
        [
            *("--timeline-dir", str(folder / "timelines"), "--store", f"file://{folder}/store"),
            *("report", "llm", "--with", f"kubernetes={folder}/events.json"),
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    return " ".join(done.output.split())


def test_a_start_is_told_by_its_pods_alone(tmp_path: Path) -> None:
    shown = _report(tmp_path, _data(_pod(0), _pod(1), *_events(0), *_events(1)))
    assert f"submission {SUBMISSION}, attempt 0, 2 node(s)" in shown
    assert "ready after 3.0 s, 12.0 s after it was submitted" in shown
    for stage in ("pod scheduling", "pod set-up", "image pull", "container create"):
        assert stage in shown


def test_a_pod_that_notes_something_itself_is_believed(tmp_path: Path) -> None:
    timelines = tmp_path / "timelines"
    own = Timeline.start(timelines, job="llm", submission=SUBMISSION, attempt=0, node="n0", rank=0)
    own.span("import torch").end()
    found = find_start(WithPods(TimelineFolder(timelines), _data(_pod(0), _pod(1))), "llm")
    names = {(stage.resource["host.name"], stage.name) for stage in found.stages()}
    assert names == {("n0", "import torch"), ("n1", "start"), ("n1", "ready")}


def test_of_pods_in_one_place_the_last_counts(tmp_path: Path) -> None:
    failed, again = _pod(0), _pod(0, began="12:05:00", ready="12:05:01")
    again["metadata"]["uid"] = "pod-0-again"
    for items in ((failed, again), (again, failed)):
        found = find_start(WithPods(TimelineFolder(tmp_path), _data(*items)), "llm")
        assert {stage.resource["k8s.pod.uid"] for stage in found.stages()} == {"pod-0-again"}


@pytest.mark.parametrize(
    "variables",
    [
        {"BOOTSEER_RANK": "5", "RANK": "3", "JOB_COMPLETION_INDEX": "1"},
        {"RANK": "3", "JOB_COMPLETION_INDEX": "1"},
        {"JOB_COMPLETION_INDEX": "1"},
        {},
    ],
)
def test_all_that_note_a_pod_s_stages_agree_on_its_rank(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named fault: with two variables set, stages of one pod had two ranks."""
    for name in ("BOOTSEER_RANK", "RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launcher = load_settings().rank
    labels = {"io.kubernetes.pod.name": "llm-0", "io.kubernetes.pod.uid": "pod-0"}
    assert start_of_container(labels, variables).rank == launcher
    pod = _pod(0)
    env = pod["spec"]["containers"][0]["env"]
    env[:] = [one for one in env if one["name"] != "BOOTSEER_RANK"]
    env += [{"name": name, "value": value} for name, value in variables.items()]
    stages = find_start(WithPods(TimelineFolder(tmp_path), _data(pod)), "llm").stages()
    assert {stage.resource["bootseer.rank"] for stage in stages} == {launcher}


def test_one_that_is_not_ready_is_open_and_one_that_has_ended_was(tmp_path: Path) -> None:
    waiting, ended = _pod(0), _pod(1)
    waiting["status"]["conditions"][0]["status"] = "False"
    ended["status"]["phase"] = "Succeeded"
    state = ended["status"]["containerStatuses"][0]["state"]
    state["terminated"] = state.pop("running")
    stages = find_start(WithPods(TimelineFolder(tmp_path), _data(waiting, ended)), "llm").stages()
    ends = {(one.resource["host.name"], one.name): one.end_ns for one in stages}
    assert ends[("n0", "start")] is None
    assert ends[("n1", "ready")] is not None
    assert ("n0", "ready") not in ends


def test_how_often_a_container_was_started_again_is_noted(tmp_path: Path) -> None:
    pod = _pod(0)
    pod["status"]["containerStatuses"][0]["restartCount"] = 3
    assert "the container was restarted 3 times" in _report(tmp_path, _data(pod))


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"nodeName": "n0", "containers": [{"env": None}]}},
        {"spec": {"nodeName": "../n0"}},
        {"status": {"phase": "Pending"}},
        {"status": {"containerStatuses": [{"state": {"waiting": {}}}]}},
        {"status": []},
    ],
)
def test_other_pods_are_no_starts(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError):
        find_start(WithPods(TimelineFolder(tmp_path), _data({**_pod(0), **change})), "llm")


def test_what_is_no_output_of_kubectl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError):
        WithPods(TimelineFolder(tmp_path), b"NAME READY\n")
