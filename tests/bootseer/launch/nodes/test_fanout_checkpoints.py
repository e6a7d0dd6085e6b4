"""Whole starts whose nodes read one checkpoint: its stripe units leave the storage about once."""

import contextlib
import hashlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bootseer.checkpoints import copy_in, open_checkpoints
from bootseer.demo.limited import read_account
from bootseer.fanout import protocol
from bootseer.fanout.keys import key_of
from bootseer.fanout.objects import ChunkList, chunk_list
from bootseer.fanout.trees import Trees
from bootseer.launch.fanout import find_plan
from bootseer.settings.config import load_config
from testbed.node import Node, attribute
from testbed.paths import REPOSITORY
from testbed.servers.registry import free_port
from testbed.waiting import wait_for
from tests.bootseer.fanout.nodes import Act, member, offer_of
from tests.bootseer.launch.nodes.fanout_nodes import COUNT, FanoutNodes, fanout_figures

pytestmark = pytest.mark.needs("mount", "fuse")

MIB = 2**20
DATA = random.Random(7).randbytes(12 * MIB + 12_345)
HOSTILE = Trees(COUNT).root(0)
# The checkpoint is read ahead before the job reads it, as in starts that import for seconds.
READER = """
import glob, hashlib, sys
sys.path.insert(0, sys.argv[3])
from testbed.waiting import wait_for
wait_for(
    lambda: sum(open(one).read().count("checkpoint ahead") for one in glob.glob(sys.argv[2]))
    > int(sys.argv[4]),
    "the checkpoint to be read ahead",
)
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())
import bootseer
bootseer.ready()
"""


class Site(FanoutNodes):
    """Nodes that mount one folder of checkpoints, which counts its bytes as well."""

    def __init__(self, base: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(base, stack)
        self.folder = base / "checkpoints"
        self.counted = base / "counted"
        self.url = f"limit+{self.folder.as_uri()}?tally={self.counted}"

    def save(self, data: bytes) -> ChunkList:
        """Save a step, and return the list of its units."""
        local = self.base / "model.pt"
        local.write_bytes(data)
        with open_checkpoints(self.folder.as_uri(), stripe_unit_bytes=MIB) as storage:
            copy_in(storage, local, "step-1/model.pt")
            chunks = storage.tree.stored.view("step-1/model.pt").digested_units(len(data))
        return chunk_list([one.length for one in chunks], [one.digest or b"" for one in chunks])

    def read(self, nodes: Sequence[Node], data: bytes, attempt: int = 0) -> int:
        """Start these nodes; return how many bytes left the storage. Mounts linger."""
        before = read_account(self.counted).bytes_read
        variables = {"BOOTSEER_ATTEMPT": str(attempt), "BOOTSEER_LINGER": "60"}
        if attempt:
            # The fan-out of the last start may still be about to end.
            variables["BOOTSEER_FANOUT_PORT"] = str(free_port())
        started = [self._start(node, variables) for node in nodes]
        for process in started:
            said, complaints = process.communicate(timeout=60)
            assert process.returncode == 0, complaints
            assert said.strip() == hashlib.sha256(data).hexdigest()
        return read_account(self.counted).bytes_read - before

    def _start(self, node: Node, variables: dict[str, str]) -> "subprocess.Popen[str]":
        mounted = node.base / "checkpoints"
        words = ("--checkpoint", f"{self.url}:{mounted}", "--", sys.executable, "-c", READER)
        model, logs = mounted / "step-1/model.pt", node.base / "run/logs/*"
        attempt = variables["BOOTSEER_ATTEMPT"]
        return node.start("run", *words, model, logs, REPOSITORY, attempt, variables=variables)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(tmp_path, stack)


def test_a_checkpoint_that_all_nodes_read_leaves_the_storage_once(site: Site) -> None:
    # The second start takes over the mounts of the first; meanwhile the file was replaced.
    for attempt, data in enumerate((DATA, DATA[::-1])):
        site.save(data)
        assert site.read(site.nodes, data, attempt) < 1.2 * len(data)
    wait_for(lambda: all("fan-out" in one.spans() for one in site.nodes), "the fan-outs' end")
    for node in site.nodes:
        # The list of chunks counts as well.
        assert int(fanout_figures(node)["bootseer.bytes"]) >= len(DATA)
        assert attribute(node.spans()["checkpoint"], "bootseer.how") == "live"
        assert not list((node.base / "cache/fanout").iterdir())


@pytest.mark.parametrize("feeds", [True, False])
def test_a_node_that_is_lost_or_lies_changes_no_byte(
    site: Site, monkeypatch: pytest.MonkeyPatch, feeds: bool
) -> None:
    chunks = site.save(DATA)
    others = [node for number, node in enumerate(site.nodes) if number != HOSTILE]
    with contextlib.ExitStack() as stack:
        if feeds:
            address, key = _address_and_key(site.nodes[HOSTILE], monkeypatch)
            requests = stack.enter_context(member(address, HOSTILE, _lie(chunks), key=key))
        assert site.read(others, DATA) < 2.2 * len(DATA)
        if feeds:
            assert any(one.operation == protocol.FEED for one in requests)


def _address_and_key(node: Node, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, int], bytes]:
    """Return the address of a node's fan-out, and the start's key."""
    # Only here: whatever this process starts must not look like the node's, which are killed.
    with monkeypatch.context() as patch:
        for name, value in node.environment.items():
            patch.setenv(name, value)
        secret = node.environment["BOOTSEER_FANOUT_KEY"]
        plan = find_plan(load_config({}).settings, ["true"], secret)
    assert plan is not None
    own = plan.membership.members[plan.membership.own]
    key = key_of(bytes.fromhex(plan.secret), plan.membership.digest, *plan.start)
    return (own.host, own.port), key


def _lie(chunks: ChunkList) -> Act:
    """Return an act that sends the right list and zeros for every chunk."""

    def act(sock: socket.socket, request: protocol.Request) -> None:
        offer = offer_of(HOSTILE)
        if request.operation == protocol.ASK:
            sock.sendall(protocol.encode_offer(offer))
            return
        data = chunks.encode()
        sock.sendall(protocol.encode_frame(protocol.LIST, len(data), offer) + data)
        for index in range(request.count * 2 + request.tree, len(chunks.lengths), 2):
            length = chunks.lengths[index]
            sock.sendall(protocol.encode_frame(protocol.CHUNK, length, offer) + bytes(length))
        raise ConnectionResetError

    return act
