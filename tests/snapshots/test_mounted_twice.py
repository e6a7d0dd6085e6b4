"""Several set-ups of one job on one folder: their mounts lie on each other, and go together."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.linux.processes import ProcessId
from bootseer.served.overlays import overlays, parse_overlays
from bootseer.served.service import services_dir
from bootseer.served.users import add_user, unmount_if_unused
from bootseer.settings.config import Settings
from testbed.mounts.snapshot_mounts import WAIT_S, wait_gone
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import environment_of

pytestmark = pytest.mark.needs("mount", "fuse")


def _job(node: Settings, target: Path, count: int) -> "subprocess.Popen[str]":
    """Start `bootseer run` with `count` set-ups of one folder; it then waits for its input's
    end."""
    words = [sys.executable, "-m", "bootseer", "run", "--target", str(target)]
    for number in range(count):
        words += ["--setup", f"mkdir -p {target}; echo {number} > {target}/file{number}"]
    return subprocess.Popen(
        [*words, "--", "sh", "-c", "echo ready; cat"],
        env=environment_of(node),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_ready(job: "subprocess.Popen[str]") -> None:
    assert job.stdout is not None
    assert job.stderr is not None
    if job.stdout.readline() != "ready\n":
        pytest.fail(job.stderr.read())


def _captured(node: Settings, target: Path, count: int) -> None:
    """Store all snapshots and remove the target."""
    with _job(node, target, count) as job:
        _wait_ready(job)
        job.communicate("", WAIT_S)
    shutil.rmtree(target)


def _is_left(target: Path) -> bool:
    return any(cover.path == target for cover in overlays())


@pytest.mark.parametrize(("end", "count"), [("exit", 2), ("kill", 3)])
def test_nothing_is_left_of_several_set_ups_on_one_folder(
    tmp_path: Path, covering: MakeNode, end: str, count: int
) -> None:
    """Regression: the lower mount and its server stayed for ever."""
    target = tmp_path / "env"
    _captured(covering("a"), target, count)
    node = covering("b")
    with _job(node, target, count) as job:
        assert job.stdin is not None
        _wait_ready(job)
        assert len(list(target.iterdir())) == count
        assert sum(cover.path == target for cover in overlays()) >= 2
        if end == "kill":
            job.kill()
        job.stdin.close()
        assert job.wait(WAIT_S) == (0 if end == "exit" else -signal.SIGKILL)
    wait_for(lambda: not _is_left(target), "the end of all mounts of the job")
    wait_gone(node)
    wait_for(
        lambda: not list(services_dir(node.run_dir).iterdir()),
        "the removal of the folders of all mounts",
    )
    assert list(target.iterdir()) == []


def test_a_mount_below_one_that_is_used_is_waited_for(tmp_path: Path, covering: MakeNode) -> None:
    """Its server waits for users of the upper mount, since that cannot be unmounted before."""
    target = tmp_path / "env"
    _captured(covering("a"), target, 2)
    node = covering("b")
    with _job(node, target, 2) as job, subprocess.Popen(["sleep", "600"]) as other:
        _wait_ready(job)
        lower, upper = (cover for cover in overlays() if cover.path == target)
        assert (lower.is_topmost, upper.is_topmost) == (False, True)
        add_user(services_dir(node.run_dir) / upper.id, other.pid)
        job.kill()
        job.wait(WAIT_S)
        assert unmount_if_unused(services_dir(node.run_dir) / lower.id) == ProcessId.of(other.pid)
        assert (target / "file1").read_text() == "1\n"
        other.kill()
        other.wait(WAIT_S)
    wait_for(lambda: not _is_left(target), "the end of both mounts")
    wait_gone(node)


def test_what_lies_on_top_is_told_by_the_mounts_numbers() -> None:
    """Mounts that propagate from another namespace go below existing ones, but are listed last."""
    line = "%d %d 0:40 / /env rw - overlay bootseer-cover:%s rw\n"
    table = (line % (12, 20, "first") + line % (20, 1, "came-in-later")).encode()
    assert [(one.id, one.is_topmost) for one in parse_overlays(table)] == [
        ("first", True),
        ("came-in-later", False),
    ]
