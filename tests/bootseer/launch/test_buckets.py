"""Starts with a store in a bucket of a real gateway (Ceph's): each object that a start replays."""

import json
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.report.sources import StoredTimelines, list_starts
from bootseer.store import open_store
from testbed import waiting
from testbed.node import Node, attribute, node_at
from tests.bootseer.launch.conftest import Image
from tests.bootseer.launch.test_checkpoint import LOAD, SAVE

pytestmark = pytest.mark.rgw


@pytest.fixture
def bucket_url() -> str:
    return f"s3://conformance/starts-{secrets.token_hex(6)}"


@pytest.fixture
def nodes(
    rgw: dict[str, str], bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Node, Node]]:
    """Yield two nodes that share a bucket."""
    for name, value in rgw.items():
        monkeypatch.setenv(name, value)
    with (
        node_at(tmp_path / "node", f"{bucket_url}/store", variables=rgw) as first,
        node_at(tmp_path / "second", f"{bucket_url}/store", variables=rgw) as second,
    ):
        yield first, second


@pytest.mark.needs("mount", "fuse")
def test_an_image(nodes: tuple[Node, Node], image: Image) -> None:
    job = ("--image", image.source, "--", "python3", "-c", "import decimal, email; print('ran')")
    for node in nodes:
        done = node.run("run", *job)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
        node.wait_clean()
        is_second = node is nodes[1]
        assert ("not indexed yet" in done.stderr) is not is_second
        assert attribute(node.spans()["image served"], "bootseer.hit") is is_second
    assert done.stderr == ""


def test_an_environment(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    line = "echo ran >> $COUNT; mkdir -p $PLACE; head -c 3000000 /dev/zero > $PLACE/x"
    place = tmp_path / "place"
    variables = {"COUNT": str(tmp_path / "count"), "PLACE": str(place)}
    for node in nodes:
        job = ("--setup", line, "--target", str(place), "--", "stat", "-c", "%s", place / "x")
        done = node.run("run", *job, variables=variables)
        assert (done.returncode, done.stdout) == (0, "3000000\n"), done.stderr
        node.wait_clean()
        if place.exists():
            place.rename(tmp_path / f"of {node.base.name}")
    assert (tmp_path / "count").read_text() == "ran\n"


def test_kept_caches(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    folder = tmp_path / "some cache"
    code = (
        "import sys; from pathlib import Path; at = Path(sys.argv[1], 'entry')\n"
        "print(at.exists()); at.parent.mkdir(exist_ok=True); at.write_text('compiled')"
    )
    for node, is_there in zip(nodes, ("False\n", "True\n"), strict=True):
        job = ("--keep", str(folder), "--", sys.executable, "-c", code, str(folder))
        done = node.run("run", *job)
        assert (done.returncode, done.stdout) == (0, is_there), done.stderr
        node.wait_clean()
        folder.rename(tmp_path / f"of {node.base.name}")


@pytest.mark.needs("fuse")
def test_checkpoints(nodes: tuple[Node, Node], bucket_url: str) -> None:
    digests = []
    for node, code in zip(nodes, (SAVE, LOAD), strict=True):
        checkpoint = ("--checkpoint", f"{bucket_url}/ckpt:{node.base / 'mnt'}")
        done = node.run("run", *checkpoint, "--", "python3", "-c", code)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
        node.wait_clean()
    assert digests[0] == digests[1]


def test_timelines(nodes: tuple[Node, Node]) -> None:
    variables = {"BOOTSEER_PUBLISH_TIMELINES": "on", "SLURM_JOB_ID": "7"}
    code = "import bootseer; bootseer.stage('load').end(); bootseer.ready()"
    for node in nodes:
        named = {**variables, "BOOTSEER_NODE": node.base.name}
        done = node.run("run", "--", sys.executable, "-c", code, variables=named)
        assert done.returncode == 0, done.stderr
        node.wait_clean()
    with open_store(nodes[0].store) as store:
        starts = list_starts(StoredTimelines(store), "job")
        stages = [stage.name for start in starts for stage in start.stages() if stage.end_ns]
    assert stages.count("load") == 2
    shown = nodes[1].run("report", "job", "--json")
    assert json.loads(shown.stdout)


# Each node has the folder of the set-up for itself, under one name.
_OWN_FOLDER = 'mount --bind "$0" "$1"; shift; exec "$@"'


@pytest.mark.needs("root", "mount")
def test_eight_nodes_at_once_run_one_set_up(
    rgw: dict[str, str], bucket_url: str, tmp_path: Path
) -> None:
    env, go = tmp_path / "env", tmp_path / "go"
    env.mkdir()
    # By a variable: the key of a set-up tells whether a file exists that the command names.
    line = f"echo ran >> $COUNT; until [ -e $GO ]; do sleep 0.05; done; echo made > {env}/x"
    variables = {**rgw, "COUNT": str(tmp_path / "count"), "GO": str(go), "BOOTSEER_DEADLINE": "60"}
    nodes = [Node(tmp_path / f"node-{n}", bucket_url, variables=variables) for n in range(8)]
    job = ("--setup", line, "--target", env, "--", "cat", env / "x")
    starts = []
    try:
        for node in nodes:
            own = node.base / "own"
            own.mkdir()
            prefix = ("unshare", "--mount", "sh", "-ec", _OWN_FOLDER, str(own), str(env))
            names = {"BOOTSEER_NODE": node.base.name}
            starts.append(node.start("run", *job, prefix=prefix, variables=names))
        waiting.wait_for(lambda: all(node.count_begun("environment") for node in nodes), "all")
        go.touch()
        for start in starts:
            out, err = start.communicate(timeout=200)
            assert (start.returncode, out) == (0, "made\n"), err
        for node in nodes:
            node.wait_clean()
        assert (tmp_path / "count").read_text() == "ran\n"
    finally:
        for node in nodes:
            node.sweep()


def test_an_endpoint_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    """After the deadline, the start continues as without a store, with a warning."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "BOOTSEER_DEADLINE": "2",
        }
        with node_at(tmp_path / "node", "s3://bucket/store", variables=variables) as node:
            line = "mkdir -p env; echo made > env/x"
            done = node.run("run", "--setup", line, "--target", "env", "--", "cat", "env/x")
            assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr
            assert "no answer within" in done.stderr
            waiting.wait_for(lambda: not node.processes(), "the end of all processes")
