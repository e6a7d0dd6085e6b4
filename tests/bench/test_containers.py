"""What the image cases stand on: layouts, a line of their own, nodes that leave nothing behind."""

import gzip
import hashlib
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.containers.big_image import as_zstd, synthetic
from bench.containers.node import HOST, Node
from bootseer.prefetch.sources import open_source
from testbed.images.layout import Layout
from testbed.line import own_network
from testbed.paths import REPOSITORY
from testbed.processes import run_json
from testbed.waiting import wait_for

needs_root = pytest.mark.needs("root")


def make_layout(folder: Path) -> Layout:
    tree = folder / "tree"
    (tree / "app").mkdir(parents=True)
    (tree / "app/file").write_text("content")
    layout = Layout(folder / "layout")
    layout.create()
    layout.write_index({"v1": [layout.add_tree(tree)]})
    return layout


def test_a_layout_is_an_image_of_the_tree(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    [layer] = layout.layers("v1")
    with gzip.open(layout.blob(layer.digest)) as file:
        data = file.read()
    assert layer.diff_id == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert layer.tar_bytes == len(data)
    with open_source(f"oci:{layout.folder}:v1", tmp_path) as source:
        assert [one.digest for one in source.layers] == [layer.diff_id]


def test_other_compression_keeps_the_layers(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    layers = layout.layers("v1")
    copy = as_zstd(layout, layers, tmp_path / "zstd")
    assert [layer.diff_id for layer in copy.layers("v1")] == [layer.diff_id for layer in layers]


def test_a_synthetic_layer_has_the_size_asked_for(tmp_path: Path) -> None:
    layout = synthetic(tmp_path / "layout", 3 * 2**20)
    [layer] = layout.layers("v1")
    with gzip.open(layout.blob(layer.digest)) as file, tarfile.open(fileobj=file) as archive:
        assert [member.size for member in archive] == [2**20] * 3


@needs_root
@pytest.mark.needs("mount")
def test_a_line_counts_what_crosses_it_and_is_left_again() -> None:
    before = Path("/proc/thread-self/ns/net").readlink()
    with own_network() as line:
        assert Path("/proc/thread-self/ns/net").readlink() != before
        line.set_rate(1000)
        first_bytes = line.received_bytes()
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname()) as client:
                client.sendall(bytes(100_000))
            with server.accept()[0] as accepted:
                while accepted.recv(65536):
                    pass
        assert 100_000 < line.received_bytes() - first_bytes < 120_000
    assert Path("/proc/thread-self/ns/net").readlink() == before


@needs_root
@pytest.mark.needs("mount")
def test_a_node_ends_with_all_that_ran_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    with Node(folder) as node:
        assert HOST in node.run(["cat", "/etc/hosts"], timeout_s=60)
        ready = folder / "ready"
        script = f"mount -t tmpfs tmpfs {folder}/var-lib; touch {ready}; sleep 600"
        node.start(["sh", "-c", script], ready.exists)
        processes = node.run(["sh", "-c", "ls -d /proc/[0-9]*"], timeout_s=60).split()
        assert 2 < len(processes) < 10
        pids = node.pids()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@needs_root
@pytest.mark.needs("mount")
def test_a_node_counts_the_cpu_of_orphans_too(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    done = tmp_path / "done"
    script = f'({sys.executable} -c "$0"; touch {done}) >/dev/null 2>&1 &'
    with Node(tmp_path / "node") as node:
        node.run(["sh", "-c", script, burn], timeout_s=60)
        wait_for(done.exists)
        assert node.cpu_s() >= 0.3


@needs_root
@pytest.mark.needs("mount")
def test_a_command_that_fails_on_a_node_says_why(tmp_path: Path) -> None:
    with Node(tmp_path / "node") as node:
        with pytest.raises(RuntimeError, match="no such thing"):
            node.run(["sh", "-c", "echo no such thing >&2; exit 3"], timeout_s=60)
        with pytest.raises(RuntimeError, match="did not start: wrong flag"):
            node.start(["sh", "-c", "echo wrong flag"], lambda: False)


def test_a_command_is_timed_with_its_peak_memory() -> None:
    grow = "x = b'1' * 200_000_000; y = 3"
    cost = run_json(
        [sys.executable, "-m", "bench.containers.timed", sys.executable, "-c", grow], timeout_s=30
    )
    assert 200e6 < cost["peak_bytes"] < 300e6
    assert cost["cpu_s"] > 0


_ENTER_AND_DIE = """
import os, sys
from pathlib import Path
from bench.containers.node import Node
node = Node(Path(sys.argv[1])).__enter__()
print(*node.pids(), flush=True)
os.kill(os.getpid(), 9)
"""


@needs_root
@pytest.mark.needs("mount")
def test_a_node_ends_when_its_benchmark_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENTER_AND_DIE, str(tmp_path / "node")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
