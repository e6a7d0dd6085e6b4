"""`bootseer standby`: what a start needs is mounted before it, and gone where none comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bootseer.launch.harness import Node, attribute
from tests.support.mounts.fuse_mount import require_fuse, require_root

pytestmark = [pytest.mark.fuse, pytest.mark.root]


@pytest.fixture
def one(node: Node) -> Node:
    """A node for which the store has the environment, and whose checkpoint folder has a file."""
    require_root()
    require_fuse()
    assert node.run(*_options(node), "--", "sh", "-c", "echo 1 > mnt/step-1").returncode == 0
    node.wait_clean()
    (node.base / "env/x").unlink()
    (node.base / "env").rmdir()
    return node


def _options(node: Node) -> tuple[str, ...]:
    setup = "echo ran >> ../count; mkdir -p env; echo a > env/x"
    checkpoint = f"{(node.base.parent / 'ckpt').as_uri()}:{node.base}/mnt"
    return ("--setup", setup, "--target", "env", "--mode", "mount", "--checkpoint", checkpoint)


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
    assert rows >= {"environment", "checkpoints", "lingering", f"{one.base}/mnt:"}
    assert "job (for another " in out
    started = one.run(*_options(one), "--", "sh", "-c", "cat env/x mnt/step-1")
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


def test_killed_at_any_moment(one: Node) -> None:
    """The next start finds what it needs, or makes it; nothing of it stays for ever."""
    for delay_s in (0.1, 0.2, 0.3, 0.4, 0.6, 1.0):
        with _standby(one, *_options(one), "--for", "10m") as process:
            time.sleep(delay_s)
            process.kill()
            process.communicate(timeout=60)
        for pid, line in one.processes().items():
            if "bootseer.launch.linger" in line:
                os.kill(pid, signal.SIGKILL)
        for folder in (one.base / "run/mounts").iterdir():
            if not (folder / "state.json").exists():
                # As it is a minute later: until then it may be one that is being made.
                os.utime(folder, (1, 1))
        started = one.run(*_options(one), "--", "sh", "-c", "cat env/x mnt/step-1")
        assert (started.returncode, started.stdout) == (0, "a\n1\n"), started.stderr
        one.wait_clean()
    assert list((one.base / "env").iterdir()) == []
