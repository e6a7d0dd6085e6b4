"""An image in a Docker engine: `docker://NAME`, through the Docker SDK.

The engine streams the archive of `docker save` into a temporary file without a name, which is then
read as an archive. The file vanishes with this process, even if it is killed.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bootseer.errors import InvalidInputError, NotFoundError, UnavailableError, from_oserror
from bootseer.linux.private_files import make_private_directory
from bootseer.prefetch.sources.files import open_docker_archive
from bootseer.prefetch.sources.model import ImageSource
from bootseer.prefetch.sources.stream import ReadAhead

if TYPE_CHECKING:
    from docker.client import DockerClient

_CHUNK_BYTES = 2**20
_DEADLINE_S = 60
"""Deadline of each read of the engine's answer, not of the whole image. `ReadAhead`, which waits at
most 300 s for each MiB, gives up an engine that sends only a byte now and then."""


def open_docker_image(name: str, work_dir: Path) -> ImageSource:
    """Copy the image `name` out of the engine that DOCKER_HOST names, or the default one.

    Raises: UnavailableError if no engine answers; NotFoundError; NoSpaceError; and as
    `open_docker_archive`.
    """
    # Imported late: the SDK costs more than most commands take.
    import requests
    from docker.client import DockerClient
    from docker.errors import APIError, DockerException, ImageNotFound

    if not name:
        raise InvalidInputError(
            "docker:// needs the name of an image, such as docker://python:3.12"
        )
    with ExitStack() as stack:
        try:
            client = DockerClient.from_env(timeout=_DEADLINE_S)
            stack.callback(client.close)
            ahead = ReadAhead(_archive_chunks(client, name), "docker-save")
            stack.callback(ahead.close)
            path = _copy(iter(lambda: ahead.read(_CHUNK_BYTES), b""), name, work_dir, stack)
        except ImageNotFound as error:
            raise NotFoundError(
                f"the Docker engine has no image {name!r}; docker pull it first"
            ) from error
        except APIError as error:
            raise UnavailableError(f"the Docker engine refused {name!r}: {error}") from error
        except (DockerException, requests.RequestException) as error:
            raise UnavailableError(
                f"no Docker engine answers ({_reason(error)}); start it, or set DOCKER_HOST, or "
                "index a `docker save` archive instead"
            ) from error
        source = open_docker_archive(path)
        keep = stack.pop_all()
        return replace(source, reference=_with_tag(name), release=keep.close)


def _archive_chunks(client: "DockerClient", name: str) -> Iterator[bytes]:
    yield from client.images.get(name).save(_CHUNK_BYTES, named=True)


def _copy(chunks: Iterator[bytes], name: str, work_dir: Path, stack: ExitStack) -> Path:
    try:
        make_private_directory(work_dir)
        file = stack.enter_context(tempfile.TemporaryFile(dir=work_dir))  # noqa: SIM115
        for chunk in chunks:
            file.write(chunk)
        file.flush()
    except OSError as error:
        if error.errno is None:
            raise  # An error of the engine, not of the disk.
        raise from_oserror(error, f"copy the image {name!r} to {work_dir}") from error
    # A file without a name can be opened again by its descriptor.
    return Path(f"/proc/self/fd/{file.fileno()}")


def _with_tag(name: str) -> str:
    """Return "python:latest" for "python", as the engine does."""
    last = name.rpartition("/")[2]
    return name if ":" in last or "@" in last else f"{name}:latest"


def _reason(error: Exception) -> str:
    """Return the innermost cause in one line: the SDK wraps it four times."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
