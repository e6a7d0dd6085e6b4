"""`bootseer run --image`: indexed once, replayed elsewhere, as the image's user, then removed."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.sources import StoredTimelines, list_starts
from bootseer.store import open_store
from testbed import waiting
from testbed.containers.containerd_images import shell_layer
from testbed.images.building import LayoutBuilder, tar_of
from testbed.node import Node, attribute, node_at, wait_for_file
from testbed.paths import REPOSITORY
from tests.bootseer.launch.conftest import Image

pytestmark = pytest.mark.needs("mount", "fuse")

SHOW = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid(), "cwd": os.getcwd(),
    "environment": dict(os.environ), "stdin": sys.stdin.read(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))), "root": sorted(os.listdir("/")),
}))
"""
STAGES = """
import sys
sys.path.insert(0, "/source")
import bootseer
with bootseer.stage("load"):
    import decimal, email.message
bootseer.ready()
"""


def test_recorded_once_and_replayed_on_another_node(
    node: Node, image: Image, tmp_path: Path
) -> None:
    bind = f"{REPOSITORY}:/source:ro"
    job = ("--image", image.source, "--bind", bind, "--", "python3", "-c", STAGES)
    first = node.run("run", *job)
    assert first.returncode == 0, first.stderr
    assert "not indexed yet" in first.stderr
    node.wait_clean()
    (index,) = (path for path in (tmp_path / "store/hot").iterdir() if len(path.name) == 64)
    assert (index / "default.json").is_file()
    spans = node.spans()
    # Written by the job, as the image's user.
    assert spans["load"]["parentSpanId"] == spans["start"]["spanId"]
    assert spans["ready"]["parentSpanId"] == spans["start"]["spanId"]
    assert spans["image pull"]["parentSpanId"] == spans["image"]["spanId"]
    assert attribute(spans["image served"], "bootseer.hit") is False
    with node_at(tmp_path / "second", node.store) as second:
        done = second.run("run", *job)
        assert (done.returncode, done.stderr) == (0, "")
        second.wait_clean()
        spans = second.spans()
        assert "image pull" not in spans
        assert attribute(spans["image served"], "bootseer.hit") is True
        moved = int(attribute(spans["image served"], "bootseer.bytes"))
        whole = sum(path.stat().st_size for path in (tmp_path / "store/blobs").rglob("*"))
        assert 0 < moved < whole * 2 / 3


def test_a_start_in_an_image_is_in_the_store(node: Node, image: Image) -> None:
    """The job inside reports that it is ready; at its end the server adds figures."""
    program = f"{STAGES}\nsys.stdin.read()"
    bind = f"{REPOSITORY}:/source:ro"
    job = ("--image", image.source, "--bind", bind, "--", "python3", "-c", program)
    variables = {"BOOTSEER_PUBLISH_TIMELINES": "on", "SLURM_JOB_ID": "7"}

    def stages() -> set[str]:
        with open_store(node.store) as store:
            starts = list_starts(StoredTimelines(store), "job")
        return {stage.name for start in starts for stage in start.stages() if stage.end_ns}

    options: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with node.start("run", *job, stdin=subprocess.PIPE, variables=variables, **options) as running:
        waiting.wait_for(lambda: "ready" in stages(), "the timeline")
        assert {"start", "image", "load"} <= stages()
        running.communicate("", timeout=60)
    node.wait_clean()
    assert "image served" in stages()


def test_the_images_entrypoint_starts_the_command(node: Node, tmp_path: Path) -> None:
    """`docker run` does the same."""
    layout = LayoutBuilder(tmp_path / "layout")
    entry = ["sh", "-c", 'echo entry "$@"; exec "$@"', "sh"]
    run = {"Entrypoint": entry, "Env": ["PATH=/usr/bin:/bin"]}
    layout.add_image([tar_of(shell_layer())], tag="1", run=run)
    job = ("--image", f"oci:{layout.directory}:1")
    command = ("--", "ls", "-d", "/proc/self/status")
    done = node.run("run", *job, *command)
    assert (done.returncode, done.stdout) == (
        0,
        "entry ls -d /proc/self/status\n/proc/self/status\n",
    ), done.stderr
    none = node.run("run", *job, "--entrypoint", "", *command)
    assert (none.returncode, none.stdout) == (0, "/proc/self/status\n"), none.stderr
    other = node.run("run", *job, "--entrypoint", "/usr/bin/stat", "--", "-c", "%n", "/proc")
    assert (other.returncode, other.stdout) == (0, "/proc\n"), other.stderr
    assert node.run("run", "--entrypoint", "", *command).returncode == 2
    # Known before anything is mounted or set up.
    own = node.run("run", *job, "--entrypoint", "", "--setup", "echo set up", "--target", "/x")
    assert own.returncode == 2
    assert "no command of its own" in own.stderr
    assert "set up" not in own.stderr


def test_without_a_command_it_is_the_images_own(node: Node, tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    run = {"Cmd": ["sh", "-c", "echo of the image"], "Env": ["PATH=/usr/bin:/bin"]}
    layout.add_image([tar_of(shell_layer())], tag="1", run=run)
    done = node.run("run", "--image", f"oci:{layout.directory}:1")
    assert (done.returncode, done.stdout) == (0, "of the image\n"), done.stderr
    disabled = node.run("run", "--image", "x", variables={"BOOTSEER_DISABLE": "1"})
    assert (disabled.returncode, disabled.stdout) == (2, "")
    assert "BOOTSEER_DISABLE is set" in disabled.stderr


def test_what_the_command_gets(node: Node, known_image: Image, tmp_path: Path) -> None:
    job = (
        *("--image", known_image.source, "--bind", f"{tmp_path}:/data"),
        *("--", "python3", "-c", SHOW),
    )
    variables = {"RANK": "3", "MASTER_ADDR": "host", "VIRTUAL_ENV": "/host"}
    process = node.start("run", *job, stdin=subprocess.PIPE, variables=variables)
    out, err = process.communicate("for the job", timeout=60)
    assert process.returncode == 0, err
    got = json.loads(out)
    assert got["pid"] == process.pid
    assert (got["uid"], got["gid"], got["cwd"]) == (1000, 1001, "/job")
    assert got["stdin"] == "for the job"
    assert set(got["descriptors"]) <= {0, 1, 2, 3}
    assert "data" in got["root"]
    environment = got["environment"]
    assert environment["FROM_IMAGE"] == "yes"
    assert environment["HOME"] == "/home/worker"
    assert environment["RANK"] == "3"
    assert environment["BOOTSEER_RANK"] == "3"
    assert environment["BOOTSEER_JOB"] == "job"
    assert environment["MASTER_ADDR"] == "host"
    assert "VIRTUAL_ENV" not in environment
    # The launcher's own is not the image's; what the job's processes note themselves by is.
    hooks = "/run/bootseer/python/bootseer/profile/collect/path"
    assert environment["PYTHONPATH"] == hooks
    node.wait_clean()


def test_exit_codes_and_signals(node: Node, known_image: Image) -> None:
    for command, code in (
        (["sh", "-c", "exit 7"], 7),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "kill -KILL $$"], -signal.SIGKILL),
    ):
        done = node.run("run", "--image", known_image.source, "--", *command)
        assert done.returncode == code, done.stderr
    node.wait_clean()
    for number in (signal.SIGTERM, signal.SIGKILL):
        waiting = "import time; print('up', flush=True); time.sleep(600)"
        with node.start(
            "run", "--image", known_image.source, "--", "python3", "-c", waiting
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            process.communicate(timeout=30)
        assert process.returncode == -number
        node.wait_clean()


def test_a_signal_while_the_image_is_pulled(node: Node, image: Image) -> None:
    with node.start("run", "--image", image.source, "--", "true") as process:
        assert process.stderr is not None
        assert "not indexed yet" in process.stderr.readline()
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    node.wait_clean()
    assert node.run("run", "--image", image.source, "--", "sh", "-c", ":").returncode == 0
    node.wait_clean()


def test_kill_9_at_each_step(node: Node, shell_image: Image, tmp_path: Path) -> None:
    job = (
        *("--image", shell_image.source, "--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:/ckpt"),
        *("--setup", "echo data > env", "--target", "/job", "--", "cat", "env"),
    )
    steps = ("its timeline", "a server", "an image", "a mount", "a container's folder")
    for step in (*steps, "an environment", "the command"):
        with node.start("run", *job) as process:
            node.kill_at(process, step)
    done = node.run("run", *job)
    assert (done.returncode, done.stdout) == (0, "data\n"), done.stderr
    node.wait_clean()


def test_setup_and_checkpoint_inside(node: Node, known_image: Image, tmp_path: Path) -> None:
    """The set-up runs as root of the image, before the job, which is an ordinary user."""
    job = (
        *("--image", known_image.source, "--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:/ckpt"),
        *("--setup", "echo from-setup > env; echo ran; ls /ckpt"),
        *("--target", "/job", "--", "sh", "-c"),
    )
    done = node.run("run", *job, "cat env; echo saved > /ckpt/step")
    assert (done.returncode, done.stdout) == (0, "from-setup\n"), done.stderr
    assert "\nran\n" in done.stderr
    node.wait_clean()
    with node_at(tmp_path / "second", node.store) as second:
        again = second.run("run", *job, "cat env /ckpt/step")
        assert (again.returncode, again.stdout) == (0, "from-setup\nsaved\n"), again.stderr
        assert "restored" in again.stderr
        assert "\nran\n" not in again.stderr
        second.wait_clean()


def test_a_setup_inside_is_linked_at_later_starts(node: Node, known_image: Image) -> None:
    """The environment is extracted once on the node; a job's own files are removed with the job."""
    code = "import os; os.umask(0); os.mkdir('env'); open('env/file', 'w').write('from-setup\\n')"
    job = (
        *("--image", known_image.source, "--mode", "link", "--target", "/job/env"),
        *("--setup", f'python3 -c "{code}"'),
        *("--", "sh", "-c", "cat env/file; echo written > env/file; echo x > env/new"),
    )
    first = node.run("run", *job)
    assert (first.returncode, first.stdout) == (0, "from-setup\n"), first.stderr
    node.wait_clean()
    for _ in range(2):
        done = node.run("run", *job)
        assert (done.returncode, done.stdout) == (0, "from-setup\n"), done.stderr
        assert "linked: an overlay over this node's cache" in done.stderr
        node.wait_clean()
    (tree,) = (path for path in (node.base / "cache/trees").iterdir() if path.is_dir())
    assert [path.name for path in tree.iterdir()] == ["file"]


def test_a_setup_that_fails_inside(node: Node, known_image: Image, tmp_path: Path) -> None:
    """The mounts of the host are removed, too, although the set-up had a namespace of its own."""
    done = node.run(
        "run",
        *("--image", known_image.source, "--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:/ckpt"),
        *("--setup", "exec 9> /ckpt/open; (sleep 600 <&9 >/dev/null 2>&1 & ); exit 9"),
        *("--target", "/job/env", "--", "true"),
    )
    assert done.returncode == 9, done.stderr
    node.wait_clean()


def test_a_mount_that_fails_beside_the_image(node: Node, known_image: Image) -> None:
    done = node.run(
        "run",
        *("--image", known_image.source, "--checkpoint", "file:///proc/self/status:/ckpt"),
        *("--setup", "true", "--target", "/job/env", "--", "true"),
    )
    assert done.returncode == 2
    assert "is a file" in done.stderr
    assert "set-up" not in done.stderr
    node.wait_clean()


def test_a_tag_that_moves(node: Node, shell_image: Image, tmp_path: Path) -> None:
    moving = Image(tmp_path / "moving", tmp_path / "root")
    shutil.copytree(shell_image.root, moving.root, symlinks=True)
    for text in ("one", "one", "two"):
        (moving.root / "version").write_text(text)
        shutil.rmtree(moving.directory, ignore_errors=True)
        moving.build()
        done = node.run("run", "--image", moving.source, "--", "cat", "/version")
        assert (done.returncode, done.stdout) == (0, text), done.stderr


def test_a_layer_that_the_store_has_lost(node: Node, known_image: Image, tmp_path: Path) -> None:
    for name in ("blobs", "bundles", "hot"):
        shutil.rmtree(tmp_path / "store" / name, ignore_errors=True)
    done = node.run("run", "--image", known_image.source, "--", "cat", "/etc/passwd")
    assert done.returncode == 0, done.stderr
    assert "is missing in" in done.stderr
    assert "pulling what the store lacks of image" in done.stderr
    node.wait_clean()


def test_a_directory_that_changes(node: Node, shell_image: Image, tmp_path: Path) -> None:
    roots = [tmp_path / "a" / "root", tmp_path / "b" / "root"]
    for root in roots:
        shutil.copytree(shell_image.root, root, symlinks=True)
        (root / "version").write_text(str(root))
        done = node.run("run", "--image", root, "--", "cat", "/version")
        # Not the one of the same last name.
        assert (done.returncode, done.stdout) == (0, str(root)), done.stderr
    again = node.run("run", "--image", roots[0], "--", "cat", "/version")
    assert (again.stdout, again.stderr) == (str(roots[0]), "")
    # The first start is published behind it.
    node.wait_clean()
    (roots[0] / "version").write_text("new")
    changed = node.run("run", "--image", roots[0], "--", "cat", "/version")
    assert changed.stdout == "new"
    assert "has changed" in changed.stderr


def test_the_timeline_is_the_images_users_to_write(node: Node, known_image: Image) -> None:
    done = node.run(
        "run", "--image", known_image.source, "--", "sh", "-c", "echo $BOOTSEER_TIMELINE"
    )
    assert done.stdout == "/run/bootseer/timeline.jsonl\n"
    (file,) = (node.base / "timeline").rglob("*.jsonl")
    assert file.stat().st_uid == 1000
    # Its server adds the start's figures when the job has ended.
    node.wait_clean()
    shutil.rmtree(node.base / "timeline")
    (node.base / "timeline").write_text("in the way")
    done = node.run(
        "run", "--image", known_image.source, "--", "sh", "-c", "echo $BOOTSEER_TIMELINE"
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_two_starts_at_once(node: Node, shell_image: Image, tmp_path: Path) -> None:
    """Two starts of one job on one node have mounts of their own, and see the same folder."""
    ckpt = tmp_path / "ckpt"
    job = (
        *("--image", shell_image.source, "--checkpoint", f"{ckpt.as_uri()}:/ckpt", "--"),
        *(
            "sh",
            "-c",
            "echo $RANK > /ckpt/$RANK && until test -e /ckpt/0 -a -e /ckpt/1; do :; done",
        ),
    )
    started = [node.start("run", *job, variables={"RANK": rank}) for rank in "01"]
    for process in started:
        with process:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
    node.wait_clean()


def test_a_killed_image_server_is_not_the_end(node: Node, known_image: Image) -> None:
    """The supervisor replaces the server while the job reads."""
    code = """
import pathlib, time
pathlib.Path("/out/up").touch()
while not pathlib.Path("/out/go").exists():
    time.sleep(0.01)
import email.message, decimal
"""
    out = node.base / "out"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    with node.start(
        "run",
        *("--image", known_image.source, "--bind", f"{out}:/out", "--", "python3", "-c", code),
    ) as process:
        wait_for_file(out / "up")
        servers = [pid for pid, line in node.processes().items() if "prefetch.serve" in line]
        os.kill(max(servers), signal.SIGKILL)
        (out / "go").touch()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    node.wait_clean()
