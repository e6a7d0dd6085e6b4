"""Parser of NCCL's initialisation times in logs with `NCCL_DEBUG=INFO`. Pure (no I/O).

The line is printed by `ncclCommInitRankFunc` in NCCL's src/init.cc (2.21 and later): "Init timings
- NAME: rank R nranks N total T (kernels K, alloc A, bootstrap B, ...)". It has no time of day, and
its rank is the one in the communicator; a process's rank in the job is that in its largest one.
"""

import re

from bootseer.report.others.foreign_stage import STAGES_MAX, ForeignStage, lines

ROLE = "NCCL"
_LINE = re.compile(
    r"(\S{1,253}:\d{1,10}):\d{1,10} \[\d{1,4}\] NCCL INFO (?:.{0,64} )??Init timings[ -]{0,3}"
    r"\w{0,64}: rank (\d{1,7}) nranks (\d{1,7}) total (\d{1,6}\.\d{1,9}) \(([^()]{1,500})\)"
)
_PART = re.compile(r"(\w{1,32}) (\d{1,6}\.\d{1,9})")


def parse_nccl(data: bytes) -> list[ForeignStage]:
    """Return the initialisation of each communicator, in log order for each process."""
    by_process: dict[str, list[tuple[int, int, float, tuple[tuple[str, float], ...]]]] = {}
    count = 0
    for line in lines(data):
        match = _LINE.search(line)
        if match is None:
            continue
        process, rank, size, total, text = match.groups()
        parts = tuple((f"NCCL {name}", float(seconds)) for name, seconds in _PART.findall(text))
        by_process.setdefault(process, []).append((int(size), int(rank), float(total), parts))
        count += 1
        if count >= STAGES_MAX:
            break
    found = []
    for process, communicators in by_process.items():
        _, rank = max((size, -rank) for size, rank, _, _ in communicators)
        for number, (size, _, total, parts) in enumerate(communicators):
            found.append(
                ForeignStage(
                    name="NCCL init",
                    role=ROLE,
                    begin_ns=None,
                    end_ns=None,
                    rank=-rank,
                    nodes=(process.rpartition(":")[0],),
                    unit=f"{process} {number}",
                    attributes={"nccl.total_s": total, "nccl.nranks": size},
                    parts=tuple((name, seconds) for name, seconds in parts if seconds > 0),
                )
            )
    return found
