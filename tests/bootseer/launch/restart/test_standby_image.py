"""`bootseer standby --image`: tree, pages and container files are there before the start."""

import re
import subprocess
import sys

import pytest

from testbed.needs import require
from testbed.node import Node, attribute
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import Image

pytestmark = pytest.mark.needs("mount", "fuse")

SHOW = "cat /job/env /ckpt/step-1; echo > /tmp/mine"


def _options(node: Node, image: Image) -> tuple[str, ...]:
    checkpoint = f"{(node.base.parent / 'ckpt').as_uri()}:/ckpt"
    setup = ("--setup", "echo set-up > env", "--target", "/job")
    return ("--image", image.source, "--checkpoint", checkpoint, *setup)


def _standby(node: Node, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bootseer", "standby", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=node.environment, cwd=node.base, stdout=pipe, stderr=pipe, text=True
    )


def _done(node: Node, *words: str) -> tuple[int, str, str]:
    with _standby(node, *words) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def one(node: Node, known_image: Image) -> Node:
    """Return a node whose store has the image, a record of its start, and the environment in it."""
    require("mount", "fuse")
    done = node.run("run", *_options(node, known_image), "--", "sh", "-c", "echo 1 > /ckpt/step-1")
    assert done.returncode == 0, done.stderr
    node.wait_clean()
    return node


def test_a_start_takes_over_what_is_held(one: Node, known_image: Image) -> None:
    options = _options(one, known_image)
    code, _, err = _done(one, *options)
    assert code == 0, err

    def held() -> str:
        code, out, err = _done(one, "--status")
        assert code == 0, err
        return out

    read_ahead = re.compile(
        r"bytes are on this node; [1-9]\d* bytes that starts read are in memory"
    )
    wait_for(lambda: read_ahead.search(held()), "the pages of the image")
    rows = {line.split()[0] for line in held().splitlines()}
    assert rows >= {"container", "checkpoints", "attendant", "expected:"}
    started = one.run("run", *options, "--", "sh", "-c", SHOW)
    assert (started.returncode, started.stdout) == (0, "set-up\n1\n"), started.stderr
    spans = one.spans()
    stages = ("image", "environment", "checkpoint")
    assert [attribute(spans[one], "bootseer.how") for one in stages] == ["live"] * 3
    # It was not asked to linger, and so all goes with it.
    one.wait_clean()


def test_it_is_let_go(one: Node, known_image: Image) -> None:
    options = ("--image", known_image.source)
    assert _done(one, *options)[0] == 0
    assert _done(one, "--end")[0] == 0
    one.wait_clean()
    assert _done(one, *options, "--for", "1s")[0] == 0
    one.wait_clean()


def test_killed_at_each_step(one: Node, known_image: Image) -> None:
    """The next start finds its inputs, or makes them; none of the killed one's stay for ever."""
    options = _options(one, known_image)
    for step in ("a server", "a mount", "an environment", "the process that lingers"):
        with _standby(one, *options, "--for", "10m") as process:
            one.kill_at(process, step)
        one.kill_lingering()
        started = one.run("run", *options, "--", "sh", "-c", SHOW)
        assert (started.returncode, started.stdout) == (0, "set-up\n1\n"), started.stderr
        one.wait_clean()


def test_imports_are_not_held_for_an_image(one: Node, known_image: Image) -> None:
    """The standby says so in a line; a start records them."""
    line = "bootseer: warning: workers start without a preloader: --preload holds no"
    program = ("--", "python3", "-c", "print('up')")
    code, _, err = _done(one, "--image", known_image.source, "--preload", *program)
    assert (code, err.count(line)) == (0, 1), err
    done = one.run("run", "--image", known_image.source, "--preload", *program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "up\n", "")
    assert attribute(one.spans()["image"], "bootseer.how") == "live"
    one.wait_clean()
