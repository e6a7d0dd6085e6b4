"""The output of `bootseer demo`: that of a whole run, and the documents for made-up launches."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli import cli
from bootseer.demo import abilities, job
from bootseer.demo.job import Launch, Plan
from bootseer.timeline.otlp import Stage
from testbed.paths import REPOSITORY
from tests.bootseer.cli.json_page import agree

# The page cache of the whole machine is left alone: other tests run beside this one.
_CODE = """
from bootseer.cli import main
from bootseer.demo import job
job.drop_page_cache = lambda: False
main()
"""
_FAST_NETWORK = ("--link-mbit", "1000000", "--file-mbyte", "1000000")


def _without_figures(lines: list[str]) -> list[str]:
    """Return the lines with every number as "#", without its unit, and with single spaces."""
    numbers = (re.sub(r"\d+(\.\d+)?( [kMGT]?B\b)?", "#", line) for line in lines)
    return [" ".join(line.split()) for line in numbers]


def _readme() -> list[str]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return text.split("$ make demo\n")[1].split("```")[0].splitlines()


@pytest.mark.needs("root", "mount", "fuse", modules=["pip"], programs=["tar", "ldd"])
def test_the_readme_shows_what_a_run_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CODE, "demo", "--quick", "--dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *_FAST_NETWORK], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    sentences = [line for line in _readme() if line.startswith("demo: ")]
    table = [line for line in _readme() if not line.startswith("demo: ")]
    assert _without_figures(done.stderr.splitlines()) == _without_figures(sentences)
    assert _without_figures(done.stdout.splitlines()) == _without_figures(table)
    for row in done.stdout.splitlines()[1:]:
        first_s, second_s = re.findall(r" (\d+\.\d\d) ", row)
        assert float(first_s) > 0, row
        assert float(second_s) > 0, row
    assert list(tmp_path.iterdir()) == []


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


class _World:
    """Stand-in for `bootseer.demo.job.World` that launches nothing."""

    second_checksum = "same"

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
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
    monkeypatch.setattr(abilities, "left_out_of", lambda: {"environment": "no pip"})
    monkeypatch.setattr(job, "World", _World)
    return CliRunner().invoke(cli, ["demo", "--dir", str(folder), *arguments])


def test_the_document_compares_both_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = _demo(monkeypatch, tmp_path, "--json")
    document = json.loads(done.stdout)
    agree("demo", document, free=("stages", "left_out"))
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
    assert (document["published_bytes"], document["identical"]) == (30, True)
    assert document["left_out"] == {"environment": "no pip"}
    assert "demo: leaving out the environment: no pip\n" in done.stderr


def test_launches_that_loaded_different_bytes_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_World, "second_checksum", "other")
    done = _demo(monkeypatch, tmp_path)
    assert "loaded different bytes" in str(done.exception)
    assert done.stdout == ""
