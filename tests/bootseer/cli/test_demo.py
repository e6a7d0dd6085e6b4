"""The output of `bootseer demo` for made-up launches; `make wheel-test` runs a real one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.demo import job
from bootseer.demo.job import DemoPlan, Launch
from bootseer.timeline.otlp import Stage
from tests.bootseer.cli.json_page import agree
from tests.support.demo_output import readme_output, without_figures

_SECOND_NS = 10**9


def _stage(name: str, begin_s: int, end_s: int, **attributes: int) -> Stage:
    return Stage(
        name,
        *("", "", ""),
        start_ns=begin_s * _SECOND_NS,
        end_ns=end_s * _SECOND_NS,
        attributes={f"bootseer.{key}": value for key, value in attributes.items()},
    )


def _launch(load_s: int, checksum: str) -> Launch:
    """Return a launch without an environment whose checkpoint takes `load_s` seconds."""
    begin_s = 100
    ready_s = begin_s + 3 + load_s
    return Launch(
        stages=(
            _stage("image", begin_s, begin_s + 1),
            _stage("image pull", begin_s, begin_s + 1, bytes=20 * load_s),
            _stage("import", begin_s + 1, begin_s + 2),
            _stage("checkpoint", begin_s + 2, begin_s + 3),
            _stage("load", begin_s + 3, ready_s),
            _stage("ready", ready_s, ready_s),
        ),
        trainer={"checksum": checksum},
        bytes_read=700 + load_s,
        checkpoint_bytes_read=500,
        wall_s=20.0,
        machine_cpu_s=float(load_s),
    )


class _Demo:
    """Stand-in for `bootseer.demo.job.Demo` that launches nothing."""

    second_checksum = "same"

    def __init__(self, plan: DemoPlan, say: Callable[[str], None]) -> None:
        assert (plan.with_image, plan.with_environment, plan.with_checkpoint) == (True, False, True)
        self._folder = plan.folder
        self.image_bytes = 400

    def build(self) -> None:
        pass

    def launch(self, number: int) -> Launch:
        return _launch(9, "same") if number == 1 else _launch(1, self.second_checksum)

    def await_record(self) -> None:
        pass

    def bytes_written(self) -> int:
        return 30

    def remove(self) -> None:
        self._folder.rmdir()


def _demo(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> Any:
    monkeypatch.setattr(job, "stages_left_out", lambda: {"environment": "no pip"})
    monkeypatch.setattr(job, "Demo", _Demo)
    return CliRunner().invoke(cli, ["demo", "--dir", str(folder), *arguments])


def test_the_document_compares_both_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = _demo(monkeypatch, tmp_path, "--json")
    document = json.loads(done.stdout)
    agree("demo", document, free=("stages", "left_out", "network"))
    assert document["stages"] == {
        "image": {
            "first_s": 2.0, "second_s": 2.0, "ratio": 1.0, "first_bytes": 180, "second_bytes": 20,
        },
        "checkpoint": {
            "first_s": 10.0, "second_s": 2.0, "ratio": 5.0, "first_bytes": 500, "second_bytes": 500,
        },
    }  # fmt: skip
    assert document["total"] == {
        "first_s": 12.0, "second_s": 4.0, "ratio": 3.0, "first_bytes": 709, "second_bytes": 701,
        "first_cpu_s": 9.0, "second_cpu_s": 1.0,
    }  # fmt: skip
    assert document["image"] == {"bytes": 400, "touched_share": 0.05}
    assert document["published_bytes"] == 30
    assert document["left_out"] == {"environment": "no pip"}
    assert "demo: leaving out the environment: no pip\n" in done.stderr


def test_the_readme_shows_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = _demo(monkeypatch, tmp_path)
    table = [line for line in without_figures(done.stdout) if not line.startswith("demo: ")]
    shown = [line for line in readme_output() if not line.startswith(("demo: ", "environment "))]
    assert table == shown


def test_launches_that_loaded_different_bytes_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_Demo, "second_checksum", "other")
    done = _demo(monkeypatch, tmp_path)
    assert "loaded different bytes" in str(done.exception)
    assert done.stdout == ""
