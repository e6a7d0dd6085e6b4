"""Two jobs of one node that want different environments in one directory get their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BusyError, exit_code_of
from bootseer.linux.processes import start_time
from bootseer.served.overlays import overlays
from bootseer.served.service import live_mounts, services_dir
from bootseer.settings.config import Settings
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.restore import restore_snapshot
from testbed.mounts.snapshot_mounts import wait_gone
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import (
    SetupProcess,
    done_by,
    environment_of,
    runs,
    small_setup,
    snapshot_run,
)

pytestmark = pytest.mark.needs("mount", "fuse")


def _other(tmp_path: Path) -> SetupRequest:
    """Return another set-up of the same directory."""
    target = tmp_path / "env"
    text = f"mkdir -p {target}/d; cd /; pwd > {target}/d/file; pwd > {target}/more"
    return SetupRequest(command=["sh", "-ec", text], targets=[str(target)])


def _seen_by(job: "subprocess.Popen[str]", path: Path) -> str:
    """Return the content of a file in the mount namespace of a job."""
    return Path(f"/proc/{job.pid}/root{path}").read_text()


@pytest.fixture(params=["mount", "link", "extract"])
def node(mounting: MakeNode, request: pytest.FixtureRequest) -> Settings:
    return replace(mounting("b"), restore_mode=request.param)


# For parts that do not depend on the way of restoring: a served mount, and one without a server.
two_modes = pytest.mark.parametrize("node", ["mount", "link"], indirect=True)


def _publish(node: Settings, *requests: SetupRequest) -> None:
    """Store the snapshots of all set-ups and remove the target."""
    for request in requests:
        maker = replace(node, cache_dir=node.cache_dir / "maker", run_dir=node.run_dir / "maker")
        assert run_setup(maker, request).how == "captured"
        shutil.rmtree(request.targets[0])


@pytest.mark.parametrize("is_stored", [True, False])
def test_jobs_with_different_set_ups_have_their_own(
    tmp_path: Path, node: Settings, is_stored: bool
) -> None:
    """Regression: the first job got the second one's environment; the second lost it with the
    first."""
    request, target = small_setup(tmp_path)
    other = _other(tmp_path)
    _publish(node, request, *([other] if is_stored else []))
    with SetupProcess(node, request) as one:
        assert one.how == "restored"
        with SetupProcess(node, other) as two:
            assert two.how == ("restored" if is_stored else "captured")
            assert _seen_by(two, target / "d/file") == "/\n"
            assert _seen_by(one, target / "d/file") == "Linux\n"
            assert not Path(f"/proc/{one.pid}/root{target}/more").exists()
            one.end()
            assert _seen_by(two, target / "d/file") == "/\n"
            two.end()
    wait_gone(node)
    assert not any(cover.path == target for cover in overlays())
    # Its state is removed first.
    wait_for(lambda: not any(services_dir(node.run_dir).iterdir()), "the end of its folder")
    # Changes by the second job were its own.
    assert not (target / "more").exists()
    assert runs(tmp_path) == 1


@pytest.mark.parametrize("inner", ["the first", "the second"])
def test_jobs_whose_directories_lie_in_one_another(
    tmp_path: Path, node: Settings, inner: str
) -> None:
    """Regression: only jobs with exactly the same directory were separated."""
    outer, deep = tmp_path / "env", tmp_path / "env/deep"
    targets = (deep, outer) if inner == "the first" else (outer, deep)
    one_text, two_text = (
        f"mkdir -p {deep}; echo {number} > {deep}/file; echo > {deep}/{number}" for number in (1, 2)
    )
    first = SetupRequest(command=["sh", "-ec", one_text], targets=[str(targets[0])])
    second = SetupRequest(command=["sh", "-ec", two_text], targets=[str(targets[1])])
    _publish(node, first)
    with SetupProcess(node, first) as one, SetupProcess(node, second) as two:
        assert (one.how, two.how) == ("restored", "captured")
        assert _seen_by(one, deep / "file") == "1\n"
        assert not Path(f"/proc/{one.pid}/root{deep}/2").exists()
        assert _seen_by(two, deep / "file") == "2\n"
        one.end()
        assert _seen_by(two, deep / "file") == "2\n"
        two.end()
    wait_gone(node)
    assert not (deep / "2").exists()


def test_a_job_that_wrote_to_its_environment_keeps_it(tmp_path: Path, node: Settings) -> None:
    """Regression: the second job ran its set-up on top of the first one's mount, and both lost
    it."""
    request, target = small_setup(tmp_path)
    _publish(node, request)
    with SetupProcess(node, request) as one:
        Path(f"/proc/{one.pid}/root{target}/written").write_text("by the first")
        with SetupProcess(node, request) as two:
            assert two.how == "restored"
            assert not Path(f"/proc/{two.pid}/root{target}/written").exists()
            assert _seen_by(one, target / "written") == "by the first"
            one.end()
            assert _seen_by(two, target / "d/file") == "Linux\n"
            two.end()
    wait_gone(node)
    assert runs(tmp_path) == 1


def test_a_job_keeps_its_environment_when_what_keeps_it_is_killed(
    tmp_path: Path, mounting: MakeNode
) -> None:
    """Regression: the next start unmounted it, although an overlay over files needs no process."""
    node = replace(mounting("b"), restore_mode="link")
    request, target = small_setup(tmp_path)
    _publish(node, request)
    with SetupProcess(node, request) as one:
        ((_, state),) = live_mounts(node.run_dir)
        os.kill(state.pid, signal.SIGKILL)
        wait_for(lambda: not start_time(state.pid), "the end of the holder")
        with SetupProcess(node, request) as two:
            assert two.how == "restored"
            assert _seen_by(one, target / "d/file") == "Linux\n"
            assert _seen_by(two, target / "d/file") == "Linux\n"
            one.end()
            assert _seen_by(two, target / "d/file") == "Linux\n"
            two.end()
    assert run_setup(node, request).how == "restored"
    assert [cover.path for cover in overlays()] == [target]


@two_modes
def test_jobs_with_the_same_set_up_share_it(tmp_path: Path, node: Settings) -> None:
    request, _ = small_setup(tmp_path)
    _publish(node, request)
    with SetupProcess(node, request) as one, SetupProcess(node, request) as two:
        assert two.how == "in place"
        for job in (one, two):
            assert os.stat(f"/proc/{job.pid}/ns/mnt") == os.stat("/proc/self/ns/mnt")
            job.end()


@two_modes
def test_a_difference_is_kept_from_the_job_that_runs_on_the_original(
    tmp_path: Path, node: Settings
) -> None:
    """Both jobs see only the files that were there before, as in the interpreter's directories."""
    target = tmp_path / "env"
    target.mkdir()
    (target / "system").write_text("system")
    first = SetupRequest(command=["sh", "-ec", f"echo 1 > {target}/first"], targets=[str(target)])
    second = SetupRequest(command=["sh", "-ec", f"echo 2 > {target}/second"], targets=[str(target)])
    with SetupProcess(node, first) as one, SetupProcess(node, second) as two:
        assert (one.how, two.how) == ("captured", "captured")
        assert _seen_by(two, target / "second") == "2\n"
        assert _seen_by(two, target / "system") == "system"
        assert not Path(f"/proc/{one.pid}/root{target}/second").exists()
        one.end()
        two.end()
    wait_gone(node)
    assert sorted(os.listdir(target)) == ["first", "system"]


@pytest.mark.needs(programs=["setpriv"])
@two_modes
def test_without_a_namespace_it_is_refused(tmp_path: Path, node: Settings) -> None:
    request, target = small_setup(tmp_path)
    _publish(node, request)
    words = [sys.executable, "-m", "bootseer", "run", "--target", str(target)]
    setup = ["--setup", f"mkdir -p {target}/d; echo other > {target}/d/file"]
    weak = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    with SetupProcess(node, request) as one:
        done = done_by([*weak, *words, *setup, "--", "true"], environment_of(node))
        assert done.returncode == 19, done.stderr
        assert f"{target} is in use by process {one.pid}" in done.stderr
        assert _seen_by(one, target / "d/file") == "Linux\n"
        one.end()
    assert done_by([*words, *setup, "--", "true"], environment_of(node)).returncode == 0


@two_modes
def test_what_is_to_stay_is_refused_while_a_job_runs_on_it(tmp_path: Path, node: Settings) -> None:
    """`snapshot run` and `snapshot restore` change the node's own view."""
    request, _ = small_setup(tmp_path)
    _publish(node, request)
    source = tmp_path / "source"
    source.mkdir()
    key = create_snapshot(node, [str(source)]).fingerprint
    with SetupProcess(node, request) as one:
        done = done_by(snapshot_run(_other(tmp_path)), environment_of(node))
        assert done.returncode == exit_code_of(BusyError())
        assert f"in use by process {one.pid}" in done.stderr
        one.end()
    moved = SetupRequest(command=["true"], targets=[str(source)])
    with SetupProcess(node, moved) as other:
        with pytest.raises(BusyError, match=f"process {other.pid}"):
            restore_snapshot(node, key)
        other.end()


@two_modes
def test_a_job_within_a_job_builds_on_it(tmp_path: Path, node: Settings) -> None:
    """A process and its descendants are one job, which needs no view of its own."""
    request, target = small_setup(tmp_path)
    _publish(node, request)
    run = [sys.executable, "-m", "bootseer", "run", "--target", str(target), "--setup"]
    inner = [*run, f"cat {target}/d/file > {target}/copy", "--", "cat", f"{target}/copy"]
    code = f"import subprocess, json; subprocess.run(json.loads({json.dumps(json.dumps(inner))}))"
    words = " ".join(request.command[:-1]) + f" '{request.command[-1]}'"
    command = [*run, words, "--", sys.executable, "-c", code]
    done = done_by(command, environment_of(node))
    assert (done.returncode, done.stdout) == (0, "Linux\n"), done.stderr
    assert "mount namespace" not in done.stderr


@two_modes
def test_checkpoints_come_along(tmp_path: Path, node: Settings) -> None:
    request, target = small_setup(tmp_path)
    _publish(node, request)
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/latest").write_text("step 7")
    words = [sys.executable, "-m", "bootseer", "run", "--target", str(target)]
    words += ["--setup", f"echo other > {target}/d/other || mkdir -p {target}/d"]
    words += ["--checkpoint", f"{(tmp_path / 'remote').as_uri()}:{tmp_path}/ckpt"]
    with SetupProcess(node, request) as one:
        done = done_by([*words, "--", "cat", f"{tmp_path}/ckpt/latest"], environment_of(node))
        assert (done.returncode, done.stdout) == (0, "step 7"), done.stderr
        assert "a mount namespace of its own" in done.stderr
        one.end()


@two_modes
def test_what_is_merely_too_old_is_used_where_it_cannot_be_replaced(
    tmp_path: Path, node: Settings
) -> None:
    """A refusal would stop a job that asks for the environment that is there."""
    request, _ = small_setup(tmp_path)
    _publish(node, request)
    strict = replace(node, snapshot_max_age_s=0.001)
    with SetupProcess(node, request) as one:
        said: list[str] = []
        assert run_setup(strict, request, report=said.append).how == "in place"
        assert any("used as it is" in line for line in said)
        one.end()
    assert run_setup(strict, request).how in ("captured", "restored")
