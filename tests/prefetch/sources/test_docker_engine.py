"""Images in a real Docker engine: a running one, or one started for the test."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import requests
from docker.client import DockerClient
from docker.errors import DockerException, ImageNotFound

from bootseer.errors import NotFoundError, UnavailableError
from bootseer.prefetch.index.catalogue import load_tree
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.sources import open_source
from bootseer.store import open_store
from testbed.images.building import NASTY, run_tool, write_layout
from testbed.needs import MissingError
from testbed.waiting import wait_started

_START_S = 30


def _answers(url: str) -> bool:
    with warnings.catch_warnings():
        # The SDK does not close a socket that it could not connect.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = DockerClient(base_url=url, timeout=5)
        except (DockerException, requests.RequestException):
            return False
    with closing(client):
        return bool(client.ping())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an engine."""
    if "DOCKER_HOST" in os.environ or Path("/var/run/docker.sock").exists():
        url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if _answers(url):
            yield url
            return
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        raise MissingError(
            "no Docker engine runs here, and there is no dockerd that root could start"
        )
    root = tmp_path_factory.mktemp("dockerd")
    url = f"unix://{root}/docker.sock"
    options = {
        "--host": url,
        "--data-root": root / "data",
        "--exec-root": root / "exec",
        "--pidfile": root / "pid",
        "--storage-driver": "vfs",
        "--bridge": "none",
        "--iptables": "false",
        "--ip6tables": "false",
    }
    command = ["dockerd", *(f"{option}={value}" for option, value in options.items())]
    with (root / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_started(
            daemon,
            lambda: (root / "docker.sock").exists() and _answers(url),
            lambda: str((root / "log").read_text(errors="replace").splitlines()[-1:]),
            timeout_s=_START_S,
            error=MissingError,
        )
        yield url
    finally:
        daemon.terminate()
        try:
            daemon.wait(_START_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(60)


def test_an_image_in_the_engine(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine)
    name = "bootseer-test/nasty:v1"
    layout = tmp_path / "layout"
    # An engine refuses a layer that names a path twice.
    layers = [list({member.name: member for member in layer}.values()) for layer in NASTY]
    write_layout(layout, layers, compression="gzip", tag="v1", run={"Cmd": ["tool"]})
    archive = tmp_path / "image.tar"
    run_tool("skopeo", "copy", f"oci:{layout}:v1", f"docker-archive:{archive}:{name}")
    work = tmp_path / "work"
    with (
        closing(DockerClient(base_url=engine)) as client,
        open_store(str(tmp_path / "store")) as store,
    ):
        try:
            client.images.load(archive.read_bytes())
            with open_source(str(layout), work) as source:
                direct = index_image(source, store, work)
            with open_source(f"docker://{name}", work) as source:
                assert source.reference == name
                # If this process were killed now, nothing would stay.
                assert list(work.iterdir()) == []
                record = index_image(source, store, work)
        finally:
            with suppress(ImageNotFound):
                client.images.remove(name, force=True)
        assert list(work.iterdir()) == []
        assert record.reference == name
        assert record.config.cmd == ("tool",)
        assert record.layers == direct.layers
        assert record.index_digest == direct.index_digest
        assert load_tree(store, record, tmp_path / "cache").resolve(b"bin/tool") is not None


def test_an_image_that_the_engine_lacks(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine)
    with pytest.raises(NotFoundError, match="docker pull"):
        open_source("docker://bootseer-test/absent:v1", tmp_path / "work")
    with pytest.raises((NotFoundError, UnavailableError)):
        open_source("docker://NOT A NAME", tmp_path / "work")
