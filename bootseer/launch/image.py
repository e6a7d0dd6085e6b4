"""The image stage of a start: from what `--image` says to a container that can be entered.

Alone decides what is tried when a part of that fails: another store when the shared one does, an
extracted image where none can be mounted. Main thread only.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.config import Settings
from bootseer.errors import BootseerError, CorruptError, InvalidInputError, NotFoundError
from bootseer.timeline.recorder import FILE_VARIABLE, Timeline

if TYPE_CHECKING:
    from bootseer.prefetch.container import Container
    from bootseer.prefetch.sources import ImageSource

Say = Callable[[str], None]
"""Gets one sentence for people at a time."""

_log = logging.getLogger(__name__)

# In the container. Not where it is on the host: a user other than root may not get there.
_TIMELINE = "/run/bootseer/timeline.jsonl"


def open_image(
    settings: Settings, image: str, binds: Sequence[str], timeline: Timeline, say: Say
) -> "Container":
    """A container of `image`: a name in the store, or a source, which is indexed if need be.

    Raises: BootseerError where the image cannot be had at all.
    """
    from bootseer.prefetch.container import prepare_container
    from bootseer.prefetch.extracted import prepare_extracted

    with timeline.span("image") as span:
        settings, reference = _ensure_indexed(settings, image, timeline.below(span), say)
        try:
            container = prepare_container(settings, reference, binds=binds)
            span.set("bootseer.from", "store")
        except (InvalidInputError, NotFoundError):
            raise
        except (BootseerError, OSError) as error:
            say(f"warning: starting from an extracted image, since none can be mounted: {error}")
            span.set("bootseer.fallback", "extracted")
            container = prepare_extracted(settings, reference, binds=binds)
        _show_timeline(container, timeline.path)
        return container


def container_environment(container: "Container") -> dict[str, str]:
    """This process's variables for a program of the container."""
    environment = container.job_environment(os.environ)
    if any(bind.target == _TIMELINE for bind in container.binds):
        environment[FILE_VARIABLE] = _TIMELINE
    else:
        environment.pop(FILE_VARIABLE, None)
    return environment


def _show_timeline(container: "Container", path: Path) -> None:
    """Let training code in the container write to the timeline, whichever user it runs as."""
    from bootseer.prefetch.process_spec import resolve_user

    if not path.exists():
        return
    container.bind(path, _TIMELINE)
    user = resolve_user(container.image.directory, container.config.user)
    if user.uid and not container.rootless:
        try:
            os.chown(path, user.uid, -1)
        except OSError as error:
            _log.debug("stages of the job itself will not be on the timeline: %s", error)


# ---- which image -----------------------------------------------------------------------------


def _ensure_indexed(
    settings: Settings, image: str, timeline: Timeline, say: Say
) -> tuple[Settings, str]:
    """The settings with a store that has the image, and the name that it has there.

    An image that nobody has indexed is pulled whole, as any start would, and indexed meanwhile.
    """
    from bootseer.prefetch.catalogue import find_image
    from bootseer.prefetch.sources import is_source, open_source
    from bootseer.store import open_store

    if not is_source(image):
        with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
            return settings, find_image(store, image).reference
    with open_source(image, _work_dir(settings)) as source:
        try:
            return settings, _index(settings, source, image, timeline, say)
        except (BootseerError, OSError) as error:
            # The ordinary path without the shared store: pull the image for this node alone.
            say(f"warning: starting without the shared store: {error}")
            settings = replace(settings, store_url=(settings.cache_dir / "local-store").as_uri())
            return settings, _index(settings, source, image, timeline, say)


def _work_dir(settings: Settings) -> Path:
    return settings.cache_dir / "work"


def _index(
    settings: Settings, source: "ImageSource", image: str, timeline: Timeline, say: Say
) -> str:
    """The name of the image in the store, where it is now if it was not before."""
    from bootseer.prefetch.catalogue import check_blobs, find_image, load_tree
    from bootseer.prefetch.indexing import index_image
    from bootseer.store import open_store

    reference = source.reference
    if source.identity is None:
        # A directory, which is called only by its last name: others may be called so, too.
        path = os.fsencode(Path(image).resolve())
        reference = f"{reference}-{hashlib.sha256(path).hexdigest()[:12]}"
    with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
        try:
            known = find_image(store, reference)
            # A tag moves; the digest of the configuration is the image.
            if source.identity == known.identity or (
                source.identity is None and not _changed_since(Path(image), known.created_ns)
            ):
                load_tree(store, known, settings.cache_dir)
                check_blobs(store, known)
                return known.reference
            say(f"image {reference} has changed: indexing it again")
        except (NotFoundError, InvalidInputError):
            say(f"image {reference} is not indexed yet: pulling it whole, this once")
        except CorruptError as error:
            say(f"warning: indexing image {reference} again: {error}")
        with timeline.span("image index") as span:
            record = index_image(source, store, _work_dir(settings), reference=reference)
            span.set("bootseer.bytes", sum(layer.size_bytes or 0 for layer in source.layers))
            span.set("bootseer.from", "source")
        return record.reference


def _changed_since(directory: Path, when_ns: int) -> bool:
    """Whether anything below a directory has changed: it has no digest to compare."""
    top = directory.stat()
    # The change time, which nothing but the clock sets. A removed name changes its directory.
    if top.st_ctime_ns >= when_ns:
        return True
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                # What is mounted below is not part of the image.
                if status.st_dev != top.st_dev:
                    continue
                if status.st_ctime_ns >= when_ns:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return False
