"""A set-up inside an image: the layers of the image's root tell its changes."""

import json
from pathlib import Path

import pytest

from testbed.node import Node, attribute, node_at
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import Image

pytestmark = pytest.mark.needs("mount", "fuse")

# In a package that the image has, as an upgrade of it would.
SET_UP = """
import email, os, pathlib, shutil
package = pathlib.Path(email.__file__).parent
(package / "quoprimime.py").unlink()
(package / "charset.py").write_text("changed")
(package / "_parseaddr.py").chmod(0o600)
(package / "encoders.py").rename(package / "renamed.py")
os.link(package / "utils.py", package / "linked.py")
shutil.rmtree(package / "mime")
(package / "mime").mkdir()
(package / "mime/new.py").symlink_to("../utils.py")
os.utime(package / "mime", ns=(1, 10**18 + 1))
for path in ("/opt/tool", "/tmp/temporary", "/root/.cache/pip", "/etc/new"):
    pathlib.Path(path).mkdir(parents=True)
    (pathlib.Path(path) / "file").touch()
pathlib.Path("/etc/passwd").open("a").write("other:x:7:7::/:/bin/sh\\n")
shutil.rmtree(package.parent / "wsgiref")
"""
SHOW = """
import email, json, os, pathlib
found = {}
for path in [pathlib.Path(email.__file__).parent, *pathlib.Path(email.__file__).parent.rglob("*")]:
    status = path.lstat()
    if "__pycache__" in path.parts:
        continue
    size = 0 if path.is_dir() and not path.is_symlink() else status.st_size
    links = 0 if path.is_dir() else status.st_nlink
    found[str(path)] = [status.st_mode, status.st_uid, size, status.st_mtime_ns, links]
print(json.dumps(found, sort_keys=True))
"""


def _package_in(image: Image) -> Path:
    """Return the folder of a package of the standard library in the image."""
    (package,) = image.root.rglob("python3*/email")
    return Path("/") / package.relative_to(image.root)


def test_a_set_up_that_changes_what_the_image_has(
    node: Node, known_image: Image, tmp_path: Path
) -> None:
    inside = _package_in(known_image)
    (tmp_path / "bind").mkdir()
    for name, text in (("set-up.py", SET_UP), ("show.py", SHOW)):
        (tmp_path / "bind" / name).write_text(text)
    (tmp_path / "bind").chmod(0o755)
    job = (
        *("--image", known_image.source, "--bind", f"{tmp_path / 'bind'}:/bind"),
        *("--setup", "python3 -B /bind/set-up.py", "--target", inside, "--mode", "extract"),
        *("--", "python3", "-B", "/bind/show.py"),
    )
    first = node.run("-v", "run", *job)
    assert first.returncode == 0, first.stderr
    assert "stored snapshot" in first.stderr
    # The layers told.
    assert "scanning" not in first.stderr
    node.wait_clean()
    (warning,) = (line for line in first.stderr.splitlines() if "changed during" in line)
    assert "/etc/passwd" in warning
    assert "/etc/new/file" in warning
    assert "/opt/tool/file" in warning
    assert f"{inside.parent}/wsgiref" in warning
    for other in ("temporary", "pip", "email", "more folders", "resolv"):
        assert other not in warning
    shown = json.loads(first.stdout)
    assert f"{inside}/mime/new.py" in shown
    assert f"{inside}/quoprimime.py" not in shown
    with node_at(tmp_path / "second", node.store) as second:
        again = second.run("-v", "run", *job)
        assert again.returncode == 0, again.stderr
        assert "restored snapshot" in again.stderr
        assert "scanning" not in again.stderr
        assert "changed during" not in again.stderr
        second.wait_clean()
    assert json.loads(again.stdout) == shown


def test_a_target_with_a_mount_inside_is_scanned(
    node: Node, known_image: Image, tmp_path: Path
) -> None:
    inside = _package_in(known_image)
    (tmp_path / "bind").mkdir()
    (tmp_path / "bind/file").touch()
    done = node.run(
        "-v",
        "run",
        *("--image", known_image.source, "--bind", f"{tmp_path / 'bind'}:{inside}/bound"),
        *("--setup", f"echo x > {inside}/new; echo x > {inside}/bound/x", "--target", inside),
        *("--", "cat", f"{inside}/new"),
    )
    assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr
    assert f"something is mounted on {node.base}" in done.stderr
    # The file and where something is mounted: nothing of that.
    assert ": 2 files; " in done.stderr
    node.wait_clean()


@pytest.mark.needs(programs=["runc"])
@pytest.mark.parametrize("mode", ["mount", "link", "extract"])
def test_runc_shows_what_was_mounted_below_the_root(
    node: Node, known_image: Image, tmp_path: Path, mode: str
) -> None:
    """The image's user sees environments, checkpoint folders and the timeline, and may write."""
    code = "import os; os.umask(0); os.mkdir('env'); open('env/file', 'w').write('made\\n')"
    script = "cat env/file && echo job > env/new && cat env/new && echo x > /ckpt/$STEP"
    script += " && echo $BOOTSEER_TIMELINE && test -w $BOOTSEER_TIMELINE && echo $$"
    job = (
        *("--image", known_image.source, "--runtime", "runc", "--bind", f"{tmp_path}:/job/bound"),
        *("--checkpoint", f"{(tmp_path / 'ckpt').as_uri()}:/ckpt", "--mode", mode),
        *("--setup", f'python3 -c "{code}"', "--target", "/job/env", "--", "sh", "-c", script),
    )
    for step in "ab":
        done = node.run("run", *job, variables={"STEP": step})
        shown = "made\njob\n/run/bootseer/timeline.jsonl\n1\n"
        assert (done.returncode, done.stdout) == (0, shown), done.stderr
        node.wait_clean()
    assert "restored" in done.stderr
    assert {"a", "b"} <= {path.name for path in (tmp_path / "ckpt").iterdir()}


@pytest.mark.needs(programs=["runc"])
def test_what_lingers_is_taken_over_by_the_next_container(node: Node, known_image: Image) -> None:
    """The next container also takes over after one whose runc was killed."""
    job = ("--image", known_image.source, "--runtime", "runc", "--linger", "10m", "--")
    waits = "import time; print('up', flush=True); time.sleep(600)"
    with node.start("run", *job, "python3", "-c", waits) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
    wait_for_no_container(node)
    done = node.run("run", *job, "sh", "-c", "echo $$ > /tmp/mine && cat /tmp/mine")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert attribute(node.spans()["image"], "bootseer.how") == "live"
    assert node.run("standby", "--end").returncode == 0
    node.wait_clean()


def wait_for_no_container(node: Node) -> None:
    wait_for(lambda: not any("time.sleep(600)" in one for one in node.processes().values()))
