"""Pods over lazily served images, as a kubelet starts them: CRI's sandboxes and containers."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.containers.containerd_images import layers, shell_layer
from tests.support.containers.containerd_node import Node
from tests.support.images.building import Layout, Member, tar_of
from tests.support.mounts.image_mounts import index
from tests.support.servers.faulty_relay import FaultyRelay
from tests.support.servers.registry import running_registry
from tests.support.waiting import wait_for


def test_pods_start_and_end(tmp_path: Path) -> None:
    images: dict[str, tuple[list[Sequence[Member]], dict[str, object]]] = {
        "pause": ([shell_layer()], {"Entrypoint": ["/usr/bin/sleep", "1000"]}),
        # CRI mounts the image once more to fill its volumes.
        "trainer": (layers("trainer"), {"Cmd": ["/bin/sh"], "Volumes": {"/opt": {}}}),
    }
    with (
        running_registry(tmp_path / "registry") as registry,
        FaultyRelay(registry.host) as relay,
        Node(pause_image=f"{relay.host}/pause:1") as node,
    ):
        for name, (contents, run) in images.items():
            layout = Layout(tmp_path / name)
            layout.add_image([tar_of(members) for members in contents], run=run)
            registry.push_layout(layout.directory, "latest", f"{name}:1")
            index(node.settings, layout.directory, name)
            node.pull(f"{relay.host}/{name}:1")
        image = f"{relay.host}/trainer:1"
        asked = relay.count(r"GET /v2/.*/blobs/")
        with (
            node.run_pod("first", image, "/usr/bin/sleep", "1000") as first,
            node.run_pod("second", image, "/usr/bin/sleep", "1000") as second,
        ):
            assert len(node.trees()) == len(images)
            assert first.execute("/bin/sh", "-c", "echo mine > /opt/top; cat /opt/top") == "mine\n"
            assert second.execute("/usr/bin/cat", "/opt/top") == "top of trainer\n"
            assert second.execute("/usr/bin/ls", "/opt") == "base\ntop\ntrainer\n"
        assert relay.count(r"GET /v2/.*/blobs/") == asked
        wait_for(lambda: not node.trees())
