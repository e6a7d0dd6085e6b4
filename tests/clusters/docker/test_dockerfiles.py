"""The Dockerfiles of docker/, built by buildah and run by runc as a container engine does.

The base image, `python:...-slim` on Docker's hub, is made here: a Debian with its own Python as a
virtual environment in /usr/local, where `pip` and `--prefix` work as in the official image.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.debian import NETWORK_FILES, make_system, network_variables
from testbed.needs import require
from testbed.paths import REPOSITORY

_PACKAGES = "ca-certificates,passwd,python3,python3-pip,python3-venv"


class Engine:
    """Buildah with its own storage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places = [f"--volume={path}:{path}:ro" for path in NETWORK_FILES if path.exists()]
        self._variables = [f"--env={name}={value}" for name, value in network_variables().items()]

    def run(self, *words: str | Path, deadline_s: float = 60) -> str:
        """Run a command of buildah and return its output. Raises: AssertionError."""
        options = ("--root", self._folder / "storage", "--runroot", self._folder / "run")
        done = subprocess.run(
            ["buildah", *options, "--storage-driver", "vfs", *words],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def container(self, image: str, *options: str) -> str:
        """Make a container of an image; return its name."""
        return self.run("from", "--pull-never", *options, image).split()[-1]

    def make_base(self, archive: Path, names: set[str]) -> None:
        """Make the images `names` of a Debian's archive."""
        container = self.container("scratch")
        self.run("add", "--quiet", container, archive, "/")
        self.run(
            "config",
            *self._variables,
            "--env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            container,
        )
        inside = ("run", "--isolation=chroot", container, "--")
        self.run(*inside, "python3", "-m", "venv", "/usr/local")
        for name in names:
            self.run("commit", "--quiet", container, name)
        self.run("rm", container)

    def build(self, dockerfile: str, image: str) -> None:
        """Build a Dockerfile of this checkout."""
        network = ("--network=host", "--isolation=chroot", "--pull-never", *self._places)
        words = ("--file", REPOSITORY / dockerfile, "--tag", image, REPOSITORY)
        self.run("bud", *network, *words, deadline_s=300)

    def start(self, image: str, store: Path, *words: str) -> str:
        """Run the image's own command, or `words`, with /dev/fuse and CAP_SYS_ADMIN."""
        container = self.container(image, "--device=/dev/fuse", "--cap-add=SYS_ADMIN")
        try:
            inspected = json.loads(self.run("inspect", container))["OCIv1"]["config"]
            command = words or (*inspected.get("Entrypoint", ()), *inspected["Cmd"])
            options = ("--isolation=oci", "--network=host", f"--volume={store}:/store")
            environment = ("--env=BOOTSEER_STORE=/store",)
            inside = (*options, *self._places, *environment, container, "--", *command)
            return self.run("run", *inside, deadline_s=180)
        finally:
            self.run("rm", container)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    require("root", "mount", "fuse", programs=["buildah", "mmdebstrap", "runc"])
    folder = tmp_path_factory.mktemp("engine")
    archive = folder / "base.tar"
    make_system("trixie", archive, _PACKAGES, deadline_s=300)
    made = Engine(folder)
    texts = [path.read_text() for path in (REPOSITORY / "docker").rglob("Dockerfile")]
    names = set(re.findall(r"^FROM (\S+)", "\n".join(texts), re.MULTILINE))
    made.make_base(archive, {f"docker.io/library/{name}" for name in names})
    yield made
    shutil.rmtree(folder, ignore_errors=True)


def test_the_example_s_second_start_restores_what_the_first_installed(
    engine: Engine, tmp_path: Path
) -> None:
    engine.build("docker/Dockerfile", "trainer")
    first = engine.start("trainer", tmp_path)
    assert "no snapshot" in first
    assert "stored snapshot" in first
    assert "first step: 0.0" in first
    second = engine.start("trainer", tmp_path)
    assert "restored snapshot" in second
    assert "Collecting" not in second
    assert "first step: 0.0" in second


def test_the_image_of_the_nodes_has_all_that_runs_there(engine: Engine, tmp_path: Path) -> None:
    engine.build("docker/node/Dockerfile", "bootseer-node")
    assert "Usage: bootseer" in engine.start("bootseer-node", tmp_path)
    for command in ("snapshotter", "kubernetes csi", "kubernetes spawner", "kubernetes webhook"):
        shown = engine.start("bootseer-node", tmp_path, "bootseer", *command.split(), "--help")
        assert f"Usage: bootseer {command}" in shown
    assert "uid=65532" in engine.start("bootseer-node", tmp_path, "id")
