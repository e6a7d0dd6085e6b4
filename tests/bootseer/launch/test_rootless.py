"""Starts without root: fusermount3 mounts, and a user namespace makes the container."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.node import Node, attribute
from testbed.users import folder_for_all_users, unprivileged

pytestmark = pytest.mark.needs("fuse")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_for_all_users() as folder:
        yield folder


def test_image_and_checkpoint(node: Node, image_root: Path, tmp_path: Path) -> None:
    job = (
        *("--image", image_root, "--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:/ckpt"),
        *("--", "sh", "-c"),
    )
    prefix = unprivileged(node.base.parent)
    first = node.run("run", *job, "echo saved > /ckpt/x; echo $BOOTSEER_JOB", prefix=prefix)
    assert (first.returncode, first.stdout) == (0, "job\n"), first.stderr
    second = node.run("run", *job, "cat /ckpt/x; exit 3", prefix=prefix)
    assert (second.returncode, second.stdout, second.stderr) == (3, "saved\n", "")
    node.wait_clean()


def test_an_image_lingers_without_root(node: Node, image_root: Path, tmp_path: Path) -> None:
    job = (
        *("--image", image_root, "--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:/ckpt"),
        *("--linger", "10m", "--", "sh", "-c", "ls /ckpt /tmp; echo > /ckpt/x; echo > /tmp/y"),
    )
    # Both in one mount namespace.
    twice = ("sh", "-c", '"$@" && "$@"', "sh")
    done = node.run("run", *job, prefix=(*unprivileged(node.base.parent), *twice))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "/ckpt:\n\n/tmp:\n/ckpt:\nx\n\n/tmp:\n"
    spans = node.spans()
    how = [attribute(spans[name], "bootseer.how") for name in ("image", "checkpoint")]
    assert how == ["live", "live"]
    for pid, line in node.processes().items():
        if "bootseer.launch.attendant" in line:
            os.kill(pid, signal.SIGTERM)
    node.wait_clean()


def test_a_start_on_the_host_without_root(node: Node, tmp_path: Path) -> None:
    mount = node.base / "mnt"
    done = node.run(
        "run",
        *("--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:{mount}"),
        *("--setup", "mkdir -p env; echo x > env/x", "--target", "env"),
        *("--", "sh", "-c", "id -u; cat env/x; echo saved > mnt/x; cat mnt/x"),
        prefix=unprivileged(node.base.parent),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["x", "saved"]
    node.wait_clean()


def test_set_up_inside_an_image(node: Node, image_root: Path) -> None:
    """The changes are in an upper layer with the attributes of an ordinary user's."""
    root = node.base / "root"
    shutil.copytree(image_root, root, symlinks=True)
    for path in ("usr/share/old/a", "usr/share/old/b", "etc/group"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("old")
    code = "import os; os.remove('/usr/share/old/a'); os.remove('/etc/group')"
    line = f'python3 -c "{code}"; echo c > /usr/share/old/c; echo x > /etc/new'
    job = (
        *("--image", root, "--setup", line, "--target", "/usr/share/old", "--mode", "extract"),
        *("--", "sh", "-c", "cd /usr/share/old && echo *"),
    )
    done = node.run("-v", "run", *job, prefix=unprivileged(node.base.parent))
    assert (done.returncode, done.stdout) == (0, "b c\n"), done.stderr
    assert "scanning" not in done.stderr
    assert ": 1 files; " in done.stderr
    assert "not stored: /etc/ (2 names); " in done.stderr
    node.wait_clean()


PRELOADED = """
import large
from pathlib import Path
parent = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1]
print(large.VALUE, Path(f"/proc/{parent}/comm").read_text().strip())
"""


def test_imports_are_shared_without_root(node: Node) -> None:
    # As a package that is installed for this user.
    (node.base / "lib").mkdir()
    (node.base / "lib/large.py").write_text("import time; time.sleep(0.15); VALUE = 5")
    (node.base / "train.py").write_text(PRELOADED)
    prefix = unprivileged(node.base.parent)
    variables = {
        "PYTHONUSERBASE": str(node.base),
        "PYTHONPATH": f"{node.environment['PYTHONPATH']}:{node.base}/lib",
    }
    parents = []
    for _ in range(2):
        done = node.run(
            "run",
            *("--preload", "--", sys.executable, "-u", "train.py"),
            prefix=prefix,
            variables=variables,
            start_new_session=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        value, parent = done.stdout.split()
        assert value == "5"
        parents.append(parent)
    assert parents[0] != parents[1] == "bootseer-guard"
    node.wait_clean()
