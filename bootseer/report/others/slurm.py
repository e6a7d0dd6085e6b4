"""Parser of Slurm's `sacct` (JSON or table) and `scontrol show job`. Pure (no I/O).

A requeued job has a record per attempt (`sacct --duplicates`), with the time at which it was queued
again. Times are by slurmctld's clock, in whole seconds.
"""

import re
from collections.abc import Iterator
from typing import Any

from bootseer.base.documents import parse
from bootseer.report.graph import CONTROL_PLANE
from bootseer.report.others.foreign_stage import (
    SIZE_MAX,
    STAGES_MAX,
    ForeignStage,
    clean,
    instant,
    lines,
)

FIELDS = "JobID,State,Submit,Eligible,Start,End"
"""Columns to ask `sacct --parsable2` for. State and End are for people and are not read."""
_PAIR = re.compile(r"(\w+)=(\S*)")
_WHERE = "the output of Slurm"

_Record = tuple[str, Any, Any, Any]
"""Job, and the times at which it was submitted, eligible and started."""


def parse_slurm(data: bytes) -> list[ForeignStage]:
    """Return the stages `held` and `queued` of each attempt of each job."""
    head = data.lstrip()[:1]
    if head == b"{":
        records = _of_json(parse(data, _WHERE, SIZE_MAX, is_foreign=True))
    elif re.search(rb"^\s*JobId=", data[:4096], re.MULTILINE):
        records = _of_scontrol(data)
    else:
        records = _of_table(data)
    found: list[ForeignStage] = []
    for number, record in enumerate(records):
        found += _stages(number, *record)
        if len(found) >= STAGES_MAX:
            break
    return found


def _stages(number: int, job: str, *times: Any) -> Iterator[ForeignStage]:
    submitted, eligible, started = map(instant, times)
    if submitted is None or not job:
        return
    held_until = max(submitted, eligible) if eligible is not None else None
    if held_until != submitted:
        yield _known("held", submitted, held_until, job, number)
    if held_until is not None:
        end = max(held_until, started) if started is not None else None
        yield _known("queued", held_until, end, job, number)


def _known(name: str, begin: int, end: int | None, job: str, number: int) -> ForeignStage:
    return ForeignStage(
        name=name,
        role=CONTROL_PLANE,
        begin_ns=begin,
        end_ns=end,
        clock="slurmctld",
        unit=f"{job} {number}",
        submission=job,
    )


def _of_json(document: Any) -> Iterator[_Record]:
    jobs = document.get("jobs") if isinstance(document, dict) else None
    for job in jobs if isinstance(jobs, list) else ():
        time = job.get("time") if isinstance(job, dict) else None
        if isinstance(time, dict):
            submitted, eligible, started = (
                _number(time.get(name)) for name in ("submission", "eligible", "start")
            )
            yield _job_id(job), submitted, eligible, started


def _job_id(job: dict[str, Any]) -> str:
    """Return the submission that a timeline of the job has: ARRAY_TASK for a task of an array."""
    array, het = job.get("array"), job.get("het")
    if isinstance(array, dict) and _number(array.get("job_id")):
        return f"{_number(array['job_id'])}_{_number(array.get('task_id'))}"
    if isinstance(het, dict) and _number(het.get("job_id")):
        return str(_number(het["job_id"]))
    return str(_number(job.get("job_id")))


def _number(value: Any) -> int:
    """Return a number, which newer releases of Slurm wrap in an object; 0 if there is none."""
    if isinstance(value, dict):
        value = value.get("number")
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def _of_table(data: bytes) -> Iterator[_Record]:
    columns: list[str] = []
    for line in lines(data):
        cells = line.strip().split("|")
        if not columns:
            columns = cells if "Submit" in cells and "JobID" in cells else []
            continue
        row = dict(zip(columns, cells, strict=False))
        job = clean(row.get("JobID"))
        # Skip job steps (12.0, 12.batch), and all components of a heterogeneous job but 12+0.
        if "." not in job and not re.search(r"\+[1-9]", job):
            yield job.partition("+")[0], row.get("Submit"), row.get("Eligible"), row.get("Start")


def _of_scontrol(data: bytes) -> Iterator[_Record]:
    text = data.decode("utf-8", "replace")
    for job in re.split(r"(?:^|(?<=\n))(?=JobId=)", text):
        # The first pair of each name counts: later ones may be in the job's command or comment.
        found = dict(reversed(_PAIR.findall(job[:8192])))
        if found.get("ArrayTaskId", "").isdecimal():
            found["JobId"] = f"{found.get('ArrayJobId')}_{found['ArrayTaskId']}"
        if "JobId" in found:
            # For a pending job, StartTime is only an estimate.
            started = found.get("StartTime") if found.get("JobState") != "PENDING" else None
            submitted, eligible = found.get("SubmitTime"), found.get("EligibleTime")
            yield clean(found["JobId"]), submitted, eligible, started
