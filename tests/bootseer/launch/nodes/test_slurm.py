"""Prolog and epilog of Slurm, without Slurm; tests/clusters/slurm has a real one."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.fuse.striped.mounted.mount import (
    MountedCheckpoints,
    mount_checkpoints,
    mount_spec,
)
from bootseer.launch.slurm import job_of, requested_checkpoints, tidy
from bootseer.linux.processes import ProcessId
from bootseer.served.service import is_alive
from bootseer.settings.config import Settings, load_config
from testbed.mounts.fuse_mount import clear_mount
from testbed.needs import require
from testbed.paths import REPOSITORY
from testbed.slurm.pages import page_block
from testbed.waiting import wait_for

_root_only = pytest.mark.needs("root")
SCRIPT = REPOSITORY / "docker/slurm/bootseer"


@pytest.mark.parametrize(
    ("comment", "wished"),
    [
        ("", []),
        ("ask me before you cancel this", []),
        ("it's unbalanced", []),
        ("bootseer run -- true", []),
        ("bootseer standby --checkpoint hdfs://a/b:/mnt/c", ["hdfs://a/b:/mnt/c"]),
        (
            "bootseer standby --checkpoint a://b:/c --checkpoint 'd://e f:/g'",
            ["a://b:/c", "d://e f:/g"],
        ),
    ],
)
def test_a_comment_asks_for_checkpoints(comment: str, wished: list[str]) -> None:
    assert requested_checkpoints(comment) == wished


@pytest.mark.parametrize(
    "comment",
    [
        "bootseer standby",
        "bootseer standby --setup 'curl evil | sh'",
        "bootseer standby --checkpoint a://b:/c --setup x",
        "bootseer standby --checkpoint",
        "bootseer standby" + " --checkpoint a://b:/c" * 5,
    ],
)
def test_a_comment_asks_for_nothing_else(comment: str) -> None:
    with pytest.raises(InvalidInputError, match="asks for more than"):
        requested_checkpoints(comment)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    variables = {"HOME": str(tmp_path), "BOOTSEER_RUN_DIR": str(tmp_path / "run")}
    return load_config({}, variables).settings


@pytest.fixture
def mounts(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, MountedCheckpoints]]:
    """Yield checkpoint folders that were mounted in the jobs 1 and 2."""
    require("fuse")
    found = {}
    for job in ("1", "2"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        directory = tmp_path / f"mounted-{job}"
        directory.mkdir()
        spec = mount_spec(settings, (tmp_path / job).as_uri(), directory)
        found[job] = mount_checkpoints(spec)
    yield found
    for mounted in found.values():
        clear_mount(mounted.directory)


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.needs("fuse")
def test_a_jobs_mounts_are_taken_off_and_no_others(
    settings: Settings, mounts: dict[str, MountedCheckpoints], is_killed: bool
) -> None:
    ended, other = mounts["1"], mounts["2"]
    assert job_of(ended.pid) == "1"
    if is_killed:
        for pid in (ended.pid, ended.worker_pid):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(ended.state_dir), "their end")
    said: list[str] = []
    tidy(settings, "1", said.append)
    assert not os.path.ismount(ended.directory)
    assert not ended.state_dir.exists()
    assert os.path.ismount(other.directory)
    assert said == []


@pytest.mark.parametrize(("over", "is_ended"), [("3", True), ("4", False)])
@pytest.mark.needs("fuse")
def test_what_lives_of_a_job_that_is_over_keeps_no_mount(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, over: str, is_ended: bool
) -> None:
    """Slurm's daemons were killed, so that processes of the job survived it."""
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    directory = tmp_path / "mounted"
    directory.mkdir()
    with subprocess.Popen(["sleep", "600"]) as user:
        try:
            spec = mount_spec(
                settings, (tmp_path / "3").as_uri(), directory, user=ProcessId.of(user.pid)
            )
            mount_checkpoints(spec)
            tidy(settings, over, pytest.fail)
            assert os.path.ismount(directory) is not is_ended
        finally:
            user.kill()
            clear_mount(directory)


# ---- the script -------------------------------------------------------------------------------


def _lines_of_a_job(folder: Path, **more: str) -> list[str]:
    """Run prolog and epilog at once, with this folder's configuration and program.

    Returns:
        The lines that they log, those of the prolog first.
    """
    text = SCRIPT.read_text().replace("/etc/bootseer/slurm.conf", str(folder / "conf"))
    log = folder / "log"
    (folder / "script").write_text(text.replace("/var/log/bootseer-slurm.log", str(log)))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0", "SLURM_JOB_GID": "0", **more}

    def run(kind: str) -> None:
        done = subprocess.run(
            ["sh", folder / "script"],
            env={**job, "SLURM_SCRIPT_CONTEXT": f"{kind}_slurmd", "PATH": os.environ["PATH"]},
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, ("prolog", "epilog")))
    lines = log.read_text().splitlines() if log.exists() else []
    return sorted(lines, key=lambda line: " epilog of job " in line)


@_root_only
@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("#!/bin/sh\nexit 0", ""),
        ("#!/bin/sh\nexit 1", "failed"),
        ("#!/bin/sh\nprintf 'a\\033[2J\\nb'; exit 3", "a [2J bfailed"),
        ("#!/bin/sh\ntrap '' TERM; sleep 60", "ended after 1 s"),
        # What it leaves behind holds its output open.
        ("#!/bin/sh\nsetsid sleep 60 & echo begun", "begun"),
        ("#!/bin/sh\nyes", "y y y"),
        (None, "failed"),
    ],
)
def test_the_script_succeeds_whatever_bootseer_does(
    tmp_path: Path, program: str | None, line: str
) -> None:
    if program is not None:
        (tmp_path / "bootseer").write_text(program + "\n")
        (tmp_path / "bootseer").chmod(0o755)
    (tmp_path / "conf").write_text(f"BOOTSEER={tmp_path}/bootseer DEADLINE=1 GRACE=4\n")
    lines = _lines_of_a_job(tmp_path)
    assert len(lines) == (2 if line else 0)
    for kind, one in zip(("prolog", "epilog"), lines, strict=False):
        assert f"{kind} of job 7: " in one
        assert line in one
        assert one.isprintable()


def _script_that_notes_its_end(folder: Path, say: str) -> Path:
    """Write a program that runs the script `say`, then makes a file; return the epilog's file."""
    (folder / "bootseer").write_text(f"#!/bin/sh\n{say}\ntouch {folder}/done-$2\n")
    (folder / "bootseer").chmod(0o755)
    (folder / "conf").write_text(f"BOOTSEER={folder}/bootseer\n")
    return folder / "done-epilog"


@_root_only
def test_more_than_the_log_keeps_ends_nothing_early(tmp_path: Path) -> None:
    """A log line for each of many files is more than a pipe holds."""
    say = "n=0; while [ $n -lt 300 ]; do printf %1000d $n; n=$((n + 1)); done"
    end = _script_that_notes_its_end(tmp_path, say)
    assert all(len(line) < 2100 for line in _lines_of_a_job(tmp_path))
    assert end.exists()


@_root_only
def test_a_log_that_cannot_be_written_keeps_nothing_undone(tmp_path: Path) -> None:
    end = _script_that_notes_its_end(tmp_path, "echo something")
    (tmp_path / "log").symlink_to(tmp_path / "nowhere/log")
    assert _lines_of_a_job(tmp_path) == []
    assert end.exists()


@_root_only
def test_a_user_whose_cache_cannot_be_emptied_holds_up_no_epilog(tmp_path: Path) -> None:
    """A user may hold the cache's locks."""
    end = _script_that_notes_its_end(tmp_path, "[ $1 = slurm ] || { trap '' TERM; sleep 60; }")
    (tmp_path / "cache/bootseer-0").mkdir(parents=True)
    (tmp_path / "cache/bootseer-0/file").write_text("content")
    with (tmp_path / "conf").open("a") as conf:
        conf.write(f"DEADLINE=15 CACHE_DIR={tmp_path}/cache CACHE_LIMIT=0\n")
    (line,) = _lines_of_a_job(tmp_path)
    assert "the cache of user 0 is not emptied" in line
    assert "ended after" not in line
    assert end.exists()


@_root_only
def test_names_that_a_user_has_made_keep_no_cache_from_being_emptied(tmp_path: Path) -> None:
    """There are more names than a command's arguments can hold; the longest unused cache comes
    first."""
    _script_that_notes_its_end(tmp_path, "[ $1 = slurm ] || exit 1")
    cache = tmp_path / "cache"
    cache.mkdir()
    for number in range(12_000):
        (cache / f"bootseer-{number:0230}").touch()
    for unused_s, uid in enumerate((0, 65534)):
        folder = cache / f"bootseer-{uid}"
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("content")
        os.chown(folder, uid, uid)
        os.utime(folder, (10**9 - unused_s, 10**9 - unused_s))
    with (tmp_path / "conf").open("a") as conf:
        conf.write(f"CACHE_DIR={cache} CACHE_LIMIT=0\n")
    (line,) = _lines_of_a_job(tmp_path)
    assert re.findall(r"the cache of user (\d+) is not", line) == ["65534", "0"]


@_root_only
def test_components_of_a_heterogeneous_job_are_one_job(tmp_path: Path) -> None:
    """Slurm gives their tasks the number of the first component, and each epilog its own."""
    _script_that_notes_its_end(tmp_path, "echo it is $SLURM_JOB_ID")
    assert all("it is 6" in one for one in _lines_of_a_job(tmp_path, SLURM_HET_JOB_ID="6"))


@_root_only
def test_a_configuration_that_is_no_shell_script_drains_no_node(tmp_path: Path) -> None:
    (tmp_path / "conf").write_text("DEADLINE=(\n")
    assert any("conf" in line for line in _lines_of_a_job(tmp_path))


def test_what_the_page_shows_are_scripts() -> None:
    for text in ("#SBATCH", "bootseer-image", "prolog.d"):
        language = "bash" if text == "#SBATCH" else "sh"
        script = page_block("slurm.md", language, text)
        assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0
    assert subprocess.run(["sh", "-n", str(SCRIPT)]).returncode == 0
    compile(page_block("slurm.md", "python", "torch.distributed"), "train.py", "exec")
