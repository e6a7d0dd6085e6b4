"""Targets that read messages of registries, HDFS and the kernel, and their clients' files."""

import json
import socket
import struct
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from bootseer.base.varints import delimited
from bootseer.errors import BootseerError, CorruptError, InvalidInputError, UnknownFormatError
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.dispatch import Dispatcher, Reply
from bootseer.fuse.kernel.operations import Caller, Operations
from bootseer.kubernetes.webhook.plan import Cluster, answer
from bootseer.prefetch.sources import documents
from bootseer.registry.documents import parse_index, parse_object
from bootseer.registry.hosts import parse_hosts
from bootseer.registry.tokens import parse_challenges
from bootseer.store.hdfs.messages import MESSAGES
from bootseer.store.hdfs.namenode import (
    UNANSWERED,
    CallWait,
    NameNodes,
    Replica,
    StoredBlock,
    response_in,
)
from bootseer.store.hdfs.reading import DataNodeConnection, DataNodes, packet_headers
from bootseer.store.paths import split_path
from bootseer.store.web import names_in
from bootseer.transfer.attempt import Attempt
from tests.bootseer.kubernetes.webhook.pod_objects import pod_object, review_of
from tests.bootseer.store.hdfs import protobuf as pb
from tests.fuzz import samples
from tests.fuzz.harness import Target
from tests.fuzz.mutations import mutated, mutated_json_bytes

# ---- HDFS ---------------------------------------------------------------------------------------


def _delimited(*messages: bytes) -> bytes:
    return b"".join(map(delimited, messages))


def _answers() -> list[bytes]:
    head = pb.number(1, 0) + pb.number(2, 0)
    block = pb.text(1, "pool") + pb.number(2, 7) + pb.number(3, 1) + pb.number(4, 1000)
    identity = (
        pb.text(1, "127.0.0.1") + pb.text(2, "host") + pb.text(3, "uuid") + pb.number(4, 9866)
    )
    info = pb.blob(1, identity) + pb.text(8, "/rack")
    located = (
        pb.blob(1, block) + pb.number(2, 0) + pb.blob(3, info) * 2 + pb.number(4, 0)
        + pb.blob(5, pb.blob(1, b"token")) + pb.number(7, 1) + pb.text(8, "storage")
    )  # fmt: skip
    blocks = pb.number(1, 1000) + pb.blob(2, located) * 2 + pb.number(3, 0) + pb.blob(4, located)
    status = pb.number(11, 2**27) + pb.number(1, 1)
    usage = pb.number(3, 5) + pb.number(4, 10)
    failed = (
        pb.number(2, 1) + pb.text(4, "org.apache.X") + pb.text(5, "is not the lease owner (=a: /")
    )
    return [
        _delimited(head, pb.blob(1, blocks)),
        _delimited(head, pb.blob(1, located)),
        _delimited(head, pb.blob(1, status)),
        _delimited(head, pb.blob(1, usage)),
        _delimited(head, pb.number(1, 1000) + pb.number(3, 500)),
        _delimited(failed),
    ]


class _Answered(NameNodes):
    """NameNode whose answers a test gives."""

    data = b""

    def answer(self, method: str, request: bytes, wait: CallWait) -> bytes:
        return response_in(self.data)


_BLOCK = MESSAGES["ExtendedBlock"](poolId="pool", blockId=7, generationStamp=1, numBytes=4096)


def _read_answer(data: bytes) -> None:
    node = _Answered("hdfs://nobody", 0.01)
    node.data = data
    for ask in (
        lambda: node.stored_blocks("/f"),
        lambda: node.writing_servers("/f"),
        lambda: node.add_block("/f", "holder", ()).block_of(1),
        lambda: node.plain_block_bytes("/f"),
        lambda: node.call("getFsStats"),
        lambda: node.call("getServerDefaults"),
        lambda: node.call("getQuotaUsage", path="/"),
        lambda: node.complete("/f", "holder", _BLOCK),
    ):
        try:
            ask()
        except UNANSWERED:
            pass


_LENGTH = 3000


@st.composite
def _transfers(draw: st.DrawFn) -> bytes:
    """Draw a DataNode's answer to a read of `_LENGTH` bytes: its response, then packets."""
    checksum = pb.number(1, 0) + pb.number(2, 512)
    body = pb.number(1, 0) + pb.blob(4, pb.blob(1, checksum) + pb.number(2, 0))
    response = draw(mutated((_delimited(body),))) if draw(st.booleans()) else _delimited(body)
    size = draw(st.sampled_from((512, 1024, 4096, 1, 7)))
    heads = packet_headers(0, 3072, size)
    count = len(heads) // 31
    packets = b"".join(
        heads[31 * n : 31 * n + 31] + b"x" * min(size, max(3072 - size * n, 0))
        for n in range(count)
    )
    return response + draw(mutated((packets,)))


def _read_transfer(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(1)
        theirs.sendall(data[: 2**16])
        theirs.shutdown(socket.SHUT_WR)
        nodes = DataNodes(5)
        connection = DataNodeConnection(("127.0.0.1", 1), ours)
        nodes.take = lambda address: connection  # type: ignore[method-assign]
        block = StoredBlock(0, _BLOCK, b"token", (Replica(("127.0.0.1", 1)),))
        buffer = bytearray(_LENGTH)
        assert nodes.read_into([block], 0, memoryview(buffer), Attempt()) in (0, _LENGTH)
        nodes.close()


# ---- registries ---------------------------------------------------------------------------------

_DESCRIPTOR: dict[str, Any] = {
    "digest": samples.DIGEST, "size": 5, "mediaType": "application/vnd.oci.image.layer.v1.tar",
    "annotations": {"org.opencontainers.image.ref.name": "v1"},
    "platform": {"architecture": "amd64", "os": "linux"},
}  # fmt: skip
_DOCUMENTS: list[Any] = [
    {"schemaVersion": 2, "manifests": [_DESCRIPTOR, _DESCRIPTOR]},
    {"schemaVersion": 2, "config": _DESCRIPTOR, "layers": [_DESCRIPTOR]},
    {"architecture": "amd64", "config": {"Env": ["A=1"], "Cmd": ["x"], "User": "9"},
     "rootfs": {"type": "layers", "diff_ids": [samples.DIGEST]}},
    [{"Config": "c.json", "RepoTags": ["a:b"], "Layers": ["l/layer.tar"]}],
]  # fmt: skip


def _read_document(data: bytes) -> None:
    for read in (
        parse_index,
        documents.parse_manifest,
        documents.parse_config,
        documents.parse_archive_manifest,
        parse_object,
    ):
        try:
            read(data, "a document")
        except (CorruptError, UnknownFormatError, InvalidInputError):
            pass


_HOSTS = b"""
server = "https://registry.example"
[host."https://mirror.example:5000/v2/x"]
  capabilities = ["pull", "resolve"]
  ca = ["a.crt", "b.crt"]
  client = [["a.cert", "a.key"], "b.pem"]
  skip_verify = true
  override_path = true
  [host."https://mirror.example:5000/v2/x".header]
    x-a = ["1", "2"]
"""
_CHALLENGE = b'Bearer realm="https://a/token",service="x",scope="a\\"b", Basic realm=y, error=1'


_PAGE = b"""<a href="../">up</a><a href='a%20b'>a</a><A class=x HREF=c/>c</A><a href="d&amp;e#f">"""


# ---- the kernel ----------------------------------------------------------------------------------

_OPCODES = sorted(
    value
    for name, value in vars(wire).items()
    if name.isupper() and isinstance(value, int) and 0 < value < 60
)


# One dispatcher for all inputs, since it reports each kind of failure once.
_DISPATCHER = Dispatcher(Operations(), None)


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    """Draw the number of an operation, a node, and a request's body."""
    opcode = draw(st.sampled_from(sorted(set(_OPCODES))))
    body = draw(
        mutated((b"name\0", b"name\0other\0", bytes(96), b"\xff" * 128, bytes(40) + b"a\0b\0"))
    )
    return struct.pack("<IQ", opcode, draw(st.sampled_from((1, 0, 2**64 - 1)))) + body


def _read_request(data: bytes) -> None:
    opcode, node = struct.unpack_from("<IQ", data)
    caller = Caller(0, 0, 1, 0)
    answer = _DISPATCHER.answer(opcode, caller, node, memoryview(data)[12:])
    assert answer is None or isinstance(answer, Reply)
    if answer is not None:
        assert 0 <= answer.error <= 511
        assert not (answer.error and answer.body)


def _read_review(data: bytes) -> None:
    cluster = Cluster(has_driver=True, handler="bootseer", store_url="hdfs://namenode/store")
    found = json.loads(answer(data, lambda: cluster, lambda *_: ""))["response"]
    assert found["allowed"] is True
    assert len(found.get("warnings", ())) <= 8


_ASKED = {"replay": "auto", "environment": "llm", "checkpoint": "hdfs://namenode/ckpt"}
_REVIEWS = [
    json.loads(review_of(pod_object({f"bootseer.io/{name}": text for name, text in asked})))
    for asked in (_ASKED.items(), list(_ASKED.items())[:1], ())
]


def _read_page(data: bytes) -> None:
    for name in names_in(data.decode(errors="replace"), "http://host/store/"):
        assert len(split_path(name)) == 1


NETWORK_TARGETS = (
    Target("web-page", mutated((_PAGE,)), _read_page, ()),
    Target("webhook-review", mutated_json_bytes(_REVIEWS), _read_review, (CorruptError,)),
    Target("hdfs-answer", mutated(_answers()), _read_answer, (BootseerError,)),
    Target("hdfs-transfer", _transfers(), _read_transfer, ()),
    Target("registry-document", mutated_json_bytes(_DOCUMENTS), _read_document, ()),
    Target(
        "registry-hosts",
        mutated((_HOSTS,)),
        lambda data: parse_hosts(data, "registry.example", Path("/x/hosts.toml")),
        (InvalidInputError,),
    ),
    Target(
        "registry-challenge",
        mutated((_CHALLENGE,)),
        lambda data: parse_challenges(data.decode("latin-1")),
        (),
    ),
    Target("fuse-request", _requests(), _read_request, ()),
)
