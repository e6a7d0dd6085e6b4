"""A node that has a whole bundle starts with it although the store does not answer."""

import hashlib
import io
import os
import time
from pathlib import Path

import pytest

from bootseer.prefetch.bundle.format import BundleExtent, write_bundle
from bootseer.prefetch.bundle.hot_store import HotPointer, keep_bundle, read_kept_bundle
from bootseer.prefetch.cache.limit import trim_records
from bootseer.prefetch.images.mount import unmount_image
from bootseer.prefetch.serve.plan import begin_serving
from bootseer.served.control import ask
from bootseer.settings.config import Settings
from testbed.mounts.image_mounts import index, mounted, run_program, settings_at
from testbed.mounts.sweeping import sweep
from testbed.waiting import wait_for

READ = "import sys; [open(p, 'rb').read() for p in sys.argv[1:]]"


@pytest.mark.needs("fuse")
def test_a_start_without_the_store_uses_the_bundle_that_was_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).write_bytes(name.encode() * 100_000)
    settings = settings_at(tmp_path)
    record = index(settings, root, "image:1")
    directory = tmp_path / "mnt"
    with mounted(settings, "image:1", directory) as image:
        run_program(READ, directory / "one")
        image.ready()
    sweep(settings.run_dir.parent, settings)
    with mounted(settings, "image:1", directory) as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        run_program(READ, directory / "one", directory / "two")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    try:
        served = begin_serving(settings, "image:1", record.index_digest, directory).wait()
        wait_for(lambda: ask(served.state_dir, "status")["prefetch"] is not None)
        run_program(READ, directory / "one", directory / "two")
        status = ask(served.state_dir, "status")
        assert status["faults"]["fault_count"] == 0
        assert status["prefetch"]["used_bytes"] > 0
        assert status["prefetch"]["error"] is None
        unmount_image(settings, directory)
    finally:
        sweep(settings.run_dir.parent, settings)


def kept(settings: Settings) -> tuple[str, HotPointer]:
    """Digest of an index, and pointer to its bundle of one frame, which is kept on the node."""
    digest = "sha256:" + "7" * 64
    header = write_bundle(
        digest, [(BundleExtent(0, 0, 512),)], lambda *place: bytes(512), [io.BytesIO()]
    )
    bundle_digest = f"sha256:{hashlib.sha256(header).hexdigest()}"
    pointer = HotPointer(digest, bundle_digest, len(header), len(header), digest, 1, 1)
    keep_bundle(settings, "work", pointer, header)
    return digest, pointer


def test_a_copy_that_is_used_stays_and_one_that_is_not_goes(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    digest, _ = kept(settings)

    def age() -> None:
        """Make the copy look unread for 40 days."""
        for path in (settings.cache_dir / "catalogue/hot").iterdir():
            os.utime(path, (time.time() - 40 * 86_400,) * 2)

    age()
    assert read_kept_bundle(settings, digest, "work", [512]) is not None
    trim_records(settings.cache_dir)
    assert read_kept_bundle(settings, digest, "work", [512]) is not None
    age()
    trim_records(settings.cache_dir)
    assert read_kept_bundle(settings, digest, "work", [512]) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
@pytest.mark.parametrize("name", ["json", "header"])
def test_a_damaged_copy_is_as_good_as_none(tmp_path: Path, name: str, damage: str) -> None:
    settings = settings_at(tmp_path)
    digest, pointer = kept(settings)
    found = read_kept_bundle(settings, digest, "work", [512])
    assert found is not None
    assert found[0] == pointer
    assert read_kept_bundle(settings, digest, "other", [512]) is None
    assert read_kept_bundle(settings, digest, "work", [511]) is None
    (path,) = (settings.cache_dir / "catalogue/hot").glob(f"*.{name}")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(
        {"cut": bytes(data[:-9]), "empty": b"", "foreign": b"{}"}.get(damage, bytes(data))
    )
    assert read_kept_bundle(settings, digest, "work", [512]) is None
