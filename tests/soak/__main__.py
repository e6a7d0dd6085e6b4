"""`python -m tests.soak`: rounds of jobs and faults for a given time.

A soak continues where it was stopped. Each round is drawn from the seed and its number. Exit code 1
with findings.
"""

import argparse
import heapq
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from testbed.waiting import pause
from tests.conftest import reset_signals
from tests.soak.faults import draw_fault
from tests.soak.jobs import SoakJob, start_job
from tests.soak.remains import final_findings, run, settle
from tests.soak.site import SoakSite, missing_tools, open_site

_GC_EVERY = 7


class Soak:
    """State of a soak, kept in a file, so that a stopped soak continues."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._file = folder / "state.json"
        state = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.seed: int = state.get("seed", seed)
        self.round: int = state.get("round", 0)
        self.elapsed_s: float = state.get("elapsed_s", 0.0)
        self.results: Counter[str] = Counter(state.get("results", {}))
        self.findings: list[str] = state.get("findings", [])

    def save(self) -> None:
        """Write the state to the file."""
        self._file.write_text(json.dumps({k: v for k, v in vars(self).items() if k[0] != "_"}))

    def note(self, findings: list[str]) -> None:
        """Keep and print findings."""
        for finding in findings:
            print(f"  FINDING in round {self.round}: {finding}", flush=True)
            self.findings.append(f"round {self.round}: {finding}")


def play_round(site: SoakSite, soak: Soak) -> None:
    """Run some jobs and faults at once, and wait until nothing of them is left."""
    generator = random.Random(f"{soak.seed}:{soak.round}")
    users = generator.sample(site.users, generator.choice([1, 1, 2]))
    jobs = [
        start_job(site, user, generator)
        for user in users
        for _ in range(generator.choice([1, 2, 2, 3]) if len(users) == 1 else 1)
    ]
    faults = [
        draw_fault(site, user, generator) for user in users for _ in range(generator.randrange(3))
    ]
    print(f"round {soak.round}: {[job.name for job in jobs]}", flush=True)
    begun_s = time.monotonic()
    # Begins and ends of faults by time; a fault also ends if all jobs have ended before.
    tie = itertools.count()
    agenda: list[tuple[float, int, str, Callable[[], object]]] = []
    for fault in faults:
        heapq.heappush(agenda, (fault.after_s, next(tie), fault.name, fault.begin))
        ends_s = fault.after_s + fault.for_s
        heapq.heappush(agenda, (ends_s, next(tie), f"end of {fault.name}", fault.undo))
    while agenda:
        at_s, _, name, act = heapq.heappop(agenda)
        pause(begun_s + at_s - time.monotonic())
        print(f"  {at_s:.1f} s: {name} {act() or ''}", flush=True)
    soak.note([finding for job in jobs for finding in _judged(soak, job, bool(faults), len(jobs))])
    for user in users:
        soak.note(settle(user))
    if soak.round % _GC_EVERY == _GC_EVERY - 1:
        collected = run(users[0], "gc", "--delete")
        if collected.returncode:
            soak.note([f"GC: {collected.returncode} {collected.stderr[-300:]}"])


def _judged(soak: Soak, job: SoakJob, has_fault: bool, job_count: int) -> list[str]:
    result = job.result()
    kind = result.partition(":")[0]
    soak.results[kind] += 1
    if result != "right":
        print(f"  {job.name}: {result}", flush=True)
    if kind.isupper():
        return [f"{job.name}: {result}"]
    # Without a fault, a job may fail only if another job uses the same path.
    if kind == "failed" and not has_fault and job_count == 1:
        return [f"{job.name} without any fault: {result}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, help="end after so many, if the time is not over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "bootseer-soak"))
    arguments = parser.parse_args()
    reset_signals()
    # SIGTERM ends the soak as Ctrl-C does, so that nothing is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if missing := missing_tools():
        print(f"skipped: the soak needs {', '.join(missing)}")
        return 0
    with open_site(arguments.folder) as site:
        soak = Soak(arguments.folder, arguments.seed)
        print(f"seed {soak.seed}, round {soak.round}, {soak.elapsed_s:.0f} s done", flush=True)
        rounds = range(soak.round, arguments.rounds) if arguments.rounds else itertools.count()
        for _ in rounds:
            if soak.elapsed_s >= arguments.minutes * 60:
                break
            begun_s = time.monotonic()
            play_round(site, soak)
            soak.round += 1
            soak.elapsed_s += time.monotonic() - begun_s
            soak.save()
        soak.note(final_findings(site))
        soak.save()
    print(f"{soak.round} rounds in {soak.elapsed_s:.0f} s: {dict(soak.results)}")
    print(f"{len(soak.findings)} findings")
    for finding in soak.findings:
        print(f"- {finding}")
    return 1 if soak.findings else 0


if __name__ == "__main__":
    sys.exit(main())
