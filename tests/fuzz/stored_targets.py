"""Targets that read environments, striped files, records and leases of the store."""

import hashlib
import json
import struct
from typing import Any

import msgspec
import xxhash
from hypothesis import strategies as st

from bootseer.base.documents import members_digest
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.fuse.striped import layout
from bootseer.prefetch.bundle import hot_store, similar
from bootseer.prefetch.index import chains, records
from bootseer.report.decoding import decode
from bootseer.report.explain import StartModel, break_down
from bootseer.report.export import analysis_document
from bootseer.report.graph import StartGraph
from bootseer.report.sources import BYTES_MAX, pack, unpack
from bootseer.snapshots import manifest as manifests
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.manifest import Manifest, Outside, Stored, StoredIndex
from bootseer.snapshots.manifest import Target as SnapshotTarget
from bootseer.store.objects import lease, uses
from bootseer.timeline import otlp, stored
from tests.fuzz import samples
from tests.fuzz.harness import Target
from tests.fuzz.mutations import mutated, mutated_json, mutated_json_bytes

_DAMAGED = (CorruptError, UnknownFormatError)
_PARTS = (Part("command", '["x"]'), Part("salt", ""))


def _manifest() -> Any:
    stored, index = Stored(samples.DIGEST, 1000), StoredIndex(samples.INDEX, 100)
    targets = (
        SnapshotTarget(path=b"/opt/env-\xff", whole=False, blob=stored, index=index,
                       deletions=(b"lib/old.py", b"\xfe"), file_count=3, content_bytes=5000),
        SnapshotTarget(path=b"/other", whole=True, blob=stored, index=index, deletions=(),
                       file_count=0, content_bytes=0,
                       earlier=(Stored("sha256:" + "77" * 32, 7),)),
    )  # fmt: skip
    outside = Outside(paths=("/etc/x",), path_count=7)
    whole = Manifest(
        fingerprint=fingerprint(_PARTS),
        parts=_PARTS,
        targets=targets,
        created_ns=1,
        setup_ns=2,
        node="node",
        name="base",
        version="0.1.0",
        outside=outside,
    )
    return json.loads(manifests.encode(whole))


@st.composite
def _manifests(draw: st.DrawFn) -> bytes:
    document = draw(mutated_json((_manifest(),)))
    if isinstance(document, dict) and draw(st.booleans()):
        document.pop("digest", None)
        parts: Any = document.get("parts")
        try:
            document["fingerprint"] = fingerprint([Part(*part) for part in parts])
        except (TypeError, AttributeError, ValueError):
            pass
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        document["digest"] = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    data = json.dumps(document).encode()
    return draw(mutated((data,))) if draw(st.integers(0, 4)) == 0 else data


def _read_manifest(data: bytes) -> None:
    found = manifests.decode(data)
    for target in found.targets:
        assert target.path.startswith(b"/")
        for path in (target.path[1:], *target.deletions):
            assert not {b"", b".", b".."} & set(path.split(b"/"))
    manifests.encode(found)


def _layout() -> bytes:
    block = layout.MIN_BLOCK_BYTES
    segments = []
    for number, count in ((1, 1), (2, 3)):
        size = 5 * block + 100 * number
        parts = tuple(
            layout.PartFile(f"{i:02x}", layout.part_size(size, block, count, i))
            for i in range(count)
        )
        count = -(-size // block)
        sums = layout.pack_checksums(list(range(count)))
        made = layout.Segment(f"{number:032x}", size, block, block, parts, sums, bytes(32 * count))
        segments.append(made)
    return layout.encode_layout(layout.Layout("f" * 32, tuple(segments)))


@st.composite
def _layouts(draw: st.DrawFn) -> bytes:
    """Draw a layout with a mutated body, and with right checksums and padding."""
    good = _layout()
    (body_bytes,) = struct.unpack_from("<Q", good, 40)
    body = draw(mutated((good[128 : 128 + body_bytes],)))
    head = bytearray(good[:120])
    if draw(st.integers(0, 3)) == 0:
        head[32:] = draw(mutated((bytes(head[32:]),)))[:88].ljust(88, b"\0")
    else:
        struct.pack_into("<QQ", head, 40, len(body), xxhash.xxh3_64_intdigest(body))
    data = bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))) + body
    return data + bytes((1729 - len(data)) % 4096)


def _read_layout(data: bytes) -> None:
    found = layout.decode_layout(data, "f")
    assert found.size_bytes == sum(segment.size_bytes for segment in found.segments)
    assert layout.decode_layout(layout.encode_layout(found), "f") == found


_CHAIN = chains.chain_ids([samples.DIGEST])[-1]


def _records() -> list[Any]:
    config = records.ImageConfig(env=("A=1",), diff_ids=(samples.DIGEST,))
    layers = (records.ImageLayer(samples.DIGEST, samples.DIGEST, 7),)
    image = records.ImageRecord("a:b", samples.DIGEST, samples.INDEX, 9, config, layers, 5, 3, 7)
    layer = records.LayerRecord(
        samples.DIGEST, samples.DIGEST, 7, samples.INDEX, (b"usr", b"\xff"), ((b"a", b"b"),)
    )
    pointer = hot_store.HotPointer(samples.INDEX, samples.DIGEST, 9, 200, samples.DIGEST, 2, 5)
    stream = similar.LayerStream(samples.DIGEST, 7)
    related = similar.SimilarImages((similar.SimilarImage(samples.INDEX, 5, (stream,)),))
    chain = {"kind": "bootseer-chain", "version": 1, "chain_id": _CHAIN,
             "diff_ids": [samples.DIGEST], "index_digest": samples.INDEX}  # fmt: skip
    use = {"kind": "bootseer-use", "version": 1, "index_digest": samples.INDEX,
           "blob_digests": [samples.DIGEST]}  # fmt: skip
    held = lease.LeaseRecord("owner", "0" * 32, 5, 10)
    found = [
        json.loads(data)
        for data in (
            records.IMAGE_FORM.encode(image),
            records.LAYER_FORM.encode(layer),
            hot_store.POINTER_FORM.encode(pointer),
            similar.FORM.encode(related),
            held.encode(),
        )
    ]
    return [*found, chain, use]


@st.composite
def _record_inputs(draw: st.DrawFn) -> bytes:
    """Draw a record, mostly with a right checksum, else without one or with a wrong one."""
    document = draw(mutated_json(_records()))
    if isinstance(document, dict) and draw(st.integers(0, 3)):
        document.pop("checksum", None)
        try:
            document["checksum"] = members_digest(document, "checksum")
        except UnicodeEncodeError:
            pass
    data = json.dumps(document).encode()
    return draw(mutated((data,))) if draw(st.integers(0, 4)) == 0 else data


def _read_record(data: bytes) -> None:
    for read in (
        lambda: records.IMAGE_FORM.decode(data, "x"),
        lambda: records.LAYER_FORM.decode(data, "x"),
        lambda: hot_store.decode_pointer(data, samples.INDEX, "x"),
        lambda: similar.FORM.decode(data, "x"),
        lambda: chains.decode_chain(data, _CHAIN, "x"),
        lambda: uses.FORM.decode(data, "x"),
        lambda: lease.decode(data),
    ):
        try:
            read()
        except _DAMAGED:
            pass


# ---- timelines, in which a job in a container can write anything -------------------------------


def _stage_lines() -> list[Any]:
    resource: dict[str, otlp.Value] = {"host.name": "n", "bootseer.rank": 1, "bootseer.attempt": 0}
    attributes: dict[str, otlp.Value] = {
        "bootseer.bytes": 5,
        "bootseer.fallback": "x",
        "y": 1.5,
        "z": True,
    }
    stage = otlp.Stage("image", "0" * 32, "1" * 16, "", 5, 9, True, "why", attributes, resource)
    started = stage._replace(name="start", span_id="2" * 16, end_ns=None)
    return [json.loads(line) for line in (otlp.encode_end(stage), otlp.encode_start(started))]


@st.composite
def _timelines(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(mutated_json_bytes(_stage_lines()), min_size=1, max_size=4))
    return draw(mutated((b"\n".join(lines),))) if draw(st.booleans()) else b"\n".join(lines)


def _read_timeline(data: bytes) -> None:
    stages = decode(data)
    graph = StartGraph()
    graph.add_node(stages, 0)
    breakdown = break_down(graph)
    assert (breakdown is None) == (not stages)
    analysis = StartModel(graph).analyse()
    found = [msgspec.to_builtins(breakdown), analysis_document(analysis)]
    json.dumps(found, allow_nan=False)


def _read_stored_timeline(data: bytes) -> None:
    assert len(unpack(data)) <= BYTES_MAX


def _read_gathered(data: bytes) -> None:
    for name, content in stored.decode_gathered(data):
        assert "/" not in name
        assert len(content) <= len(data)


_GATHERED = stored.encode_gathered(
    {f"20261128T120000Z-7-{node}-0": pack(b"{}\n") for node in ("a", "b" * 128)}
)


STORED_TARGETS = (
    Target("manifest", _manifests(), _read_manifest, _DAMAGED),
    Target("layout", _layouts(), _read_layout, _DAMAGED),
    Target("record", _record_inputs(), _read_record, ()),
    Target("timeline", _timelines(), _read_timeline, ()),
    Target("stored-timeline", mutated((pack(b"{}\n"),)), _read_stored_timeline, (CorruptError,)),
    Target("gathered", mutated((_GATHERED,)), _read_gathered, (ValueError,)),
)
