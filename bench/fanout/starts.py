"""Whole starts of several nodes: image, environment and checkpoint, from a store behind its line.

The nodes are those of `lab`: network namespaces whose lines are limited. The store, HDFS or Ceph's
S3 gateway, runs in a namespace of its own. Each node has folders of its own, in memory. Needs root.
"""

import contextlib
import io
import os
import secrets
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.fanout.lab import Scenario, Site
from bench.machine.tmpfs import tmpfs
from bootseer.checkpoints import copy_in, open_checkpoints
from bootseer.fanout.trees import STORE
from testbed.hdfs.cluster import MiniHdfs
from testbed.images.building import LayoutBuilder
from testbed.images.rootfs import python_root
from testbed.needs import require
from testbed.network import entered
from testbed.node import Node, node_at
from testbed.paths import REPOSITORY
from testbed.servers.s3 import make_bucket, rgw_server

MEGABYTE = 1 << 20
_NODE_BYTES = 256 << 20
"""Memory for the folders of one node: three times its reads, and the image's index."""
_LIMIT_S = 600.0
_UNIT_BYTES = 256 << 10
"""Stripe unit of the checkpoint: striped, since only stripe units travel by fan-out, and so small
that a line of a few megabits carries one in less than a second."""
# The image's own files are read as far as the imports need them, and the rest in these sizes.
_PROGRAM = """
import decimal, email.message, http.client, json, sys, time
for path in ("/usr/share/trainer.bin", "/job/env/data", "/mnt/checkpoint/step-1.bin"):
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
sys.path.insert(0, "/source")
import bootseer
print(time.monotonic(), flush=True)
input()
bootseer.ready()
"""


class Starts:
    """Nodes and a store, in which the start of a job is recorded."""

    def __init__(
        self, site: Site, count: int, folder: Path, megabytes: tuple[int, int, int]
    ) -> None:
        """Build the job's image in `folder`; `megabytes` of the image, environment and checkpoint
        that every node reads."""
        self.site, self.count, self._folder = site, count, folder
        self._image_mb, self._environment_mb, self._checkpoint_mb = megabytes
        self._number = 0
        root = python_root(folder / "root")
        share = root / "usr/share"
        share.mkdir(parents=True, exist_ok=True)
        (share / "trainer.bin").write_bytes(os.urandom(self._image_mb * MEGABYTE))
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(root, ".")
        path = ["PATH=/usr/local/bin:/usr/bin:/bin"]
        layout = LayoutBuilder(folder / "layout")
        layout.add_image([buffer.getvalue()], tag="train", run={"Env": path})

    def record(self, url: str, variables: Mapping[str, str]) -> None:
        """Put the checkpoint into the store, and the image and environment by a first start."""
        checkpoint = self._folder / "step-1.bin"
        checkpoint.write_bytes(os.urandom(self._checkpoint_mb * MEGABYTE))
        with (
            entered(self.site.network(STORE)),
            _environment(variables),
            open_checkpoints(f"{url}/checkpoints", stripe_unit_bytes=_UNIT_BYTES) as storage,
        ):
            copy_in(storage, checkpoint, checkpoint.name)
        checkpoint.unlink()
        with self._node("recorder", url, variables) as node:
            process = self._begin(node, STORE, url)
            _, said = process.communicate("\n", timeout=_LIMIT_S)
            if process.returncode:
                raise RuntimeError(f"the start that is recorded has failed: {said[-500:]}")
            node.wait_clean()

    def take(
        self, url: str, variables: Mapping[str, str], count: int, *, fanout: bool = True
    ) -> float:
        """Start `count` nodes that have nothing; return the seconds until the last one is done."""
        self._number += 1
        hosts = f"10.214.0.[2-{count + 1}]"
        common = {
            **variables,
            "BOOTSEER_FANOUT": "auto" if fanout else "off",
            "BOOTSEER_FANOUT_HOSTS": hosts,
            "BOOTSEER_FANOUT_KEY": secrets.token_hex(32),
            "BOOTSEER_SUBMISSION": str(self._number),
        }
        with contextlib.ExitStack() as stack:
            nodes = [
                stack.enter_context(
                    self._node(
                        f"{self._number}-{number}",
                        url,
                        {**common, "BOOTSEER_NODE": self.site.address(number)},
                    )
                )
                for number in range(count)
            ]
            began_s = time.monotonic()
            jobs = [self._begin(node, number, url) for number, node in enumerate(nodes)]
            try:
                done_s = []
                for job in jobs:
                    assert job.stdout is not None
                    line = job.stdout.readline()
                    if not line:
                        raise RuntimeError(f"a node has failed: {job.communicate()[1][-500:]}")
                    done_s.append(float(line))
                for job in jobs:
                    job.communicate("\n", timeout=_LIMIT_S)
            finally:
                for job in jobs:
                    job.kill()
            return max(done_s) - began_s

    @contextlib.contextmanager
    def _node(self, name: str, url: str, variables: Mapping[str, str]) -> Iterator[Node]:
        own = {"BOOTSEER_FILL": "0", "BOOTSEER_DEADLINE": "120", **variables}
        with node_at(self._folder / name, f"{url}/store", variables=own) as node:
            yield node
        subprocess.run(["rm", "-rf", self._folder / name], check=True, timeout=60)

    def _begin(self, node: Node, host: int, url: str) -> "subprocess.Popen[str]":
        data = self._environment_mb * MEGABYTE
        setup = (
            "python3 -c \"import os; os.makedirs('/job/env'); "
            f"open('/job/env/data', 'wb').write(os.urandom({data}))\""
        )
        return node.start(
            "run",
            *("--image", f"oci:{self._folder / 'layout'}:train"),
            *("--setup", setup, "--target", "/job/env"),
            *("--checkpoint", f"{url}/checkpoints:/mnt/checkpoint"),
            *("--bind", f"{REPOSITORY}:/source:ro"),
            *("--", "python3", "-c", _PROGRAM),
            prefix=["nsenter", f"--net={self.site.network(host)}", "--"],
            stdin=subprocess.PIPE,
        )


@contextlib.contextmanager
def start_site(
    directory: Path, count: int, mbit: float, megabytes: tuple[int, int, int]
) -> Iterator[Starts]:
    """Yield nodes with lines of `mbit` each, and the files of a job. Raises: MissingError."""
    require("root", programs=("ip", "tc", "nsenter"))
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(tmpfs(directory, count * _NODE_BYTES))
        site = Site(Scenario(count, mbit=mbit))
        stack.callback(site.remove)
        site.make()
        yield Starts(site, count, memory, megabytes)


@contextlib.contextmanager
def hdfs_store(starts: Starts, directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the URL of a folder on a real HDFS in the store's namespace. Raises: MissingError."""
    address = starts.site.address(STORE)
    launcher = ["nsenter", f"--net={starts.site.network(STORE)}", "--"]
    cluster = MiniHdfs(
        directory / "hdfs", datanode_count=1, is_measured=True, address=address, launcher=launcher
    )
    with cluster:
        yield f"{cluster.url}/bench", {"HADOOP_USER_NAME": "hdfs"}


@contextlib.contextmanager
def s3_store(starts: Starts, directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the URL of a folder in a bucket of a Ceph gateway there. Raises: MissingError."""
    with contextlib.ExitStack() as stack:
        with entered(starts.site.network(STORE)):
            found = stack.enter_context(rgw_server(directory / "rgw", "0.0.0.0"))
            endpoint = found["AWS_ENDPOINT_URL"].replace("0.0.0.0", starts.site.address(STORE))
            variables = {**found, "AWS_ENDPOINT_URL": endpoint}
            make_bucket(variables, "bench")
        yield "s3://bench/starts", variables


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
