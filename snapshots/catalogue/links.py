"""Links of the records of snapshots to other objects of a store.

The only place that says what a garbage collector knows of snapshots (docs/format/store.md, "Use
and garbage"). Functions and constants only.
"""

from bootseer.blob.keys import blob_key, index_key
from bootseer.errors import NotFoundError
from bootseer.snapshots.catalogue.catalogue import (
    FOLDER,
    NAMES,
    load,
    manifest_key,
    read_pointer,
)
from bootseer.store import Store
from bootseer.store.objects.records import ONE_DOCUMENT, Entry, Format, Links


def _links_of_name(store: Store, key: str) -> Links:
    named = manifest_key(read_pointer(store, key))
    return Links(hangs_on=(named,), label=key[len(NAMES) :].removesuffix(".json"))


def _links_of_manifest(store: Store, key: str) -> Links:
    manifest = load(store, key[len(FOLDER) :].removesuffix(".json"))
    if manifest is None:
        raise NotFoundError(key)
    command = next((part.value for part in manifest.parts if part.name == "command"), "")
    paths = tuple(target.path for target in manifest.targets)
    return Links(
        # Blobs of earlier snapshots as well, whether these stay or go.
        tuple(
            key
            for target in manifest.targets
            for key in (
                index_key(target.index.digest),
                *(blob_key(blob.digest) for blob in target.blobs),
            )
        ),
        entry=Entry(
            "snapshot",
            manifest.fingerprint,
            manifest.created_ns,
            group=repr((command, sorted(paths))),
            targets=paths,
            trees=tuple(target.index.digest for target in manifest.targets),
            is_cache=bool(manifest.cache),
            is_remade=True,
        ),
    )


FORMATS = (
    Format(NAMES, _links_of_name, pattern=ONE_DOCUMENT),
    Format(FOLDER, _links_of_manifest, pattern=ONE_DOCUMENT),
)
"""What a garbage collector knows of snapshots."""
