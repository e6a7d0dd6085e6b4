"""A directory's tar stream gives the blob that packing the directory gives."""

import io
import os
from pathlib import Path

from bootseer.blob.index import encode
from bootseer.blob.pack.packing import pack_directory, pack_tar, tar_directory
from testbed.images.rootfs import odd_tree

_FRAME = 128 * 1024


def test_a_directory_packed_and_pulled_is_one_blob(tmp_path: Path) -> None:
    """The files are sparse, and smaller and larger than a frame, where the two could cut
    differently."""
    root = odd_tree(tmp_path / "root")
    with (root / "holes").open("wb") as file:
        for offset, length in ((300_000, 300_000), (2_000_000, 777_777)):
            file.seek(offset)
            file.write(os.urandom(length))
        file.truncate(9_000_000)
    for i in range(-1100, 600, 37):
        (root / f"size-{i}").write_bytes(os.urandom(_FRAME + i))
        (root / f"size-{i}-small").write_bytes(os.urandom(5000 + i))
    packed = io.BytesIO()
    tree = pack_directory(root, packed)
    stream = io.BytesIO()
    pulled = tar_directory(root, stream.write)
    stream.seek(0)
    again = io.BytesIO()
    assert encode(pack_tar(stream, again)) == encode(tree)
    assert again.getvalue() == packed.getvalue()
    assert [pulled.inode(i) for i in range(pulled.inode_count)] == [
        tree.inode(i) for i in range(tree.inode_count)
    ]
    (blob,) = pulled.blobs
    assert (blob.stream_digest, blob.stream_length) == (
        tree.blobs[0].stream_digest,
        tree.blobs[0].stream_length,
    )
    assert (blob.size_bytes, len(blob.frames)) == (0, 0)
