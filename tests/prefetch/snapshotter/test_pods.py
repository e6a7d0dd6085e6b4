"""Pods over lazily served images as a kubelet starts them: CRI's sandboxes and containers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bootseer.report.sources import StoredTimelines
from bootseer.store import open_store
from bootseer.timeline.otlp import Stage
from testbed.containers.containerd_images import layers, shell_layer
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import LayoutBuilder, Member, tar_of
from testbed.mounts.image_mounts import index
from testbed.servers.faulty_relay import FaultyRelay
from testbed.servers.registry import running_registry
from testbed.waiting import wait_for

_SLEEP = ("/usr/bin/sleep", "1000")
_IMAGES: dict[str, tuple[list[Sequence[Member]], dict[str, object]]] = {
    "pause": ([shell_layer()], {"Entrypoint": list(_SLEEP)}),
    # CRI mounts the image once more to fill its volumes.
    "trainer": (layers("trainer"), {"Cmd": ["/bin/sh"], "Volumes": {"/opt": {}}}),
}


@contextmanager
def _node_with_images(folder: Path) -> Iterator[tuple[ContainerdNode, FaultyRelay]]:
    """Yield a node that has pulled the images through a relay."""
    with (
        running_registry(folder / "registry") as registry,
        FaultyRelay(registry.host) as relay,
        ContainerdNode(pause_image=f"{relay.host}/pause:1") as node,
    ):
        for name, (contents, run) in _IMAGES.items():
            layout = LayoutBuilder(folder / name)
            layout.add_image([tar_of(members) for members in contents], run=run)
            registry.push_layout(layout.directory, "latest", f"{name}:1")
            index(node.settings, layout.directory, name)
            node.pull(f"{relay.host}/{name}:1")
        yield node, relay


def test_pods_start_and_end(tmp_path: Path) -> None:
    with _node_with_images(tmp_path) as (node, relay):
        image = f"{relay.host}/trainer:1"
        asked = relay.count(r"GET /v2/.*/blobs/")
        with (
            node.run_pod("first", image, *_SLEEP) as first,
            node.run_pod("second", image, *_SLEEP) as second,
        ):
            assert len(node.trees()) == len(_IMAGES)
            assert first.execute("/bin/sh", "-c", "echo mine > /opt/top; cat /opt/top") == "mine\n"
            assert second.execute("/usr/bin/cat", "/opt/top") == "top of trainer\n"
            assert second.execute("/usr/bin/ls", "/opt") == "base\ntop\ntrainer\n"
        assert relay.count(r"GET /v2/.*/blobs/") == asked
        node.wait_for_unmounts()


def test_the_mount_of_an_image_is_a_stage_of_the_pods_over_it(tmp_path: Path) -> None:
    told = {"BOOTSEER_JOB": "train", "BOOTSEER_SUBMISSION": "s1", "RANK": "3", "TOKEN": "secret-1"}
    with _node_with_images(tmp_path) as (node, relay):
        image = f"{relay.host}/trainer:1"
        with (
            node.run_pod("first", image, *_SLEEP, variables=told),
            node.run_pod("again", image, *_SLEEP, restart_count=1),
            node.run_pod("second", image, *_SLEEP),
        ):
            first, second = _stage_of(node, "train", "s1"), _stage_of(node, "second", "second-uid")
        # A restarted container of a pod is no part of the start.
        with open_store(node.settings.store_url) as store:
            assert not StoredTimelines(store).starts("again")
        assert "secret-1" not in f"{first}{node.log()}"
        # The store has it: no later step would remove it here.
        wait_for(lambda: not list(node.settings.timeline_dir.iterdir()))
    assert (first.name, second.name) == ("image mount", "image mount")
    assert first.resource["k8s.pod.name"] == "first"
    assert first.resource["bootseer.rank"] == 3
    assert first.attributes == {"bootseer.how": "mounted", "bootseer.hit": False}
    assert second.attributes["bootseer.how"] == "live"
    assert first.end_ns is not None
    assert first.start_ns < first.end_ns < second.start_ns


def _stage_of(node: ContainerdNode, job: str, submission: str) -> Stage:
    """Return the only stage of a start as soon as the store has it."""
    with open_store(node.settings.store_url) as store:
        wait_for(lambda: StoredTimelines(store).starts(job), f"the timeline of {job}")
        (start,) = StoredTimelines(store).starts(job)
    assert start.submission == submission
    (stage,) = start.stages()
    return stage
