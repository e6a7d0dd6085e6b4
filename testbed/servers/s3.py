"""A real S3 server for tests: moto's, over HTTP, in a process of its own, on loopback."""

import contextlib
import importlib
import importlib.util
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

from testbed.needs import MissingError

_START_DEADLINE_S = 240
_ADDRESS = re.compile(rb"Running on (http://127\.0\.0\.1:\d+)")


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment under which `s3://bucket/...` is a bucket of this server."""
    for module in ("moto.server", "s3fs"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise MissingError(f"{module.partition('.')[0]} is not installed: no S3 here")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
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
        address = found_address.get(timeout=_START_DEADLINE_S)
        environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield environment
    finally:
        # fsspec would give clients of this server to those who ask for the next one.
        importlib.import_module("s3fs").S3FileSystem.clear_instance_cache()
        process.kill()
        process.wait(60)
        listener.join(60)
        assert process.stderr is not None
        process.stderr.close()
