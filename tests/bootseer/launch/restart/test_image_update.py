"""A new image after one that lingers: only the image stage runs, and fetches only new layers."""

import io
import json
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from testbed.images.building import LayoutBuilder, Member, digest, tar_of
from testbed.node import Node, attribute
from testbed.servers.faulty_relay import FaultyRelay
from testbed.servers.registry import Registry
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import IMAGE_PATH, Image

pytestmark = pytest.mark.needs("mount", "fuse")


class _Tag:
    """Tag in a real registry, to which images with more and more layers are pushed."""

    def __init__(self, registry: Registry, relay: FaultyRelay, folder: Path, base: Image) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(base.root, ".")
        self._registry, self._relay, self._folder = registry, relay, folder
        self._layers = [buffer.getvalue()]
        self._repository = f"team/r{secrets.token_hex(6)}"
        self.source = ""

    def push(self, version: str, tag: str = "train") -> int:
        """Push the image with one more layer; return the layer's size."""
        top = tar_of(
            [
                Member("version", data=version.encode()),
                Member("new", data=b"n" * 300_000),
                Member("env", "d"),
            ]
        )
        self._layers.append(top)
        layout = LayoutBuilder(self._folder / version)
        layout.add_image(self._layers, tag="train", run={"Env": [f"PATH={IMAGE_PATH}"]})
        self._registry.push_layout(layout.directory, "train", f"{self._repository}:{tag}")
        self.source = f"registry://{self._relay.host}/{self._repository}:{tag}"
        return len(top)

    def fetched_bytes(self) -> int:
        """Return the bytes of layers that were requested since the last call."""
        sizes = {digest(layer): len(layer) for layer in self._layers}
        seen, self._relay.seen = self._relay.seen, []
        names = [one.path.rpartition("/")[2] for one in seen if one.method == "GET"]
        return sum(sizes.get(name, 0) for name in names)


def _start(node: Node, tag: _Tag) -> tuple[str, str, str, int]:
    """Return the output, how the stages were done, and the bytes of layers that were fetched."""
    checkpoint = f"{(node.base.parent / 'ckpt').as_uri()}:/ckpt"
    options = ("--image", tag.source, "--checkpoint", checkpoint, "--linger", "10m")
    done = node.run("run", *options, "--", "cat", "/version")
    assert done.returncode == 0, done.stderr
    spans = node.spans()
    image, mounted = (attribute(spans[one], "bootseer.how") for one in ("image", "checkpoint"))
    return done.stdout, image, mounted, tag.fetched_bytes()


def _served(node: Node) -> list[str]:
    command = [sys.executable, "-m", "bootseer", "status", "--json"]
    text = subprocess.run(command, env=node.environment, check=True, capture_output=True).stdout
    return [one["what"] for one in json.loads(text)["served"] if one["kind"] == "container"]


@pytest.mark.needs("mount", "fuse")
def test_a_new_layer_under_the_same_tag_and_another(
    node: Node, shell_image: Image, registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    tag = _Tag(registry, relay, tmp_path / "images", shell_image)
    tag.push("one")
    text, *how, first_bytes = _start(node, tag)
    assert (text, how) == ("one", ["mounted", "mounted"])
    assert first_bytes > 1_000_000
    assert _start(node, tag) == ("one", "live", "live", 0)
    size = tag.push("two")
    assert _start(node, tag) == ("two", "changed", "live", size)
    # What the tag named before does not stay.
    wait_for(lambda: len(_served(node)) == 1, "the end of what served the old one")
    assert _start(node, tag) == ("two", "live", "live", 0)
    size = tag.push("three", "next")
    assert _start(node, tag) == ("three", "changed", "live", size)
    options = ("--image", tag.source, "--linger", "off", "--", "cat", "/version")
    assert node.run("run", *options).stdout == "three"
    node.wait_clean()


@pytest.mark.needs("mount", "fuse")
def test_an_environment_belongs_to_its_image(
    node: Node, shell_image: Image, registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    """The environment stays mounted with the same image, and is set up once more in a new one."""
    tag = _Tag(registry, relay, tmp_path / "images", shell_image)
    setup = ("--setup", "cat /version > /env/version", "--target", "/env")

    def start() -> tuple[str, object, object]:
        command = ("--linger", "10m", "--", "cat", "/env/version")
        done = node.run("run", "--image", tag.source, *setup, *command)
        assert done.returncode == 0, done.stderr
        spans = node.spans()
        image, environment = (
            attribute(spans[one], "bootseer.how") for one in ("image", "environment")
        )
        return done.stdout, image, environment

    tag.push("one")
    assert start() == ("one", "mounted", "captured")
    # As on another node, which has no such files yet.
    assert start() == ("one", "live", "restored")
    assert start() == ("one", "live", "live")
    tag.push("two")
    assert start() == ("two", "changed", "captured")
    node.run("run", "--image", tag.source, "--linger", "off", "--", "cat", "/version")
    node.wait_clean()
