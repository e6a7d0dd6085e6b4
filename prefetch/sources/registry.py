"""An image in a registry: `registry://HOST[:PORT]/NAME[:TAG|@sha256:DIGEST]`.

Names are Docker's: a name without a host is on Docker Hub. Documents are compared with the digests
that name them; a tag is whatever the registry says it is. Layers are verified as they are read.
"""

from pathlib import Path

from msgspec.structs import replace

from bootseer.errors import InvalidInputError, UnsupportedError
from bootseer.prefetch.sources.documents import image_of, parse_manifest
from bootseer.prefetch.sources.model import ImageSource
from bootseer.registry.client import RegistryClient, open_registry_client
from bootseer.registry.documents import DOCUMENT_BYTES_MAX
from bootseer.registry.hosts import DEFAULT_HOSTS_DIR
from bootseer.registry.reference import Reference
from bootseer.registry.reference import parse_reference as parse_image_name

_FOREIGN = ("foreign", "nondistributable")
_CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
    "",
)


def open_registry(
    name: str,
    *,
    hosts_dir: Path = DEFAULT_HOSTS_DIR,
    deadline_s: float = 60.0,
    copies: bool = True,
) -> ImageSource:
    """Open the image called `name`, for this machine's platform.

    Streams of layers survive broken connections.

    Args:
        name: The part of the source behind `registry://`.
        hosts_dir: Configures mirrors, as containerd's certs.d.
        deadline_s: The longest single wait.
        copies: Whether packing a layer copies it (`TarLayer.is_copied`).

    Raises: InvalidInputError, NotFoundError, PermissionDeniedError, UnavailableError,
    DeadlineError, CorruptError, UnknownFormatError, UnsupportedError.
    """
    if not name:
        raise InvalidInputError(
            "registry:// needs the name of an image, such as registry://docker.io/python:3.12"
        )
    reference = parse_image_name(name)
    client = open_registry_client(reference, hosts_dir=hosts_dir, deadline_s=deadline_s)
    try:
        return _open_image(client, reference, copies=copies)
    except BaseException:
        client.close()
        raise


def store_name(reference: Reference) -> str:
    """Return the name of the image in a store. Pure."""
    # Names in a store have no brackets, as IPv6 addresses do, and do not begin with a colon.
    name = str(reference).replace("[", "").replace("]", "")
    return f"0{name}" if name.startswith(":") else name


def _open_image(client: RegistryClient, reference: Reference, *, copies: bool) -> ImageSource:
    document = client.for_this_machine(client.manifest(reference.target), str(reference))
    manifest = parse_manifest(document.data, str(reference))
    where = f"{reference} ({document.digest})"
    if manifest.config.media_type not in _CONFIG_TYPES:
        raise InvalidInputError(
            f"{where} is no container image but an artifact ({manifest.config.media_type[:100]})"
        )
    for layer in manifest.layers:
        if any(word in layer.media_type for word in _FOREIGN):
            raise UnsupportedError(
                f"{where}: the layer {layer.digest} is not in the registry (it may not be "
                "distributed); such images are not read"
            )
    image = image_of(
        manifest,
        client.blob(manifest.config.digest, DOCUMENT_BYTES_MAX),
        lambda layer: client.open(layer.digest, layer.size_bytes),
        where,
    )
    return ImageSource(
        store_name(reference),
        image.identity,
        image.config,
        [
            replace(layer, registry_digest=layer.stored_digest, is_copied=copies)
            for layer in image.layers
        ],
        client.close,
        manifest_digest=document.digest,
    )
