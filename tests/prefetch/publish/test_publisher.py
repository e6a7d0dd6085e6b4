"""The process that publishes a start's results."""

import os
from pathlib import Path

import pytest

from bootseer.prefetch.publish.publishing import wait_published
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import mounted, run_program, settings_at

# The publisher begins as a fork of this program.
NICENESS_OF_A_JOB = """
import os, sys
from pathlib import Path
from bootseer.prefetch.publish import publish_image, publishing
from testbed.mounts.image_mounts import settings_at
settings = settings_at(Path(sys.argv[1]))
def publish(*arguments):
    (settings.run_dir / "niceness").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
publish_image.publish_node_image = publish
publishing.start_image_publisher(settings, "sha256:" + "7" * 64)
assert publishing.wait_published(settings, 30)
assert not list((settings.run_dir / "services").iterdir())
print((settings.run_dir / "niceness").read_text())
"""


def test_it_gives_way_to_the_job_beside_it(tmp_path: Path) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(run_program(NICENESS_OF_A_JOB, tmp_path)) == min(19, own + 15)


@pytest.mark.needs("fuse")
def test_a_pulled_image_is_published_when_its_start_is_over(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [[Member("a", data=b"x" * 5000)]], tag="v1")
    settings = settings_at(tmp_path)
    with mounted(settings, f"oci:{layout.directory}:v1", tmp_path / "mnt") as image:
        assert image.status()["record"] == "recording"
        assert not wait_published(settings, 0)
        run_program("import sys; open(sys.argv[1]).read()", image.directory / "a")
        assert not (tmp_path / "store/layers").exists()
        image.ready()
        assert wait_published(settings, 30)
        assert list((tmp_path / "store/layers").iterdir())
