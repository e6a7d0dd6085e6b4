"""Builds container images for tests from single tar members.

Layers are lists of `Member`; `tar_of` writes them in the given order without checking them, so that
hostile and odd layers can be made. `write_layout` makes an OCI layout of them.
"""

import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from testbed.needs import require

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Member:
    """Tar member as it is to be written.

    `kind` is one of f d l h c b p: file, directory, symbolic link, hard link, character device,
    block device, fifo.
    """

    name: str
    kind: str = "f"
    data: bytes = b""
    mode: int | None = None
    uid: int = 0
    gid: int = 0
    mtime: float = 1_600_000_000
    link: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: Mapping[str, str] = field(default_factory=dict)


_TYPES = {
    "f": tarfile.REGTYPE,
    "d": tarfile.DIRTYPE,
    "l": tarfile.SYMTYPE,
    "h": tarfile.LNKTYPE,
    "c": tarfile.CHRTYPE,
    "b": tarfile.BLKTYPE,
    "p": tarfile.FIFOTYPE,
}


def tar_of(members: Sequence[Member], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an uncompressed tar with exactly these members, in this order."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tar_format, errors="surrogateescape"
    ) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type = _TYPES[member.kind]
            default = 0o755 if member.kind == "d" else 0o644
            info.mode = default if member.mode is None else member.mode
            info.uid, info.gid, info.mtime = member.uid, member.gid, member.mtime
            info.linkname = member.link
            info.devmajor, info.devminor = member.device
            info.size = len(member.data)
            info.pax_headers = {f"SCHILY.xattr.{k}": v for k, v in member.xattrs.items()}
            archive.addfile(info, io.BytesIO(member.data))
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def compress(data: bytes, compression: str) -> bytes:
    """Compress a tar by the method `compression`.

    The methods are none, gzip, members (gzip of several members, as pigz and eStargz write), zstd,
    and frames (zstd of several frames behind a skippable one).
    """
    half = len(data) // 2
    if compression == "gzip":
        return gzip.compress(data, mtime=0)
    if compression == "members":
        return b"".join(gzip.compress(part, mtime=0) for part in (data[:half], b"", data[half:]))
    if compression == "zstd":
        return zstandard.ZstdCompressor().compress(data)
    if compression == "frames":
        skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
        compressor = zstandard.ZstdCompressor()
        return skippable + compressor.compress(data[:half]) + compressor.compress(data[half:])
    return data


class LayoutBuilder:
    """OCI layout that is being written to `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifests: list[dict[str, Any]] = []
        (directory / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.write_index()

    def blob_path(self, name: str) -> Path:
        return self.directory / "blobs" / name.replace(":", "/", 1)

    def add_blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        """Store a blob; return its descriptor."""
        name = digest(data)
        self.blob_path(name).write_bytes(data)
        return {"mediaType": media_type, "digest": name, "size": len(data)}

    def add_document(self, document: object, media_type: str) -> dict[str, Any]:
        return self.add_blob(json.dumps(document).encode(), media_type)

    def add_image(
        self,
        layers: Sequence[bytes],
        *,
        tag: str | None = "latest",
        compression: str | Sequence[str] = "none",
        run: Mapping[str, object] | None = None,
        architecture: str = ARCHITECTURE,
        diff_ids: Sequence[str] | None = None,
        listed: bool = True,
    ) -> dict[str, Any]:
        """Add an image of these uncompressed tars; return the descriptor of its manifest.

        `compression` is the method for all layers, or one method for each.
        """
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": run or {},
            "rootfs": {
                "type": "layers",
                "diff_ids": list(diff_ids or [digest(layer) for layer in layers]),
            },
        }
        ways = [compression] * len(layers) if isinstance(compression, str) else compression
        suffixes = {"none": "", "zstd": "+zstd", "frames": "+zstd"}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": self.add_document(config, CONFIG_TYPE),
            "layers": [
                self.add_blob(compress(layer, way), LAYER_TYPE + suffixes.get(way, "+gzip"))
                for layer, way in zip(layers, ways, strict=True)
            ],
        }
        descriptor = self.add_document(manifest, MANIFEST_TYPE)
        descriptor["platform"] = {"os": "linux", "architecture": architecture}
        if tag is not None:
            descriptor["annotations"] = {"org.opencontainers.image.ref.name": tag}
        if listed:
            self.manifests.append(descriptor)
            self.write_index()
        return descriptor

    def write_index(self) -> None:
        index = {"schemaVersion": 2, "manifests": self.manifests}
        (self.directory / "index.json").write_text(json.dumps(index))


def write_layout(
    directory: Path, layers: Sequence[Sequence[Member]], **options: Any
) -> LayoutBuilder:
    """Write an OCI layout with one image."""
    layout = LayoutBuilder(directory)
    layout.add_image([tar_of(members) for members in layers], **options)
    return layout


NASTY: Sequence[Sequence[Member]] = (
    (
        Member("./", "d", mode=0o755, mtime=1_500_000_000),
        Member("./bin/", "d", mode=0o755),
        Member("bin/tool", data=b"tool 1\n", mode=0o4755, xattrs={"user.origin": "layer 0"}),
        Member("bin/tool-link", "h", link="bin/tool", mode=0o4755),
        Member("bin/sh", "l", link="tool"),
        Member("etc/", "d", mode=0o700, uid=1, gid=2),
        Member("etc/deep/er/file", data=b"implied parents\n"),
        Member("etc/replaced", data=b"was a file"),
        Member("etc/tree/", "d"),
        Member("etc/tree/inside", data=b"goes away with its directory"),
        Member("var/", "d"),
        Member("var/cache/", "d", mode=0o1777),
        Member("var/cache/old", data=b"hidden by an opaque directory"),
        Member("var/cache/sub/old", data=b"too"),
        Member("var/keep", data=b"kept", uid=4_000_000, mtime=1_234_567_890.123456789),
        Member("dev/null", "c", device=(1, 3), mode=0o666),
        Member("dev/disk", "b", device=(8, 0), mode=0o660),
        Member("run/pipe", "p", mode=0o600),
        Member("long/" + "n" * 200, data=b"long name"),
        Member("long/" + "/".join(["d" * 60] * 4), data=b"long path"),
        Member("long/link", "l", link="t/" * 120 + "end"),
        Member("a", data=b"first"),
        Member("b", "h", link="a"),
        Member("empty", data=b""),
        Member("twice", data=b"first entry"),
        Member("twice", data=b"second entry wins", mode=0o600),
        Member("gone", data=b"deleted above"),
    ),
    (
        Member("etc/.wh.replaced"),
        Member("etc/replaced/", "d", mode=0o711),
        Member("etc/replaced/now", data=b"a directory"),
        Member("etc/tree", data=b"now a file"),
        Member("var/", "d", mode=0o750, gid=7, mtime=1_650_000_000),
        Member("var/cache/", "d", mode=0o755),
        Member("var/cache/.wh..wh..opq"),
        Member("var/cache/new", data=b"beside the opaque mark"),
        Member(".wh.gone"),
        Member(".wh.never-there"),
        Member("a", data=b"only this name changed"),
        Member("big", data=bytes(range(256)) * 2000),
    ),
    (
        Member("gone", data=b"and back again"),
        Member("c", "h", link="b"),
        Member("bin/.wh.sh"),
        Member("bin/tool", data=b"tool 2\n", mode=0o755, xattrs={"user.origin": "layer 2"}),
        Member("var/cache/new-link", "h", link="var/cache/new"),
    ),
)
"""Layers with nearly every feature of real ones, in forms that `umoci unpack` agrees on."""


def run_tool(*command: str | Path) -> None:
    """Run skopeo or umoci. Raises: MissingError if the program is not installed."""
    require(programs=[str(command[0])])
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
