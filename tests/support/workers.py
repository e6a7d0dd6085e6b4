"""A process that has imported all tests, and is forked for each worker of pytest-xdist.

To import (and, in a new checkout, to rewrite and compile) the test modules takes as long as the
rest of a collection, or longer. Each worker still collects by itself.
"""

import os
import sys

import pytest
from execnet.gateway_io import popen_bootstrapline

from testbed import zygote
from testbed.paths import REPOSITORY


def install(config: pytest.Config) -> None:
    """Let the workers of this run be forks of one process."""
    zygote.fork_for(popen_bootstrapline, "tests.support.workers", *config.args)


def main() -> None:
    """Import what the tests need by a collection, and serve."""
    descriptor, *paths = sys.argv[1:]
    os.chdir(REPOSITORY)
    silent = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1)
    os.dup2(silent, 1)
    # Whatever it says, each worker says it again.
    pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", *paths])
    os.dup2(kept, 1)
    for one in (silent, kept):
        os.close(one)
    zygote.serve(int(descriptor))


if __name__ == "__main__":
    main()
