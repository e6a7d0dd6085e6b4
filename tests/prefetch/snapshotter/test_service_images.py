"""Snapshots of indexed images: the mounted tree, its users and its lifetime."""

import contextlib
import os
import threading
from pathlib import Path

import grpc

from bootseer.blob.keys import blob_key, index_key
from bootseer.prefetch.index.chains import chain_ids, chain_key, publish_chain_index, read_chain
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.prefetch.snapshotter.service import KIND_COMMITTED
from bootseer.prefetch.snapshotter.snapshot import REF_LABEL, WORKLOAD_LABEL
from bootseer.served.service import live_mounts, log_path, services
from bootseer.served.status import kind_of
from bootseer.store import open_store
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import Member, digest, tar_of, write_layout
from testbed.mounts.image_mounts import TIMEOUT_S, checksums_in_child, index
from testbed.waiting import wait_for
from tests.prefetch.snapshotter.conftest import CHAINS, add_image, directories, lower_of, pull


def test_an_indexed_image_is_there_without_being_unpacked(
    node: ContainerdNode, tmp_path: Path
) -> None:
    record = add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    assert checksums_in_child([lower / "top", lower / "etc/base", lower / "etc/gone"]) == [
        digest(b"t")[7:],
        digest(b"base")[7:],
        "ENOENT",
    ]
    # So that records and bundles are shared with `image run`, `image mount` and other nodes.
    ((_, state),) = live_mounts(node.settings.run_dir)
    assert (state.index_digest, state.workload) == (record.index_digest, "train")
    info = node.call("Stat", key=CHAINS[-1]).info
    assert (info.parent, info.kind) == (CHAINS[0], KIND_COMMITTED)
    assert len(directories(node)) == 1


def test_the_writable_root_is_as_containerds(node: ContainerdNode, tmp_path: Path) -> None:
    add_image(node, tmp_path)
    pull(node)
    (mount,) = node.call("Prepare", key="c1", parent=CHAINS[-1]).mounts
    upper = next(o.removeprefix("upperdir=") for o in mount.options if o.startswith("upperdir="))
    status = os.stat(upper)
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o755, 0, 0)


def test_containers_share_one_mount_until_the_last_is_gone(
    node: ContainerdNode, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    pull(node)
    keys = [f"c{number}" for number in range(6)]
    lowers: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda key=key: lowers.append(
                lower_of(node.call("Prepare", key=key, parent=CHAINS[-1]))
            )
        )
        for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lowers) == 6
    assert {*lowers} == {*node.trees()}
    for key in keys[:-1]:
        node.call("Remove", key=key)
    node.call("Cleanup")
    wait_for(lambda: len(directories(node)) == 1)
    assert node.trees() == lowers[:1]
    node.call("Remove", key=keys[-1])
    wait_for(lambda: not node.trees() and not list(live_mounts(node.settings.run_dir)))
    wait_for(lambda: not list((node.root / "trees").iterdir()))


def test_a_workload_of_its_own_has_a_mount_of_its_own(node: ContainerdNode, tmp_path: Path) -> None:
    add_image(node, tmp_path)
    pull(node)
    node.call("Prepare", key="c1", parent=CHAINS[-1])
    node.call("Prepare", key="c2", parent=CHAINS[-1], labels={WORKLOAD_LABEL: "evaluate"})
    found = {state.workload for _, state in live_mounts(node.settings.run_dir)}
    assert found == {"train", "evaluate"}


def test_layers_that_are_not_indexed_lie_on_those_that_are(
    node: ContainerdNode, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    pull(node)
    above = digest(b"a chain that the store does not know")
    labels = {REF_LABEL: above}
    (mount,) = node.call("Prepare", key="extract", parent=CHAINS[-1], labels=labels).mounts
    upper = next(o.removeprefix("upperdir=") for o in mount.options if o.startswith("upperdir="))
    Path(upper, "unpacked").write_text("u")
    node.call("Commit", name=above, key="extract", labels=labels)
    (mount,) = node.call("Prepare", key="c1", parent=above).mounts
    lowers = next(o for o in mount.options if o.startswith("lowerdir=")).partition("=")[2]
    first, second = map(Path, lowers.split(":"))
    assert first == Path(upper)
    assert checksums_in_child([second / "top"]) == [digest(b"t")[7:]]
    # The container holds the mount, not the committed snapshot in between.
    node.call("Remove", key="c1")
    wait_for(lambda: not node.trees())


def test_an_image_is_pulled_once_the_store_has_lost_a_layer(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    add_image(fresh, tmp_path)
    with open_store(fresh.settings.store_url) as store:
        for info in list(store.list("blobs/")):
            store.delete(info.path)
    labels = {REF_LABEL: CHAINS[0]}
    assert fresh.call("Prepare", key="extract", labels=labels).mounts[0].type == "bind"
    assert "index it again" in fresh.log()


def test_a_record_that_lies_about_its_chain_serves_nothing(
    node: ContainerdNode, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    other = digest(b"another chain")
    with open_store(node.settings.store_url) as store:
        store.publish(chain_key(other), store.read(chain_key(CHAINS[-1])))
    assert node.call("Prepare", key="extract", labels={REF_LABEL: other}).mounts
    assert "do not make the chain" in node.log()


def test_a_chain_that_names_another_images_tree_is_merged_anew(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    record = add_image(fresh, tmp_path)
    write_layout(tmp_path / "other", [[Member("top", data=b"other")]])
    other = index(fresh.settings, tmp_path / "other", "other:1")
    with open_store(fresh.settings.store_url) as store:
        chain = read_chain(store, CHAINS[-1])
        assert chain is not None
        publish_chain_index(store, chain.diff_ids, other.index_digest)
    pull(fresh)
    lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    ((_, state),) = live_mounts(fresh.settings.run_dir)
    assert state.index_digest == record.index_digest


def test_a_tree_that_nobody_has_merged_is_merged_and_published(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    record = add_image(fresh, tmp_path)
    pull(fresh)
    lower = lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[0]))
    assert checksums_in_child([lower / "etc/gone", lower / "top"]) == [digest(b"x")[7:], "ENOENT"]
    with open_store(fresh.settings.store_url) as store:
        chain = read_chain(store, CHAINS[0])
        assert chain is not None
        assert chain.index_digest not in ("", record.index_digest)
        assert store.exists(index_key(chain.index_digest))


def test_a_merged_tree_that_the_store_has_lost_is_merged_again(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    record = add_image(fresh, tmp_path)
    with open_store(fresh.settings.store_url) as store:
        store.delete(index_key(record.index_digest))
    pull(fresh)
    lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    ((_, state),) = live_mounts(fresh.settings.run_dir)
    assert state.index_digest == record.index_digest


def test_a_tree_that_cannot_be_mounted_is_unavailable(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    add_image(fresh, tmp_path)
    pull(fresh)
    wait_for(lambda: (fresh.settings.cache_dir / "indexes").exists())
    store = Path(fresh.settings.store_url.removeprefix("file://"))
    store.rename(tmp_path / "elsewhere")
    with contextlib.suppress(FileNotFoundError):
        (fresh.settings.cache_dir / "indexes").rename(tmp_path / "indexes")
    code = fresh.refusal_code("Prepare", key="c1", parent=CHAINS[-1])
    assert code is grpc.StatusCode.UNAVAILABLE
    assert fresh.refusal_code("Stat", key="c1") is grpc.StatusCode.NOT_FOUND
    # When the store is back, it works.
    (tmp_path / "elsewhere").rename(store)
    lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))


def test_a_damaged_image_is_not_noted_as_an_environment(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    """The next start of an environment reads such a note; a container does not."""
    record = add_image(fresh, tmp_path)
    pull(fresh)
    lower = lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    store = Path(fresh.settings.store_url.removeprefix("file://"))
    for layer in record.layers:
        blob = store / blob_key(layer.blob_digest)
        blob.chmod(0o600)
        blob.write_bytes(bytes(blob.stat().st_size))
    assert checksums_in_child([lower / "etc/base"]) == ["EIO"]
    (found,) = [one for one in services(fresh.settings.run_dir) if one.is_alive]
    assert kind_of(found.state) == "containerd image"
    assert not (fresh.settings.cache_dir / "damaged").exists()
    # Its server's log names the damage.
    log = log_path(fresh.settings.run_dir, found.state.id).read_text()
    assert blob_key(record.layers[0].blob_digest) in log


def test_a_pulled_image_is_mounted_before_it_is_started(tmp_path: Path) -> None:
    with ContainerdNode(with_containerd=False, linger_s=60) as node:
        record = add_image(node, tmp_path)
        pull(node)
        wait_for(lambda: len(node.trees()) == 1)
        ((_, state),) = live_mounts(node.settings.run_dir)
        assert state.index_digest == record.index_digest
        assert lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1])) == node.trees()[0]
        node.call("Remove", key="c1")
        node.call("Cleanup")
        wait_for(lambda: not directories(node))
        assert len(node.trees()) == 1


def test_pulled_images_are_mounted_although_one_of_them_cannot_be(tmp_path: Path) -> None:
    with ContainerdNode(with_containerd=False, linger_s=60) as node:
        chains, records, before = {}, {}, set[str]()
        for name in ("first", "last", "lost"):
            layer = [Member(name, data=name.encode())]
            write_layout(tmp_path / name, [layer])
            with open_store(node.settings.store_url) as store:
                before = {info.path for info in store.list()}
            records[name] = index(node.settings, tmp_path / name, f"{name}:1")
            (chains[name],) = chain_ids([digest(tar_of(layer))])
        # The first one is slow, so that the others are due together.
        for number, name in enumerate(("first", "lost", "last")):
            labels = {REF_LABEL: chains[name]}
            node.refusal_code("Prepare", key=f"extract-{number}", parent="", labels=labels)
            if name == "lost":
                with open_store(node.settings.store_url) as store:
                    for key in {info.path for info in store.list()} - before:
                        store.delete(key)
                kept = node.settings.cache_dir / "indexes"
                (kept / records[name].index_digest.partition(":")[2]).unlink(missing_ok=True)
        wanted = {records[name].index_digest for name in ("first", "last")}
        wait_for(lambda: wanted <= {s.index_digest for _, s in live_mounts(node.settings.run_dir)})


def test_a_pulled_image_whose_files_are_here_needs_no_store(
    fresh: ContainerdNode, tmp_path: Path
) -> None:
    add_image(fresh, tmp_path)
    pull(fresh)
    lower = lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    names = ("top", "etc/base")
    expected = checksums_in_child([lower / name for name in names])
    fresh.call("Remove", key="c1")
    wait_for(lambda: not list(live_mounts(fresh.settings.run_dir)))
    assert wait_published(fresh.settings, TIMEOUT_S)
    Path(fresh.settings.store_url.removeprefix("file://")).rename(tmp_path / "elsewhere")
    lower = lower_of(fresh.call("Prepare", key="c2", parent=CHAINS[-1]))
    found = checksums_in_child([lower / name for name in names])
    assert found == expected, f"{lower in fresh.trees()}\n{fresh.log()}\n{fresh.image_logs()}"
