"""Publication of pods' timelines by a node's daemons."""

import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace

from bootseer.errors import NotFoundError
from bootseer.kubernetes import pod_stages
from bootseer.kubernetes.pod_stages import ImageMountStages, pod_timeline, start_of_volume
from bootseer.prefetch.snapshotter.snapshot import ImageMount
from bootseer.report.sources import StoredTimelines
from bootseer.store import open_store
from testbed.mounts.image_mounts import settings_at
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import silent_url

__all__ = ["silent_url"]


def _attributes(number: int) -> dict[str, str]:
    return {
        "csi.storage.k8s.io/pod.name": f"llm-{number}",
        "csi.storage.k8s.io/pod.uid": f"pod-{number}",
        "job": "llm",
        "submission": "s",
        "rank": str(number),
    }


def test_pods_that_start_at_once_share_one_publishing_thread(
    tmp_path: Path, silent_url: str
) -> None:
    """A named fault: each volume had a thread and a connection, however long the store took."""
    slow = replace(settings_at(tmp_path), store_url=silent_url, publish_timelines=True)
    slow = replace(slow, deadline_s=0.5)
    quick = replace(settings_at(tmp_path), publish_timelines=True)
    for number in range(30):
        # The silent store holds the thread while all others queue up behind it.
        settings = slow if number == 0 else quick
        with pod_timeline(settings, start_of_volume(_attributes(number)), "volume") as timeline:
            assert timeline is not None
            timeline.note("environment", 10**18, 10**9)
        assert sum(one.name == "timeline" for one in threading.enumerate()) <= 1
    with open_store(quick.store_url) as store:
        wait_for(
            lambda: sum(len(one.files) for one in StoredTimelines(store).starts("llm")) == 29,
            "the timelines of all pods but the first",
        )


def test_containerd_is_asked_for_an_unknown_container_a_few_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named fault: it was asked 150 times for each pod's sandbox, and logged each as an error."""
    asked = []

    def container(address: Path, identity: str) -> NoReturn:
        asked.append(identity)
        raise NotFoundError(f"container {identity} is not known")

    monkeypatch.setattr(pod_stages, "container", container)
    stages = ImageMountStages(settings_at(tmp_path), tmp_path / "containerd.sock", 2.0)
    stages.start()
    stages.add(ImageMount("sandbox", tmp_path, 0, 0, is_live=False))
    over_s = time.monotonic() + 2.5
    wait_for(lambda: time.monotonic() > over_s, "the end of the time within which it is known")
    assert 1 < len(asked) <= 6
