"""A node for each test, and what needs privileges."""

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
    """A fresh node with a store of its own."""
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as made:
        yield made


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A NameNode that accepts and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"hdfs://127.0.0.1:{server.getsockname()[1]}/ckpt"


@dataclass
class Image:
    """An OCI layout that is rebuilt under the same tag."""

    directory: Path
    root: Path
    """Its root file system, to change."""

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
    """A real, small root file system with Python; not to be changed."""
    root = python_root(tmp_path_factory.mktemp("image") / "root")
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nworker:x:1000:1001::/home/worker:/bin/sh\n"
    )
    return root


@pytest.fixture(scope="session")
def image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Runs as an ordinary user, in a folder and with variables of its own; not to be changed."""
    require("mount", "fuse")
    made = Image(tmp_path_factory.mktemp("layout") / "img", image_root)
    made.build(User="worker", WorkingDir="/job", Env=["FROM_IMAGE=yes", f"PATH={IMAGE_PATH}"])
    return made


@pytest.fixture(scope="session")
def shell_image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The same without Python, which makes a pull much cheaper; not to be changed."""
    require("mount", "fuse")
    base = tmp_path_factory.mktemp("shell")
    without = shutil.ignore_patterns("python3*", "libpython3*")
    shutil.copytree(image_root, base / "root", symlinks=True, ignore=without)
    made = Image(base / "img", base / "root")
    made.build(User="worker", WorkingDir="/job", Env=["FROM_IMAGE=yes", f"PATH={IMAGE_PATH}"])
    return made


@pytest.fixture(scope="session")
def published(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `image`, published by its first start; not to be changed."""
    base = tmp_path_factory.mktemp("published")
    with node_at(base / "node", (base / "store").as_uri()) as node:
        done = node.run("run", "--image", image.source, "--", "sh", "-c", ":")
        assert done.returncode == 0, done.stderr
        node.wait_clean()
    return base / "store"


@pytest.fixture
def known_image(image: Image, published: Path, tmp_path: Path) -> Image:
    """`image`, and the test's own store has it, as somebody else has started it before."""
    subprocess.run(["cp", "-a", published, tmp_path / "store"], check=True, timeout=60)
    return image
