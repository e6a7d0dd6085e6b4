"""`bootseer standby` mounts the inputs of a start before it, and unmounts them if none comes."""

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.needs import require
from testbed.node import Node, attribute

pytestmark = pytest.mark.needs("mount", "fuse")

# Devices as a container without --device /dev/fuse has them, at the folder $0.
NO_FUSE = """
mount -t tmpfs none "$0" && mkdir "$0/shm" && mount --bind /dev/shm "$0/shm" || exit 90
for name in null zero full random urandom tty; do
    touch "$0/$name" && mount --bind "/dev/$name" "$0/$name" || exit 91
done
mount --rbind "$0" /dev && exec "$@"
"""


@pytest.fixture
def one(node: Node) -> Node:
    """Return a node whose store has the environment, and whose checkpoint folder has a file."""
    require("mount", "fuse")
    assert node.run("run", *_options(node), "--", "sh", "-c", "echo 1 > mnt/step-1").returncode == 0
    node.wait_clean()
    (node.base / "env/x").unlink()
    (node.base / "env").rmdir()
    return node


def _options(node: Node) -> tuple[str, ...]:
    setup = "echo ran >> ../count; mkdir -p env; echo a > env/x"
    checkpoint = f"{(node.base.parent / 'ckpt').as_uri()}:{node.base}/mnt"
    return ("--setup", setup, "--target", "env", "--mode", "mount", "--checkpoint", checkpoint)


def _standby(node: Node, *words: str, prefix: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    command = [*prefix, sys.executable, "-m", "bootseer", "standby", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=node.environment, cwd=node.base, stdout=pipe, stderr=pipe, text=True
    )


def _done(node: Node, *words: str, prefix: tuple[str, ...] = ()) -> tuple[int, str, str]:
    with _standby(node, *words, prefix=prefix) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _timelines(node: Node) -> list[Path]:
    return list((node.base / "timeline").rglob("*.jsonl"))


def test_a_start_takes_over_what_is_held(one: Node) -> None:
    before = _timelines(one)
    code, _, err = _done(one, *_options(one))
    assert code == 0, err
    assert _timelines(one) == before
    code, out, err = _done(one, "--status")
    assert code == 0, err
    rows = {line.split()[0] for line in out.splitlines()}
    assert rows >= {"environment", "checkpoints", "attendant", f"{one.base}/mnt:"}
    assert "job (for another " in out
    started = one.run("run", *_options(one), "--", "sh", "-c", "cat env/x mnt/step-1")
    assert (started.returncode, started.stdout) == (0, "a\n1\n"), started.stderr
    spans = one.spans()
    assert attribute(spans["environment"], "bootseer.how") == "live"
    assert attribute(spans["checkpoint"], "bootseer.how") == "live"
    assert (one.base.parent / "count").read_text() == "ran\n"
    # It was not asked to linger, and so all goes with it.
    one.wait_clean()


def test_it_is_let_go_when_that_is_asked_for_and_by_itself(one: Node) -> None:
    assert _done(one, *_options(one))[0] == 0
    assert _done(one, "--end")[0] == 0
    one.wait_clean()
    assert _done(one, "--status")[0] == 10
    assert _done(one, *_options(one), "--for", "1s")[0] == 0
    one.wait_clean()
    assert _done(one, "--for", "1s")[0] == 2


def test_killed_at_each_step(one: Node) -> None:
    """The next start finds its inputs, or makes them; none of the killed one's stay for ever."""
    steps = ("nothing yet", "its timeline", "an environment", "a server", "a mount")
    for step in (*steps, "the process that lingers"):
        with _standby(one, *_options(one), "--for", "10m") as process:
            one.kill_at(process, step)
        one.kill_lingering()
        started = one.run("run", *_options(one), "--", "sh", "-c", "cat env/x mnt/step-1")
        assert (started.returncode, started.stdout) == (0, "a\n1\n"), started.stderr
        one.wait_clean()
    assert list((one.base / "env").iterdir()) == []


def test_without_fuse_a_start_is_an_ordinary_one(one: Node) -> None:
    """The environment is extracted, and one line says why it is not mounted."""
    devices = one.base.parent / "devices"
    devices.mkdir()
    unshare = ("unshare", "--mount", "--propagation", "private")
    prefix = (*unshare, "sh", "-c", NO_FUSE, str(devices))
    environment = _options(one)[:-2]
    code, _, err = _done(one, *environment, prefix=prefix)
    assert (code, err.count("warning: ")) == (0, 1), err
    assert "warning: extracted: it cannot be mounted: there is no /dev/fuse" in err
    assert one.mounts() == []
    code, out, err = _done(one, "--status", prefix=prefix)
    assert (code, "attendant" in out) == (0, True), err
    # An environment that is there already stays as it is; a missing one is mounted.
    for number in range(2):
        words = (*environment, "--linger", "10m", "--", "cat", "env/x")
        started = one.run("run", *words, prefix=prefix)
        assert (started.returncode, started.stdout) == (0, "a\n"), started.stderr
        assert started.stderr.count("warning: ") == number, started.stderr
        (one.base / "env/x").unlink()
        (one.base / "env").rmdir()
    assert (one.base.parent / "count").read_text() == "ran\n"
    assert _done(one, "--end")[0] == 0
    one.wait_clean()
