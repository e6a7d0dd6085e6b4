"""Whole starts with fan-out: four nodes at addresses of this machine, and one store."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fanout.hosting import are_silent
from testbed.node import node_at
from testbed.paths import REPOSITORY
from testbed.servers.registry import free_port
from tests.bootseer.launch.conftest import Image
from tests.bootseer.launch.nodes.fanout_nodes import (
    COUNT,
    ORDINARY,
    TREES,
    FanoutNodes,
    fanout_figures,
)

pytestmark = pytest.mark.needs("mount", "fuse")

PROGRAM = """
import sys
sys.path.insert(0, "/source")
import bootseer, decimal, email.message, http.client, json, os
gate = "/gate" if os.path.exists("/gate/go") else ""
open(f"/gate/{os.urandom(8).hex()}" if gate else "/dev/null", "w").close()
open("/gate/go" if gate else "/dev/zero", "rb", buffering=0).read(1)
bootseer.ready()
os._exit(0)  # what else the interpreter would read is no part of the record
"""
SETUP = """python3 -c "import os, sys; os.makedirs('/job/env'); \\
open('/job/env/data', 'wb').write(os.urandom(2000000))" """
LATE = re.compile("it was silent|it was slow|nothing came to it|sent none")
"""Reasons for which a node leaves a source that is late."""
JOB = (
    "--setup",
    SETUP,
    "--target",
    "/job/env",
    "--bind",
    f"{REPOSITORY}:/source:ro",
    "--",
    "python3",
    "-c",
    PROGRAM,
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FanoutNodes]:
    with contextlib.ExitStack() as stack:
        yield FanoutNodes(tmp_path, stack)


@pytest.fixture(scope="module")
def recorded(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the image and the bundle of a start; not to be changed."""
    base = tmp_path_factory.mktemp("recorded")
    with node_at(base / "node", (base / "store").as_uri()) as node:
        done = node.run("run", "--image", image.source, *JOB)
        assert done.returncode == 0, done.stderr
        node.wait_clean()
    assert list((base / "store/bundles").rglob("header"))
    return base / "store"


def test_image_and_environment_leave_the_store_once(
    site: FanoutNodes, image: Image, recorded: Path
) -> None:
    subprocess.run(["cp", "-a", recorded, site.store], check=True, timeout=60)
    # Both runtimes in one start: a node cannot tell by which of them another one runs its command.
    has_runc = os.geteuid() == 0 and shutil.which("runc") is not None
    isolated = ("--runtime", "runc") if has_runc else ()
    site.start_in_order("--image", image.source, *JOB, of_ordinary=isolated)
    figures = [fanout_figures(node) for node in site.nodes]
    came = [int(one["bootseer.bytes"]) for one in figures]
    assert min(came) > 4_000_000  # a bundle, and an environment that nothing compresses
    assert {one["bootseer.fanout.nodes"] for one in figures} == {str(COUNT)}
    assert {one["bootseer.fanout.list_from"] for one in figures} == {"Slurm"}
    stored = sum(int(one["bootseer.fanout.store_bytes"]) for one in figures)
    # On a machine that is so busy that a node says nothing for a second, others leave it.
    leaving = [one for one in figures if LATE.search(" ".join(map(str, one.values())))]
    assert stored < (2 + len(leaving)) * max(came)
    moved = site.moved()
    # Everything that four nodes read: names, indexes and faults as well.
    assert sum(one.bytes_read for one in moved) < stored + max(came)
    # Ordinary nodes ask the store for nothing but a page that they need before the bundle comes: so
    # sixteen nodes ask a NameNode for as much as four do.
    asked = [path for number in ORDINARY for path in site.paths(number)]
    if not leaving:
        assert len([path for path in asked if not path.startswith("blobs/")]) <= 2, asked
        assert len(asked) <= 2 + len(ORDINARY), asked
    assert any("was fed by 127.0.0." in one["bootseer.fanout.sources"] for one in figures)
    for node in site.nodes:
        # The files of what came are nameless, and the key is nowhere.
        assert not list((node.base / "cache/fanout").iterdir())
        for path in (
            *(node.base / "run/logs").iterdir(),
            *(node.base / "timeline").rglob("*.jsonl"),
        ):
            assert site.variables["BOOTSEER_FANOUT_KEY"] not in path.read_text()


def test_the_nodes_below_one_that_never_begins_read_the_store(
    site: FanoutNodes, image: Image, recorded: Path
) -> None:
    subprocess.run(["cp", "-a", recorded, site.store], check=True, timeout=60)
    root = TREES.root(0)
    said = site.start("--image", image.source, *JOB, absent=[root])
    assert "warning" not in said
    moved = site.moved()
    assert all(moved[number].requests > 0 for number in TREES.children(0, root))


def test_nodes_that_cannot_reach_each_other_read_the_store(
    site: FanoutNodes, image: Image, recorded: Path
) -> None:
    """A firewall that blocks the port has the same effect as addresses where no node answers."""
    subprocess.run(["cp", "-a", recorded, site.store], check=True, timeout=60)
    (first, *_) = site.nodes
    done = first.run("run", "--image", image.source, *JOB)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    first.wait_clean()
    assert "may be blocked" in fanout_figures(first)["bootseer.fallback"]


def test_a_blocked_port_is_told_from_a_node_that_is_not_up_yet() -> None:
    with contextlib.ExitStack() as stack:
        # Two wait to be accepted; the kernel drops what comes then, as a firewall does.
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        blocked = ("127.0.0.1", full.getsockname()[1])
        assert are_silent([blocked], 0.2)
        assert not are_silent([blocked, ("127.0.0.1", free_port())], 5)
        open_one = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert not are_silent([blocked, ("127.0.0.1", open_one.getsockname()[1])], 5)
        assert not are_silent([("no-such-host.invalid", 1)], 5)
        assert not are_silent([], 0)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"SLURMD_NODENAME": "n9"}, "does not name this node"),
        ({"BOOTSEER_FANOUT_HOSTS": "a,b,b,127.0.0.2"}, "names the node 'b' twice"),
        ({"BOOTSEER_FANOUT_KEY": "secret"}, "BOOTSEER_FANOUT_KEY is no key"),
        ({}, "which another job of this node may use"),
    ],
)
def test_what_cannot_be_right_costs_a_start_one_warning(
    site: FanoutNodes, variables: dict[str, str], says: str
) -> None:
    (node, *_) = site.nodes
    with socket.create_server(("127.0.0.2", 0)) as taken:
        variables = {"BOOTSEER_FANOUT_PORT": str(taken.getsockname()[1]), **variables}
        done = node.run("run", "--", "sh", "-c", "echo ran", variables=variables)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    (line,) = done.stderr.splitlines()
    assert "warning: this node reads all of the store by itself" in line
    assert says in line


@pytest.mark.parametrize("how", ["--set=fanout=off", "BOOTSEER_FANOUT"])
def test_the_kill_switch(site: FanoutNodes, how: str) -> None:
    (node, *_) = site.nodes
    words, variables = ([how], {}) if how.startswith("-") else ([], {how: "off"})
    done = node.run("run", *words, "--", "true", variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    node.wait_clean()
    assert "fan-out" not in node.spans()
