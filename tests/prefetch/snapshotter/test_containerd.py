"""The snapshotter with a real containerd: images are pulled as a kubelet pulls them, and run.

docs/containerd.md describes each version of containerd with each client. BOOTSEER_TEST_CONTAINERD
names a folder with another containerd to run these tests with, as `make test-containerd-2` does.
"""

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.index.chains import chain_ids
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.service import live_mounts
from bootseer.store import open_store
from testbed.containers.containerd_images import add_image, layers, shell_layer
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import NASTY, LayoutBuilder, Member, digest, tar_of
from testbed.mounts.image_mounts import TIMEOUT_S, index, tree_in_child
from testbed.needs import MissingError
from testbed.servers.faulty_relay import FaultyRelay
from testbed.servers.registry import Registry, free_port, running_registry
from testbed.users import as_ordinary_user
from testbed.waiting import wait_for


@dataclass
class NodeAndRegistry:
    """Node, and a registry whose requests are recorded."""

    node: ContainerdNode
    registry: Registry
    relay: FaultyRelay
    folder: Path

    def push(self, name: str, contents: Sequence[Sequence[Member]]) -> str:
        """Push an image to the registry; return containerd's name for it."""
        layout = LayoutBuilder(self.folder / name)
        add_image(layout, contents, "latest")
        self.registry.push_layout(layout.directory, "latest", f"team/{name}:1")
        return f"{self.relay.host}/team/{name}:1"

    def index(self, name: str) -> ImageRecord:
        """Index the image that `push` has pushed."""
        return index(self.node.settings, self.folder / name, f"{name}:1")

    def pulled(self, name: str) -> set[int]:
        """Return the numbers of the layers of `name`, from 0, that were asked for.

        Manifest and configuration are not counted. A layer that containerd has from another image
        is not asked for again.
        """
        folder = self.folder / name
        (descriptor,) = json.loads((folder / "index.json").read_text())["manifests"]
        blob = folder / "blobs" / descriptor["digest"].replace(":", "/")
        wanted = [layer["digest"] for layer in json.loads(blob.read_text())["layers"]]
        seen = {seen.path for seen in self.relay.seen if seen.method == "GET"}
        blobs = f"/v2/team/{name}/blobs"
        return {number for number, layer in enumerate(wanted) if f"{blobs}/{layer}" in seen}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeAndRegistry]:
    folder = tmp_path_factory.mktemp("site")
    with (
        running_registry(folder / "registry") as registry,
        FaultyRelay(registry.host) as relay,
        ContainerdNode() as node,
    ):
        yield NodeAndRegistry(node, registry, relay, folder)


def chains_of(contents: Sequence[Sequence[Member]]) -> tuple[str, ...]:
    return chain_ids([digest(tar_of(members)) for members in contents])


def is_clean(node: ContainerdNode) -> bool:
    """Return whether no image or container has a mount, a server or files."""
    folders = [node.root / name for name in ("snapshots", "trees", "removed")]
    return not (
        node.trees()
        or any(True for _ in live_mounts(node.settings.run_dir))
        or any(path for folder in folders for path in folder.iterdir())
    )


def test_an_indexed_image_is_pulled_without_its_layers(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("indexed", layers("indexed"))
    record = site.index("indexed")
    node.pull(reference)
    assert site.pulled("indexed") == set()
    read = "cat /opt/top; ls /opt; sha256sum /usr/share/large"
    out = node.run(reference, "indexed", "sh", "-c", read)
    (large,) = (member.data for member in shell_layer() if member.name == "usr/share/large")
    names = "base\nindexed\ntop\n"
    assert out == f"top of indexed\n{names}{digest(large)[7:]}  /usr/share/large\n"
    assert site.pulled("indexed") == set()
    # After the removal only the record of reads is left.
    node.remove_image(reference)
    wait_for(lambda: is_clean(node))
    assert node.snapshots() == {}
    assert wait_published(node.settings, TIMEOUT_S)
    with open_store(node.settings.store_url) as store:
        assert hot_store.read_pointer(store, record.index_digest, "train") is not None


def test_a_later_start_replays_what_the_first_touched(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("replayed", layers("replayed"))
    record = site.index("replayed")
    node.pull(reference)
    node.run(reference, "first", "cat", "/opt/replayed")
    # The record is published when the server ends.
    wait_for(lambda: not list(live_mounts(node.settings.run_dir)))
    assert wait_published(node.settings, TIMEOUT_S)
    node.start(reference, "second", "sleep", "1000")
    try:
        ((state_dir, state),) = live_mounts(node.settings.run_dir)
        assert state.index_digest == record.index_digest
        # The bundle's header is fetched while the container starts.
        wait_for(lambda: node.status(state_dir)["prefetch"] is not None)
    finally:
        node.remove("second")


def test_trees_are_those_that_containerd_unpacks(site: NodeAndRegistry, tmp_path: Path) -> None:
    node = site.node
    # Without hard links into lower layers, which containerd's overlayfs refuses.
    contents = [[m for m in members if m.kind != "h" or members is NASTY[0]] for members in NASTY]
    reference = site.push("nasty", contents)
    site.index("nasty")
    node.pull(reference)
    assert site.pulled("nasty") == set()
    top = chains_of(contents)[-1]
    ours = view(node, "bootseer", top, tmp_path / "ours")
    node.ctr("images", "pull", "--plain-http", "--snapshotter", "overlayfs", reference)
    theirs = view(node, "overlayfs", top, tmp_path / "theirs")
    assert ours == theirs


def view(
    node: ContainerdNode, snapshotter: str, chain_id: str, directory: Path
) -> dict[bytes, object]:
    """Return the tree of a committed snapshot."""
    directory.mkdir()
    snapshots = ("snapshots", "--snapshotter", snapshotter)
    done = node.ctr(*snapshots, "view", "--target", directory, "viewed", chain_id)
    subprocess.run(shlex.split(done.stdout), check=True, timeout=TIMEOUT_S)
    try:
        # Unpacking one layer over another copies changed files: link counts shrink, and folders get
        # newer times. The tests of merging check that nothing else differs.
        return {
            path: (mode, owner, size, mtime if content else 0, device, target, xattrs, content)
            for path, (mode, owner, _, size, mtime, device, target, xattrs, content, _) in (
                tree_in_child(directory).items()
            )
        }
    finally:
        subprocess.run(["umount", directory], check=True, timeout=TIMEOUT_S)
        # containerd may have collected it, since nothing refers to it.
        node.ctr(*snapshots, "rm", "viewed", check=False)


def test_containers_of_one_image_write_apart(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("shared", layers("shared"))
    site.index("shared")
    node.pull(reference)
    names = ["writer-0", "writer-1", "writer-2"]
    starts = [
        node.start_ctr(
            *("run", "--detach", "--snapshotter", "bootseer", reference, name, "sleep", "1000")
        )
        for name in names
    ]
    for start in starts:
        _, err = start.communicate(timeout=TIMEOUT_S)
        assert start.returncode == 0, err
    try:
        # Those of other tests are removed after a while.
        wait_for(lambda: len(node.trees()) == 1)
        for name in names:
            node.execute(name, "sh", "-c", f"echo {name} > /opt/top; rm /opt/base")
        for name in names:
            assert node.execute(name, "cat", "/opt/top") == f"{name}\n"
        assert node.run(reference, "reader", "cat", "/opt/shared", "/opt/base") == "shared\nbase\n"
    finally:
        for name in names:
            node.remove(name)
    node.wait_for_unmounts()


def test_only_containers_see_what_is_served(site: NodeAndRegistry) -> None:
    """Containers with any user see it, also in a user namespace; users of the node do not."""
    node = site.node
    reference = site.push("closed", layers("closed"))
    site.index("closed")
    node.pull(reference)
    # The mode of the node's own folder must not be what keeps others out.
    node.base.chmod(0o711)
    try:
        mapped = ("--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")
        for name, options in (("root", ()), ("map", mapped)):
            read = ("sh", "-c", "cat /opt/top && cat /proc/self/uid_map")
            out = node.run(reference, f"closed-{name}", *read, options=options)
            assert out.startswith("top of closed\n"), name
            assert ("100000" in out) is (name == "map")
        node.start(reference, "closed", "sh", "-c", "echo secret > /written; sleep 1000")
        try:
            wait_for(lambda: node.command_succeeds("closed", "ls", "/written"))
            read = ("cat", "/opt/top", "/opt/closed")
            out = node.execute("closed", *read, user="65534:65534")
            assert out == "top of closed\nclosed\n"
            (tree,) = node.trees()
            (upper,) = (node.root / "snapshots").glob("*/fs/written")
            for path in (tree / "opt/top", upper, node.root / "trees", node.root / "snapshots"):
                assert path.exists()
                # stat fails where not even the folders above may be entered.
                done = subprocess.run(
                    [*as_ordinary_user(), "ls", path],
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                )
                assert "Permission denied" in done.stderr, done.stdout
        finally:
            node.remove("closed")
    finally:
        node.base.chmod(0o700)


def test_several_pulls_of_one_image_at_once(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("crowd", layers("crowd"))
    site.index("crowd")
    node.pull_at_once(reference, 4)
    assert site.pulled("crowd") == set()
    assert node.run(reference, "crowd", "cat", "/opt/crowd") == "crowd\n"


def test_only_layers_that_are_not_indexed_are_pulled(site: NodeAndRegistry) -> None:
    node = site.node
    base = layers("partial")[:2]
    top = [
        Member("opt/late", data=b"late\n"),
        Member("opt/.wh.partial"),
    ]
    site.push("base", base)
    site.index("base")
    reference = site.push("partial", [*base, top])
    node.pull(reference)
    assert site.pulled("partial") == {2}
    out = node.run(reference, "partial", "sh", "-c", "cat /opt/late; ls /opt")
    assert out == "late\ngone\nlate\n"
    node.remove_image(reference)
    node.wait_for_unmounts()


def test_an_image_that_is_not_indexed_is_pulled_whole(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("whole", layers("whole"))
    node.pull(reference)
    assert site.pulled("whole") >= {0, 3}
    assert node.run(reference, "whole", "cat", "/opt/top") == "top of whole\n"
    assert node.trees() == []


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_containers_run_on_without_the_snapshotter(
    site: NodeAndRegistry, sign: signal.Signals
) -> None:
    node = site.node
    name = f"survivor-{sign.name.lower()}"
    reference = site.push(name, layers(name))
    site.index(name)
    node.pull(reference)
    node.start(reference, name, "sleep", "1000")
    try:
        node.stop(node.snapshotter, sign)
        # Not read before, so the image's server has to fetch it.
        assert node.execute(name, "cat", f"/opt/{name}") == f"{name}\n"
        node.snapshotter = node.start_snapshotter()
        assert node.execute(name, "cat", "/opt/base") == "base\n"
        wait_for(lambda: node.run_succeeds(reference, f"{name}-new", "cat", "/opt/top"))
        assert len(node.trees()) == 1
    finally:
        node.remove(name)
    node.wait_for_unmounts()


def test_an_images_containers_start_again_after_its_server_died(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("orphan", layers("orphan"))
    site.index("orphan")
    node.pull(reference)
    node.start(reference, "orphan", "sleep", "1000")
    try:
        node.kill_image_servers()
        assert node.run(reference, "orphan-new", "cat", "/opt/orphan") == "orphan\n"
    finally:
        node.remove("orphan")


def test_images_outlive_a_restart_of_containerd(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("kept", layers("kept"))
    site.index("kept")
    node.pull(reference)
    node.stop(node.containerd)
    node.containerd = node.start_containerd()
    wait_for(lambda: reference in str(node.cri("ListImages")))
    assert node.run(reference, "kept", "cat", "/opt/kept") == "kept\n"
    assert site.pulled("kept") == set()


def test_pods_of_other_runtime_classes_start_without_a_snapshotter(site: NodeAndRegistry) -> None:
    """On a booting node, the snapshotter may run in a pod itself."""
    if site.node.is_version("1.6"):
        raise MissingError("containerd has a snapshotter for each runtime class from 1.7 on")
    reference = site.push("classed", layers("classed"))
    with ContainerdNode(runtime_class=True) as node:
        index(node.settings, site.folder / "classed", "classed:1")
        node.stop(node.containerd)
        node.stop(node.snapshotter)
        node.containerd = node.start_containerd()
        node.pull(reference)
        assert site.pulled("classed") == {0, 1, 2, 3}
        node.snapshotter = node.start_snapshotter()
        assert node.snapshots() == {}
        annotations = {"io.containerd.cri.runtime-handler": "bootseer"}
        # containerd waits a moment before it tries a socket again.
        wait_for(lambda: node.can_pull(reference, annotations))
        assert node.snapshots() != {}
        assert node.run(reference, "classed", "cat", "/opt/classed") == "classed\n"


def test_a_store_that_is_down_leaves_the_ordinary_pull(
    site: NodeAndRegistry, tmp_path: Path
) -> None:
    store_url = f"hdfs://127.0.0.1:{free_port()}/bootseer"
    reference = site.push("lonely", layers("lonely"))
    with ContainerdNode(store_url=store_url) as node:
        node.pull(reference)
        assert site.pulled("lonely") == {0, 1, 2, 3}
        assert node.run(reference, "lonely", "cat", "/opt/lonely") == "lonely\n"
        warnings = [line for line in node.log().splitlines() if "since the store fails" in line]
        assert len(warnings) == 1, node.log()


def test_containerds_own_pull_is_lazy_from_version_2(site: NodeAndRegistry) -> None:
    node = site.node
    reference = site.push("client", layers("client"))
    site.index("client")
    node.ctr("images", "pull", "--plain-http", "--snapshotter", "bootseer", reference)
    assert site.pulled("client") & {0, 3} == (set() if node.is_version("2") else {0, 3})
    assert node.run(reference, "client", "cat", "/opt/client") == "client\n"


def test_hostile_references_of_a_client_are_refused(site: NodeAndRegistry) -> None:
    node = site.node
    refusal_code = node.ctr(
        *("snapshots", "--snapshotter", "bootseer", "prepare", "hostile", "../../etc"), check=False
    )
    assert refusal_code.returncode != 0
    with pytest.raises(grpc.RpcError):
        node.call("Prepare", key="x", parent="../../etc")
