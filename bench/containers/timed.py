"""Runs a command and prints its costs as JSON: `python -m bench.containers.timed COMMAND...`

A process of its own, since the kernel tells the peak memory of children only as the maximum over
all of them.
"""

import json
import resource
import subprocess
import sys
import time


def main() -> None:
    """Run the command with its output on stderr; exit with its exit code."""
    started_s = time.monotonic()
    code = subprocess.run(sys.argv[1:], stdout=sys.stderr, check=False).returncode
    wall_s = time.monotonic() - started_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        # ru_maxrss is in KiB (getrusage(2)).
        "peak_bytes": used.ru_maxrss * 1024,
    }
    sys.stdout.write(json.dumps(cost) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
