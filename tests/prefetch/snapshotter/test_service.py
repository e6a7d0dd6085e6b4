"""The snapshotter as containerd calls it, over its socket, with real mounts but no containerd."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bootseer.blob.keys import index_key
from bootseer.fuse.kernel import mounts
from bootseer.prefetch.chains import chain_ids, chain_key, publish_chain_index, read_chain
from bootseer.prefetch.mount_state import live_mounts
from bootseer.prefetch.publish import wait_published
from bootseer.prefetch.records import ImageRecord
from bootseer.prefetch.snapshotter.snapshot import REF_LABEL, WORKLOAD_LABEL
from bootseer.prefetch.snapshotter.wire import KIND_COMMITTED, MESSAGES
from bootseer.store import open_store
from tests.support.containerd_node import Node
from tests.support.image_mounts import (
    REPOSITORY,
    TIMEOUT_S,
    bootseer,
    checksums_outside,
    index,
    outside,
    skip_unless_root,
    wait_for,
)
from tests.support.images import Member, digest, tar_of, write_layout

LAYERS = (
    [Member("etc/", "d"), Member("etc/base", data=b"base"), Member("etc/gone", data=b"x")],
    [Member("./", "d", mode=0o751, uid=7, gid=8), Member("etc/.wh.gone"), Member("top", data=b"t")],
)
CHAINS = chain_ids([digest(tar_of(members)) for members in LAYERS])


@pytest.fixture
def fresh() -> Iterator[Node]:
    """A node that knows nothing yet."""
    with Node(with_containerd=False) as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    with Node(with_containerd=False) as started:
        yield started


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    """A node without snapshots, which has seen the image before."""
    yield shared
    for _ in range(10):
        for key in reversed(list(shared.snapshots())):
            with contextlib.suppress(grpc.RpcError):
                shared.call("Remove", key=key)
    assert shared.snapshots() == {}
    wait_for(lambda: not directories(shared) and not shared.trees())


def add_image(node: Node, tmp_path: Path) -> ImageRecord:
    write_layout(tmp_path / "layout", LAYERS)
    return index(node.settings, tmp_path / "layout", "app:1")


def pull(node: Node) -> None:
    """What containerd does for an image that it need not unpack."""
    parent = ""
    for number, chain_id in enumerate(CHAINS):
        labels = {REF_LABEL: chain_id}
        code = node.refused("Prepare", key=f"extract-{number}", parent=parent, labels=labels)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        parent = chain_id


def lower_of(answer: object) -> Path:
    """The only directory that an overlay lies on."""
    (mount,) = answer.mounts  # type: ignore[attr-defined]
    assert mount.type == "overlay"
    (lower,) = [o.removeprefix("lowerdir=") for o in mount.options if o.startswith("lowerdir=")]
    assert ":" not in lower
    return Path(lower)


def directories(node: Node) -> set[str]:
    return {path.name for path in (node.root / "snapshots").iterdir()}


def test_messages_are_encoded_as_containerd_does() -> None:
    request = MESSAGES["PrepareSnapshotRequest"](key="k", parent="p", labels={"a": "b"})
    assert request.SerializeToString() == b"\x12\x01k\x1a\x01p\x22\x06\x0a\x01a\x12\x01b"
    info = MESSAGES["Info"](name="n", kind=KIND_COMMITTED)
    info.created_at.seconds = 1
    assert info.SerializeToString() == b"\x0a\x01n\x18\x03\x22\x02\x08\x01"
    # What a later release of containerd may send besides.
    later = request.SerializeToString() + b"\xfa\x01\x01x"
    assert MESSAGES["PrepareSnapshotRequest"].FromString(later).key == "k"


def test_ordinary_snapshots_live_as_containerd_wants_them(node: Node) -> None:
    (mount,) = node.call("Prepare", key="a", labels={"x": "1"}).mounts
    assert (mount.type, list(mount.options)) == ("bind", ["rw", "rbind"])
    Path(mount.source, "file").write_bytes(b"f" * 10_000)
    assert node.call("Usage", key="a").size >= 10_000
    node.call("Commit", name="layer", key="a", labels={"y": "2"})
    info = node.call("Stat", key="layer").info
    assert (info.kind, dict(info.labels), info.parent) == (KIND_COMMITTED, {"y": "2"}, "")
    assert info.created_at.seconds > 1_500_000_000
    (above,) = node.call("Prepare", key="b", parent="layer").mounts
    assert above.type == "overlay"
    assert node.call("Mounts", key="b").mounts[0] == above
    (view,) = node.call("View", key="v", parent="layer").mounts
    assert (view.type, view.source, list(view.options)) == ("bind", mount.source, ["ro", "rbind"])
    assert node.refused("Commit", name="x", key="v") is grpc.StatusCode.FAILED_PRECONDITION
    assert node.refused("Remove", key="layer") is grpc.StatusCode.FAILED_PRECONDITION
    assert node.refused("Mounts", key="layer") is grpc.StatusCode.FAILED_PRECONDITION
    assert node.refused("Prepare", key="b") is grpc.StatusCode.ALREADY_EXISTS
    assert node.refused("Prepare", key="c", parent="none") is grpc.StatusCode.NOT_FOUND
    assert node.refused("Prepare", key="c", parent="b") is grpc.StatusCode.INVALID_ARGUMENT
    assert node.refused("Stat", key="none") is grpc.StatusCode.NOT_FOUND
    assert {i.name for i in node.call("List", filters=["kind==committed"])} == {"layer"}
    updated = node.call(
        "Update", info={"name": "b", "labels": {"z": "3"}}, update_mask={"paths": ["labels.z"]}
    )
    assert dict(updated.info.labels) == {"z": "3"}
    for key in ("v", "b", "layer"):
        node.call("Remove", key=key)
    wait_for(lambda: not directories(node))
    assert node.call("List") == []


def test_an_indexed_image_is_there_without_being_unpacked(node: Node, tmp_path: Path) -> None:
    record = add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    assert checksums_outside([lower / "top", lower / "etc/base", lower / "etc/gone"]) == [
        digest(b"t")[7:],
        digest(b"base")[7:],
        "ENOENT",
    ]
    # So that records and bundles are those of `image run`, `image mount` and other nodes.
    ((_, state),) = live_mounts(node.settings)
    assert (state.index_digest, state.workload) == (record.index_digest, "train")
    info = node.call("Stat", key=CHAINS[-1]).info
    assert (info.parent, info.kind) == (CHAINS[0], KIND_COMMITTED)
    assert len(directories(node)) == 1


def test_the_writable_root_is_as_containerds(node: Node, tmp_path: Path) -> None:
    add_image(node, tmp_path)
    pull(node)
    (mount,) = node.call("Prepare", key="c1", parent=CHAINS[-1]).mounts
    upper = next(o.removeprefix("upperdir=") for o in mount.options if o.startswith("upperdir="))
    status = os.stat(upper)
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o755, 0, 0)


def test_containers_share_one_mount_until_the_last_is_gone(node: Node, tmp_path: Path) -> None:
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
    wait_for(lambda: not node.trees() and not list(live_mounts(node.settings)))
    wait_for(lambda: not list((node.root / "trees").iterdir()))


def test_a_workload_of_its_own_has_a_mount_of_its_own(node: Node, tmp_path: Path) -> None:
    add_image(node, tmp_path)
    pull(node)
    node.call("Prepare", key="c1", parent=CHAINS[-1])
    node.call("Prepare", key="c2", parent=CHAINS[-1], labels={WORKLOAD_LABEL: "evaluate"})
    found = {state.workload for _, state in live_mounts(node.settings)}
    assert found == {"train", "evaluate"}


def test_layers_that_are_not_indexed_lie_on_those_that_are(node: Node, tmp_path: Path) -> None:
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
    assert checksums_outside([second / "top"]) == [digest(b"t")[7:]]
    # What holds the mount is the container, not the committed snapshot between.
    node.call("Remove", key="c1")
    wait_for(lambda: not node.trees())


def test_an_image_is_pulled_once_the_store_has_lost_a_layer(fresh: Node, tmp_path: Path) -> None:
    add_image(fresh, tmp_path)
    with open_store(fresh.settings.store_url) as store:
        for info in list(store.list("blobs/")):
            store.delete(info.path)
    labels = {REF_LABEL: CHAINS[0]}
    assert fresh.call("Prepare", key="extract", labels=labels).mounts[0].type == "bind"
    assert "index it again" in fresh.log()


def test_a_record_that_lies_about_its_chain_serves_nothing(node: Node, tmp_path: Path) -> None:
    add_image(node, tmp_path)
    other = digest(b"another chain")
    with open_store(node.settings.store_url) as store:
        store.publish(chain_key(other), store.read(chain_key(CHAINS[-1])))
    assert node.call("Prepare", key="extract", labels={REF_LABEL: other}).mounts
    assert "do not make the chain" in node.log()


def test_a_chain_that_names_another_images_tree_is_merged_anew(fresh: Node, tmp_path: Path) -> None:
    record = add_image(fresh, tmp_path)
    write_layout(tmp_path / "other", [[Member("top", data=b"other")]])
    other = index(fresh.settings, tmp_path / "other", "other:1")
    with open_store(fresh.settings.store_url) as store:
        chain = read_chain(store, CHAINS[-1])
        assert chain is not None
        publish_chain_index(store, chain.diff_ids, other.index_digest)
    pull(fresh)
    lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    ((_, state),) = live_mounts(fresh.settings)
    assert state.index_digest == record.index_digest


@pytest.mark.parametrize("label", ["../../../etc", "/etc/passwd", "sha256:../../x", "", "a\nb"])
def test_a_label_that_is_no_digest_is_refused(node: Node, label: str) -> None:
    code = node.refused("Prepare", key="extract", labels={REF_LABEL: label})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert node.call("List") == []


def test_keys_are_never_paths(node: Node) -> None:
    (mount,) = node.call("Prepare", key="../../../escape").mounts
    assert Path(mount.source).is_relative_to(node.root / "snapshots")
    assert node.refused("Prepare", key="") is grpc.StatusCode.INVALID_ARGUMENT
    assert node.refused("Prepare", key="a\0b") is grpc.StatusCode.INVALID_ARGUMENT


def test_a_tree_that_nobody_has_merged_is_merged_and_published(fresh: Node, tmp_path: Path) -> None:
    record = add_image(fresh, tmp_path)
    pull(fresh)
    lower = lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[0]))
    assert checksums_outside([lower / "etc/gone", lower / "top"]) == [digest(b"x")[7:], "ENOENT"]
    with open_store(fresh.settings.store_url) as store:
        chain = read_chain(store, CHAINS[0])
        assert chain is not None
        assert chain.index_digest not in ("", record.index_digest)
        assert store.exists(index_key(chain.index_digest))


def test_a_merged_tree_that_the_store_has_lost_is_merged_again(fresh: Node, tmp_path: Path) -> None:
    record = add_image(fresh, tmp_path)
    with open_store(fresh.settings.store_url) as store:
        store.delete(index_key(record.index_digest))
    pull(fresh)
    lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    ((_, state),) = live_mounts(fresh.settings)
    assert state.index_digest == record.index_digest


def test_a_tree_that_cannot_be_mounted_is_unavailable(fresh: Node, tmp_path: Path) -> None:
    add_image(fresh, tmp_path)
    pull(fresh)
    wait_for(lambda: (fresh.settings.cache_dir / "indexes").exists())
    store = Path(fresh.settings.store_url.removeprefix("file://"))
    store.rename(tmp_path / "elsewhere")
    with contextlib.suppress(FileNotFoundError):
        (fresh.settings.cache_dir / "indexes").rename(tmp_path / "indexes")
    code = fresh.refused("Prepare", key="c1", parent=CHAINS[-1])
    assert code is grpc.StatusCode.UNAVAILABLE
    assert fresh.refused("Stat", key="c1") is grpc.StatusCode.NOT_FOUND
    # And when the store is back, it works.
    (tmp_path / "elsewhere").rename(store)
    lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))


def test_a_pulled_image_is_mounted_before_it_is_started(tmp_path: Path) -> None:
    with Node(with_containerd=False, linger_s=60) as node:
        record = add_image(node, tmp_path)
        pull(node)
        wait_for(lambda: len(node.trees()) == 1)
        ((_, state),) = live_mounts(node.settings)
        assert state.index_digest == record.index_digest
        assert lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1])) == node.trees()[0]
        node.call("Remove", key="c1")
        node.call("Cleanup")
        wait_for(lambda: not directories(node))
        assert len(node.trees()) == 1


def test_a_pulled_image_whose_files_are_here_needs_no_store(fresh: Node, tmp_path: Path) -> None:
    add_image(fresh, tmp_path)
    pull(fresh)
    lower = lower_of(fresh.call("Prepare", key="c1", parent=CHAINS[-1]))
    names = ("top", "etc/base")
    expected = checksums_outside([lower / name for name in names])
    fresh.call("Remove", key="c1")
    wait_for(lambda: not list(live_mounts(fresh.settings)))
    assert wait_published(fresh.settings, TIMEOUT_S)
    Path(fresh.settings.store_url.removeprefix("file://")).rename(tmp_path / "elsewhere")
    lower = lower_of(fresh.call("Prepare", key="c2", parent=CHAINS[-1]))
    found = checksums_outside([lower / name for name in names])
    assert found == expected, f"{lower in fresh.trees()}\n{fresh.log()}\n{fresh.image_logs()}"


def test_a_server_that_died_is_replaced_when_mounts_are_asked_for(
    node: Node, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    pull(node)
    first = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    node.kill_image_servers()
    second = lower_of(node.call("Mounts", key="c1"))
    assert second != first
    assert checksums_outside([second / "top"]) == [digest(b"t")[7:]]
    wait_for(lambda: node.trees() == [second])


def test_a_dead_server_is_not_taken_for_alive_while_it_is_tidied_away(
    node: Node, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    pull(node)
    first = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    ((state_dir, _),) = live_mounts(node.settings)
    children = node.image_server_ids()
    held = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(state_dir)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        assert held.stdout is not None
        assert held.stdout.readline() == b"held\n"
        assert lower_of(node.call("Mounts", key="c1")) != first
    finally:
        held.kill()
        held.communicate()


_HOLD = """
import sys, time
from pathlib import Path
from bootseer.prefetch.mount_state import take_lock
while True:
    try:
        lock = take_lock(Path(sys.argv[1]), create=False)
        break
    except BlockingIOError:
        time.sleep(0.001)
print("held", flush=True)
time.sleep(60)
"""


def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path) -> None:
    skip_unless_root()
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", small], check=True)
    try:
        with Node(with_containerd=False, root=small / "root") as node:
            node.call("Prepare", key="before")
            filler = small / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            codes = {node.refused("Prepare", key=f"full-{number}") for number in range(3)}
            assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert {info.name for info in node.call("List")} == {"before"}
            filler.unlink()
            node.call("Prepare", key="after")
            assert {info.name for info in node.call("List")} == {"before", "after"}
            wait_for(lambda: len(directories(node)) == 2)
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_mounts_outlive_the_snapshotter(node: Node, tmp_path: Path, sign: signal.Signals) -> None:
    add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    node.stop(node.snapshotter, sign)
    assert checksums_outside([lower / "top"]) == [digest(b"t")[7:]]
    node.snapshotter = node.start_snapshotter()
    assert lower_of(node.call("Mounts", key="c1")) == lower
    assert lower_of(node.call("Prepare", key="c2", parent=CHAINS[-1])) == lower
    for key in ("c1", "c2", *reversed(CHAINS)):
        node.call("Remove", key=key)
    wait_for(lambda: not node.trees() and not list(live_mounts(node.settings)))


@pytest.mark.parametrize("run_dir", ["on disk", "in memory"])
def test_a_start_mends_what_the_machines_end_left(node: Node, tmp_path: Path, run_dir: str) -> None:
    add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    before = directories(node)
    node.stop(node.snapshotter, signal.SIGKILL)
    node.kill_image_servers()
    mounts.detach(lower, lazy=True)
    if run_dir == "in memory":
        shutil.rmtree(node.settings.run_dir)
    (node.root / "snapshots/999/fs").mkdir(parents=True)
    (node.root / "snapshots/new-garbage").mkdir()
    (node.root / "trees/garbage").mkdir()
    node.snapshotter = node.start_snapshotter()
    # Without being asked: containers that are started again find it there.
    wait_for(lambda: len(node.trees()) == 1)
    assert checksums_outside([node.trees()[0] / "top"]) == [digest(b"t")[7:]]
    wait_for(lambda: directories(node) == before)
    wait_for(
        lambda: [path.name for path in (node.root / "trees").iterdir()] == [node.trees()[0].name]
    )


def test_an_index_that_a_crash_tore_is_fetched_again(node: Node, tmp_path: Path) -> None:
    record = add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    node.stop(node.snapshotter, signal.SIGKILL)
    node.kill_image_servers()
    mounts.detach(lower, lazy=True)
    kept = node.settings.cache_dir / "indexes" / record.index_digest.partition(":")[2]
    # What a file system leaves of a file that was renamed and not synced.
    kept.write_bytes(b"")
    node.snapshotter = node.start_snapshotter()
    lower = lower_of(node.call("Mounts", key="c1"))
    assert checksums_outside([lower / "top"]) == [digest(b"t")[7:]]


def test_deep_directories_are_removed(node: Node) -> None:
    (mount,) = node.call("Prepare", key="a").mounts
    outside(
        """
import os, sys
os.chdir(sys.argv[1])
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
""",
        mount.source,
    )
    node.call("Remove", key="a")
    wait_for(lambda: not directories(node) and not list((node.root / "removed").iterdir()))


def test_one_snapshotter_works_in_a_folder(node: Node) -> None:
    options = ["--address", node.base / "second.sock", "--root", node.root]
    done = bootseer(node.settings, "snapshotter", *options)
    assert done.returncode == 19
    assert "another snapshotter" in done.stderr


def test_only_its_user_may_ask_it(node: Node) -> None:
    assert (node.base / "snapshotter.sock").stat().st_mode & 0o777 == 0o600


def test_systemd_hears_that_it_is_ready(tmp_path: Path) -> None:
    skip_unless_root()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0bootseer-test-" + tmp_path.name)
        receiver.settimeout(30)
        command = [sys.executable, "-m", "bootseer", "--store", tmp_path / "store"]
        command += ["--cache-dir", tmp_path / "cache", "--run-dir", tmp_path / "run"]
        command += ["snapshotter", "--address", tmp_path / "s", "--root", tmp_path / "root"]
        process = subprocess.Popen(
            [str(argument) for argument in command],
            cwd=REPOSITORY,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": f"@bootseer-test-{tmp_path.name}"},
        )
        try:
            assert receiver.recv(100) == b"READY=1"
            process.terminate()
            assert receiver.recv(100) == b"STOPPING=1"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


def test_without_root_the_command_says_so_and_makes_nothing(tmp_path: Path) -> None:
    skip_unless_root()
    code = """
import os, sys
import bootseer.cli.snapshotter_commands, bootseer.prefetch.snapshotter.process
import bootseer.prefetch.snapshotter.core
from bootseer.cli import main
os.setuid(65534)
main(["snapshotter", "--root", sys.argv[1]])
"""
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "root"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 18
    assert "needs root" in done.stderr
    assert not (tmp_path / "root").exists()


def test_without_grpc_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["grpc"] = None
from bootseer.cli import main
main(["snapshotter", "--root", sys.argv[1]])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "root"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 18
    assert "bootseer[containerd]" in done.stderr
    assert not (tmp_path / "root").exists()
