"""The process that publishes what a start leaves behind."""

import os
from pathlib import Path

import pytest

from bootseer.prefetch.publish import publishing
from bootseer.prefetch.publish.publishing import start_image_publisher
from testbed.mounts.image_mounts import outside, settings_at

NICENESS_OF_A_JOB = """
import os, sys
from pathlib import Path
from bootseer.prefetch.publish import publish_image, publishing
publish_image.publish_node_image = lambda *arguments: print(os.getpriority(os.PRIO_PROCESS, 0))
sys.exit(publishing.main(Path(sys.argv[1])))
"""


def test_it_gives_way_to_the_job_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        publishing, "spawn", lambda module, arguments, *rest, **options: started.append(arguments)
    )
    start_image_publisher(settings_at(tmp_path), "sha256:" + "7" * 64)
    ((folder,),) = started
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(outside(NICENESS_OF_A_JOB, folder)) == min(19, own + 15)
    assert not Path(folder).exists()
