"""Blobs that the store has lost come from the registry while a job reads."""

import hashlib
import os
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.reading.registry import second_source
from bootseer.prefetch.sources import open_source
from bootseer.store import open_store
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import checksums_in_child, mounted, settings_at
from testbed.mounts.sweeping import sweep
from testbed.servers.registry import Registry


def test_only_names_of_registries_have_one(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    for name in ("train:v1", "library/train", "a/b/c:v1", "/train"):
        assert second_source(settings, name, "sha256:" + "00" * 32) is None
    for name in ("localhost/train", "127.0.0.1:5000/train:v1", "ghcr.io/a/b@sha256:00"):
        assert second_source(settings, name, "sha256:" + "00" * 32) is not None


@pytest.mark.parametrize("damage", ["gone", "damaged", "registry gone, too"])
@pytest.mark.needs("fuse")
def test_a_lost_layer_comes_from_the_registry(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-logins"))
    contents = {f"file-{number}": os.urandom(400_000) for number in range(3)}
    members = [Member(name, data=data) for name, data in contents.items()]
    layout = write_layout(tmp_path / "layout", [members], compression="gzip", tag="v1")
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    where = registry.push_layout(layout.directory, "v1", f"tests/{name}:v1")
    settings = settings_at(tmp_path)
    with (
        open_source(f"registry://{where}", tmp_path / "work") as source,
        open_store(settings.store_url) as store,
    ):
        record = index_image(source, store, tmp_path / "work")
    assert record.reference == where
    path = tmp_path / "store" / blob_key(record.layers[0].blob_digest)
    path.chmod(0o600)
    if damage == "damaged":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.unlink()
    if damage == "registry gone, too":
        # The tag does not exist any more.
        tags = registry.root.glob(f"**/tests/{name}/_manifests/tags/v1")
        for tag in list(tags):
            tag.rename(tag.with_name("v2"))
    try:
        with mounted(settings, where, tmp_path / "mnt", record="never") as image:
            found = checksums_in_child([image.directory / name for name in contents])
            status = image.status()
    finally:
        sweep(settings.run_dir.parent, settings)
    if damage == "registry gone, too":
        assert found == ["EIO"] * 3
    else:
        assert found == [hashlib.sha256(data).hexdigest() for data in contents.values()]
        assert status["cached_bytes"] == status["image_bytes"]
        assert status["faults"]["failed_count"] == 0
