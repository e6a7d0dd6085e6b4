"""Fuzzes all targets in turn, or one, or replays one input.

    python -m tests.fuzz [--minutes N] [TARGET [FILE]]

Prints the seed of each round; exits with 1 after a failure, whose input is kept.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from tests.fuzz.harness import FuzzError, fuzz, replay
from tests.fuzz.targets import TARGETS

_COUNT = 200
_CPU_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of the first round")
    options = parser.parse_args()
    if options.file:
        replay(TARGETS[options.target], options.file.read_bytes())
        return 0
    names = [options.target] if options.target else sorted(TARGETS)
    end_s = time.monotonic() + 60 * options.minutes
    number = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    failed = False
    while time.monotonic() < end_s:
        for name in names:
            sys.stderr.write(f"{name}: seed {number}\n")
            try:
                fuzz(TARGETS[name], _COUNT, number, _CPU_S)
            except FuzzError as error:
                sys.stderr.write(f"{error}\n")
                failed = True
            if time.monotonic() > end_s:
                break
        number += 1
    return int(failed)


sys.exit(main())
