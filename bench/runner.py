"""Runs a case: sessions for all variants, then interleaved runs; or each variant once."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.machine import environment
from bench.model import Case, TakeSample, Workspace, figures_of
from bench.reporting.result import Result, VariantResult
from bench.reporting.summary import Run, Turn, measure_ratio, schedule
from testbed.needs import MissingError


def run_case(
    case: Case,
    *,
    is_quick: bool,
    kept: Path | None = None,
    rounds: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run every variant that can run here, `rounds` times (default: the case's number).

    `kept` is the folder for preparations that are used again (None: nothing is kept); `say` is
    called with a line for people at each event. A variant that fails is dropped from there on, with
    the reason. Raises: MissingError if the whole case cannot run.
    """
    rounds = rounds or (case.quick_runs if is_quick else case.runs)
    started_at_s = time.time()
    runs: list[Run] = []
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bootseer-bench-")))
        workspace = Workspace(directory, is_quick, kept or directory / "kept", say)
        surroundings = environment.describe(directory)
        stack.enter_context(case.prepare(workspace))
        takers: dict[str, TakeSample] = {}
        for variant in case.variants:
            try:
                takers[variant.name] = stack.enter_context(variant.session(workspace))
            except MissingError as reason:
                skipped[variant.name] = str(reason)
                say(f"{variant.name}: skipped: {reason}")
        for turn in schedule(list(takers), rounds, case.warmups):
            if turn.variant not in skipped:
                try:
                    run = _take(case, turn, takers[turn.variant])
                except (OSError, RuntimeError, MissingError) as error:
                    skipped[turn.variant] = str(error)
                    say(f"{turn.variant}: dropped: {error}")
                    continue
                say(_line(run))
                if turn.round_number >= 0:
                    runs.append(run)
        notes = tuple(workspace.shared.get("notes", ()))
    return Result(
        case=case.name,
        description=case.description,
        is_quick=is_quick,
        started_at_s=started_at_s,
        environment=surroundings,
        notes=notes,
        variants=tuple(
            VariantResult(variant.name, variant.description, skipped.get(variant.name))
            for variant in case.variants
        ),
        runs=tuple(runs),
        ratios=tuple(measure_ratio(ratio, runs) for ratio in case.ratios),
    )


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """Variants that ran, and the reasons why others were skipped or failed, by name."""

    ran: tuple[str, ...]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]


def smoke(
    case: Case, *, kept: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> SmokeResult:
    """Run each variant once with the least sizes, to check that the case still works.

    A variant fails if it raises, or lacks a figure that a ratio names. Raises: MissingError if the
    whole case cannot run here.
    """
    figures: dict[str, Mapping[str, float]] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bootseer-bench-")))
        workspace = Workspace(directory, True, kept or directory / "kept", say, is_smoke=True)
        stack.enter_context(case.prepare(workspace))
        for variant in case.variants:
            say(f"{case.name}: {variant.name}")
            try:
                take = stack.enter_context(variant.session(workspace))
                figures[variant.name] = figures_of(case, take())
            except MissingError as reason:
                skipped[variant.name] = str(reason)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                failed[variant.name] = str(error) or repr(error)
    for ratio in case.ratios:
        for side in (ratio.top, ratio.bottom):
            if side.name not in figures.get(side.variant, {side.name: 0.0}):
                failed.setdefault(side.variant, f"it has no figure {side.name!r}")
    ran = tuple(name for name in figures if name not in failed)
    return SmokeResult(ran, skipped, failed)


def _take(case: Case, turn: Turn, take: TakeSample) -> Run:
    return Run(turn.round_number, turn.variant, figures_of(case, take()))


def _line(run: Run) -> str:
    label = f"round {run.round_number + 1}" if run.round_number >= 0 else "warm-up"
    return f"{label}: {run.variant}: {run.figures['wall_s']:.3f} s"
