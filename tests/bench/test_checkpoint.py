"""What the checkpoint cases stand on: arithmetic of placement, checked content, clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.checkpoint.content import BLOCK_BYTES, Check, Content
from bench.checkpoint.loading import shapes
from bench.checkpoint.measure import derive
from bench.checkpoint.placement import Moved, allowed_s, even_s, placement_figures
from bench.checkpoint.torch_environment import TorchEnvironment
from bench.model import Sample
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import run_json, tree_peak_bytes


def test_the_busiest_link_says_what_the_placement_allows() -> None:
    moved = Moved((300, 100, 0, 0), (0, 0, 50, 0))
    rates = [100.0, 100.0, 10.0, 100.0]
    assert allowed_s(moved, rates) == 5.0  # 50 bytes into the slow one
    assert allowed_s(moved, [100.0] * 4) == 3.0
    assert allowed_s(moved, [None] * 4) == 0.0
    assert even_s(moved, [100.0] * 4) == 1.0
    assert even_s(moved, [None] * 4) == 0.0


def test_moved_bytes_are_a_difference_of_counters() -> None:
    moved = Moved((30, 10), (5, 7)) - Moved((10, 10), (5, 0))
    assert moved == Moved((20, 0), (0, 7))
    figures = placement_figures(moved, [10.0, 10.0])
    assert figures["allowed_s"] == 2.0
    assert figures["network_bytes"] == 27
    assert figures["busiest_bytes"] == 20
    assert figures["datanode_1_bytes"] == 7


def test_shares_are_of_the_time_taken() -> None:
    taken = Sample(4.0, {"client": 1.0, "server": 2.0}, 2**30, {"allowed_s": 3.0, "even_s": 1.0})
    derived = derive(taken)
    assert (derived["allowed_share"], derived["even_share"]) == (0.75, 0.25)
    assert derived["cpu_s_per_gib"] == 3.0
    assert "allowed_share" not in derive(Sample(1.0, moved_bytes=0))


@pytest.mark.parametrize("step_bytes", [4096, BLOCK_BYTES, 3 * BLOCK_BYTES // 2])
def test_content_that_is_where_it_belongs_is_accepted(step_bytes: int) -> None:
    content = Content()
    data = b"".join(content.block(index) for index in range(4))
    check = Check()
    for offset in range(0, len(data), step_bytes):
        check.feed(offset, memoryview(data)[offset : offset + step_bytes])
    assert check.read_bytes == len(data)


def test_content_of_another_place_is_refused() -> None:
    content = Content()
    with pytest.raises(RuntimeError, match="bytes of block 7"):
        Check().feed(BLOCK_BYTES - 100, bytes(100) + content.block(7))


def client(action: str, **arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.checkpoint.client", action, json.dumps(arguments)]
    outcome: dict[str, float] = run_json(command, timeout_s=30)
    return outcome


def test_clients_write_and_read_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    size_bytes = 3 * BLOCK_BYTES
    assert (
        client("write_files", paths=paths, size_bytes=size_bytes)["moved_bytes"] == size_bytes * 2
    )
    assert client("read_files", paths=paths, size_bytes=size_bytes)["moved_bytes"] == size_bytes * 2
    one = client("read_file", path=paths[0], size_bytes=BLOCK_BYTES)
    assert one["moved_bytes"] == BLOCK_BYTES
    assert one["wall_s"] > 0
    assert one["peak_bytes"] > 2**20


def test_clients_read_striped_files_unmounted(tmp_path: Path) -> None:
    plain = tmp_path / "data"
    size_bytes = 2 * BLOCK_BYTES
    client("write_file", path=str(plain), size_bytes=size_bytes)
    url = f"file://{tmp_path}"
    for arguments in ({"url": url, "name": "data"}, {"url": f"{url}/data"}):
        action = "read_into" if "name" in arguments else "read_fsspec"
        assert client(action, size_bytes=size_bytes, **arguments)["moved_bytes"] == size_bytes


def test_a_model_has_whole_layers() -> None:
    found = shapes(2**27)
    assert len(found) == 18
    assert sum(2 * shape[0] * (*shape, 1)[1] for shape in found.values()) >= 2**27
    assert found["layers.1.mlp.up"] == (5632, 2048)


def test_an_environment_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = TorchEnvironment(tmp_path)
    environment.folder.mkdir()
    monkeypatch.setattr(TorchEnvironment, "python", "/bin/false")
    with pytest.raises(MissingError, match=r"some-loader.* cannot be installed"):
        environment.add("some-loader==1.0")


def test_peak_memory_of_a_process_is_read() -> None:
    assert 2**20 < tree_peak_bytes(os.getpid()) < 2**36
    done = subprocess.Popen([sys.executable, "-c", ""], cwd=REPOSITORY)
    done.wait()
    assert tree_peak_bytes(done.pid) == 0
