"""Fixtures: nodes with a snapshotter and no containerd, and an image of two layers for them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bootseer.prefetch.index.chains import chain_ids
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.snapshotter.snapshot import REF_LABEL
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import Member, digest, tar_of, write_layout
from testbed.mounts.image_mounts import index
from testbed.waiting import wait_for

LAYERS = (
    [Member("etc/", "d"), Member("etc/base", data=b"base"), Member("etc/gone", data=b"x")],
    [Member("./", "d", mode=0o751, uid=7, gid=8), Member("etc/.wh.gone"), Member("top", data=b"t")],
)
CHAINS = chain_ids([digest(tar_of(members)) for members in LAYERS])


@pytest.fixture
def fresh() -> Iterator[ContainerdNode]:
    """New node."""
    with ContainerdNode(with_containerd=False) as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[ContainerdNode]:
    with ContainerdNode(with_containerd=False) as started:
        yield started


@pytest.fixture
def node(shared: ContainerdNode) -> Iterator[ContainerdNode]:
    """Node without snapshots that has used the image before."""
    yield shared
    for _ in range(10):
        for key in reversed(list(shared.snapshots())):
            with contextlib.suppress(grpc.RpcError):
                shared.call("Remove", key=key)
    assert shared.snapshots() == {}
    wait_for(lambda: not directories(shared) and not shared.trees())


def add_image(node: ContainerdNode, tmp_path: Path) -> ImageRecord:
    write_layout(tmp_path / "layout", LAYERS)
    return index(node.settings, tmp_path / "layout", "app:1")


def pull(node: ContainerdNode) -> None:
    """Make the calls of containerd for an image that it need not unpack."""
    parent = ""
    for number, chain_id in enumerate(CHAINS):
        labels = {REF_LABEL: chain_id}
        code = node.refusal_code("Prepare", key=f"extract-{number}", parent=parent, labels=labels)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        parent = chain_id


def lower_of(answer: object) -> Path:
    """Return the only lower directory of an overlay."""
    (mount,) = answer.mounts  # type: ignore[attr-defined]
    assert mount.type == "overlay"
    (lower,) = [o.removeprefix("lowerdir=") for o in mount.options if o.startswith("lowerdir=")]
    assert ":" not in lower
    return Path(lower)


def directories(node: ContainerdNode) -> set[str]:
    return {path.name for path in (node.root / "snapshots").iterdir()}
