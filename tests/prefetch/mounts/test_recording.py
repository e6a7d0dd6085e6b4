"""Records of mounts, their use by the next mount, and records that are not published."""

import pytest

from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.store import open_store
from testbed.mounts.image_mounts import checksums_in_child, drop_cache, mounted, run_program
from testbed.waiting import wait_for
from tests.prefetch.mounts.conftest import IndexedDirectory, read_hot

pytestmark = pytest.mark.needs("fuse")


def test_record_then_replay_moves_only_the_hot_bytes(node: IndexedDirectory) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        assert image.status()["prefetch"] is None
        image.ready()
        # After the record's end no read is recorded.
        checksums_in_child([image.directory / "cold"])
        wait_for(lambda: image.status()["record"] == "published")
    drop_cache(node.settings)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        before = image.status()
        read_hot(node, image.directory)
        status = image.status()
        assert status["faults"]["fault_count"] == 0
        assert status["moved"]["fetched_bytes"] == before["moved"]["fetched_bytes"]
        assert status["moved"]["fetched_bytes"] < 1_000_000
        assert status["prefetch"]["recall"] == 1.0
        assert status["prefetch"]["precision"] > 0.95
        image.ready()
        assert image.status()["record"] == "not needed"


def test_a_bundle_that_missed_much_is_made_anew(node: IndexedDirectory) -> None:
    for paths, traces in ((("hot-2",), 1), (("hot-1", "hot-2"), 2)):
        with mounted(node.settings, "image:1", node.base / "mnt") as image:
            checksums_in_child([image.directory / name for name in paths])
        assert wait_published(node.settings, 30)
        with open_store(node.settings.store_url) as store:
            pointer = hot_store.read_pointer(store, node.record.index_digest, "train")
        assert pointer is not None
        assert pointer.trace_count == traces


def test_no_record_when_told_so(node: IndexedDirectory) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", record="never") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    with open_store(node.settings.store_url) as store:
        assert hot_store.workloads(store, node.record.index_digest) == []


def test_ready_by_datagram_ends_the_record(node: IndexedDirectory) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", record="always") as image:
        read_hot(node, image.directory)
        run_program(
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
            "name, _, secret = sys.argv[1].partition(':');"
            "s.sendto(b'ready ' + secret.encode(), '\\0' + name)",
            image.ready_name,
        )
        wait_for(lambda: image.status()["record"] == "published")


def test_what_is_not_recorded_is_not_said_to_be(node: IndexedDirectory) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", record="never") as image:
        assert image.status()["record"] == "off"
        image.ready()
        assert image.status()["record"] == "off"


def test_a_short_window_ends_the_record(node: IndexedDirectory) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", record_window_s=0.2) as image:
        wait_for(lambda: image.status()["record"] != "recording")


@pytest.mark.parametrize("damage", ["flip", "gone", "header", "pointer"])
def test_damaged_bundle_costs_nothing_but_the_help(node: IndexedDirectory, damage: str) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    with open_store(node.settings.store_url) as store:
        pointer = hot_store.read_pointer(store, node.record.index_digest, "train")
    assert pointer is not None
    path = node.stored(hot_store.part_key(pointer.bundle_digest, 0))
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
    elif damage == "header":
        path = node.stored(hot_store.header_key(pointer.bundle_digest))
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    else:
        node.stored(hot_store.pointer_key(node.record.index_digest, "train")).write_bytes(b"{")
    drop_cache(node.settings)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        assert image.status()["faults"]["fault_frame_count"] > 0
