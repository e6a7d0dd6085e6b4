"""A real start has the folders, objects and processes that docs/launch-flow.md names."""

import re
import subprocess
from pathlib import Path

import pytest

from testbed.node import Node, node_at
from testbed.paths import REPOSITORY
from tests.bootseer.launch.conftest import Image

pytestmark = pytest.mark.needs("mount", "fuse")

PAGE = (REPOSITORY / "docs/launch-flow.md").read_text(encoding="utf-8")
# There only for a moment, or long after a start.
_PASSING = ("run_dir/services/ID-*", "leases/", "used/")
_STORED = "bundles|blobs|chains|hot|hotsets|images|indexes|layers|snapshots|traces"
# What stands for a name of which the page says only what it is.
_NAMES = re.compile(r"ID-\*|\b(?:ID|P|NAME|HEX|INDEX|WORKLOAD|FINGERPRINT|JOB|ATTEMPT)\b")
SET_UP = "import os; os.makedirs('/opt/tool'); open('/opt/tool/file', 'w').close()"
COMMAND = "import os, sys; print(os.listdir('/mnt'), flush=True); sys.stdin.read()"


def _named(prefix: str) -> list[str]:
    """Return the patterns of the names that the page has below a setting or folder."""
    found = re.findall(rf"`((?:{prefix})/[\w/.*-]*)`", PAGE)
    kept = {one.rstrip("/") for one in found if not one.startswith(_PASSING) and ".py" not in one}
    return sorted(_NAMES.sub("*", one) for one in kept)


def _job(image: Image, folder: Path) -> tuple[str, ...]:
    words = ["--image", image.source, "--setup", f'python3 -c "{SET_UP}"', "--target", "/opt/tool"]
    return (*words, "--checkpoint", f"{folder.as_uri()}:/mnt", "--", "python3", "-c", COMMAND)


def test_what_the_page_names_is_there(node: Node, image: Image, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-1.pt").write_bytes(bytes(1000))
    first = node.run("run", *_job(image, folder), stdin="")
    assert first.returncode == 0, first.stderr
    node.wait_clean()
    stored = _named(_STORED)
    assert len(stored) > 5
    for pattern in stored:
        assert any((tmp_path / "store").glob(pattern)), f"the store has no {pattern}"

    with node_at(tmp_path / "second", node.store) as second:
        process = second.start("run", *_job(image, folder), stdin=subprocess.PIPE)
        assert process.stdout is not None
        assert "step-1.pt" in process.stdout.readline()
        for setting, place in (("run_dir", "run"), ("cache_dir", "cache")):
            for pattern in _named(setting):
                below = second.base / place
                assert any(below.glob(pattern.partition("/")[2])), f"the node has no {pattern}"
        lines = second.processes()
        assert lines[process.pid].startswith("python3 -c")
        running = " ".join(lines.values())
        for server in ("bootseer.fuse.striped.mounted.job_mount", "bootseer.prefetch.serve.server"):
            assert f"`{server}`" in PAGE
            # It and its worker.
            assert running.count(server) == 2, running
        _, errors = process.communicate("", timeout=60)
        assert process.returncode == 0, errors
        second.wait_clean()
        assert any((second.base / "timeline/job/0").rglob("*.jsonl"))


def test_the_files_are_reached_in_the_order_that_the_page_gives() -> None:
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| (\d*) \|", PAGE, re.M)
    assert 20 < len(rows) <= 30
    files = [file for _, file, _ in rows]
    assert [int(number) for number, _, _ in rows] == [*range(1, len(rows) + 1)]
    for number, file, reached_from in rows[1:]:
        assert int(reached_from) < int(number)
        text = (REPOSITORY / files[int(reached_from) - 1]).read_text(encoding="utf-8")
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, name = f"bootseer.{module.removeprefix('bootseer.')}".rpartition(".")
        said = (f"{package}.{name}", f"from {package} import", f'"{name}"')
        assert any(one in text for one in said), f"{files[int(reached_from) - 1]} names no {file}"
