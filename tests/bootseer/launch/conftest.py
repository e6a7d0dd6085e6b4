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
from testbed.needs import require
from testbed.node import Node, node_at
from tests.support.made_once import made_once

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
def image_root(tmp_path_factory: pytest.TempPathFactory, small_root: Path) -> Path:
    """Return a real, small root file system with Python and a user; not to be changed."""

    def make(root: Path) -> None:
        shutil.copytree(small_root, root, symlinks=True)
        (root / "etc/passwd").write_text(
            "root:x:0:0::/root:/bin/sh\nworker:x:1000:1001::/home/worker:/bin/sh\n"
        )

    return made_once(tmp_path_factory, "image-root", make)


@pytest.fixture(scope="session")
def image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return an image that runs as an ordinary user, with a folder and variables of its own.

    Not to be changed.
    """
    return _image(tmp_path_factory, "image", image_root)


def _image(factory: pytest.TempPathFactory, name: str, root: Path) -> Image:
    require("mount", "fuse")
    variables = ["FROM_IMAGE=yes", f"PATH={IMAGE_PATH}"]

    def make(folder: Path) -> None:
        Image(folder, root).build(User="worker", WorkingDir="/job", Env=variables)

    return Image(made_once(factory, name, make), root)


@pytest.fixture(scope="session")
def shell_image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return the image without Python, which makes a pull much cheaper; not to be changed."""

    def make(root: Path) -> None:
        without = shutil.ignore_patterns("python3*", "libpython3*")
        shutil.copytree(image_root, root, symlinks=True, ignore=without)

    return _image(tmp_path_factory, "shell-image", made_once(tmp_path_factory, "shell-root", make))


@pytest.fixture(scope="session")
def published(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with `image`, published by its first start; not to be changed."""

    def make(base: Path) -> None:
        with node_at(base / "node", (base / "store").as_uri()) as node:
            done = node.run("run", "--image", image.source, "--", "sh", "-c", ":")
            assert done.returncode == 0, done.stderr
            node.wait_clean()

    return made_once(tmp_path_factory, "published", make) / "store"


@pytest.fixture
def known_image(image: Image, published: Path, tmp_path: Path) -> Image:
    """Return `image`; the test's own store has it, as after a start of another node."""
    subprocess.run(["cp", "-a", published, tmp_path / "store"], check=True, timeout=60)
    return image
