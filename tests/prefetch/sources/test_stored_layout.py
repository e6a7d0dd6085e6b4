"""OCI layouts on shared storage: the same image as from the folder, and clear errors."""

from pathlib import Path

import pytest

from bootseer.errors import CorruptError, NotFoundError
from bootseer.prefetch.sources import open_source
from testbed.images.building import NASTY, write_layout
from tests.prefetch.sources.packed import packed_digests


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    write_layout(tmp_path / "images" / "app", NASTY, compression="gzip", tag="v1")
    return tmp_path / "images" / "app"


@pytest.mark.parametrize("tag", ["", "#v1"])
def test_the_same_image_as_from_the_folder(layout: Path, tmp_path: Path, tag: str) -> None:
    limited = f"oci:limit+{layout.as_uri()}?stream_bytes_per_s=1e9{tag}"
    near = open_source(f"oci:{layout}", tmp_path)
    far = open_source(limited, tmp_path)
    assert far.identity == near.identity
    assert far.reference == "app:v1"
    assert packed_digests(far) == packed_digests(near)


def test_what_is_missing_is_named(layout: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no-such-tag"):
        open_source(f"oci:{layout.as_uri()}#no-such-tag", tmp_path)
    with pytest.raises(NotFoundError, match="nowhere"):
        open_source(f"oci:{(tmp_path / 'nowhere').as_uri()}", tmp_path)


def test_a_flipped_byte_is_refused(layout: Path, tmp_path: Path) -> None:
    largest = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CorruptError):
        packed_digests(open_source(f"oci:{layout.as_uri()}", tmp_path))
