"""The process of a node that takes part in a fan-out, as its clients and the start see it."""

import contextlib
import os
import socket
import subprocess
import threading
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


def test_a_client_that_reads_late_learns_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More news than a socket holds wait for the client when the start is ready."""
    url, data, count = (tmp_path / "store").as_uri(), bytes(range(250)) * 4, 1000
    with open_store(url) as store:
        store.publish("parts", data)
    chunks = tuple(Chunk("parts", n, 1, content_digest(data[n : n + 1])) for n in range(count))
    known = {
        "HOME": str(tmp_path),
        "BOOTSEER_CONFIG": "/dev/null",
        "BOOTSEER_RUN_DIR": str(tmp_path / "run"),
        "BOOTSEER_STORE": url,
        "BOOTSEER_NODE": "n1",
        "BOOTSEER_FANOUT_HOSTS": "n[1-4]",
        "BOOTSEER_SUBMISSION": "7",
    }
    settings = load_config({}, known).settings
    shared = load_config({}, {**known, "BOOTSEER_STORE": "hdfs://n/s"}).settings
    plan = find_plan(shared, ["true"], "5e" * 32)
    assert plan is not None
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        job = subprocess.Popen(["sleep", "600"])
        stack.callback(job.wait)
        stack.callback(job.kill)
        plan = replace(plan, settings=settings, user=ProcessId.of(job.pid))
        ours = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ours.bind(fanout_address(settings))
        ours.listen()
        peers = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host = threading.Thread(
            target=hosting.take_part, args=(plan, ours, peers, lambda at_ns, figures: over.set())
        )
        host.start()
        stack.callback(host.join)
        stack.callback(job.kill)
        client = stack.enter_context(connected(fanout_address(settings), 5))
        client.sendall(SharedObject(url, chunks).encode())
        _, files, _, _ = socket.recv_fds(client, 1, 1)
        with os.fdopen(files[0], "rb") as file:
            wait_for(lambda: file.seek(0) == 0 and file.read() == data, "the object")
        monkeypatch.setenv("BOOTSEER_READY_SOCKETS", "")
        add_ready_names(os.environ, plan.ready_name)
        client.settimeout(20)
        send_ready()
        assert over.wait(20)
        while client.recv(1 << 20):
            pass
