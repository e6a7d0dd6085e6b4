"""`describe_subject`: which manifest a store in a registry lies beside."""

import contextlib
from collections.abc import Mapping
from typing import Any

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import INDEX_TYPES, parse_object
from bootseer.registry.platforms import unsuitability
from bootseer.registry.reference import Reference


def describe_subject(client: RegistryClient, reference: Reference) -> Mapping[str, Any]:
    """The descriptor of the image's manifest; of an index, that of this machine's platform.

    Raises: InvalidInputError where there is no such image, NotFoundError where it has none for this
    platform; as `RegistryClient.manifest`.
    """
    try:
        document = client.manifest(reference.target)
    except NotFoundError as error:
        # Not as the error that it is: this is no object that may yet come.
        raise InvalidInputError(f"there is no image {reference} to keep a store beside") from error
    if document.media_type in INDEX_TYPES and reference.digest is None:
        entries = parse_object(document.data, client.name).get("manifests")
        ranked: list[tuple[int, int, str]] = []
        for entry in entries if isinstance(entries, list) else []:
            with contextlib.suppress(AttributeError, KeyError):
                where = entry["platform"]
                names = (str(where.get(name) or "") for name in ("os", "architecture", "variant"))
                rank = unsuitability(*names)
                if rank is not None:
                    ranked.append((rank, len(ranked), str(entry["digest"])))
        if not ranked:
            raise NotFoundError(f"{reference} has no image for this machine's platform")
        document = client.manifest(min(ranked)[2])
    return {
        "mediaType": document.media_type,
        "digest": document.digest,
        "size": len(document.data),
    }
