"""Real S3 servers in processes of their own on loopback: moto's, and Ceph's gateway.

moto starts in a second and accepts every request that boto3 makes. Ceph's gateway is common on
clusters: it refuses every `If-Match`, ignores `If-None-Match` when a multipart upload is completed,
and answers some failures without a body. Its monitor and its one OSD keep everything in memory.
"""

import contextlib
import importlib
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from testbed.hdfs.cluster import unassigned_ports
from testbed.needs import require
from testbed.processes import killed_with_parent
from testbed.waiting import is_listening, wait_started

_START_DEADLINE_S = 240
_ADDRESS = re.compile(rb"Running on (http://127\.0\.0\.1:\d+)")
_TOOL_S = 120
_KEY, _SECRET = "AKTEST", "SKTEST"
# moto looks whether an object exists, and then stores it: without a lock, two exclusive creates at
# once may both succeed.
_MOTO = """
import threading
from moto.s3.responses import S3Response
from moto.server import main
lock, put_object = threading.RLock(), S3Response.put_object
def put_object_alone(self):
    with lock:
        return put_object(self)
S3Response.put_object = put_object_alone
main()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yield the environment in which `s3://bucket/...` is a bucket of a moto server."""
    require(modules=["moto", "boto3", "obstore"])
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    found_address: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if match := _ADDRESS.search(line):
                found_address.put(match[1].decode())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield _environment(found_address.get(timeout=_START_DEADLINE_S), "test", "test")
    finally:
        process.kill()
        process.wait(60)
        listener.join(60)
        assert process.stderr is not None
        process.stderr.close()


def _environment(endpoint: str, key: str, secret: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def client_of(environment: Mapping[str, str]) -> Any:
    """Return a boto3 client for a server."""
    return importlib.import_module("boto3").client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )


def make_bucket(environment: Mapping[str, str], name: str) -> None:
    """Make a bucket unless it exists."""
    client = client_of(environment)
    there = (client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists)
    with contextlib.suppress(*there):
        client.create_bucket(Bucket=name)


@contextlib.contextmanager
def rgw_server(base: Path, host: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """Yield the environment in which `s3://bucket/...` is a bucket of a Ceph gateway.

    Its files are in `base`; it listens on `host`, 127.0.0.1 or 0.0.0.0. Raises: MissingError.
    """
    require("root", modules=["boto3", "obstore"], programs=["ceph-mon", "ceph-osd", "radosgw"])
    ports = unassigned_ports(3)
    configuration = base / "ceph.conf"
    for name in ("mon", "osd", "run"):
        (base / name).mkdir(parents=True)
    configuration.write_text(
        _CONFIGURATION.format(base=base, mon=ports[0], v1=ports[1], rgw=f"{host}:{ports[2]}")
    )
    log = base / "log"
    started: list[subprocess.Popen[bytes]] = []

    def run(*words: str | Path) -> str:
        command = [words[0], "-c", configuration, *words[1:]]
        done = subprocess.run(command, capture_output=True, timeout=_TOOL_S, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def start(*words: str | Path) -> "subprocess.Popen[bytes]":
        command = [*map(str, words), "-f", "-c", str(configuration)]
        with log.open("ab") as sink:
            process = subprocess.Popen(killed_with_parent(command), stdout=sink, stderr=sink)
        started.append(process)
        return process

    try:
        address = f"[v2:127.0.0.1:{ports[0]},v1:127.0.0.1:{ports[1]}]"
        run("monmaptool", "--create", "--fsid", _FSID, "--addv", "a", address, base / "monmap")
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", base / "monmap")
        start("ceph-mon", "-i", "a")
        run("ceph", "--connect-timeout", "60", "osd", "new", _OSD, "0")
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", _OSD)
        start("ceph-osd", "-i", "0")
        gateway = start("radosgw", "-n", "client.rgw")
        names = ("--uid=test", "--display-name=test")
        keys = (f"--access-key={_KEY}", f"--secret-key={_SECRET}")
        run("radosgw-admin", "user", "create", *names, *keys)
        wait_started(gateway, lambda: is_listening(ports[2]), lambda: log.read_text()[-2000:])
        yield _environment(f"http://{host}:{ports[2]}", _KEY, _SECRET)
    finally:
        for process in reversed(started):
            process.kill()
            process.wait(60)


_FSID = "11111111-2222-3333-4444-555555555555"
_OSD = "22222222-3333-4444-5555-666666666666"
# Nothing is replicated, encrypted or kept, and deleted objects are freed at once. Nagle's algorithm
# would add 40 ms to each answer. A monitor would end itself where the disk is 95 % full.
_CONFIGURATION = """[global]
fsid = 11111111-2222-3333-4444-555555555555
mon host = v2:127.0.0.1:{mon},v1:127.0.0.1:{v1}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
osd objectstore = memstore
memstore device bytes = 8589934592
ms bind ipv4 = true
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
run dir = {base}/run
admin socket = {base}/run/$name.asok
pid file = {base}/run/$name.pid
log file = {base}/$name.log
mon pg warn on no replicas = false
mon data avail crit = 0
osd pool default pg num = 8
mon max pg per osd = 1000
[mon.a]
mon data = {base}/mon
[osd.0]
osd data = {base}/osd
[client.rgw]
rgw frontends = beast endpoint={rgw} tcp_nodelay=1
rgw thread pool size = 64
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 60
"""
