"""Manifests and blobs that the registry tests push."""

import json
from typing import Any

from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import MANIFEST_TYPE, digest_of


def push_blob(client: RegistryClient, data: bytes) -> dict[str, Any]:
    """Push a blob; return its descriptor."""
    digest = digest_of(data)
    client.push_blob(digest, data)
    return {"mediaType": "application/octet-stream", "digest": digest, "size": len(data)}


def manifest_of(client: RegistryClient, *blobs: bytes, **fields: Any) -> bytes:
    """Return the manifest of an image whose blobs are pushed; the manifest itself is not."""
    config = push_blob(client, b"{}")
    layers = [push_blob(client, blob) for blob in blobs]
    document = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": layers}
    return json.dumps({**document, **fields}).encode()
