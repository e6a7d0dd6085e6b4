"""`image index --to registry`: the pushed objects beside an image are a store to mount it from."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.images.building import NASTY, Member, run_tool, write_layout
from testbed.mounts.image_mounts import checksums_in_child, drop_cache, mounted, settings_at
from testbed.node import Node
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import Registry, htpasswd_auth, running_registry
from testbed.waiting import wait_for

USER, PASSWORD = "me", "s3cret-pass"
CONFIG = {"Cmd": ["/bin/tool"], "Env": ["A=1"]}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Registry that requires a login for everything."""
    root = tmp_path_factory.mktemp("registry")
    with running_registry(root, htpasswd_auth(root, USER, PASSWORD)) as running:
        yield running


def logged_in(base: Path, host: str, store: str = "") -> Node:
    """Return a node that has logged in to the registry by `docker login`."""
    login = {"auths": {host: {"auth": "bWU6czNjcmV0LXBhc3M="}}}
    places = {"DOCKER_CONFIG": str(base), "BOOTSEER_REGISTRY_HOSTS_DIR": str(base / "hosts")}
    node = Node(base, store, variables=places)
    (base / "config.json").write_text(json.dumps(login))
    return node


def said(node: Node, *words: str | Path, code: int = 0) -> str:
    """Run a command; return its output, or its error if `code` is not 0. Never with the
    password."""
    done = node.run("-vv", *words)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "s3cret" not in done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.needs("fuse")
def test_an_image_is_indexed_beside_itself_and_mounted_from_there(
    registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    big = [Member("big", data=os.urandom(3_000_000))]
    layout = write_layout(tmp_path / "l", [*NASTY, big], compression="gzip", tag="v1", run=CONFIG)
    registry.push_layout(layout.directory, "v1", "team/train:v1", f"{USER}:{PASSWORD}")
    where = f"{relay.host}/team/train:v1"

    first = logged_in(tmp_path / "first", relay.host)
    indexed = json.loads(
        said(first, "image", "index", f"registry://{where}", "--to", "registry", "--json")
    )
    assert indexed["layers_written"] == len(NASTY) + 1
    assert indexed["store"] == (f"oci://{relay.host}/team/train@{layout.manifests[0]['digest']}")

    # Another node knows only the image's name.
    second = logged_in(tmp_path / "second", relay.host, f"oci://{where}")
    again = json.loads(said(second, "image", "index", f"registry://{where}", "--json"))
    assert (again["index_digest"], again["layers_written"]) == (indexed["index_digest"], 0)
    relay.seen.clear()
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    said(second, "image", "mount", where, mountpoint)
    try:
        # The keys, the image's record, and the server's own requests.
        assert relay.count("") <= 12
        read = subprocess.run(
            ["timeout", "30", "cat", mountpoint / "big", mountpoint / "gone"],
            capture_output=True,
            check=True,
        )
        assert read.stdout == big[0].data + b"and back again"
    finally:
        said(second, "unmount", mountpoint)


@pytest.mark.needs("fuse")
def test_a_start_is_recorded_and_replayed_beside_the_image(
    registry: Registry,
    relay: FaultyRelay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trace, hot set and bundle are published by processes of their own, which log in
    themselves."""
    files = [Member("cold", data=os.urandom(2_000_000)), Member("hot", data=os.urandom(500_000))]
    layout = write_layout(tmp_path / "l", [files], tag="v1")
    where = registry.push_layout(layout.directory, "v1", "team/rec:v1", f"{USER}:{PASSWORD}")
    node = logged_in(tmp_path / "node", registry.host)
    indexed = json.loads(
        said(node, "image", "index", f"registry://{where}", "--to", "registry", "--json")
    )
    for name in ("HOME", "DOCKER_CONFIG", "BOOTSEER_REGISTRY_HOSTS_DIR"):
        monkeypatch.setenv(name, node.environment[name])
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    settings = settings_at(tmp_path, store_url=indexed["store"])
    with mounted(settings, where, tmp_path / "mnt") as image:
        checksums_in_child([image.directory / "hot"])
        image.ready()
        wait_for(lambda: image.status()["record"] == "published")
    drop_cache(settings)
    with mounted(settings, where, tmp_path / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        assert checksums_in_child([image.directory / "hot"]) == [
            hashlib.sha256(files[1].data).hexdigest()
        ]
        status = image.status()
        assert status["faults"]["fault_count"] == 0
        assert status["moved"]["fetched_bytes"] < 1_000_000


def test_other_tools_see_artifacts_of_the_image(registry: Registry, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l", NASTY[:1], tag="v1")
    where = registry.push_layout(layout.directory, "v1", "team/seen:v1", f"{USER}:{PASSWORD}")
    node = logged_in(tmp_path / "node", registry.host)
    said(node, "image", "index", f"registry://{where}", "--to", "registry")
    tag = layout.manifests[0]["digest"].replace(":", "-")
    shown = subprocess.run(
        [
            *("skopeo", "inspect", "--raw", "--tls-verify=false", "--creds", f"{USER}:{PASSWORD}"),
            f"docker://{registry.host}/team/seen:{tag}",
        ],
        capture_output=True,
        check=True,
        timeout=60,
    )
    entries = json.loads(shown.stdout)["manifests"]
    assert {entry["artifactType"] for entry in entries} == {"application/vnd.bootseer.store.v1"}
    # The image itself is unchanged.
    run_tool(
        *("skopeo", "--insecure-policy", "copy", "--quiet", "--src-tls-verify=false"),
        *("--src-creds", f"{USER}:{PASSWORD}"),
        *(f"docker://{where}", f"oci:{tmp_path}/back:v1"),
    )


def test_only_images_of_registries_have_a_place_beside_them(tmp_path: Path) -> None:
    write_layout(tmp_path / "l", NASTY[:1], tag="v1")
    node = logged_in(tmp_path / "node", "r.io")
    refusal = said(node, "image", "index", f"oci:{tmp_path}/l:v1", "--to", "registry", code=2)
    assert "is not in a registry" in refusal


def test_a_login_that_may_not_push_is_refused_by_name(
    registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "l", NASTY[:1], tag="v1")
    registry.push_layout(layout.directory, "v1", "team/read:v1", f"{USER}:{PASSWORD}")
    relay.faults = [Fault("POST|PUT", 1000, 403)]
    node = logged_in(tmp_path / "node", relay.host)
    refusal = said(
        node,
        *("image", "index", f"registry://{relay.host}/team/read:v1", "--to", "registry"),
        code=12,
    )
    assert "docker login" in refusal
