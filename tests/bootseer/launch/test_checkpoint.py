"""`bootseer run --checkpoint`: written in one start, read in the next, unmounted with the job."""

from pathlib import Path

import pytest

from bootseer.store import open_backend
from testbed.needs import require
from testbed.node import Node, attribute, wait_for_file
from testbed.paths import REPOSITORY
from tests.fuse.striped.support.mounting import checkpoints

pytestmark = pytest.mark.needs("fuse")

SAVE = """
import hashlib, os
data = os.urandom(20_000_000)
with open("mnt/step-1.pt", "wb") as file:
    file.write(data)
print(hashlib.sha256(data).hexdigest())
"""
LOAD = """
import hashlib
print(hashlib.file_digest(open("mnt/step-1.pt", "rb"), "sha256").hexdigest())
"""


@pytest.fixture(params=["file", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    require("fuse")
    if request.param == "file":
        return (tmp_path / "ckpt").as_uri()
    found: str = request.getfixturevalue("hdfs_url")
    return found


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    require("fuse")
    return (tmp_path / "ckpt").as_uri()


def test_saved_in_one_start_and_loaded_in_the_next(node: Node, url: str) -> None:
    checkpoint = ("--checkpoint", f"{url}:{node.base / 'mnt'}")
    saved = node.run("run", *checkpoint, "--", "python3", "-c", SAVE)
    assert saved.returncode == 0, saved.stderr
    node.wait_clean()
    loaded = node.run("run", *checkpoint, "--", "python3", "-c", LOAD)
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert loaded.stdout == saved.stdout
    node.wait_clean()
    # It is striped: the logical file is a small layout, the bytes are in parts.
    backend = open_backend(url)
    try:
        assert backend.stat("step-1.pt").size_bytes < 100_000
    finally:
        backend.close()


def test_killed_in_a_save(node: Node, local_url: str) -> None:
    """The new file does not appear; the old one stays."""
    checkpoint = ("--checkpoint", f"{local_url}:{node.base / 'mnt'}")
    code = """
import os, time
open("mnt/old", "w").write("old")
file = open("mnt/new", "wb")
file.write(bytes(9_000_000))
old = open("mnt/old", "w")
old.write("half")
old.flush()
open("up", "w").close()
time.sleep(600)
"""
    with node.start("run", *checkpoint, "--", "python3", "-c", code) as process:
        wait_for_file(node.base / "up")
        process.kill()
        process.communicate(timeout=60)
    # At once: the server of the killed start may still be at work.
    done = node.run("run", *checkpoint, "--", "sh", "-c", "ls mnt; cat mnt/old")
    assert (done.returncode, done.stdout) == (0, "old\nold"), done.stderr
    node.wait_clean()


@pytest.mark.needs("fuse")
def test_two_checkpoint_folders(node: Node, tmp_path: Path) -> None:
    # Of several colons the last one counts; a folder needs no URL.
    first, second = (tmp_path / "a").as_uri() + ":b", tmp_path / "b"
    done = node.run(
        "run",
        *("--checkpoint", f"{first}:{node.base}/m/a", "--checkpoint", f"{second}:{node.base}/m/b"),
        *("--", "sh", "-c", "echo 1 > m/a/x; echo 2 > m/b/x; cat m/a/x m/b/x"),
    )
    assert (done.returncode, done.stdout) == (0, "1\n2\n"), done.stderr
    node.wait_clean()


@pytest.mark.parametrize(
    ("url", "code", "word"),
    [
        ("hdfs://127.0.0.1:9/ckpt", 17, "127.0.0.1:9"),
        ("nosuch://host/ckpt", 2, "nosuch"),
        ("file:///proc/self/status", 2, "is a file"),
    ],
)
@pytest.mark.needs("fuse")
def test_a_checkpoint_url_that_cannot_be_mounted(
    node: Node, url: str, code: int, word: str
) -> None:
    done = node.run(
        "run",
        *("--checkpoint", f"{url}:{node.base}/mnt", "--", "touch", "job-ran"),
        variables={"BOOTSEER_DEADLINE": "2"},
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert word in done.stderr
    assert not (node.base / "job-ran").exists()
    node.wait_clean()


@pytest.mark.needs("fuse")
def test_no_secret_in_what_is_said(node: Node) -> None:
    done = node.run(
        "run",
        *("--checkpoint", f"hdfs://user:geheim@127.0.0.1:9/ckpt:{node.base}/mnt", "--", "true"),
        variables={"BOOTSEER_DEADLINE": "2"},
    )
    assert done.returncode not in (0, None)
    assert "geheim" not in done.stderr
    # Files that its servers are still removing cannot be read.
    node.wait_clean()
    for path in node.base.rglob("*"):
        if path.is_file():
            assert b"geheim" not in path.read_bytes(), path


def test_the_second_mount_fails_and_the_first_goes(node: Node, local_url: str) -> None:
    (node.base / "occupied").write_text("a file")
    done = node.run(
        "run",
        *("--checkpoint", f"{local_url}:{node.base}/mnt"),
        *("--checkpoint", f"{local_url}:{node.base}/occupied/mnt", "--", "touch", "job-ran"),
    )
    assert done.returncode != 0
    assert "occupied/mnt" in done.stderr
    assert not (node.base / "job-ran").exists()
    # Not only some time later: a caller may want to mount there next.
    assert node.mounts() == []
    node.wait_clean()


def test_a_command_that_is_missing_leaves_no_mount(node: Node, local_url: str) -> None:
    done = node.run("run", "--checkpoint", f"{local_url}:{node.base}/mnt", "--", "no-such-program")
    assert done.returncode == 127
    assert node.mounts() == []
    node.wait_clean()


@pytest.mark.needs("fuse")
def test_a_failing_mount_ends_the_setups(node: Node) -> None:
    """The failure must not come after ten minutes of pip."""
    (node.base / "file").write_text("")
    done = node.run(
        "run",
        *("--checkpoint", f"{(node.base / 'file').as_uri()}:{node.base}/mnt"),
        *("--setup", "mkdir -p env; until grep -q Error run/logs/*.log; do :; done"),
        *("--setup", "touch second-ran", "--target", "env", "--", "touch", "job-ran"),
    )
    assert done.returncode == 2, done.stderr
    assert not (node.base / "second-ran").exists()


def test_mounted_there_already(node: Node, local_url: str) -> None:
    """Another process has mounted the folder, and keeps it."""
    mount = node.base / "mnt"
    mount.mkdir()
    with checkpoints(node.base, mount, local_url):
        done = node.run("run", "--checkpoint", f"{local_url}:{mount}", "--", "touch", "job-ran")
        assert done.returncode == 19
        assert "torchrun" in done.stderr
        assert [one.path for one in node.mounts()] == [mount]


def test_it_overlaps_the_environment(node: Node, local_url: str) -> None:
    """Each stage waits until it has seen the other begin."""
    mount = node.base / "mnt"
    seen = f"until grep -q checkpoint timeline/job/0/*/*.jsonl && mountpoint -q {mount}; do :; done"
    done = node.run(
        "run",
        *("--checkpoint", f"{local_url}:{mount}"),
        *("--setup", f"{seen}; mkdir -p env; touch env/x", "--target", "env", "--", "true"),
    )
    assert done.returncode == 0, done.stderr
    spans = node.spans()
    checkpoint, environment = spans["checkpoint"], spans["environment"]
    assert int(checkpoint["startTimeUnixNano"]) < int(environment["endTimeUnixNano"])
    assert int(environment["startTimeUnixNano"]) < int(checkpoint["endTimeUnixNano"])
    for span in (checkpoint, environment):
        assert span["parentSpanId"] == spans["start"]["spanId"]
    assert attribute(environment, "bootseer.how") == "captured"


# The clock of the start alone, not of what it has forked, is an hour ahead once the file is there.
CLOCK = """
import os, time
if "run" in __import__("sys").orig_argv:
    def monotonic(real=time.monotonic, pid=os.getpid()):
        return real() + 3600 * (os.getpid() == pid and os.path.exists("late"))
    time.monotonic = monotonic
"""


def test_what_was_mounted_in_time_is_used_however_long_a_setup_takes(
    node: Node, local_url: str
) -> None:
    """With a set-up of over two minutes the start once ended with "not mounted within the
    deadline"."""
    mount = node.base / "mnt"
    (node.base / "clock").mkdir()
    (node.base / "clock/sitecustomize.py").write_text(CLOCK)
    setup = f"until mountpoint -q {mount}; do sleep 0.1; done; mkdir -p env; touch env/x late"
    done = node.run(
        "run",
        *("--checkpoint", f"{local_url}:{mount}", "--setup", setup, "--target", "env"),
        *("--", "mountpoint", mount),
        variables={
            "PYTHONPATH": f"{node.base / 'clock'}:{REPOSITORY}",
            "BOOTSEER_DEADLINE": "60",
        },
    )
    assert done.returncode == 0, done.stderr
    assert (node.base / "late").exists()
    node.wait_clean()


def test_a_path_that_was_not_there_is_refused(node: Node, local_url: str) -> None:
    """Only the last name of a folder for checkpoints may be missing."""
    url = f"{local_url}/misspelt/run-1"
    done = node.run("run", "--checkpoint", f"{url}:{node.base / 'mnt'}", "--", "echo", "trained")
    assert done.returncode == 10
    assert done.stdout == ""
    assert f"{url} is not there, nor is the folder above it: check the URL, or make " in done.stderr
    assert not Path(local_url.removeprefix("file://"), "misspelt").exists()
    node.wait_clean()


def test_a_folder_that_was_not_there_is_said(node: Node, local_url: str) -> None:
    """A misspelt URL would start the training from step 0 in silence."""
    checkpoint = ("--checkpoint", f"{local_url}:{node.base / 'mnt'}")
    sentence = f"bootseer: warning: {local_url} was not there: created, empty; "
    first = node.run("run", *checkpoint, "--", "true")
    assert first.returncode == 0
    assert first.stderr.startswith(sentence)
    assert first.stderr.count("\n") == 1
    node.wait_clean()
    second = node.run("run", *checkpoint, "--", "true")
    assert (second.returncode, second.stderr) == (0, "")
    node.wait_clean()
