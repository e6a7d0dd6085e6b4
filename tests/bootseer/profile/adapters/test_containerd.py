"""What containerd knows of a start: a real one runs a container in this test."""

import contextlib
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.profile.adapters.containerd import parse_containerd
from bootseer.profile.adapters.placing import Placement
from bootseer.timeline.otlp import START, Stage, Value
from testbed.containers.containerd_images import add_image, layers
from testbed.images.building import Layout
from testbed.needs import MissingError
from testbed.waiting import wait_for
from tests.bootseer.profile.adapters.conftest import Start, path_of

_NS = 10**9
_CONFIG = """
version = 2
root = "{base}/root"
state = "{base}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.internal.v1.restart",
  "io.containerd.internal.v1.tracing", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{base}/sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{base}/opt"
"""


@contextlib.contextmanager
def _containerd(base: Path) -> Iterator[tuple[str, str, str]]:
    """A containerd with folders of its own; how `ctr` speaks to it."""
    base.mkdir()
    (base / "config.toml").write_text(_CONFIG.format(base=base))
    with (base / "log").open("wb") as log:
        command = ["containerd", "--config", str(base / "config.toml")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    ctr = "ctr", "--address", f"{base}/sock"
    try:
        wait_for(
            lambda: subprocess.run([*ctr, "version"], capture_output=True).returncode == 0,
            "containerd",
        )
        yield ctr
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.timeout(200)
@pytest.mark.needs("root", "mount")
def test_real_events_of_containerd(tmp_path: Path, a_start: Callable[..., Start]) -> None:
    if any(shutil.which(name) is None for name in ("containerd", "ctr", "runc")):
        raise MissingError("needs containerd, ctr and runc")
    layout = Layout(tmp_path / "layout")
    add_image(layout, layers("t"), "example.com/t:1")
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        tar.add(layout.directory, arcname="")
    said = tmp_path / "events"
    with _containerd(tmp_path / "c") as ctr, said.open("wb") as file:
        events = subprocess.Popen([*ctr, "events"], stdout=file)
        try:
            # It has begun to listen when it hears of something.
            def heard() -> bool:
                subprocess.run([*ctr, "namespaces", "label", "default", "a=b"], timeout=30)
                return said.stat().st_size > 0

            subprocess.run([*ctr, "namespaces", "create", "default"], timeout=30)
            wait_for(heard, "the first event")
            image = ["image", "import", "--base-name", "example.com/t", str(tmp_path / "image.tar")]
            subprocess.run([*ctr, *image], check=True, timeout=60)
            listed = subprocess.run([*ctr, "image", "list", "-q"], capture_output=True, text=True)
            run = [
                "run",
                "--rm",
                "--net-host",
                listed.stdout.split()[0],
                "train",
                "sh",
                "-c",
                "true",
            ]
            subprocess.run([*ctr, *run], check=True, timeout=60)
            wait_for(lambda: b"/containers/delete" in said.read_bytes(), "the last event")
        finally:
            events.terminate()
            events.wait(10)
    known = parse_containerd(said.read_bytes())
    assert [one.name for one in known] == ["image unpack", "container create", "container start"]
    (began,) = [one.end_ns for one in known if one.name == "container start"]
    assert began is not None
    start = a_start(began / 1e9 + 0.5, nodes=["n1"]).explained(containerd=known)
    names = [name for name, _ in path_of(start) if not name.startswith("before")]
    assert names[:4] == ["image unpack", "container create", "container start", "scheduling"]
    assert start.analysis.before_s == pytest.approx((began - (known[0].begin_ns or 0)) / 1e9 + 0.5)


def test_a_container_that_started_long_after_its_image_was_mounted_is_placed() -> None:
    """The mount is noted by the snapshotter, within the pull."""

    def stage(name: str, begin_s: int, end_s: int) -> Stage:
        resource: dict[str, Value] = {"host.name": "n1", "bootseer.rank": 0}
        return Stage(name, "t", name, "", begin_s * _NS, end_s * _NS, resource=resource)

    found = parse_containerd(
        b'1970-01-01 00:00:40.0 +0000 UTC k8s.io /containers/create {"id":"c","image":"i"}\n'
        b'1970-01-01 00:00:41.0 +0000 UTC k8s.io /tasks/create {"container_id":"c"}\n'
        b'1970-01-01 00:00:42.0 +0000 UTC k8s.io /tasks/start {"container_id":"c"}\n'
    )
    others = Placement({"containerd": found})
    placed = others.of([stage("image mount", 20, 21), stage(START, 42, 50)])
    assert [one.name for one in placed] == ["container create", "container start"]
