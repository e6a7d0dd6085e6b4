"""DataNodes are limited and counted: by the kernel in a network of their own, or by relays."""

import contextlib
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checkpoint import limits
from bench.checkpoint.cluster import CappedHdfs, data_folder
from bench.checkpoint.limits import Limiter, limiter
from bench.checkpoint.measure import run_client
from bench.checkpoint.placement import Moved
from bench.model import Workspace
from testbed.hdfs.classpath import classpath
from testbed.line import configure
from testbed.needs import MissingError

_NET = Path("/proc/thread-self/ns/net")


@pytest.fixture
def kernel() -> Iterator[Limiter]:
    if os.geteuid() != 0 or shutil.which("tc") is None:
        raise MissingError("a network of its own with classes needs root and iproute2's tc")
    before = _NET.readlink()
    with limiter() as chosen:
        if chosen.apart:
            raise MissingError(chosen.note)
        assert _NET.readlink() != before
        yield chosen
    assert _NET.readlink() == before


def exchange(address: tuple[str, int], server: socket.socket, sent: bytes, answer: bytes) -> None:
    """A client sends something to a server that answers."""

    def serve() -> None:
        connection = server.accept()[0]
        with connection:
            while connection.recv(65536):
                pass
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with socket.create_connection(address) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        received = 0
        while piece := client.recv(65536):
            received += len(piece)
    thread.join()
    assert received == len(answer)


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port


def moved_about(moved: Moved, read_bytes: tuple[int, ...], written_bytes: tuple[int, ...]) -> bool:
    """Whether these payloads were moved; headers and acknowledgements come on top."""
    return all(
        payload <= count <= 1.3 * payload + 3000
        for payload, count in zip(
            read_bytes + written_bytes, moved.read_bytes + moved.written_bytes, strict=True
        )
    )


@pytest.mark.needs("mount")
def test_the_kernel_counts_and_limits_each_datanode_and_direction(kernel: Limiter) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [port_of(server) for server in servers]
        links = stack.enter_context(kernel.links(ports[:2], 20e6))
        other_cluster = stack.enter_context(kernel.links(ports[2:], 30e6))
        for server, port, sent, answer in zip(
            servers, ports, (2_000_000, 0, 100_000), (500_000, 1_000_000, 0), strict=True
        ):
            exchange(("127.0.0.1", port), server, bytes(sent), bytes(answer))
        assert moved_about(links.moved(), (500_000, 1_000_000), (2_000_000, 0))
        assert moved_about(other_cluster.moved(), (0,), (100_000,))
        shown = configure(["tc", "-s", "class", "show", "dev", "lo"])
        assert shown.count("rate 160Mbit ceil 160Mbit burst 200000b") == 4
        assert shown.count("rate 240Mbit ceil 240Mbit") == 2
        # Packets had to wait.
        assert sum(int(count) for count in re.findall(r"overlimits (\d+)", shown)) > 0


@pytest.mark.needs("mount")
def test_a_rate_changes_without_losing_the_count(kernel: Limiter) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        kernel.links([port_of(server)], 3e6) as links,
    ):
        address = ("127.0.0.1", port_of(server))
        exchange(address, server, bytes(100_000), b"")
        # At 3 MB/s this would take more than a minute.
        links.set_rates([None])
        exchange(address, server, bytes(200_000_000), b"")
        links.set_rates([3e5])
        assert "rate 2400Kbit" in configure(["tc", "class", "show", "dev", "lo"])
        assert 200_100_000 <= links.moved().written_bytes[0] < 201_000_000


def test_where_the_kernel_cannot_relays_do(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refused() -> Iterator[None]:
        raise MissingError("a network of its own needs root")
        yield

    monkeypatch.setattr(limits, "own_network", refused)
    with limiter() as chosen, socket.create_server(("127.0.1.1", 0)) as server:
        assert chosen.apart
        assert "a network of its own needs root" in chosen.note
        with chosen.links([port_of(server)], 20e6) as links:
            exchange(("127.0.0.1", port_of(server)), server, bytes(70_000), bytes(30_000))
            links.set_rates([None])
            assert links.moved() == Moved((30_000,), (70_000,))


@pytest.fixture
def jars() -> None:
    """HDFS's, which cannot be downloaded any more once a test is in a network of its own."""
    try:
        classpath()
    except MissingError as error:
        if os.environ.get("BOOTSEER_REQUIRE_HDFS"):
            raise RuntimeError(f"there must be an HDFS: {error}") from error
        raise


@pytest.mark.hdfs
@pytest.mark.needs("mount")
def test_all_that_a_case_starts_is_in_the_network(
    jars: None, kernel: Limiter, tmp_path: Path
) -> None:
    size_bytes = 4 << 20
    with CappedHdfs(tmp_path / "hdfs", 2, 50e6, kernel) as cluster:
        cluster.empty_folder("/x")
        arguments = {"url": cluster.url, "size_bytes": size_bytes}
        run_client("native_write", {**arguments, "path": "/x/data"})
        written = cluster.moved()
        with cluster.uncapped():
            run_client("native_read", {**arguments, "paths": ["/x/data"]})
        read = cluster.moved() - written
        assert cluster.rates == [50e6, 50e6]
        assert cluster.files("/x") == ["/x/data"]
    # One block at replication 1 lies on one DataNode. What comes on top depends on how full the
    # packets of a busy machine are; twice the payload would be another copy.
    assert size_bytes < sum(written.written_bytes) < 1.5 * size_bytes
    assert sum(written.read_bytes) < 0.1 * size_bytes
    assert size_bytes < sum(read.read_bytes) < 1.5 * size_bytes
    assert sum(read.written_bytes) < 0.1 * size_bytes


def test_blocks_are_on_the_disk_where_memory_has_no_room(tmp_path: Path) -> None:
    with data_folder(Workspace(tmp_path, True, tmp_path), 2**50) as (folder, note):
        assert folder == tmp_path
        assert "one disk" in note
        assert "of memory are available" in note
