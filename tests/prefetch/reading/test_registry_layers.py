"""Images with layers in the registry: read by ranges, verified, and stored only once."""

import hashlib
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.prefetch.container.extracted import prepare_extracted
from bootseer.prefetch.images.find import resolve_image
from bootseer.prefetch.index.catalogue import find_image
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.publish.publish_image import publish_node_image
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.prefetch.sources import open_source
from bootseer.settings.config import Settings
from bootseer.store import open_store
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import checksums_in_child, mounted, settings_at
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import Registry

pytestmark = pytest.mark.needs(modules=["indexed_gzip"])

_WORDS = [random.Random(3).randbytes(5) for _ in range(2000)]


def _content(seed: int) -> bytes:
    drawn = random.Random(seed)
    return b"".join(drawn.choices(_WORDS, k=500_000))


CONTENTS = {"a": _content(1), "b": _content(2), "empty": b"", "small": b"x" * 700}


@pytest.fixture(autouse=True)
def _no_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-logins"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_at(tmp_path, copy_layers=False, fill_bytes_per_s=0)


def _push(registry: Registry, tmp_path: Path, login: str = "") -> str:
    """Push an image of two layers; return its repository and tag."""
    layers = [
        [Member(name, data=data) for name, data in list(CONTENTS.items())[:1]],
        [Member(name, data=data) for name, data in list(CONTENTS.items())[1:]],
    ]
    layout = write_layout(tmp_path / "layout", layers, compression="gzip", tag="v1")
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    registry.push_layout(layout.directory, "v1", f"tests/{name}:v1", login)
    return f"tests/{name}:v1"


def _index(settings: Settings, where: str) -> ImageRecord:
    work_dir = settings.cache_dir.parent / "work"
    with (
        open_source(f"registry://{where}", work_dir, copies=settings.copy_layers) as source,
        open_store(settings.store_url) as store,
    ):
        return index_image(source, store, work_dir)


def _read(settings: Settings, where: str, directory: Path) -> list[str]:
    with mounted(settings, where, directory, record="never") as image:
        return checksums_in_child([image.directory / name for name in CONTENTS])


def _sums() -> list[str]:
    return [hashlib.sha256(data).hexdigest() for data in CONTENTS.values()]


@pytest.mark.needs("fuse")
def test_a_node_reads_the_layers_from_the_registry(
    registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{registry.host}/{_push(registry, tmp_path)}"
    record = _index(settings, where)
    assert all(layer.blob_digest.startswith("points:") for layer in record.layers)
    assert not (tmp_path / "store/blobs").exists()
    assert _read(settings, where, tmp_path / "mnt") == _sums()


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("fault", ["no ranges", "flipped bytes", "cut", "refused once"])
def test_a_registry_that_misbehaves_serves_no_wrong_byte(
    relay: FaultyRelay, registry: Registry, settings: Settings, tmp_path: Path, fault: str
) -> None:
    where = f"{relay.host}/{_push(registry, tmp_path)}"
    _index(settings, where)
    when = r"GET /v2/.*/blobs/"
    relay.faults.append(
        {
            "no ranges": Fault(when, times=1000, ignore_range=True),
            "flipped bytes": Fault(when, times=2, flip_at=5000),
            "cut": Fault(when, times=2, cut_after_bytes=1000),
            "refused once": Fault(when, times=1, status=503),
        }[fault]
    )
    assert _read(settings, where, tmp_path / "mnt") == _sums()


@pytest.mark.needs("fuse")
def test_a_registry_that_always_lies_gives_errors(
    relay: FaultyRelay, registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{relay.host}/{_push(registry, tmp_path)}"
    _index(settings, where)
    relay.faults.append(Fault(r"GET /v2/.*/blobs/", times=10_000, flip_at=3000))
    found = _read(replace(settings, deadline_s=3.0), where, tmp_path / "mnt")
    assert found[:2] == ["EIO"] * 2


@pytest.mark.needs("fuse")
def test_a_login_that_expires_is_renewed(
    relay: FaultyRelay, registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{relay.host}/{_push(registry, tmp_path)}"
    _index(settings, where)
    challenge = {"WWW-Authenticate": f'Bearer realm="http://{relay.host}/token",service="x"'}
    token = Fault(r"GET /token", times=100, status=200, body=b'{"token": "new"}')
    relay.faults += [token, Fault(r"GET /v2/.*/blobs/", times=2, status=401, headers=challenge)]
    assert _read(settings, where, tmp_path / "mnt") == _sums()
    assert any(seen.headers.get("authorization") == "Bearer new" for seen in relay.seen)


@pytest.mark.needs("fuse")
def test_damaged_seek_points_are_refused(
    registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{registry.host}/{_push(registry, tmp_path)}"
    record = _index(settings, where)
    for layer in record.layers:
        hex_digest = layer.blob_digest.partition(":")[2]
        path = tmp_path / "store/indexes/sha256" / hex_digest
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[-10] ^= 1
        path.write_bytes(data)
    # Whole layers come from the registry, by the digest of their content.
    assert _read(settings, where, tmp_path / "mnt") == _sums()


def test_without_fuse_the_layers_are_pulled_and_extracted(
    registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{registry.host}/{_push(registry, tmp_path)}"
    record = _index(settings, where)
    assert all(layer.blob_digest.startswith("points:") for layer in record.layers)
    image = prepare_extracted(settings, resolve_image(settings, where)).image
    assert checksums_in_child([image.directory / name for name in CONTENTS]) == _sums()


def test_the_first_node_publishes_seek_points(
    registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{registry.host}/{_push(registry, tmp_path)}"
    resolved = resolve_image(settings, f"registry://{where}", say=lambda line: None)
    resolved.release()
    assert not resolved.is_published
    publish_node_image(settings, resolved.record.index_digest)
    with open_store(settings.store_url) as store:
        record = find_image(store, where)
    assert all(layer.blob_digest.startswith("points:") for layer in record.layers)
    assert not (tmp_path / "store/blobs").exists()
    assert not (tmp_path / "store/chains").exists()
    # Another node pulls no layer.
    other = replace(settings, cache_dir=tmp_path / "other-cache", run_dir=tmp_path / "other-run")
    said: list[str] = []
    found = resolve_image(other, f"registry://{where}", say=said.append)
    found.release()
    assert found.is_published
    assert said == []


def test_an_image_from_elsewhere_has_its_layers_copied(
    registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{registry.host}/{_push(registry, tmp_path)}"
    _index(settings, where)
    work_dir = tmp_path / "work"
    with (
        open_source(f"oci:{tmp_path / 'layout'}:v1", work_dir) as source,
        open_store(settings.store_url) as store,
    ):
        record = index_image(source, store, work_dir, reference="mine:v1")
    assert all(layer.blob_digest.startswith("blake3:") for layer in record.layers)


@pytest.mark.needs("fuse")
def test_a_start_is_recorded_and_replayed(
    registry: Registry, settings: Settings, tmp_path: Path
) -> None:
    where = f"{registry.host}/{_push(registry, tmp_path)}"
    _index(settings, where)
    with mounted(settings, where, tmp_path / "mnt") as image:
        assert checksums_in_child([image.directory / "b"]) == _sums()[1:2]
        image.ready()
        assert wait_published(settings, 60)
    assert list((tmp_path / "store/bundles").iterdir())
    other = replace(settings, cache_dir=tmp_path / "cache-2", run_dir=tmp_path / "run-2")
    assert _read(other, where, tmp_path / "mnt") == _sums()
