"""Starts of images in a real registry, also when it fails on the way or is gone."""

import dataclasses
import os
from pathlib import Path

import pytest
from msgspec import structs

from bootseer.errors import BootseerError, NotFoundError, UnavailableError
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.publish.publish_image import publish_node_image
from bootseer.prefetch.sources import open_source
from bootseer.store import open_store
from testbed.images.building import LayoutBuilder, Member, tar_of
from testbed.mounts.image_mounts import start_program
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import Registry
from tests.support.images.pulled import PullingNode, objects

BLOBS = r"GET /v2/.*/blobs/"
PULL = """
import sys
from pathlib import Path
from bootseer.transfer.pace import Pace
from tests.support.images.pulled import PullingNode
# A late layer is not asked for twice: the test counts requests.
Pace.has_credit = False
node = PullingNode(Path(sys.argv[1]), Path(sys.argv[2]))
print(len(node.start(sys.argv[3])[1]))
"""


@pytest.fixture
def node(tmp_path: Path) -> PullingNode:
    made = PullingNode(tmp_path / "node", tmp_path / "store")
    made.settings = structs.replace(made.settings, deadline_s=60.0)
    return made


def push(registry: Registry, base: Path, name: str, *layers: bytes) -> None:
    layout = LayoutBuilder(base / name)
    layout.add_image(layers, tag="v1", compression="gzip")
    registry.push_layout(layout.directory, "v1", f"{name}:v1")


def layer(name: str) -> bytes:
    return tar_of([Member(f"{name}/{i}", data=os.urandom(700_000)) for i in range(3)])


@pytest.mark.usefixtures("no_second_requests")
def test_pulled_once_and_published(
    node: PullingNode, registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    push(registry, tmp_path, "once", layer("a"), layer("b"))
    image = f"registry://{relay.host}/once:v1"
    resolved, contents = node.start(image)
    assert len(contents) == 6
    assert resolved.record.reference == f"{relay.host}/once:v1"
    assert resolved.record.manifest_digest
    pulled = relay.count(BLOBS)
    publish_node_image(node.settings, resolved.record.index_digest)
    with (
        open_source(image, tmp_path / "work") as source,
        open_store(str(tmp_path / "other")) as store,
    ):
        index_image(source, store, tmp_path / "work")
    assert objects(tmp_path / "store") == objects(tmp_path / "other")
    # Another node asks the registry for the tag and the configuration only.
    before = relay.count(BLOBS)
    other = PullingNode(tmp_path / "second", tmp_path / "store")
    assert other.start(image)[1] == contents
    assert (pulled, relay.count(BLOBS) - before, other.said) == (3, 1, [])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(BLOBS, times=1, cut_after_bytes=300_000),
        Fault(BLOBS, times=2, status=503),
        Fault(BLOBS, times=2, status=500),
        Fault(BLOBS, times=1, status=429, headers={"Retry-After": "0"}),
    ],
    ids=["cut", "503", "500", "429"],
)
def test_a_registry_that_fails_for_a_moment(
    node: PullingNode, registry: Registry, relay: FaultyRelay, tmp_path: Path, fault: Fault
) -> None:
    push(registry, tmp_path, "moment", layer("a"), layer("b"))
    relay.faults.append(dataclasses.replace(fault))
    assert len(node.start(f"registry://{relay.host}/moment:v1")[1]) == 6


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"GET /v2/.*/blobs/", times=10_000, cut_after_bytes=50_000, ignore_range=True),
        Fault(r"GET /v2/.*/blobs/", times=10_000, flip_at=90_000),
        Fault(r"GET /v2/.*/blobs/", times=10_000, truncate_bytes=90_000, ignore_range=True),
        Fault(r"GET /v2/.*/blobs/", times=10_000, hang_s=30.0),
        Fault(r"GET /v2/.*/blobs/", times=10_000, status=401),
    ],
    ids=["dies", "flips", "truncates", "hangs", "401"],
)
def test_a_registry_that_never_gives_a_layer(
    node: PullingNode, registry: Registry, relay: FaultyRelay, tmp_path: Path, fault: Fault
) -> None:
    push(registry, tmp_path, "never", layer("a"))
    image = f"registry://{relay.host}/never:v1"
    # The configuration is the first blob.
    with open_source(image, tmp_path / "work"):
        pass
    broken = dataclasses.replace(fault)
    seen = relay.count(BLOBS)
    assert seen == 1
    with open_source(image, tmp_path / "work") as source:
        (name,) = [one.stored_digest for one in source.layers]  # type: ignore[attr-defined]
    broken.when = rf"GET /v2/.*/blobs/{name}"
    relay.faults.append(broken)
    node.settings = structs.replace(node.settings, deadline_s=1.0)
    with pytest.raises(BootseerError):
        node.obtain(image)
    assert node.left_behind() == []
    relay.faults.clear()
    node.settings = structs.replace(node.settings, deadline_s=60.0)
    assert len(node.start(image)[1]) == 3


def test_a_registry_that_is_gone(node: PullingNode, registry: Registry, tmp_path: Path) -> None:
    push(registry, tmp_path, "gone", layer("a"))
    with FaultyRelay(registry.host) as relay:
        image = f"registry://{relay.host}/gone:v1"
        resolved, contents = node.start(image)
    # The node has it, although it is not published.
    node.settings = structs.replace(node.settings, deadline_s=1.0)
    again, read = node.start(image)
    assert (again.record, read) == (resolved.record, contents)
    assert [line.startswith("warning: ") for line in node.said] == [True]
    # Other nodes do not know it ...
    other = PullingNode(tmp_path / "second", tmp_path / "store")
    other.settings = structs.replace(other.settings, deadline_s=1.0)
    with pytest.raises(UnavailableError):
        other.obtain(image)
    # ... before it is in the store.
    publish_node_image(node.settings, resolved.record.index_digest)
    other.settings = structs.replace(other.settings, deadline_s=10.0)
    assert other.start(image)[1] == contents
    assert [line.startswith("warning: ") for line in other.said] == [True]


def test_a_registry_that_has_no_such_image(node: PullingNode, registry: Registry) -> None:
    with pytest.raises(NotFoundError):
        node.obtain(f"registry://{registry.host}/no/such:image")


def test_two_starts_pull_a_layer_once(
    registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    push(registry, tmp_path, "twice", layer("a"), layer("b"))
    image = f"registry://{relay.host}/twice:v1"
    started = [start_program(PULL, tmp_path / "node", tmp_path / "store", image) for _ in range(3)]
    assert [process.communicate_checked() for process in started] == ["6\n"] * 3
    # Three configurations and two layers.
    assert relay.count(BLOBS) == 5
