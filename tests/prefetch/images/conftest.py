"""Fixtures: a node, an image of odd layers, and images indexed through the store."""

import os
from pathlib import Path

import pytest

from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.sources import open_source
from bootseer.store import open_store
from testbed.images.building import NASTY, LayoutBuilder, Member, tar_of, write_layout
from tests.support.images.pulled import PullingNode

TARS = [tar_of(members) for members in NASTY]
TAG = "latest"


def big(name: str, size_bytes: int = 3_000_000) -> bytes:
    """Return a layer that does not compress."""
    return tar_of([Member(f"{name}/{i}", data=os.urandom(size_bytes // 3)) for i in range(3)])


@pytest.fixture
def layout(tmp_path: Path) -> LayoutBuilder:
    return write_layout(tmp_path / "image", NASTY, compression="gzip")


@pytest.fixture
def node(tmp_path: Path) -> PullingNode:
    return PullingNode(tmp_path / "node", tmp_path / "store")


def source_of(layout: LayoutBuilder) -> str:
    return f"oci:{layout.directory}:{TAG}"


def index(source: str, store: Path, work_dir: Path, reference: str | None = None) -> ImageRecord:
    with open_source(source, work_dir) as opened, open_store(str(store)) as target:
        return index_image(opened, target, work_dir, reference=reference)


def indexed_contents(source: str, base: Path) -> tuple[ImageRecord, dict[str, bytes]]:
    """Index an image, and return its record and content as read by a new node."""
    record = index(source, base / "store", base / "work")
    return record, PullingNode(base / "node", base / "store").start(record.reference)[1]
