"""Snapshots that are mounted: what a job sees, who keeps them, and what kills leave."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.config import Settings
from bootseer.errors import BusyError, InvalidInputError
from bootseer.prefetch.control import ask
from bootseer.prefetch.cover_users import start_time
from bootseer.prefetch.covers import cover_at
from bootseer.prefetch.mount_state import live_mounts, mounts_dir
from bootseer.prefetch.settings_json import settings_to_json
from bootseer.snapshots.commands import create_snapshot, restore_snapshot
from bootseer.snapshots.restoring.early import server_ahead
from bootseer.snapshots.restoring.mounted import unmount_snapshot
from bootseer.snapshots.restoring.reflink import can_reflink
from bootseer.snapshots.run import SetupResult, run_setup
from bootseer.snapshots.setup.request import Request
from tests.snapshots.conftest import MakeNode
from tests.snapshots.crash_driver import DELTA, make_base
from tests.support.image_mounts import outside, skip_unless_fuse, skip_unless_root
from tests.support.snapshot_mounts import WAIT_S, end_everything, servers, wait_gone
from tests.support.trees import describe, differences, make_zoo

pytestmark = [pytest.mark.fuse, pytest.mark.root]


@pytest.fixture
def mounting(tmp_path: Path, make_node: MakeNode) -> Iterator[MakeNode]:
    """Nodes that mount; whatever happens, no mount, no server and no publisher stays."""
    skip_unless_root()
    skip_unless_fuse()
    nodes: list[Settings] = []

    def make(name: str) -> Settings:
        nodes.append(replace(make_node(name), restore_mode="mount"))
        return nodes[-1]

    yield make
    end_everything(tmp_path, *nodes)


@pytest.fixture(params=["mount", "link"])
def covering(mounting: MakeNode, request: pytest.FixtureRequest, tmp_path: Path) -> MakeNode:
    """Nodes that put overlays on targets, over trees that are served or that they keep."""
    if request.param == "link" and can_reflink(tmp_path):
        pytest.skip("files here can share their blocks: nothing is mounted to link them")

    def make(name: str) -> Settings:
        return replace(mounting(name), restore_mode=request.param)

    return make


_JOB = """
import json, sys
from bootseer.config import Settings
from bootseer.prefetch.settings_json import settings_from_json
from bootseer.snapshots.restoring.reflink import can_reflink
from bootseer.snapshots.setup.request import Request
from bootseer.snapshots.run import run_setup
settings, command, targets = json.loads(sys.argv[1])
request = Request(command=command, targets=targets)
result = run_setup(settings_from_json(settings), request, until_exit=True)
print(json.dumps([result.how, len(result.ready_names)]), flush=True)
sys.stdin.read()
"""


class Job(subprocess.Popen[str]):
    """A process that runs a set-up for itself, and lives on."""

    def __init__(self, node: Settings, request: Request) -> None:
        what = json.dumps([settings_to_json(node), request.command, request.targets])
        super().__init__(
            [sys.executable, "-c", _JOB, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(node),
            text=True,
        )
        assert self.stdout is not None
        self.how, self.ready_name_count = json.loads(self.stdout.readline())

    def end(self) -> None:
        """With SIGKILL, as the worst end that there is."""
        self.kill()
        self.wait(WAIT_S)


def _wait_uncovered(target: Path) -> None:
    end = time.monotonic() + WAIT_S
    while cover_at(target) is not None:
        assert time.monotonic() < end, f"{target} stays mounted"
        time.sleep(0.02)


def _small(tmp_path: Path) -> tuple[Request, Path]:
    """A set-up that counts its runs in `tmp_path/runs`."""
    target = tmp_path / "env"
    text = f"echo run >> {tmp_path}/runs; mkdir -p {target}/d; echo hello > {target}/d/file"
    return Request(command=["sh", "-ec", text], targets=[str(target)]), target


def _runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def _captured(node: Settings, request: Request, target: Path) -> None:
    """Its snapshot is in the store, and the target is gone, as on another node."""
    assert run_setup(node, request).how == "captured"
    shutil.rmtree(target)


def test_a_mounted_tree_is_the_original(tmp_path: Path, covering: MakeNode) -> None:
    target = tmp_path / "work/env"
    make_zoo(tmp_path / "zoo")
    target.parent.mkdir()
    request = Request(
        command=["cp", "-a", str(tmp_path / "zoo"), str(target)], targets=[str(target)]
    )
    original = describe(tmp_path / "zoo")
    _captured(covering("a"), request, target)
    node = covering("b")
    said: list[str] = []
    result = run_setup(node, request, report=said.append)
    assert (result.how, result.mode) == ("restored", node.restore_mode)
    assert result.mode_reason in said[-1]
    assert result.moved_bytes < 100_000 or result.mode == "link"
    assert cover_at(target) is not None
    assert differences(original, describe(target)) == []
    again = run_setup(node, request)
    assert (again.how, again.mode) == ("in place", node.restore_mode)
    unmount_snapshot(node, target)
    assert cover_at(target) is None
    assert list(target.iterdir()) == []
    wait_gone(node)


def test_a_mounted_difference_is_the_original(tmp_path: Path, covering: MakeNode) -> None:
    target = tmp_path / "work/env"
    make_base(target)
    base = describe(target)
    request = Request(command=["sh", "-e", "-c", DELTA, str(target)], targets=[str(target)])
    run_setup(covering("a"), request)
    original = describe(target)
    shutil.rmtree(target)
    make_base(target)
    node = covering("b")
    assert run_setup(node, request).mode == node.restore_mode
    assert differences(original, describe(target)) == []
    assert run_setup(node, request).how == "in place"
    unmount_snapshot(node, target)
    # Nothing of it was touched.
    assert differences(base, describe(target)) == []
    wait_gone(node)


def test_what_a_job_writes_goes_with_the_mount(tmp_path: Path, covering: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(covering("a"), request, target)
    node = covering("b")
    run_setup(node, request)
    (target / "d/file").write_text("changed")
    (target / "d").rename(target / "moved")
    (target / "new").write_text("new")
    assert (target / "moved/file").read_text() == "changed"
    unmount_snapshot(node, target)
    assert run_setup(node, request).how == "restored"
    assert (target / "d/file").read_text() == "hello\n"
    assert sorted(os.listdir(target)) == ["d"]
    assert _runs(tmp_path) == 1
    # What was written to is not what was asked for, and a set-up finds it as it is.
    (target / "new").write_text("new")
    assert run_setup(node, request).how == "captured"
    assert _runs(tmp_path) == 2
    assert (target / "new").read_text() == "new"


def test_it_stays_while_any_of_its_jobs_lives(tmp_path: Path, covering: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(covering("a"), request, target)
    node = covering("b")
    with Job(node, request) as one, Job(node, request) as other:
        assert (one.how, other.how) == ("restored", "in place")
        assert other.ready_name_count == (node.restore_mode == "mount")
        assert len(servers(node)) == 1
        one.end()
        # Long enough for a server that made a mistake.
        time.sleep(0.5)
        assert (target / "d/file").read_text() == "hello\n"
        other.end()
    _wait_uncovered(target)
    wait_gone(node)
    with Job(node, request) as third:
        assert third.how == "restored"
        third.end()


def test_a_job_that_comes_and_goes_does_not_end_what_was_to_stay(
    tmp_path: Path, mounting: MakeNode
) -> None:
    request, target = _small(tmp_path)
    _captured(mounting("a"), request, target)
    node = mounting("b")
    with Job(node, request) as job:
        assert run_setup(node, request).how == "in place"
        job.end()
    ((state_dir, _),) = live_mounts(node)
    # Neither does a new worker, which finds its first user gone.
    os.kill(int(ask(state_dir, "status")["worker_pid"]), signal.SIGKILL)
    assert outside(f"print(open({str(target / 'd/file')!r}).read())") == "hello\n\n"
    assert cover_at(target) is not None
    unmount_snapshot(node, target)
    wait_gone(node)


def test_nodes_that_start_at_once_share_one_mount(tmp_path: Path, covering: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(covering("a"), request, target)
    node = covering("b")

    def start(_: int) -> SetupResult:
        return run_setup(node, request)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(start, range(3)))
    assert sorted(result.how for result in results) == ["in place", "in place", "restored"]
    assert len(servers(node)) == 1


def test_a_killed_server_costs_a_new_mount(tmp_path: Path, covering: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(covering("a"), request, target)
    node = covering("b")
    run_setup(node, request)
    ((state_dir, state),) = live_mounts(node)
    pids = [state.pid]
    if node.restore_mode == "mount":
        # Nobody is to be left who could serve.
        pids.append(int(ask(state_dir, "status")["worker_pid"]))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(start_time(pid) for pid in pids):
        time.sleep(0.01)
    again = run_setup(node, request)
    assert (again.how, again.mode) == ("restored", node.restore_mode)
    assert outside(f"print(open({str(target / 'd/file')!r}).read())") == "hello\n\n"
    assert not state_dir.exists()
    unmount_snapshot(node, target)
    wait_gone(node)


@pytest.mark.parametrize("step", ["served", "covered"])
def test_a_run_that_is_killed_leaves_nothing_mounted(
    tmp_path: Path, covering: MakeNode, step: str
) -> None:
    request, target = _small(tmp_path)
    _captured(covering("a"), request, target)
    node = covering("b")
    before = {"served": "_cover", "covered": "add_user"}[step]
    code = (
        "import os, signal\n"
        "from bootseer.cli import main\n"
        "from bootseer.snapshots.restoring import mounted\n"
        f"mounted.{before} = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main()"
    )
    killed = _done([sys.executable, "-c", code, *_snapshot_run(request)[3:]], _environment(node))
    assert killed.returncode == -signal.SIGKILL
    # The next run need not wait for the server to see it.
    again = run_setup(node, request)
    assert (again.how, again.mode, _runs(tmp_path)) == ("restored", node.restore_mode, 1)
    assert (target / "d/file").read_text() == "hello\n"
    unmount_snapshot(node, target)
    wait_gone(node)


def _snapshot_run(request: Request) -> list[str]:
    """As a user types it."""
    words = [sys.executable, "-m", "bootseer", "snapshot", "run", "--target"]
    return [*words, *request.targets, "--", *request.command]


def _done(command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=environment, timeout=60, capture_output=True, text=True, check=False
    )


def _environment(node: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "BOOTSEER_STORE": node.store_url,
        "BOOTSEER_CACHE_DIR": str(node.cache_dir),
        "BOOTSEER_RUN_DIR": str(node.run_dir),
        "BOOTSEER_NODE": node.node,
        "BOOTSEER_RESTORE_MODE": node.restore_mode,
    }


def test_a_failed_mount_is_extracted(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(mounting("a"), request, target)
    node = mounting("b")
    # What is at /dev/fuse can be opened, and does not mount.
    hide = 'mount --bind /dev/null /dev/fuse; exec "$@"'
    done = _done(
        ["unshare", "--mount", "sh", "-ec", hide, "sh", *_snapshot_run(request)],
        _environment(node),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: extracted: ") == 1
    assert (target / "d/file").read_text() == "hello\n"
    assert _runs(tmp_path) == 1
    assert servers(node) == []


def test_a_cache_on_an_overlay(tmp_path: Path, mounting: MakeNode) -> None:
    """As in most containers: it cannot take what is written, so that goes to memory."""
    request, target = _small(tmp_path)
    _captured(mounting("a"), request, target)
    node = mounting("b")
    script = (
        "mkdir lower upper work merged; "
        "mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay merged; "
        'BOOTSEER_CACHE_DIR=$PWD/merged/cache; export BOOTSEER_CACHE_DIR; "$@"; '
        f"echo written > {target}/new; cat {target}/d/file {target}/new; "
        f"{sys.executable} -m bootseer snapshot unmount {target}; ls -A {target}"
    )
    (tmp_path / "place").mkdir()
    command = ["unshare", "--mount", "sh", "-ec", f"cd {tmp_path}/place; {script}", "sh"]
    done = _done([*command, *_snapshot_run(request)], _environment(node))
    assert done.returncode == 0, done.stderr
    assert "mounted: it was asked for" in done.stderr
    assert done.stdout == "hello\nwritten\n"
    wait_gone(node)


def test_without_root_it_is_extracted(mounting: MakeNode) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv to be another user")
    node = mounting("b")
    # Not below pytest's own folder, which others may not enter.
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        os.chown(home, 65534, 65534)
        request, target = _small(home)
        environment = {**_environment(node), "HOME": name}
        for folder in ("STORE", "CACHE_DIR", "RUN_DIR"):
            environment[f"BOOTSEER_{folder}"] = str(home / folder)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        command += _snapshot_run(request)

        def run() -> "subprocess.CompletedProcess[str]":
            return _done(command, environment)

        first = run()
        assert first.returncode == 0, first.stderr
        shutil.rmtree(target)
        second = run()
        assert "mounting needs root (CAP_SYS_ADMIN)" in second.stderr
        assert "restored" in second.stderr
        assert (target / "d/file").read_text() == "hello\n"
        assert _runs(home) == 1


def test_a_damaged_copy_of_the_index_is_fetched_again(tmp_path: Path, mounting: MakeNode) -> None:
    """A named bug: it was taken for a damaged snapshot, and the set-up ran anew."""
    request, target = _small(tmp_path)
    _captured(mounting("a"), request, target)
    node = mounting("b")
    run_setup(node, request)
    unmount_snapshot(node, target)
    (copy,) = (node.cache_dir / "indexes").iterdir()
    copy.write_bytes(b"damaged")
    again = run_setup(node, request)
    assert (again.how, again.mode, _runs(tmp_path)) == ("restored", "mount", 1)


def test_a_snapshot_whose_blob_is_gone_is_made_anew(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(mounting("a"), request, target)
    for path in (tmp_path / "store/blobs").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert run_setup(mounting("b"), request).how == "captured"
    assert cover_at(target) is None
    shutil.rmtree(target)
    assert run_setup(mounting("c"), request).mode == "mount"


def test_unmounting(tmp_path: Path, covering: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(covering("a"), request, target)
    node = covering("b")
    with pytest.raises(InvalidInputError, match="no snapshot is mounted"):
        unmount_snapshot(node, target)
    run_setup(node, request)
    with (target / "d/file").open() as file:
        with pytest.raises(BusyError, match="--lazy"):
            unmount_snapshot(node, target)
        unmount_snapshot(node, target, lazy=True)
        assert file.read() == "hello\n"
    wait_gone(node)


def test_a_target_with_a_mount_inside_is_extracted(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = _small(tmp_path)
    inner = target / "inner"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(inner)], check=True, timeout=WAIT_S)
    try:
        (inner / "data").write_text("not the set-up's")
        run_setup(mounting("a"), request)
        shutil.rmtree(target / "d")
        said: list[str] = []
        result = run_setup(mounting("b"), request, report=said.append)
        assert (result.how, result.mode) == ("restored", "extract")
        assert sum("something else is mounted inside" in line for line in said) == 2
        assert (inner / "data").read_text() == "not the set-up's"
        assert (target / "d/file").read_text() == "hello\n"
    finally:
        subprocess.run(["umount", str(inner)], check=True, timeout=WAIT_S)


_IMPORT = """
import sys
sys.path.insert(0, {path!r})
import package.module
print(package.module.VALUE)
"""


def test_compiled_files_stay_valid_and_a_second_node_replays(
    tmp_path: Path, mounting: MakeNode
) -> None:
    target = tmp_path / "env"
    source = tmp_path / "source/package"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "module.py").write_text("VALUE = 42\n" + f"# {'x' * 100}\n" * 500)
    (source / "never-read").write_bytes(os.urandom(20_000_000))
    for path in source.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    text = f"cp -a {source.parent} {target}; {sys.executable} -m compileall -q {target}"
    request = Request(command=["sh", "-ec", text], targets=[str(target)])
    _captured(mounting("a"), request, target)
    code = _IMPORT.format(path=str(target))
    faults = []
    for name in ("b", "c"):
        node = mounting(name)
        assert run_setup(node, request).mode == "mount"
        ((state_dir, state),) = live_mounts(node)
        compiled = sorted(target.rglob("*.pyc"))
        times = [path.stat().st_mtime_ns for path in compiled]
        assert outside(code) == "42\n"
        assert [path.stat().st_mtime_ns for path in compiled] == times
        written = list((Path(state.scratch) / "upper").iterdir())
        assert written == [], "something was compiled anew"
        status = ask(state_dir, "status")
        faults.append(status["faults"]["fault_count"])
        assert status["moved"]["fetched_bytes"] < 5_000_000
        unmount_snapshot(node, target)
        wait_gone(node)
    assert faults[0] > 0
    assert faults[1] == 0


def test_the_way_is_reported(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = _small(tmp_path)
    _captured(mounting("a"), request, target)
    node = replace(mounting("b"), restore_mode="auto")
    result = run_setup(node, request)
    assert (result.mode, result.mode_reason) == ("extract", "it is small")
    assert not mounts_dir(node).exists()


def test_a_server_that_was_begun_ahead_serves_the_mount(
    tmp_path: Path, make_node: MakeNode
) -> None:
    target = tmp_path / "env"
    target.mkdir()
    (target / "file").write_text("content")
    node = make_node("a")
    key = create_snapshot(node, [str(target)]).fingerprint
    shutil.rmtree(target)
    with server_ahead(node) as none:
        # It is extracted.
        assert none is None
    node = replace(node, restore_mode="mount")
    with server_ahead(node) as process:
        assert process is not None
        restore_snapshot(node, key, process=process)
        cover = cover_at(target)
        assert cover is not None
        assert cover.id == process.identity
    assert (target / "file").read_text() == "content"
    unmount_snapshot(node, target)
