"""`python -m tests.fuse.striped.exerciser`: sequences for some minutes, or one of them again."""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.running import running
from tests.conftest import reset_signals
from tests.fuse.striped.exerciser.driver import (
    LENGTH,
    SequenceError,
    open_site,
    run_again,
    run_random,
    shrink,
)
from tests.fuse.striped.exerciser.operations import WEIGHTS


@contextlib.contextmanager
def _storage(kind: str, folder: Path) -> Iterator[str]:
    if kind == "hdfs":
        with running(MiniHdfs(folder / "hdfs")) as cluster:
            yield f"{cluster.url}/exerciser"
    else:
        yield (folder / "stored").as_uri()


def main() -> int:
    """Run; return 1 if a deviation was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--sequences", type=int, help="end after so many")
    parser.add_argument("--seed", default=str(time.time_ns() % 10**6), help="default: another one")
    parser.add_argument("--first", type=int, default=0, help="the number of the first sequence")
    parser.add_argument("--length", type=int, default=LENGTH, help="operations of a sequence")
    parser.add_argument("--storage", choices=["folder", "hdfs"], default="folder")
    parser.add_argument("--replay", type=Path, help="a file of operations, one a line")
    parser.add_argument("--shrink", type=float, default=60.0, help="for so many seconds")
    parser.add_argument("--only", help="operations to choose from, with commas between them")
    parser.add_argument("--without", default="", help="operations that are left out")
    arguments = parser.parse_args()
    reset_signals()
    weights = WEIGHTS if arguments.without else None
    if arguments.only:
        weights = {name: WEIGHTS[name] for name in arguments.only.split(",")}
    for name in filter(None, arguments.without.split(",")):
        weights = {kept: weight for kept, weight in (weights or {}).items() if kept != name}
    print(f"seed {arguments.seed}, on {arguments.storage}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="bootseer-exerciser-"))
    begun_s = time.monotonic()
    number, count = arguments.first, 0
    try:
        with _storage(arguments.storage, folder) as url:
            try:
                with open_site(folder, url) as site:
                    begun_s = time.monotonic()
                    if arguments.replay:
                        lines = arguments.replay.read_text().splitlines()
                        run_again(site, [json.loads(x) for x in lines if x.startswith("{")])
                        return 0
                    while time.monotonic() - begun_s < arguments.minutes * 60:
                        if number - arguments.first == arguments.sequences:
                            break
                        count += run_random(
                            site, arguments.seed, number, length=arguments.length, weights=weights
                        )
                        number += 1
            except SequenceError as failure:
                took_s = time.monotonic() - begun_s
                print(f"{failure}\nseed {arguments.seed}, sequence {number}, {took_s:.0f} s")
                if arguments.shrink:
                    until_s = time.monotonic() + arguments.shrink
                    (folder / "again").mkdir()
                    shorter = shrink(folder / "again", f"{url}-again", failure, until_s)
                    print(f"shortest:\n{shorter}" if shorter else "it does not happen again")
                return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    took_s = time.monotonic() - begun_s
    print(f"seed {arguments.seed}: {number} sequences, {count} operations, {took_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
