"""Writes OCI layouts: folders as gzip layers, images as lists of layers. Reads layers' sizes."""

import hashlib
import json
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from testbed.images.building import (
    ARCHITECTURE,
    CONFIG_TYPE,
    INDEX_TYPE,
    LAYER_TYPE,
    MANIFEST_TYPE,
)

# Level that Docker and BuildKit use: Go's default.
GZIP_LEVEL = 6
_TAG = "org.opencontainers.image.ref.name"
_TAR_BYTES = "tar_bytes"


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """Layer as it is stored in a layout."""

    digest: str
    diff_id: str
    stored_bytes: int
    tar_bytes: int
    compression: str = "gzip"


class OciLayout:
    """OCI layout in `folder`, to be written or read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """Make an empty layout."""
        (self.folder / "blobs/sha256").mkdir(parents=True)
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def add_tree(self, tree: Path) -> StoredLayer:
        """Add the folder `tree` as a gzip layer, its entries sorted by name."""

        def fill(writer: LayerWriter) -> None:
            sink = _GzipSink(writer)
            with tarfile.open(fileobj=cast(BinaryIO, sink), mode="w|", bufsize=2**20) as archive:
                for entry in sorted(tree.iterdir()):
                    archive.add(entry, arcname=entry.name)
            sink.end()

        return self.add_layer(fill)

    def add_layer(
        self, fill: Callable[["LayerWriter"], None], compression: str = "gzip"
    ) -> StoredLayer:
        """Add the layer that `fill` writes."""
        partial = self.folder / "layer.partial"
        with partial.open("wb") as sink:
            writer = LayerWriter(sink)
            fill(writer)
        digest = f"sha256:{writer.stored.hexdigest()}"
        diff_id = f"sha256:{writer.plain.hexdigest()}"
        partial.rename(self.blob(digest))
        return StoredLayer(digest, diff_id, writer.stored_bytes, writer.plain_bytes, compression)

    def write_index(self, images: dict[str, Sequence[StoredLayer]]) -> None:
        """Write an index with exactly these images by tag."""
        manifests = [
            {**self._add_manifest(layers), "annotations": {_TAG: tag}}
            for tag, layers in images.items()
        ]
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}
        (self.folder / "index.json").write_text(json.dumps(index))

    def layers(self, tag: str) -> list[StoredLayer]:
        """Return the layers of the image that `tag` names, the base first."""
        index = json.loads((self.folder / "index.json").read_bytes())
        named = {entry["annotations"][_TAG]: entry["digest"] for entry in index["manifests"]}
        manifest = json.loads(self.blob(named[tag]).read_bytes())
        config = json.loads(self.blob(manifest["config"]["digest"]).read_bytes())
        return [
            StoredLayer(
                entry["digest"], diff_id, entry["size"], int(entry["annotations"][_TAR_BYTES])
            )
            for entry, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
        ]

    def _add_manifest(self, layers: Sequence[StoredLayer]) -> dict[str, Any]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        config = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Env": [f"PATH={path}"]},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": self._add_document(config, CONFIG_TYPE),
            "layers": [
                {
                    "mediaType": f"{LAYER_TYPE}+{layer.compression}",
                    "digest": layer.digest,
                    "size": layer.stored_bytes,
                    "annotations": {_TAR_BYTES: str(layer.tar_bytes)},
                }
                for layer in layers
            ],
        }
        return self._add_document(manifest, MANIFEST_TYPE)

    def _add_document(self, document: object, media_type: str) -> dict[str, Any]:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blob(digest).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def blob(self, digest: str) -> Path:
        """Return the path of a blob."""
        return self.folder / "blobs" / digest.replace(":", "/")


class LayerWriter:
    """Sink of a layer: hashes and counts its uncompressed and its stored bytes."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.plain, self.stored = hashlib.sha256(), hashlib.sha256()
        self.plain_bytes = self.stored_bytes = 0

    def put(self, plain: bytes, stored: bytes) -> None:
        """Add uncompressed bytes and stored bytes; the two need not correspond piece by piece."""
        self.plain.update(plain)
        self.plain_bytes += len(plain)
        self.stored.update(stored)
        self.stored_bytes += len(stored)
        self._sink.write(stored)


class _GzipSink:
    """File-like object for tarfile that compresses into a `LayerWriter`."""

    def __init__(self, writer: LayerWriter) -> None:
        self._writer = writer
        self._gzip = zlib.compressobj(GZIP_LEVEL, wbits=31)

    def write(self, data: bytes) -> int:
        self._writer.put(data, self._gzip.compress(data))
        return len(data)

    def end(self) -> None:
        self._writer.put(b"", self._gzip.flush())
