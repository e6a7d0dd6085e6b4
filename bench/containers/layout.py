"""Writes OCI layouts: folders as gzip layers, images as lists of layers. And reads their sizes."""

import hashlib
import json
import platform
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

# What Docker and BuildKit use: Go's default.
GZIP_LEVEL = 6
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
_TAG = "org.opencontainers.image.ref.name"
_TAR_BYTES = "tar_bytes"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as stored."""

    digest: str
    diff_id: str
    stored_bytes: int
    tar_bytes: int


class Layout:
    """An OCI layout in `folder`, written by this or to be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """An empty one."""
        (self.folder / "blobs/sha256").mkdir(parents=True)
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def add_layer(self, tree: Path) -> Layer:
        """Everything in the folder `tree`, sorted by name."""
        partial = self.folder / "layer.partial"
        with partial.open("wb") as sink:
            writer = _GzipWriter(sink)
            with tarfile.open(fileobj=cast(BinaryIO, writer), mode="w|", bufsize=2**20) as archive:
                for entry in sorted(tree.iterdir()):
                    archive.add(entry, arcname=entry.name)
            writer.end()
        digest, diff_id = (
            f"sha256:{hashed.hexdigest()}" for hashed in (writer.stored, writer.plain)
        )
        partial.rename(self._blob(digest))
        return Layer(digest, diff_id, writer.stored_bytes, writer.plain_bytes)

    def write_index(self, images: dict[str, Sequence[Layer]]) -> None:
        """Exactly these images, by tag."""
        manifests = [
            {**self._add_manifest(layers), "annotations": {_TAG: tag}}
            for tag, layers in images.items()
        ]
        index = {"schemaVersion": 2, "mediaType": _INDEX_TYPE, "manifests": manifests}
        (self.folder / "index.json").write_text(json.dumps(index))

    def layers(self, tag: str) -> list[Layer]:
        """Of the image that `tag` names, the base first."""
        index = json.loads((self.folder / "index.json").read_bytes())
        named = {entry["annotations"][_TAG]: entry["digest"] for entry in index["manifests"]}
        manifest = json.loads(self._blob(named[tag]).read_bytes())
        config = json.loads(self._blob(manifest["config"]["digest"]).read_bytes())
        return [
            Layer(entry["digest"], diff_id, entry["size"], int(entry["annotations"][_TAR_BYTES]))
            for entry, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
        ]

    def _add_manifest(self, layers: Sequence[Layer]) -> dict[str, Any]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        config = {
            "architecture": _ARCHITECTURE,
            "os": "linux",
            "config": {"Env": [f"PATH={path}"]},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST_TYPE,
            "config": self._add_document(config, _CONFIG_TYPE),
            "layers": [
                {
                    "mediaType": _LAYER_TYPE,
                    "digest": layer.digest,
                    "size": layer.stored_bytes,
                    "annotations": {_TAR_BYTES: str(layer.tar_bytes)},
                }
                for layer in layers
            ],
        }
        return self._add_document(manifest, _MANIFEST_TYPE)

    def _add_document(self, document: object, media_type: str) -> dict[str, Any]:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self._blob(digest).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "/")


class _GzipWriter:
    """A file that hashes what is written to it and stores it compressed."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._gzip = zlib.compressobj(GZIP_LEVEL, wbits=31)
        self.plain, self.stored = hashlib.sha256(), hashlib.sha256()
        self.plain_bytes = self.stored_bytes = 0

    def write(self, data: bytes) -> int:
        self.plain.update(data)
        self.plain_bytes += len(data)
        self._put(self._gzip.compress(data))
        return len(data)

    def end(self) -> None:
        self._put(self._gzip.flush())

    def _put(self, data: bytes) -> None:
        self.stored.update(data)
        self.stored_bytes += len(data)
        self._sink.write(data)
