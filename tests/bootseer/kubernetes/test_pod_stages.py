"""Publication of pods' timelines by a node's daemons."""

import threading
from pathlib import Path

from msgspec.structs import replace

from bootseer.kubernetes.pod_stages import pod_timeline, start_of_volume
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
