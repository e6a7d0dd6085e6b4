"""A case from declaration to tables, without measuring anything."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.model import only
from bench.reporting import generated_page
from bench.reporting.result import from_json, load, save, to_json
from bench.reporting.tables import ratio_rows, variant_rows
from bench.runner import run_case
from testbed.needs import MissingError
from tests.bench.example import CASE


def test_variants_are_interleaved_and_those_that_cannot_run_are_named() -> None:
    said: list[str] = []
    result = run_case(CASE, is_quick=False, say=said.append)
    assert [(run.round_number, run.variant) for run in result.runs] == [
        (number, variant) for number in range(3) for variant in ("slow", "fast")
    ]
    assert {v.name: v.skipped for v in result.variants} == {
        "slow": None,
        "fast": None,
        "missing": "needs a moon | or two",
        "breaking": "it broke",
    }
    assert sum(line.startswith("warm-up") for line in said) == 2
    assert result.runs[0].figures == {
        "wall_s": 3.0,
        "server_cpu_s": 1.5,
        "cpu_s": 1.5,
        "moved_bytes": 1000.0,
        "rate": 1000 / 3,
    }
    assert [ratio.per_round for ratio in result.ratios] == [(3.0, 3.0, 3.0), ()]
    assert {"kernel", "cpu_model", "cpu_count", "memory_bytes", "commit", "file_system"} <= set(
        result.environment
    )


def test_rounds_can_be_chosen() -> None:
    assert {r.round_number for r in run_case(CASE, is_quick=True).runs} == {0, 1}
    assert {r.round_number for r in run_case(CASE, is_quick=True, rounds=1).runs} == {0}


def test_variants_can_be_chosen() -> None:
    names = [variant.name for variant in CASE.variants]
    result = run_case(only(CASE, names[1:2]), is_quick=True)
    assert {run.variant for run in result.runs} == {names[1]}
    assert not any(ratio.per_round for ratio in result.ratios)
    with pytest.raises(MissingError, match="no variant called nobody"):
        only(CASE, ["nobody"])


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = run_case(CASE, is_quick=True)
    path = tmp_path / "example.json"
    save(result, path)
    assert to_json(load(path)) == to_json(result)
    document = json.loads(path.read_text())
    assert sum(line.startswith(' {"round"') for line in path.read_text().splitlines()) == 4
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
        ("missing", "skipped: needs a moon | or two", ""),
        ("breaking", "skipped: it broke", ""),
    ]
    assert ratio_rows(result.ratios)[1] == [
        ("slow / fast", "3.00", "3.00 to 3.00", ">= 2", "met"),
        ("missing / fast", "not measured", "", "", ""),
    ]


def test_report_is_markdown_and_replaces_only_itself() -> None:
    result = dataclasses.replace(run_case(CASE, is_quick=True), started_at_s=0.0)
    text = generated_page.render([result], {"example": CASE})
    assert "### example" in text
    assert "| slow / fast | 3.00 | 3.00 to 3.00 | >= 2 | met |" in text
    assert "needs a moon \\| or two" in text
    assert "1970-01-01, quick run, 2 rounds." in text
    begin, end = generated_page.markers("results")
    document = f"before\n{begin}\nold\n{end}\nafter\n"
    replaced = generated_page.replace(document, "results", text)
    assert replaced.startswith(f"before\n{begin}\n")
    assert replaced.endswith(f"{end}\nafter\n")
    assert "old" not in replaced
    assert generated_page.replace(replaced, "results", text) == replaced
    with pytest.raises(ValueError, match="lacks the lines"):
        generated_page.replace("nothing here", "results", text)
