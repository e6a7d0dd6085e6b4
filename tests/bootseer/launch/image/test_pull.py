"""An image without an index: started from the pulled layers, published in the background."""

import io
import tarfile
from pathlib import Path

import pytest

from testbed.images.building import LayoutBuilder, Member, tar_of
from testbed.node import Node, attribute, node_at
from tests.bootseer.launch.conftest import IMAGE_PATH, Image

pytestmark = pytest.mark.needs("mount", "fuse")


def stored(store: Path) -> list[str]:
    return [path.name for path in (store / "images").glob("*")]


def test_a_setup_in_it_is_restored_once_it_is_published(
    node: Node, shell_image: Image, tmp_path: Path
) -> None:
    """The image's index is another one then, but the image is the same."""
    job = (
        *("--image", shell_image.source, "--setup", "echo set-up > env", "--target", "/job"),
        *("--", "cat", "env"),
    )
    first = node.run("run", *job)
    assert (first.returncode, first.stdout) == (0, "set-up\n"), first.stderr
    assert attribute(node.spans()["image"], "bootseer.from") == "node"
    assert attribute(node.spans()["environment"], "bootseer.hit") is False
    node.wait_clean()
    with node_at(tmp_path / "second", node.store) as second:
        done = second.run("run", *job)
        assert (done.returncode, done.stdout) == (0, "set-up\n"), done.stderr
        assert attribute(second.spans()["image"], "bootseer.from") == "store"
        assert attribute(second.spans()["environment"], "bootseer.hit") is True
        second.wait_clean()


def test_no_index_leaves_the_store_as_it_is(node: Node, shell_image: Image, tmp_path: Path) -> None:
    job = ("--image", shell_image.source, "--", "cat", "/etc/passwd")
    done = node.run("run", *job, variables={"BOOTSEER_AUTO_INDEX": "off"})
    assert (done.returncode, done.stdout) == (0, (shell_image.root / "etc/passwd").read_text())
    node.wait_clean()
    assert stored(tmp_path / "store") == []
    assert node.run("run", *job).returncode == 0
    node.wait_clean()
    assert stored(tmp_path / "store") == [f"{shell_image.directory.name}%3Atrain.json"]


def test_on_layers_that_the_store_has(node: Node, known_image: Image, tmp_path: Path) -> None:
    """The tree has fetched files of the base and local files of a new top layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(known_image.root, ".")
    layout = LayoutBuilder(tmp_path / "top" / "img")
    top = tar_of([Member("job/new", data=b"new" * 100_000), Member("etc/.wh.passwd")])
    run = {"WorkingDir": "/job", "Env": [f"PATH={IMAGE_PATH}"]}
    layout.add_image([buffer.getvalue(), top], tag="train", compression="zstd", run=run)
    code = "import decimal, os; print(len(open('new').read()), os.path.exists('/etc/passwd'))"
    job = ("--image", f"oci:{layout.directory}:train", "--", "python3", "-c", code)
    done = node.run("run", *job)
    assert (done.returncode, done.stdout) == (0, "300000 False\n"), done.stderr
    node.wait_clean()
    spans = node.spans()
    # Only the top layer was pulled; files of the base came when they were read.
    pulled = int(attribute(spans["image pull"], "bootseer.bytes"))
    assert pulled == sum(
        layer.stat().st_size
        for layer in layout.directory.rglob("blobs/sha256/*")
        if layer.stat().st_size < 10_000 and layer.read_bytes()[:2] == b"\x28\xb5"
    )
    assert int(attribute(spans["image served"], "bootseer.bytes")) > 0
    again = node.run("run", *job)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert attribute(node.spans()["image"], "bootseer.from") == "store"
    node.wait_clean()
