"""`bootseer run --image --linger` keeps the image's tree mounted for the job's next start.

The files that a container wrote are removed.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bootseer.linux.processes import wait_readable
from testbed.cgroups import memory_limit
from testbed.images.building import LayoutBuilder, Member, tar_of
from testbed.needs import require
from testbed.node import Node, attribute, wait_for_file
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import IMAGE_PATH, Image

pytestmark = pytest.mark.needs("mount", "fuse")

# As the image's user, who may write to nothing but a folder for all.
_LARGE_BYTES = 64 << 20
WRITE = "echo mine > /tmp/mine; ls /tmp"


class _Job:
    def __init__(self, node: Node, image: Image) -> None:
        self.node, self.image = node, image

    def options(self, image: str = "", linger: str = "10m", folder: str = "ckpt") -> list[str]:
        checkpoint = f"{(self.node.base.parent / folder).as_uri()}:/ckpt"
        image = image or self.image.source
        return ["--image", image, "--checkpoint", checkpoint, "--linger", linger]

    def start(self, line: str, **options: str) -> str:
        done = self.node.run("run", *self.options(**options), "--", "sh", "-c", line)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def how(self) -> tuple[Any, Any]:
        spans = self.node.spans()
        image, checkpoint = (
            attribute(spans[name], "bootseer.how") for name in ("image", "checkpoint")
        )
        return image, checkpoint

    def served(self, kind: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "bootseer", "status", "--json"]
        text = subprocess.run(
            command, env=self.node.environment, check=True, capture_output=True, timeout=60
        ).stdout
        return [one for one in json.loads(text)["served"] if one["pid"] and one["kind"] == kind]

    def server(self) -> int:
        (entry,) = self.served("container")
        return int(entry["pid"])

    def kill_server(self) -> None:
        (entry,) = self.served("container")
        # The supervisor first: it would replace its worker.
        for pid in (entry["pid"], entry["worker_pid"]):
            process = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            assert wait_readable([process], 30.0)
            os.close(process)

    def written(self) -> list[Path]:
        """Return the folders for files that containers write."""
        return list((self.node.base / "cache/containers").glob("*/*-*"))

    def end(self) -> None:
        for entry in self.served("attendant"):
            os.kill(entry["pid"], signal.SIGTERM)
        self.node.wait_clean()


@pytest.fixture
def job(node: Node, shell_image: Image) -> _Job:
    require("mount", "fuse")
    return _Job(node, shell_image)


def test_the_next_start_finds_all_live_but_what_was_written(job: _Job) -> None:
    assert job.start(f": > /ckpt/step-1; {WRITE}") == "mine\n"
    assert job.how == ("mounted", "mounted")
    server = job.server()
    wait_for(lambda: not job.written(), "the end of what the container wrote")
    assert job.start(f"ls /tmp; {WRITE}; ls /ckpt") == "mine\nstep-1\n"
    assert (job.how, job.server()) == (("live", "live"), server)
    assert "image pull" not in job.node.spans()
    wait_for(lambda: len(job.served("attendant")) == 1, "the end of the first one's process")
    # Without the option all is taken over as well, and goes with the job.
    assert job.start("ls /tmp; ls /ckpt", linger="off") == "step-1\n"
    assert job.how == ("live", "live")
    job.node.wait_clean()


def test_it_ends_by_itself(job: _Job) -> None:
    job.start("true", linger="1s")
    job.node.wait_clean()


def test_what_is_left_of_a_job_keeps_what_it_writes(job: _Job) -> None:
    """The container ends with its last process."""
    said = job.node.base.parent / "said"
    said.mkdir(mode=0o777)
    said.chmod(0o777)
    line = "exec 3<&0; echo mine > /tmp/mine; (read x <&3; cat /tmp/mine > /said/it) & echo up"
    command = (*job.options(), "--bind", f"{said}:/said", "--", "sh", "-c", line)
    left: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with job.node.start("run", *command, stdin=subprocess.PIPE, **left) as process:
        assert process.wait(60) == 0
        assert job.start("ls /tmp") == ""
        assert job.how == ("live", "live")
        wait_for(lambda: len(job.written()) == 1, "the end of what the second one wrote")
    # Its input has ended.
    wait_for(lambda: not job.written(), "the end of what the first one wrote")
    assert (said / "it").read_text() == "mine\n"
    job.end()


def test_another_mount_namespace_does_not_keep_it(job: _Job) -> None:
    """The namespace was made meanwhile, with all mounts of the host, and lives on."""
    job.start("true")
    (entry,) = job.served("container")
    with subprocess.Popen(["unshare", "--mount", "sleep", "600"]) as other:
        table = Path(f"/proc/{other.pid}/mountinfo")
        ours = os.readlink("/proc/self/ns/mnt")
        wait_for(lambda: os.readlink(f"/proc/{other.pid}/ns/mnt") != ours, "the namespace")
        assert entry["where"][0] in table.read_text()
        job.end()
        other.kill()


def test_unmounting_ends_it_at_once(job: _Job) -> None:
    job.start("true")
    (entry,) = job.served("container")
    command = [sys.executable, "-m", "bootseer", "unmount", *entry["where"]]
    subprocess.run(command, env=job.node.environment, check=True, timeout=60)
    assert job.served("container") == []
    assert job.start("ls /tmp") == ""
    assert job.how == ("mounted", "live")
    job.end()


def test_a_killed_server_is_replaced(job: _Job) -> None:
    job.start("true")
    job.kill_server()
    assert job.start("cat /etc/passwd") == (job.image.root / "etc/passwd").read_text()
    assert job.how == ("mounted", "live")
    job.end()


def test_a_server_that_does_not_answer_is_replaced(job: _Job) -> None:
    job.start("true")
    (entry,) = job.served("container")
    for pid in (entry["pid"], entry["worker_pid"]):
        os.kill(pid, signal.SIGSTOP)
    assert job.start("cat /etc/passwd") == (job.image.root / "etc/passwd").read_text()
    assert job.how == ("changed", "live")
    job.end()


def test_the_job_keeps_its_image_when_the_lingering_process_is_killed(job: _Job) -> None:
    line = ": > /ckpt/up; read x; cat /etc/passwd"
    command = (*job.options(), "--", "sh", "-c", line)
    with job.node.start("run", *command, stdin=subprocess.PIPE) as process:
        wait_for_file(job.node.base.parent / "ckpt/up")
        (lingering,) = job.served("attendant")
        os.kill(lingering["pid"], signal.SIGKILL)
        out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, (job.image.root / "etc/passwd").read_text()), err
    # What is left of the killed process is nothing but a folder, which the next server removes.
    assert job.start("true", linger="off") == ""
    job.node.wait_clean()


def test_two_jobs_of_one_image_at_once(job: _Job) -> None:
    """A tree in use is not taken over; one that lingers afterwards is, by either job."""
    line = ": > /ckpt/up; read x; ls /tmp"
    variables = {"BOOTSEER_JOB": "other"}
    command = (*job.options(), "--", "sh", "-c")
    with job.node.start("run", *command, line, stdin=subprocess.PIPE) as process:
        wait_for_file(job.node.base.parent / "ckpt/up")
        done = job.node.run("run", *command, WRITE, variables=variables)
        assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
        assert job.how == ("mounted", "mounted")
        assert len(job.served("container")) == 2
        out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, ""), err
    assert job.start("ls /tmp") == ""
    assert job.how == ("live", "live")
    job.end()


def test_another_users_start_has_its_own(job: _Job) -> None:
    """A start does not rely on the statements of another user's server."""
    job.start("true")
    server = job.server()
    (state,) = (one.parent / "state.json" for one in job.node.base.glob("run/services/*/root"))
    os.chown(state, 12345, 12345)
    try:
        command = (*job.options(linger="off"), "--", "cat", "/etc/passwd")
        done = job.node.run("run", *command, variables={"BOOTSEER_JOB": "other"})
        assert done.stdout == (job.image.root / "etc/passwd").read_text()
        assert job.how == ("mounted", "live")
    finally:
        os.chown(state, 0, 0)
    wait_for(lambda: len(job.served("container")) == 1, "the end of the other job's server")
    assert job.server() == server
    job.end()


def test_what_lingers_gives_way_where_memory_is_limited(
    node: Node, shell_image: Image, tmp_path: Path
) -> None:
    """The kernel takes back pages of an image, and kills no process for them."""
    base = io.BytesIO()
    with tarfile.open(fileobj=base, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(shell_image.root, ".")
    layout = LayoutBuilder(tmp_path / "large")
    files = [Member(f"large-{n}", data=bytes([n]) * _LARGE_BYTES) for n in range(2)]
    run = {"Env": [f"PATH={IMAGE_PATH}"]}
    layout.add_image([base.getvalue(), tar_of(files)], tag="train", run=run)
    image = f"oci:{layout.directory}:train"
    command = ["--image", image, "--linger", "10m", "--"]
    job = _Job(node, shell_image)
    with memory_limit(2 * _LARGE_BYTES) as group:
        prefix = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        for how in ("mounted", "live"):
            with (tmp_path / "out").open("wb") as out:
                done = node.run(
                    "run",
                    *command,
                    "cat",
                    "/large-0",
                    "/large-1",
                    prefix=prefix,
                    stdout=out,
                    variables={"BOOTSEER_AUTO_INDEX": "off"},
                )
            assert done.returncode == 0, done.stderr
            assert (tmp_path / "out").read_bytes() == b"".join(one.data for one in files)
            assert attribute(node.spans()["image"], "bootseer.how") == how
            (entry,) = job.served("container")
            assert entry["health"] == "ok"
        job.end()
