"""A case from declaration to tables, without measuring anything."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.__main__ import main as bench
from bench.catalogue import all_cases
from bench.fanout.plot import scale_plot
from bench.model import Case, Column, Sample, Workspace, at_least, only, ratio_of, variant
from bench.reporting import generated_page
from bench.reporting.result import from_json, load, save, to_json
from bench.reporting.summary import problems
from bench.reporting.tables import ratio_rows, variant_rows
from bench.runner import run_case, smoke
from testbed.needs import MissingError
from testbed.paths import REPOSITORY


@contextlib.contextmanager
def prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["notes"] = ["Nothing is measured"]
    yield


def taking(wall_s: float) -> Callable[[Workspace], Sample]:
    return lambda workspace: Sample(wall_s, {"server": wall_s / 2}, moved_bytes=1000)


def raising(error: Exception) -> Callable[[Workspace], Sample]:
    def take(workspace: Workspace) -> Sample:
        raise error

    return take


MISSING = "needs a moon | or two"
CASE = Case(
    name="example",
    description="An example.",
    prepare=prepare,
    variants=(
        variant("slow", "takes long", taking(3.0)),
        variant("fast", "takes less", taking(1.0)),
        variant("missing", "cannot run", raising(MissingError(MISSING))),
        variant("breaking", "fails when run", raising(RuntimeError("it broke"))),
    ),
    ratios=(
        ratio_of("slow / fast", ("slow", "wall_s"), ("fast", "wall_s"), at_least(2)),
        ratio_of("missing / fast", ("missing", "wall_s"), ("fast", "wall_s")),
    ),
    columns=(Column("s", "wall_s"), Column("kB/s", "rate", scale=1e-3, digits=1)),
    runs=3,
    quick_runs=2,
    derive=lambda sample: {"rate": (sample.moved_bytes or 0) / sample.wall_s},
)


def test_variants_are_interleaved_and_those_that_cannot_run_are_named() -> None:
    said: list[str] = []
    result = run_case(CASE, is_quick=False, say=said.append)
    assert [(run.round_number, run.variant) for run in result.runs] == [
        (number, name) for number in range(3) for name in ("slow", "fast")
    ]
    skipped = {"slow": None, "fast": None, "missing": MISSING, "breaking": "it broke"}
    assert {one.name: one.skipped for one in result.variants} == skipped
    assert sum(line.startswith("warm-up") for line in said) == 2
    figures = {"wall_s": 3.0, "server_cpu_s": 1.5, "cpu_s": 1.5, "moved_bytes": 1000.0}
    assert result.runs[0].figures == {**figures, "rate": 1000 / 3}
    assert [one.per_round for one in result.ratios] == [(3.0, 3.0, 3.0), ()]
    assert {"kernel", "cpu_count", "commit", "file_system"} <= set(result.environment)


def test_rounds_and_variants_can_be_chosen() -> None:
    assert {run.round_number for run in run_case(CASE, is_quick=True).runs} == {0, 1}
    result = run_case(only(CASE, ["fast"]), is_quick=True, rounds=1)
    assert [(run.round_number, run.variant) for run in result.runs] == [(0, "fast")]
    with pytest.raises(MissingError, match="no variant called nobody"):
        only(CASE, ["nobody"])


def test_a_smoke_run_tells_what_failed_from_what_cannot_run() -> None:
    unknown = ratio_of("made up / fast", ("slow", "made_up"), ("fast", "wall_s"))
    found = smoke(dataclasses.replace(CASE, ratios=(*CASE.ratios, unknown)))
    assert found.ran == ("fast",)
    assert found.skipped == {"missing": MISSING}
    assert found.failed == {"breaking": "it broke", "slow": "it has no figure 'made_up'"}


def test_a_case_that_does_not_fit_the_code_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(CASE, name="broken", prepare=lambda one: one.shared["renamed"])
    monkeypatch.setattr("bench.__main__.all_cases", lambda: {"broken": broken, "example": CASE})
    done = CliRunner().invoke(bench, ["--smoke", "--only", "fast"])
    assert done.exit_code == 1
    assert "broken: FAILED: " in done.stdout
    assert "KeyError: 'renamed'" in done.stdout
    assert "example: ran: fast\n" in done.stdout


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = run_case(CASE, is_quick=True)
    path = tmp_path / "example.json"
    save(result, path)
    assert to_json(load(path)) == to_json(result)
    assert sum(line.startswith(' {"round"') for line in path.read_text().splitlines()) == 4
    document = json.loads(path.read_text())
    assert document["ratios"][0]["met"] is True
    with pytest.raises(ValueError, match="schema 99"):
        from_json({**document, "schema": 99})


def test_results_as_tables() -> None:
    result = run_case(CASE, is_quick=True)
    header, rows = variant_rows(result, CASE.columns)
    assert header == ("variant", "s", "kB/s")
    assert rows == [
        ("slow", "3.00", "0.3"),
        ("fast", "1.00", "1.0"),
        ("missing", f"skipped: {MISSING}", ""),
        ("breaking", "skipped: it broke", ""),
    ]
    assert ratio_rows(result.ratios)[1] == [
        ("slow / fast", "3.00", "3.00 to 3.00", ">= 2", "met"),
        ("missing / fast", "not measured", "", "", ""),
    ]


def test_report_is_markdown_and_replaces_only_itself() -> None:
    text = generated_page.render([run_case(CASE, is_quick=True)], {"example": CASE})
    assert "| slow / fast | 3.00 | 3.00 to 3.00 | >= 2 | met |" in text
    assert "needs a moon \\| or two" in text
    begin, end = generated_page.markers("results")
    replaced = generated_page.replace(f"before\n{begin}\nold\n{end}\nafter\n", "results", text)
    assert replaced == f"before\n{begin}\n\n{text}\n{end}\nafter\n"
    assert generated_page.replace(replaced, "results", text) == replaced
    with pytest.raises(ValueError, match="lacks the lines"):
        generated_page.replace("nothing here", "results", text)


def test_published_tables_are_those_of_the_results() -> None:
    results = generated_page.load_results(REPOSITORY / "bench" / "results")
    readme, docs = REPOSITORY / "README.md", REPOSITORY / "docs"
    page, every = docs / "benchmarks.md", docs / "results.md"
    stale = [
        path.name
        for path, written in (
            (readme, generated_page.readme(readme.read_text(), results)),
            (page, generated_page.benchmarks(page.read_text(), results)),
            (every, generated_page.all_results(every.read_text(), results, all_cases())),
        )
        if path.read_text() != written
    ]
    plots = [scale_plot(result) for result in results if result.case == "fanout"]
    assert plots == [(REPOSITORY / "docs" / "scale.svg").read_text()]
    assert stale == [], "run `python -m bench --report`"


def test_declarations_are_valid() -> None:
    assert {case.name: problems(case) for case in all_cases().values() if problems(case)} == {}
