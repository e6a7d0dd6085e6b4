"""Result of a case as a JSON file with every run; all tables are made from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.model import Bound, Figure, Ratio, Target
from bench.reporting.summary import RatioResult, Run

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Variant, and the reason why it did not run, if it did not."""

    name: str
    description: str
    skipped: str | None


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that one call of the benchmark measured."""

    case: str
    description: str
    is_quick: bool
    started_at_s: float
    environment: Mapping[str, Any]
    notes: tuple[str, ...]
    """Facts that readers of the numbers must know, such as sizes and the state of caches."""
    variants: tuple[VariantResult, ...]
    runs: tuple[Run, ...]
    ratios: tuple[RatioResult, ...]


def to_json(result: Result) -> dict[str, Any]:
    """Return `result` as a JSON document.

    The ratios' median and range are for readers; loading computes them again.
    """
    return {
        "schema": SCHEMA,
        "case": result.case,
        "description": result.description,
        "quick": result.is_quick,
        "started_at_s": round(result.started_at_s, 3),
        "environment": dict(result.environment),
        "notes": list(result.notes),
        "variants": [
            {"name": v.name, "description": v.description, "skipped": v.skipped}
            for v in result.variants
        ],
        "runs": [
            {"round": run.round_number, "variant": run.variant, "figures": dict(run.figures)}
            for run in result.runs
        ],
        "ratios": [_ratio_to_json(ratio) for ratio in result.ratios],
    }


def from_json(document: Mapping[str, Any]) -> Result:
    """Return the result in a JSON document.

    Raises: ValueError for another schema; KeyError if the document is not a result.
    """
    if document["schema"] != SCHEMA:
        raise ValueError(f"this is a result of schema {document['schema']}, not {SCHEMA}")
    return Result(
        case=document["case"],
        description=document["description"],
        is_quick=document["quick"],
        started_at_s=document["started_at_s"],
        environment=document["environment"],
        notes=tuple(document["notes"]),
        variants=tuple(
            VariantResult(v["name"], v["description"], v["skipped"]) for v in document["variants"]
        ),
        runs=tuple(Run(r["round"], r["variant"], r["figures"]) for r in document["runs"]),
        ratios=tuple(_ratio_from_json(ratio) for ratio in document["ratios"]),
    )


def save(result: Result, path: Path) -> None:
    """Write `result` to `path`: to a file whole or not at all, to a device or pipe in place."""
    text = _lines(to_json(result))
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _lines(document: Mapping[str, Any]) -> str:
    """Return `document` as JSON with a line for each run, variant, ratio and note.

    A comparison of two versions then shows the runs that differ, and nothing else.
    """
    members = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
        members.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(members) + "\n}\n"


def load(path: Path) -> Result:
    """Return the result in a file. Raises: OSError, ValueError, KeyError."""
    return from_json(json.loads(path.read_text()))


def _ratio_to_json(measured: RatioResult) -> dict[str, Any]:
    ratio, spread = measured.ratio, measured.spread
    document: dict[str, Any] = {
        "name": ratio.name,
        "top": [ratio.top.variant, ratio.top.name],
        "bottom": [ratio.bottom.variant, ratio.bottom.name],
        "target": None,
        "per_round": list(measured.per_round),
        "median": spread.median if spread else None,
        "min": spread.minimum if spread else None,
        "max": spread.maximum if spread else None,
        "met": measured.is_met,
    }
    if ratio.target is not None:
        document["target"] = {"bound": ratio.target.bound.value, "limit": ratio.target.limit}
    return document


def _ratio_from_json(document: Mapping[str, Any]) -> RatioResult:
    target = document["target"]
    return RatioResult(
        Ratio(
            document["name"],
            Figure(*document["top"]),
            Figure(*document["bottom"]),
            Target(Bound(target["bound"]), target["limit"]) if target else None,
        ),
        tuple(document["per_round"]),
    )
