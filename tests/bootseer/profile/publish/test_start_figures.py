"""Figures of starts, environments and checkpoint folders, and the dashboard that shows them."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bootseer.fuse.striped.mounted.status import MountFigures, OpenFigures, render_mount
from bootseer.fuse.striped.statistics import Statistics
from bootseer.prefetch.reading.faults import FaultRecorder
from bootseer.prefetch.serve import figures as of_images
from bootseer.profile.publish.start_figures import render_start
from bootseer.timeline.otlp import PROCESS, ROLE, Stage, Value
from testbed.node import node_at
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for
from tests.fuse.striped.support.mounting import checkpoints
from tests.prefetch.serve.test_figures import figures_of

_S = 10**9
_MEMORY = {"limit_bytes": 1, "used_bytes": 0}
_LOOK = MountFigures(Statistics(), OpenFigures(0, 0, 0, ()), _MEMORY, 0.0, True)
_ENVIRONMENT: dict[str, Value] = {"bootseer.hit": True, "bootseer.bytes": 30}


def _stage(
    name: str,
    begin_s: float,
    end_s: float | None,
    role: str = "",
    attributes: Mapping[str, Value] | None = None,
    *,
    failed: bool = False,
) -> Stage:
    return Stage(
        name=name,
        trace_id="ab" * 16,
        span_id=f"{name}{role}{begin_s}",
        parent_id="",
        start_ns=int(begin_s * _S),
        end_ns=None if end_s is None else int(end_s * _S),
        failed=failed,
        attributes=attributes or {},
        resource={
            ROLE: role,
            PROCESS: f"{role}{begin_s}" if role else "",
            "bootseer.submission": "submission-7",
        },
    )


_STAGES = [
    _stage("start", 100, 110),
    _stage("environment", 101, 105, "", _ENVIRONMENT),
    _stage("environment 2", 105, 106, failed=True),
    _stage("load", 111, 115, "train.py", {"bootseer.bytes": 7}),
    _stage("load", 112, 118, "train.py", {"bootseer.bytes": 5}),
    _stage("load", 113, None, "train.py"),
    _stage("ready", 119, 119, "train.py"),
    _stage("ready", 121, 121, "train.py"),
]


def _samples(text: str) -> dict[tuple[str, ...], float]:
    """Return values by the sample's name and its labels' values, without the slot's."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert "submission" not in str(sample.labels)
            labels = [value for key, value in sample.labels.items() if key != "slot"]
            found[(sample.name, *labels)] = sample.value
    return found


def test_a_start_as_figures() -> None:
    found = _samples(render_start(_STAGES, "llama", 0))
    start = {key[0]: value for key, value in found.items() if len(key) == 2}
    assert start == {
        "bootseer_start_time_seconds": 100,
        "bootseer_start_ready": 1,
        "bootseer_start_failed": 0,
        "bootseer_start_processes": 5,
        "bootseer_start_command_seconds": 10,
        "bootseer_start_ready_seconds": 21,
    }
    load = ("llama", "load", "train.py")
    assert found["bootseer_start_stage_seconds", *load] == 6
    assert found["bootseer_start_stage_open", *load] == 1
    assert found["bootseer_start_stage_bytes", *load] == 12
    assert found["bootseer_start_stage_failures", "llama", "environment 2", ""] == 1
    assert found["bootseer_environment_seconds", "llama", "environment"] == 4
    assert found["bootseer_environment_restored", "llama", "environment"] == 1
    assert found["bootseer_environment_restored", "llama", "environment 2"] == 0
    assert found["bootseer_environment_bytes", "llama", "environment"] == 30
    assert found["bootseer_environment_failed", "llama", "environment 2"] == 1


def test_a_start_that_has_just_begun_or_names_stages_as_it_likes() -> None:
    begun = _samples(render_start([_stage("start", 100, None)], "j", 0))
    assert begun["bootseer_start_ready", "j"] == 0
    assert ("bootseer_start_ready_seconds", "j") not in begun
    assert _samples(render_start([], 'a"b\\c\nd', 0))["bootseer_start_ready", 'a"b\\c\nd'] == 0
    many = [_stage(f'step "{n}"\n', 1, 2 + n, "\\") for n in range(500)]
    stages = [key for key in _samples(render_start(many, "j", 0)) if key[0].endswith("seconds")]
    assert len(stages) == 51
    assert ("bootseer_start_stage_seconds", "j", 'step "499"\n', "\\") in stages


def test_the_next_start_goes_on_with_the_series_of_the_last(tmp_path: Path) -> None:
    metrics, target = tmp_path / "metrics", tmp_path / "env"
    # Python's own start is noted where it takes a tenth of a second, so not by every start.
    variables = {"BOOTSEER_METRICS_DIR": str(metrics), "BOOTSEER_TRACE_PYTHON": "off"}
    setup = ("--setup", f"mkdir -p {target} && echo x > {target}/x", "--target", target)
    code = "import bootseer; bootseer.ready()"
    command = ("--mode", "extract", "--", sys.executable, "-c", code)
    seen = []
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as node:
        for number in range(2):
            variables["SLURM_JOB_ID"] = f"submission-{number}"
            done = node.run("run", *setup, *command, variables=variables)
            assert done.returncode == 0, done.stderr
            node.wait_clean()
            (path,) = metrics.glob("*.prom")
            seen.append(_samples(path.read_text()))
    first, second = seen
    assert first.keys() == second.keys()
    assert first["bootseer_start_ready", "job"] == second["bootseer_start_ready", "job"] == 1
    assert first["bootseer_environment_restored", "job", "environment"] == 0
    assert second["bootseer_environment_restored", "job", "environment"] == 1
    key = ("bootseer_start_time_seconds", "job")
    assert second[key] > first[key]


@pytest.mark.needs("fuse")
def test_a_checkpoint_folder_as_figures(tmp_path: Path) -> None:
    metrics, url = tmp_path / "metrics", (tmp_path / "remote").as_uri()
    labels = (url,)

    def found() -> dict[tuple[str, ...], float]:
        (path,) = metrics.glob("bootseer-checkpoint-*.prom")
        return _samples(path.read_text())

    for mountpoint in (tmp_path / "a", tmp_path / "b"):
        mountpoint.mkdir()
        with checkpoints(tmp_path, mountpoint, url, metrics_dir=metrics):
            wait_for(lambda: any(metrics.glob("*.prom")), "the figures")
            assert found()["bootseer_checkpoint_mounted", *labels] == 1
            (mountpoint / "step").write_bytes(bytes(12 * 2**20))
            (mountpoint / "step").read_bytes()
        wait_for(lambda: found()["bootseer_checkpoint_mounted", *labels] == 0, "the last figures")
        assert found()["bootseer_checkpoint_written_bytes_total", *labels] == 12 * 2**20
        assert found()["bootseer_checkpoint_published_files_total", *labels] >= 1
        (path,) = metrics.glob("*.prom")
        path.unlink()


# ---- what documents and dashboards say -----------------------------------------------------------


def _names() -> set[str]:
    """Return the names of all samples that our files may have."""
    texts = (
        render_start(_STAGES, "j", 0),
        render_mount(_LOOK, "hdfs://nn/ckpt", 0),
        of_images.render(figures_of(FaultRecorder()), 0),
    )
    return {
        sample.name
        for text in texts
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_no_login_is_in_a_label() -> None:
    text = render_mount(_LOOK, "https://user:secret@host/ckpt?token=x", 0)
    assert 'url="https://host/ckpt"' in text
    assert "secret" not in text


def test_every_metric_is_documented() -> None:
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    for line in page.splitlines():
        if not line.startswith("| `bootseer_"):
            continue
        first, *others = re.findall(r"`(\w+)`", line.split("|")[1])
        kind = re.match(r"bootseer_[a-z]+", first)
        assert kind is not None
        page += " ".join(f"`{kind[0]}{name}`" for name in others if name.startswith("_"))
    for name in _names():
        name = re.sub(r"(?<=fault_seconds)_(bucket|sum|count)$", "", name)
        assert f"`{name}`" in page, name


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((REPOSITORY / "docker" / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    queries += [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    asked = {name for query in queries for name in re.findall(r"bootseer_\w+", query)}
    assert len(asked) > 20
    assert asked <= _names()
    for kind in ("start", "environment", "image", "checkpoint"):
        assert any(name.startswith(f"bootseer_{kind}_") for name in asked)
    for query in queries:
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")
    for one in panels:
        place = one["gridPos"]
        assert place["x"] + place["w"] <= 24


@pytest.mark.needs(programs=["promtool"])
def test_prometheus_own_tool_finds_nothing_to_say(tmp_path: Path) -> None:
    for text in (render_start(_STAGES, "j", 0), render_mount(_LOOK, "hdfs://nn/ckpt", 0)):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
    board = json.loads((REPOSITORY / "docker" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for one in board["panels"] for target in one.get("targets", ())]
    rules = [
        {"record": f"query{number}", "expr": query.replace("$job_name", ".*")}
        for number, query in enumerate(queries)
    ]
    path = tmp_path / "rules.yml"
    # JSON is YAML.
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
