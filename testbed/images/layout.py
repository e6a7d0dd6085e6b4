"""Writes OCI layouts: folders as gzip layers, images as lists of layers. And reads their sizes."""

import hashlib
import json
import platform
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

# What Docker and BuildKit use: Go's default.
GZIP_LEVEL = 6
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_TAG = "org.opencontainers.image.ref.name"
_TAR_BYTES = "tar_bytes"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as stored."""

    digest: str
    diff_id: str
    stored_bytes: int
    tar_bytes: int
    compression: str = "gzip"


class Layout:
    """An OCI layout in `folder`, written by this or to be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """An empty one."""
        (self.folder / "blobs/sha256").mkdir(parents=True)
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def add_tree(self, tree: Path) -> Layer:
        """Everything in the folder `tree` as a gzip layer, sorted by name."""

        def fill(writer: LayerWriter) -> None:
            sink = _GzipSink(writer)
            with tarfile.open(fileobj=cast(BinaryIO, sink), mode="w|", bufsize=2**20) as archive:
                for entry in sorted(tree.iterdir()):
                    archive.add(entry, arcname=entry.name)
            sink.end()

        return self.add_layer(fill)

    def add_layer(self, fill: Callable[["LayerWriter"], None], compression: str = "gzip") -> Layer:
        """What `fill` puts into its writer."""
        partial = self.folder / "layer.partial"
        with partial.open("wb") as sink:
            writer = LayerWriter(sink)
            fill(writer)
        digest = f"sha256:{writer.stored.hexdigest()}"
        diff_id = f"sha256:{writer.plain.hexdigest()}"
        partial.rename(self.blob(digest))
        return Layer(digest, diff_id, writer.stored_bytes, writer.plain_bytes, compression)

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
        manifest = json.loads(self.blob(named[tag]).read_bytes())
        config = json.loads(self.blob(manifest["config"]["digest"]).read_bytes())
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
                    "mediaType": f"{_LAYER_TYPE}+{layer.compression}",
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
        self.blob(digest).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def blob(self, digest: str) -> Path:
        """Where it is."""
        return self.folder / "blobs" / digest.replace(":", "/")


class LayerWriter:
    """Takes a layer piece by piece, as it is and as it is stored."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.plain, self.stored = hashlib.sha256(), hashlib.sha256()
        self.plain_bytes = self.stored_bytes = 0

    def put(self, plain: bytes, stored: bytes) -> None:
        """The two need not begin and end at the same place."""
        self.plain.update(plain)
        self.plain_bytes += len(plain)
        self.stored.update(stored)
        self.stored_bytes += len(stored)
        self._sink.write(stored)


class _GzipSink:
    """What tarfile writes to."""

    def __init__(self, writer: LayerWriter) -> None:
        self._writer = writer
        self._gzip = zlib.compressobj(GZIP_LEVEL, wbits=31)

    def write(self, data: bytes) -> int:
        self._writer.put(data, self._gzip.compress(data))
        return len(data)

    def end(self) -> None:
        self._writer.put(b"", self._gzip.flush())
