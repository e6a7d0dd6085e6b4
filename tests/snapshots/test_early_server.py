"""A command that starts a mount's server before it knows whether it needs one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.served.service import live_mounts, log_path
from bootseer.settings.config import Settings
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.mounted import unmount_snapshot
from testbed.mounts.sweeping import sweep
from testbed.paths import REPOSITORY
from tests.snapshots.conftest import MakeNode

pytestmark = pytest.mark.needs("mount", "fuse")

# The process that runs a set-up has no other child then. Each of its threads lists its own
# children, and may end meanwhile.
_SET_UP = (
    'mkdir "$0" && echo $$ > "$0/shell" && '
    '{ cat /proc/$PPID/task/*/children > "$0/children" 2> /dev/null || true; }'
)


# Modules of other commands, other modes or servers are not loaded: a start waits for each import.
_UNWANTED = (
    *(
        "asyncio",
        "click",
        "concurrent",
        "getpass",
        "hmac",
        "http",
        "lzma",
        "random",
        "secrets",
        "shutil",
        "statistics",
        "subprocess",
        "tempfile",
        "tomllib",
        "xml",
    ),
    *("bootseer.blob.extract.extraction", "bootseer.fanout.host"),
    *(
        "bootseer.fuse.kernel.server",
        "bootseer.prefetch.serve.server",
        "bootseer.snapshots.capture",
    ),
    *(
        "bootseer.snapshots.relocation",
        "bootseer.snapshots.environment",
        "bootseer.transfer.engine",
    ),
)
pytestmark = pytest.mark.usefixtures("fresh_interpreters")

_TELLING = """
import sys
from bootseer.served.processes import Process
wait = Process.wait
def tell(self, *arguments):
    print(*sys.modules)
    return wait(self, *arguments)
Process.wait = tell
from bootseer.__main__ import main
main()
"""

_TELLING_END = """
from bootseer.served.processes import Process
abandon = Process.abandon
def tell(self):
    print("let go", flush=True)
    abandon(self)
Process.abandon = tell
from bootseer.__main__ import main
main()
"""


def _bootseer(node: Settings, directory: Path, *arguments: str, code: str = "") -> str:
    """Run a command and return its output."""
    start = ["-c", code] if code else ["-m", "bootseer"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "BOOTSEER_STORE": node.store_url,
            "BOOTSEER_CACHE_DIR": str(node.cache_dir),
            "BOOTSEER_RUN_DIR": str(node.run_dir),
        },
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.needs("root", "fuse")
def test_a_restore_loads_no_more_than_it_needs(tmp_path: Path, make_node: MakeNode) -> None:
    node, target = make_node("a"), tmp_path / "env"
    target.mkdir()
    (target / "file").write_text("content")
    key = create_snapshot(node, [str(target)]).fingerprint
    shutil.rmtree(target)
    try:
        restore = ("snapshot", "restore", key, "--mode", "mount")
        loaded = _bootseer(node, tmp_path, *restore, code=_TELLING).split()
        ((_, state),) = live_mounts(node.run_dir)
        log = log_path(node.run_dir, state.id)
        assert (target / "file").read_text() == "content"
        assert " INFO " in log.read_text(), "it found its log once it was told"
        assert log.stat().st_mode & 0o777 == 0o600
        unmount_snapshot(node, target)
    finally:
        sweep(tmp_path, node)
    assert "bootseer.snapshots.restore" in loaded
    assert not [name for name in loaded if f"{name}.".startswith(tuple(f"{u}." for u in _UNWANTED))]


@pytest.mark.needs("root", "fuse")
def test_it_ends_before_a_set_up_and_serves_as_itself(tmp_path: Path, make_node: MakeNode) -> None:
    """The server has a command line of its own: tools that kill a start by its command line spare
    it."""
    node, target = make_node("a"), tmp_path / "env"

    def run() -> None:
        command = ["snapshot", "run", "--mode", "mount", "--target", str(target), "--"]
        _bootseer(node, tmp_path, *command, "sh", "-c", _SET_UP, str(target))

    try:
        run()
        assert (target / "children").read_text().split() == [(target / "shell").read_text().strip()]
        shutil.rmtree(target)
        run()
        ((_, state),) = live_mounts(node.run_dir)
        shown = Path(f"/proc/{state.pid}/cmdline").read_text().rstrip("\0").split("\0")
        assert shown[:3] == ["python", "-m", "bootseer.prefetch.serve.server"]
        assert (target / "shell").exists()
        unmount_snapshot(node, target)
    finally:
        sweep(tmp_path, node)


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("mode", ["extract", "mount"])
def test_none_is_begun_for_what_is_extracted(
    tmp_path: Path, make_node: MakeNode, mode: str
) -> None:
    node, target = make_node("a"), tmp_path / "env"
    target.mkdir()
    key = create_snapshot(node, [str(target)]).fingerprint
    # The command ends each server that it has started.
    restore = ("snapshot", "restore", key, "--mode", mode)
    told = _bootseer(node, tmp_path, *restore, code=_TELLING_END)
    sweep(tmp_path, node)
    assert ("let go" in told) is (mode == "mount")
