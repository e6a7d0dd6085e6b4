"""Writer of the demo's image: an OCI layout of two zstd layers."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard

from bootseer.errors import BootseerError, from_oserror

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
# Names of machines in uname(2), and in OCI images (those of Go).
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 300


def _add_bytes(layout: Path, data: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _add_layer(layout: Path, root: Path) -> tuple[dict[str, Any], str]:
    """Write a layer; return its descriptor and its diff id."""
    temporary = layout / "layer.tmp"
    plain, packed, size = hashlib.sha256(), hashlib.sha256(), 0
    command = ["tar", "--numeric-owner", "--owner=0", "--group=0", "--sort=name", "-C"]
    tar = subprocess.Popen([*command, str(root), "-cf", "-", "."], stdout=subprocess.PIPE)
    assert tar.stdout is not None
    compressor = zstandard.ZstdCompressor(level=3, threads=2).compressobj()
    with tar.stdout, temporary.open("wb") as file:
        while True:
            block = tar.stdout.read(_BLOCK_BYTES)
            plain.update(block)
            data = compressor.compress(block) if block else compressor.flush()
            packed.update(data)
            size += file.write(data)
            if not block:
                break
    if tar.wait(_TIMEOUT_S) != 0:
        raise BootseerError(f"tar failed on {root}; is the disk full?")
    temporary.rename(layout / "blobs/sha256" / packed.hexdigest())
    descriptor = {"mediaType": _LAYER, "digest": f"sha256:{packed.hexdigest()}", "size": size}
    return descriptor, f"sha256:{plain.hexdigest()}"


def write_layout(layout: Path, layers: list[Path], environment: Mapping[str, str]) -> int:
    """Write an OCI layout with one layer per root in `layers`; return the bytes of its layers.

    Raises: NoSpaceError, and other errors of the disk.
    """
    try:
        (layout / "blobs/sha256").mkdir(parents=True)
        written = [_add_layer(layout, root) for root in layers]
        config = {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": [f"{key}={value}" for key, value in environment.items()]},
            "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in written]},
        }
        descriptor = _add_bytes(layout, json.dumps(config).encode(), _CONFIG)
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": descriptor,
            "layers": [layer for layer, _ in written],
        }
        reference = _add_bytes(layout, json.dumps(manifest).encode(), _MANIFEST)
        reference["annotations"] = {"org.opencontainers.image.ref.name": "demo:latest"}
        index = {"schemaVersion": 2, "manifests": [reference]}
        (layout / "index.json").write_text(json.dumps(index))
        (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    except OSError as error:
        raise from_oserror(error, f"write the demo's image to {layout}") from error
    return sum(layer["size"] for layer, _ in written)
