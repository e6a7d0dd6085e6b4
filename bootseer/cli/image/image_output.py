"""What several commands print of an image."""

from bootseer.prefetch.index.records import ImageRecord


def image_summary(record: ImageRecord) -> dict[str, object]:
    """What `--json` shows of an image. Additive: keys are never removed or renamed."""
    config = record.config
    return {
        "reference": record.reference,
        "identity": record.identity,
        "index_digest": record.index_digest,
        "index_bytes": record.index_size_bytes,
        "files": record.file_count,
        "bytes": record.size_bytes,
        "blob_bytes": sum(layer.blob_size_bytes for layer in record.layers),
        "created_ns": record.created_ns,
        "config": {
            "env": config.env,
            "entrypoint": config.entrypoint,
            "cmd": config.cmd,
            "working_dir": config.working_dir,
            "user": config.user,
            "architecture": config.architecture,
        },
        "layers": [
            {
                "digest": layer.digest,
                "blob_digest": layer.blob_digest,
                "blob_bytes": layer.blob_size_bytes,
            }
            for layer in record.layers
        ],
    }
