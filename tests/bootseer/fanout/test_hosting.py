"""The process of a node that takes part in a fan-out, as its clients and the start see it."""

import contextlib
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.base.content_digest import content_digest
from bootseer.fanout import hosting
from bootseer.fanout.local import SharedObject, connected, fanout_address
from bootseer.launch.fanout import find_plan
from bootseer.linux.processes import ProcessId
from bootseer.served.ready_socket import add_ready_names, send_ready
from bootseer.settings.config import load_config
from bootseer.store import open_store
from bootseer.transfer.ranges import Chunk
from testbed.waiting import wait_for


class Host:
    """Process of a node, run in a thread."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, node: str) -> None:
        self.url = (folder / "store").as_uri()
        known = {
            "HOME": str(folder),
            "BOOTSEER_CONFIG": "/dev/null",
            "BOOTSEER_CACHE_DIR": str(folder / "cache"),
            "BOOTSEER_RUN_DIR": str(folder / f"run-{node}"),
            "BOOTSEER_STORE": self.url,
            "BOOTSEER_NODE": node,
            "BOOTSEER_FANOUT_HOSTS": "n[1-4]",
            "BOOTSEER_SUBMISSION": "7",
        }
        settings = load_config({}, known).settings
        self.address = fanout_address(settings)
        shared = load_config({}, {**known, "BOOTSEER_STORE": "hdfs://n/s"}).settings
        plan = find_plan(shared, ["true"], "5e" * 32)
        assert plan is not None
        job = subprocess.Popen(["sleep", "600"])
        stack.callback(job.wait)
        stack.callback(job.kill)
        self.plan = replace(plan, settings=settings, user=ProcessId.of(job.pid))
        self.has_left = threading.Event()
        """Set when the process brings no more objects."""
        ours = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ours.bind(self.address)
        ours.listen()
        peers = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(
            target=hosting.take_part, args=(self.plan, ours, peers, self._note)
        )
        thread.start()
        stack.callback(thread.join)
        stack.callback(job.kill)
        self._stack = stack

    def _note(self, at_ns: int, figures: object) -> None:
        self.has_left.set()

    def ask(self, chunks: tuple[Chunk, ...]) -> tuple[socket.socket, int]:
        """Ask for an object; return the connection and the object's file."""
        client = self._stack.enter_context(connected(self.address, 5))
        client.sendall(SharedObject(self.url, chunks).encode())
        _, files, _, _ = socket.recv_fds(client, 1, 1)
        assert files, "the process does not take the object"
        self._stack.callback(os.close, files[0])
        return client, files[0]


def chunks_of(data: bytes, first: int = 0) -> tuple[Chunk, ...]:
    """Return chunks of one byte each."""
    numbers = range(first, len(data))
    return tuple(Chunk("parts", n, 1, content_digest(data[n : n + 1])) for n in numbers)


def test_a_client_that_reads_late_learns_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More news than a socket holds wait for the client when the start is ready."""
    data = bytes(range(250)) * 4
    with contextlib.ExitStack() as stack:
        host = Host(stack, tmp_path, "n1")
        with open_store(host.url) as store:
            store.publish("parts", data)
        client, file = host.ask(chunks_of(data))
        wait_for(lambda: os.pread(file, len(data), 0) == data, "the object")
        monkeypatch.setenv("BOOTSEER_READY_SOCKETS", "")
        add_ready_names(os.environ, host.plan.ready_name)
        send_ready()
        assert host.has_left.wait(20)
        client.settimeout(20)
        while client.recv(1 << 20):
            pass


def test_two_nodes_of_a_job_share_a_cache(tmp_path: Path) -> None:
    """Processes of two containers may have the same process id, and the same folder."""
    data, count = bytes(range(60)), 30
    with contextlib.ExitStack() as stack:
        hosts = [Host(stack, tmp_path, node) for node in ("n1", "n2")]
        with open_store(hosts[0].url) as store:
            store.publish("parts", data)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for first in range(count):
            chunks = chunks_of(data, first)
            assert len(list(pool.map(partial(Host.ask, chunks=chunks), hosts))) == 2
