"""A process that has imported all tests, and is forked for each worker of pytest-xdist.

To import (and, in a new checkout, to rewrite and compile) the test modules takes as long as the
rest of a collection, or longer. Each worker still collects by itself.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from compileall import compile_file
from contextlib import contextmanager
from pathlib import Path

import pytest
from execnet.gateway_io import popen_bootstrapline

from testbed import zygote
from testbed.paths import REPOSITORY


def install(config: pytest.Config) -> None:
    """Let the workers of this run be forks of one process."""
    zygote.fork_for(popen_bootstrapline, "tests.support.workers", *config.args)


_COLLECTION = ("--collect-only", "--quiet", "-p", "no:cacheprovider")
# From those that are imported last.
_PRODUCT = ("snapshots", "prefetch", "fuse", "testbed", "bootseer")


@contextmanager
def _compiled_from_the_end(paths: Sequence[str]) -> Iterator[None]:
    """Let another process compile modules meanwhile, the last ones first.

    In a new checkout this process then finds half of the modules compiled. No other process of the
    run is busy at that time.
    """
    tests = [str(one) for path in paths for one in sorted(Path(path).rglob("test_*.py"))]
    pid = os.fork() if tests else None
    if pid == 0:
        try:
            for folder in _PRODUCT:
                for file in sorted((REPOSITORY / folder).rglob("*.py"), reverse=True):
                    compile_file(file, quiet=2)
            # pytest's own bytecode of tests is written when they are collected.
            pytest.main([*_COLLECTION, *tests[len(tests) // 2 :]])
        finally:
            os._exit(0)
    try:
        yield
    finally:
        if pid is not None:
            os.waitpid(pid, 0)


def main() -> None:
    """Import what the tests need by a collection, and serve."""
    descriptor, *paths = sys.argv[1:]
    os.chdir(REPOSITORY)
    silent = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1)
    os.dup2(silent, 1)
    # Whatever it says, each worker says it again.
    with _compiled_from_the_end(paths):
        pytest.main([*_COLLECTION, *paths])
    os.dup2(kept, 1)
    for one in (silent, kept):
        os.close(one)
    zygote.serve(int(descriptor))


if __name__ == "__main__":
    main()
