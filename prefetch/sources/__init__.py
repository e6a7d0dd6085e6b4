"""Sources of images: everything between a source's name and layers that can be packed or pulled.

DIR                       a root file system, or an OCI layout if it has an oci-layout file
oci:DIR[:TAG]             an OCI layout
oci:URL[#TAG]             an OCI layout on shared storage, at any URL that a store may have
FILE                      an archive of `docker save`, or an OCI layout in a tar
docker-archive:FILE[:TAG] such an archive, choosing one of several images (also oci-archive:)
docker://NAME             an image in the Docker engine
registry://HOST/NAME[:TAG|@DIGEST]  an image in a registry

Public: `open_source`, `ImageSource`, `Layer`, `files.open_content`, `layer_tar`. May import of
`prefetch`: `index`, `cache`.
"""

from pathlib import Path

from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.prefetch.index.catalogue import ARCHIVES, DOCKER, OCI_LAYOUT, REGISTRY
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.sources.files import (
    LAYOUT_MARKER,
    open_directory,
    open_docker_archive,
    open_docker_image,
    open_oci_layout,
    open_stored_layout,
    split_tag,
)
from bootseer.prefetch.sources.model import ImageSource, Layer

__all__ = ["ImageConfig", "ImageSource", "Layer", "open_source"]


def open_source(
    source: str,
    work_dir: Path,
    *,
    registry_hosts_dir: Path = Path("/etc/containerd/certs.d"),
    deadline_s: float = 60.0,
    copies: bool = True,
) -> ImageSource:
    """Open the image that `source` names; close it after use.

    Args:
        source: One of the forms that the package's docstring lists.
        work_dir: Folder for temporary files.
        registry_hosts_dir: As in `Settings`.
        deadline_s: The longest single wait for a registry.
        copies: The setting `copy_layers`, for layers of a registry.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError, UnavailableError,
    DeadlineError, UnsupportedError, PermissionDeniedError, NoSpaceError.
    """
    if source.startswith(DOCKER):
        return open_docker_image(source.removeprefix(DOCKER), work_dir)
    if source.startswith(REGISTRY):
        # Imported late: HTTP costs more than most commands take.
        from bootseer.prefetch.sources.registry import open_registry

        name = source.removeprefix(REGISTRY)
        return open_registry(
            name, hosts_dir=registry_hosts_dir, deadline_s=deadline_s, copies=copies
        )
    if source.startswith(OCI_LAYOUT):
        location = source.removeprefix(OCI_LAYOUT)
        if "://" in location:
            url, _, tag = location.partition("#")
            return open_stored_layout(url, tag)
        return open_oci_layout(*split_tag(location, Path.is_dir))
    for prefix in ARCHIVES:
        if source.startswith(prefix):
            location = source.removeprefix(prefix)
            return open_docker_archive(*split_tag(location, Path.is_file))
    if "://" in source:
        scheme = source.partition("://")[0]
        raise InvalidInputError(
            f"images are not read from {scheme}://; give a directory, an OCI layout, an archive "
            "of docker save, docker://NAME or registry://HOST/NAME"
        )
    return _open_path(source)


def _open_path(source: str) -> ImageSource:
    """Open the image in a directory or a file."""
    if not source:
        raise InvalidInputError("an image's source is empty; name a directory or an archive")
    path = Path(source)
    try:
        path.stat()
        is_layout = path.is_dir() and (path / LAYOUT_MARKER).exists()
    except FileNotFoundError:
        message = f"there is no file or directory {source}"
        if not source.startswith(("/", ".")):
            message += (
                f"; for an image in the Docker engine write docker://{source}, for one in a "
                f"registry registry://{source}"
            )
        raise NotFoundError(message) from None
    except OSError as error:
        raise from_oserror(error, f"read {source}") from error
    if is_layout:
        return open_oci_layout(path, "")
    if path.is_dir():
        return open_directory(path)
    if path.is_file():
        return open_docker_archive(path)
    raise InvalidInputError(f"{source} is neither a directory nor a file")
