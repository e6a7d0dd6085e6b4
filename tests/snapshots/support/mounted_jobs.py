"""A small set-up that counts its runs, and processes that run it as jobs do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bootseer.base.documents import to_builtins
from bootseer.served.overlays import overlay_at
from bootseer.settings.config import Settings
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from testbed.mounts.snapshot_mounts import WAIT_S
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

_JOB = """
import json, sys
from bootseer.settings.config import Settings
from bootseer.base.documents import from_builtins
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.environment import run_setup
settings, command, targets = json.loads(sys.argv[1])
request = SetupRequest(command=command, targets=targets)
class JobStart:
    def before_own_view(self):
        pass

    def waiting_for(self, node, created_ns):
        return lambda: None


result = run_setup(from_builtins(settings, Settings), request, job_start=JobStart())
print(json.dumps([result.how, len(result.ready_names)]), flush=True)
sys.stdin.read()
"""


class SetupProcess(subprocess.Popen[str]):
    """Process that runs a set-up for itself, and then lives on."""

    def __init__(self, node: Settings, request: SetupRequest) -> None:
        what = json.dumps([to_builtins(node), request.command, request.targets])
        super().__init__(
            [sys.executable, "-c", _JOB, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of(node),
            text=True,
        )
        assert self.stdout is not None
        self.how, self.ready_name_count = json.loads(self.stdout.readline())

    def end(self) -> None:
        """Kill the process by SIGKILL."""
        self.kill()
        self.wait(WAIT_S)


def wait_uncovered(target: Path) -> None:
    wait_for(lambda: overlay_at(target) is None, f"the unmounting of {target}")


def small_setup(tmp_path: Path) -> tuple[SetupRequest, Path]:
    """Return a set-up that counts its runs in `tmp_path/runs`, and its target.

    The key of a set-up with a word that may be a secret, as those of `echo`, takes 50 ms.
    """
    target = tmp_path / "env"
    text = f"echo >> {tmp_path}/runs; mkdir -p {target}/d; uname > {target}/d/file"
    return SetupRequest(command=["sh", "-ec", text], targets=[str(target)]), target


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def capture_and_remove(node: Settings, request: SetupRequest, target: Path) -> None:
    """Store a set-up's snapshot and remove the target, as on another node."""
    assert run_setup(node, request).how == "captured"
    shutil.rmtree(target)


def snapshot_run(request: SetupRequest) -> list[str]:
    """Return the command line of `bootseer snapshot run` for the set-up."""
    words = [sys.executable, "-m", "bootseer", "snapshot", "run", "--target"]
    return [*words, *request.targets, "--", *request.command]


def done_by(command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=environment, timeout=60, capture_output=True, text=True, check=False
    )


def environment_of(node: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "BOOTSEER_STORE": node.store_url,
        "BOOTSEER_CACHE_DIR": str(node.cache_dir),
        "BOOTSEER_RUN_DIR": str(node.run_dir),
        "BOOTSEER_NODE": node.node,
        "BOOTSEER_RESTORE_MODE": node.restore_mode,
    }
