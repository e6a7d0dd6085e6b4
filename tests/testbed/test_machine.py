"""CPU time of processes, network namespaces, and image layouts of the test bed."""

import gzip
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.prefetch.sources import open_source
from testbed.images.layout import OciLayout
from testbed.network import own_network
from testbed.processes import process_tree, run_json, tree_cpu_s, tree_peak_bytes

SPIN = """
import subprocess, sys, time
def spin(seconds):
    while time.process_time() < seconds:
        pass
if len(sys.argv) == 1:
    # One child that has ended, one that lives, and itself.
    subprocess.run([sys.executable, __file__, "ends"], check=True)
    child = subprocess.Popen([sys.executable, __file__, "lives"], stdout=subprocess.PIPE)
    child.stdout.readline()
spin(0.3)
if sys.argv[1:] != ["ends"]:
    print("done", flush=True)
    sys.stdin.read()
"""


def test_cpu_of_a_process_and_its_children_is_counted(tmp_path: Path) -> None:
    program = tmp_path / "spin.py"
    program.write_text(SPIN)
    process = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline() != b"done\n":
            assert process.poll() is None
        assert len(process_tree(process.pid)) == 2
        assert tree_cpu_s(process.pid) >= 0.8
    finally:
        process.communicate(timeout=60)
    assert tree_cpu_s(process.pid) == 0


def test_a_command_that_fails_or_hangs_ends_with_a_reason() -> None:
    printing = [sys.executable, "-c", "import json, sys; json.dump({'a': 1}, sys.stdout)"]
    assert run_json(printing, timeout_s=30) == {"a": 1}
    with pytest.raises(RuntimeError, match="no such thing"):
        run_json([sys.executable, "-c", "raise SystemExit('no such thing')"], timeout_s=30)
    with pytest.raises(RuntimeError, match="did not end"):
        run_json(["sleep", "60"], timeout_s=0.1)


def test_peak_memory_of_a_process_is_read() -> None:
    assert 2**20 < tree_peak_bytes(os.getpid()) < 2**36
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert tree_peak_bytes(done.pid) == 0


@pytest.mark.needs("root", "mount")
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


def make_layout(folder: Path) -> OciLayout:
    tree = folder / "tree"
    (tree / "app").mkdir(parents=True)
    (tree / "app/file").write_text("content")
    layout = OciLayout(folder / "layout")
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
