"""Kills relocations at their N-th change to the file system (see `crash_driver`).

`python relocate_crash_driver.py DIRECTORY POINTS` prints its results, and fails if something half
done was visible or the next restore did not work.
"""

import os
import shutil
import sys
from pathlib import Path

from bootseer.errors import AlreadyExistsError
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.restore import restore_snapshot
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.support.crash_driver import no_leftovers, points_of, run_in_child, settings_of


def _make_environment(env: Path) -> None:
    make_zoo(env)
    (env / "bin").mkdir()
    (env / "lib/__pycache__").mkdir(parents=True)
    for i in range(3):
        (env / f"bin/script{i}").write_text(f"#!{env}/bin/python\n")
        (env / f"bin/link{i}").symlink_to(env / f"bin/script{i}")
        (env / f"lib/m{i}.py").write_text(f"X = {str(env)!r}\n")
        (env / f"lib/__pycache__/m{i}.cpython-311.pyc").write_bytes(b"compiled")


def restore_relocated(top: Path, wanted: int) -> None:
    """Assert that after a kill nothing or everything is at the new path."""
    env, other = top / "env", top / "work/other"
    _make_environment(env)
    create_snapshot(settings_of(top, "a"), [str(env)], "env")

    def run() -> None:
        try:
            restore_snapshot(settings_of(top, "b"), "env", other, relocates=True)
        except AlreadyExistsError:
            assert other.exists()  # it has finished what was killed

    count = run_in_child(run, None)
    assert count is not None
    wanted_tree = describe(other)
    assert (other / "bin/script0").read_text() == f"#!{other}/bin/python\n"
    assert os.readlink(other / "bin/link0") == str(other / "bin/script0")
    assert not list(other.rglob("m0.*.pyc"))
    for point in points_of(count, wanted):
        shutil.rmtree(other)
        killed = run_in_child(run, point) is None
        if other.exists():
            assert differences(wanted_tree, describe(other)) == [], point
        assert run_in_child(run, None) is not None
        assert differences(wanted_tree, describe(other)) == [], point
        no_leftovers(other.parent)
        print(f"{point}/{count} {'killed' if killed else 'finished'}")  # noqa: T201


if __name__ == "__main__":
    restore_relocated(Path(sys.argv[1]), int(sys.argv[2]))
