"""Node of each launch test, and images, which need privileges."""

import io
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.images.building import LayoutBuilder
from testbed.images.rootfs import python_root
from testbed.needs import require
from testbed.node import Node, node_at

IMAGE_PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Return a new node with a store of its own."""
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as made:
        yield made


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Yield the URL of a NameNode that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"hdfs://127.0.0.1:{server.getsockname()[1]}/ckpt"


@dataclass
class Image:
    """OCI layout that is rebuilt under the same tag."""

    directory: Path
    root: Path
    """Root file system of the image, to change."""

    @property
    def source(self) -> str:
        return f"oci:{self.directory}:train"

    def build(self, **run: object) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(self.root, ".")
        layout = LayoutBuilder(self.directory)
        layout.add_image([buffer.getvalue()], tag="train", run=run)


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a real, small root file system with Python; not to be changed."""
    root = python_root(tmp_path_factory.mktemp("image") / "root")
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nworker:x:1000:1001::/home/worker:/bin/sh\n"
    )
    return root


@pytest.fixture(scope="session")
def image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return an image that runs as an ordinary user, with a folder and variables of its own.

    Not to be changed.
    """
    require("mount", "fuse")
    made = Image(tmp_path_factory.mktemp("layout") / "img", image_root)
    made.build(User="worker", WorkingDir="/job", Env=["FROM_IMAGE=yes", f"PATH={IMAGE_PATH}"])
    return made


@pytest.fixture(scope="session")
def shell_image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return the image without Python, which makes a pull much cheaper; not to be changed."""
    require("mount", "fuse")
    base = tmp_path_factory.mktemp("shell")
    without = shutil.ignore_patterns("python3*", "libpython3*")
    shutil.copytree(image_root, base / "root", symlinks=True, ignore=without)
    made = Image(base / "img", base / "root")
    made.build(User="worker", WorkingDir="/job", Env=["FROM_IMAGE=yes", f"PATH={IMAGE_PATH}"])
    return made


@pytest.fixture(scope="session")
def published(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with `image`, published by its first start; not to be changed."""
    base = tmp_path_factory.mktemp("published")
    with node_at(base / "node", (base / "store").as_uri()) as node:
        done = node.run("run", "--image", image.source, "--", "sh", "-c", ":")
        assert done.returncode == 0, done.stderr
        node.wait_clean()
    return base / "store"


@pytest.fixture
def known_image(image: Image, published: Path, tmp_path: Path) -> Image:
    """Return `image`; the test's own store has it, as after a start of another node."""
    subprocess.run(["cp", "-a", published, tmp_path / "store"], check=True, timeout=60)
    return image
