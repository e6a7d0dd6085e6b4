"""A start that finds its environment in place loads little besides the key's modules.

Each start waits for every module. No assertion is about time: the imported modules decide it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.node import Node

pytestmark = pytest.mark.usefixtures("fresh_interpreters")

_UNWANTED = (
    *("_hashlib", "blake3", "click", "ctypes", "socket", "subprocess", "zstandard"),
    *("blob.columns", "blob.index", "blob.tree", "fanout", "fuse", "prefetch.cache.indexes"),
    *("prefetch.serve", "snapshots.capture", "snapshots.catalogue", "snapshots.manifest"),
    *("snapshots.mounting", "snapshots.restore", "store.objects.uses", "transfer.ranges"),
)
_ALL_UNWANTED = (*_UNWANTED, *(f"bootseer.{name}" for name in _UNWANTED))
_TELLING = f"""
import os, sys, traceback
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in {_ALL_UNWANTED}:
            print(name, "is imported:", *traceback.format_stack(), file=sys.stderr)
sys.meta_path.insert(0, Watch)
def tell(*ignored):
    os.write(1, " ".join(sys.modules).encode())
    os._exit(0)
os.execvp = tell
from bootseer.__main__ import main
main()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    # A launcher of interpreters, such as pyenv's, would be asked at each start. numpy alone has no
    # cache to keep.
    python = tmp_path / "python/bin/python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "python/pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "python/lib" / version / "site-packages/numpy-2.0.0.dist-info").mkdir(parents=True)
    made = Node(tmp_path, variables={"PATH": f"{python.parent}:{os.environ['PATH']}"})
    yield made
    made.sweep()


@pytest.mark.parametrize(
    "mode", [pytest.param("mount", marks=pytest.mark.needs("root", "fuse")), "extract"]
)
def test_a_start_with_its_environment_in_place(node: Node, mode: str) -> None:
    target, script = node.base / "env", node.base / "set-up.sh"
    script.write_text(f"mkdir {target} && echo 1 > {target}/module.py\n")
    start = ["run", "--setup", f"sh {script}", "--target", target, "--", "true"]
    assert node.run(*start).returncode == 0
    if mode == "mount":
        shutil.rmtree(target)
        # Such a mount stays until it is unmounted.
        restore = ["snapshot", "run", "--mode", mode, "--target", target, "--", "sh", script]
        assert node.run(*restore).returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", _TELLING, *map(str, start)],
        env=node.environment,
        cwd=node.base,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = "is mounted already" if mode == "mount" else "is in place already"
    assert expected in done.stderr
    loaded = done.stdout.split()
    assert "bootseer.snapshots.environment" in loaded
    found = [one for one in loaded if f"{one}.".startswith(tuple(f"{u}." for u in _ALL_UNWANTED))]
    assert not found, done.stderr
